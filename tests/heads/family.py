"""What a family of models is for the tests, and the sizes, inputs and sites that families share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

VOCABULARY, TOKENS, WIDTH, HEADS, LAYERS = 61, 7, 32, 4, 2


@dataclass(frozen=True)
class Attention:
    """The sites of one kind that a family has: one a layer, unless it is shared.

    Attributes:
        kind: "self", "decoder" or "cross".
        stack: Dotted name of the stack its layers are numbered in; empty where there is none.
        names: Names of the sites, in the order of their layers.
        layout: Name of the layout row.
        heads: Query heads H.
        key_value_heads: Key/value heads G.
        head_size: Width e of one head.
        output: Name of the W_O parameter in layer 0.
        calls: Calls of each site in one forward pass.
    """

    kind: str
    stack: str
    names: tuple[str, ...]
    layout: str = "separate"
    heads: int = HEADS
    key_value_heads: int = HEADS
    head_size: int = WIDTH // HEADS
    output: str = ""
    calls: int = 1


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        name: What people call it.
        make: Builds the model; call `build` instead.
        batch: Inputs for (batch, padded); call `inputs` instead.
        attentions: The sites expected.
        interface: Whether its attention goes through transformers' attention interface.
        maskable: Whether `inputs(padded=True)` differs from `inputs(padded=False)`.
        replaceable: Whether an aggregator can take the place of its W_O.
        note: What is particular about it, for the documentation.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, bool], dict[str, Tensor]]
    attentions: tuple[Attention, ...]
    interface: bool = True
    maskable: bool = True
    replaceable: bool = True
    note: str = ""

    def build(self) -> nn.Module:
        """The model, in evaluation mode, float32, the same at each call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            return self.make().eval()

    def inputs(self, batch: int = 2, padded: bool = False) -> dict[str, Tensor]:
        """Keyword arguments of one forward pass; with `padded` the last tokens of the last sequence are padding."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(12)
            return self.batch(batch, padded)

    def __str__(self) -> str:
        return self.name


def _attention(kind: str, pattern: str, attribute: str = "", **settings) -> Attention:
    """The attentions of all layers; W_O is their `attribute`, or the parameter `output`."""
    output = f"{pattern.format(0)}.{attribute}.weight" if attribute else ""
    names = tuple(pattern.format(layer) for layer in range(LAYERS))
    return Attention(kind, pattern.partition(".{}")[0], names, **{"output": output, **settings})


self_attention, decoder_attention, cross_attention = (
    partial(_attention, kind) for kind in ("self", "decoder", "cross")
)


def one_attention(stack: str, place: str, attribute: str = "", *, kind: str = "self", **settings) -> Attention:
    """An attention that is one module."""
    name = f"{stack}.{place}".removeprefix(".")
    return Attention(kind, stack, (name,), **{"output": f"{name}.{attribute}.weight", **settings})


def draw_ids(batch: int, tokens: int = TOKENS) -> Tensor:
    # every token of a sequence is another one: equal tokens would hide what one of them does
    return torch.stack([torch.randperm(VOCABULARY - 4)[:tokens] + 4 for _ in range(batch)])


def keep_tokens(batch: int, padded: bool, tokens: int = TOKENS) -> Tensor:
    mask = torch.ones(batch, tokens, dtype=torch.long)
    if padded:
        mask[-1, -2:] = 0
    return mask


def text(batch: int, padded: bool) -> dict[str, Tensor]:
    return {"input_ids": draw_ids(batch), "attention_mask": keep_tokens(batch, padded)}


def sequences(batch: int, padded: bool) -> dict[str, Tensor]:
    source = text(batch, padded)
    return {**source, "decoder_input_ids": draw_ids(batch, 5)}


def encoded(batch: int, padded: bool) -> dict[str, Tensor]:
    """A decoder that is given the states of some encoder."""
    states = torch.randn(batch, 6, WIDTH)
    return {
        **text(batch, padded),
        "encoder_hidden_states": states,
        "encoder_attention_mask": keep_tokens(batch, padded, 6),
    }


def speech_features(batch: int, _padded: bool) -> dict[str, Tensor]:
    return {"input_features": torch.randn(batch, 8, 20), "decoder_input_ids": draw_ids(batch, 5)}


def waves(batch: int, padded: bool) -> dict[str, Tensor]:
    mask = torch.ones(batch, 400, dtype=torch.long)
    if padded:
        mask[-1, -120:] = 0
    return {"input_values": torch.randn(batch, 400), "attention_mask": mask}


def pixels(batch: int, _padded: bool) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 8, 8)}


def pixels_and_text(batch: int, padded: bool) -> dict[str, Tensor]:
    return {**text(batch, padded), **pixels(batch, padded)}


def image(batch: int, _padded: bool) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, 3, 8, 8)}


def vectors(batch: int, padded: bool) -> dict[str, Tensor]:
    inputs = {"src": torch.randn(batch, TOKENS, WIDTH), "tgt": torch.randn(batch, 5, WIDTH)}
    if padded:
        keep = keep_tokens(batch, padded).bool()
        inputs |= {"src_key_padding_mask": ~keep, "memory_key_padding_mask": ~keep}
    return inputs


def make(config: str, model: str = "", **settings: object) -> Callable[[], nn.Module]:
    """Makes a model of transformers, by the names of its configuration and class."""

    def build() -> nn.Module:
        import transformers

        kind = getattr(transformers, model or f"{config}Model")
        return kind(getattr(transformers, f"{config}Config")(**settings))

    return build


SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_HIDDEN = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 48}
BERT = {"vocab_size": VOCABULARY, **_HIDDEN, "max_position_embeddings": 40}
LLAMA = {**BERT, "num_key_value_heads": 2, **SPECIAL}
WORDS = {"vocab_size": VOCABULARY, "d_model": WIDTH}
GPT = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 40}
GPT |= {"bos_token_id": 1, "eos_token_id": 2}
_SIDES = {"layers": LAYERS, "attention_heads": HEADS, "ffn_dim": 48}
SIDES = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in _SIDES.items()}
SEQ2SEQ = {**WORDS, **SIDES, "max_position_embeddings": 40, **SPECIAL, "decoder_start_token_id": 2}
VISION = {**_HIDDEN, "image_size": 8, "patch_size": 4}
WAVES = {**_HIDDEN, "conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2}
WAVES |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}


def grouped(pattern: str = "layers.{}.self_attn", attribute: str = "o_proj", **settings) -> Attention:
    """Self-attention with grouped queries, as in Llama."""
    return self_attention(pattern, attribute, **{"key_value_heads": 2, **settings})


ENCODER_DECODER = (
    self_attention("encoder.layers.{}.self_attn", "out_proj"),
    decoder_attention("decoder.layers.{}.self_attn", "out_proj"),
    cross_attention("decoder.layers.{}.encoder_attn", "out_proj"),
)
BERT_LIKE = (self_attention("encoder.layer.{}.attention.self", output="encoder.layer.0.attention.output.dense.weight"),)
