"""The families of models headwise is tested on: one table, used by the tests and by docs/any-model.md.

Each is a tiny random model of the real class, built without a download, with inputs it takes and the attention
sites it really has. Head counts, head sizes and layer counts differ from one another wherever the family lets them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heads import vision

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
        note: What is particular about it, for the documentation.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, bool], dict[str, Tensor]]
    attentions: tuple[Attention, ...]
    interface: bool = True
    maskable: bool = True
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


def _layers(pattern: str, layers: int = LAYERS) -> tuple[str, ...]:
    return tuple(pattern.format(layer) for layer in range(layers))


def _self(pattern: str, **settings) -> Attention:
    return Attention("self", pattern.partition(".{}")[0], _layers(pattern), **settings)


def _decoder(pattern: str, **settings) -> Attention:
    return Attention("decoder", pattern.partition(".{}")[0], _layers(pattern), **settings)


def _cross(pattern: str, **settings) -> Attention:
    return Attention("cross", pattern.partition(".{}")[0], _layers(pattern), **settings)


def _ids(batch: int, tokens: int = TOKENS) -> Tensor:
    # every token of a sequence is another one: equal tokens would hide what one of them does
    return torch.stack([torch.randperm(VOCABULARY - 4)[:tokens] + 4 for _ in range(batch)])


def _keep(batch: int, padded: bool, tokens: int = TOKENS) -> Tensor:
    mask = torch.ones(batch, tokens, dtype=torch.long)
    if padded:
        mask[-1, -2:] = 0
    return mask


def _text(batch: int, padded: bool) -> dict[str, Tensor]:
    return {"input_ids": _ids(batch), "attention_mask": _keep(batch, padded)}


def _sequences(batch: int, padded: bool) -> dict[str, Tensor]:
    source = _text(batch, padded)
    return {**source, "decoder_input_ids": _ids(batch, 5)}


def _encoded(batch: int, padded: bool) -> dict[str, Tensor]:
    """A decoder that is given the states of some encoder."""
    states = torch.randn(batch, 6, WIDTH)
    return {
        **_text(batch, padded),
        "encoder_hidden_states": states,
        "encoder_attention_mask": _keep(batch, padded, 6),
    }


def _speech_features(batch: int, _padded: bool) -> dict[str, Tensor]:
    return {"input_features": torch.randn(batch, 8, 20), "decoder_input_ids": _ids(batch, 5)}


def _waves(batch: int, padded: bool) -> dict[str, Tensor]:
    mask = torch.ones(batch, 400, dtype=torch.long)
    if padded:
        mask[-1, -120:] = 0
    return {"input_values": torch.randn(batch, 400), "attention_mask": mask}


def _pixels(batch: int, _padded: bool) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 8, 8)}


def _pixels_and_text(batch: int, padded: bool) -> dict[str, Tensor]:
    return {**_text(batch, padded), **_pixels(batch, padded)}


def _image(batch: int, _padded: bool) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, 3, 8, 8)}


def _vectors(batch: int, padded: bool) -> dict[str, Tensor]:
    inputs = {"src": torch.randn(batch, TOKENS, WIDTH), "tgt": torch.randn(batch, 5, WIDTH)}
    if padded:
        keep = _keep(batch, padded).bool()
        inputs |= {"src_key_padding_mask": ~keep, "memory_key_padding_mask": ~keep}
    return inputs


def from_transformers(model: str, config: str, **settings: object) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return make


_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
_LLAMA = {**_BERT, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_VISION = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "image_size": 8,
    "patch_size": 4,
}


def _clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {**_BERT, "eos_token_id": VOCABULARY - 1, "bos_token_id": 1, "pad_token_id": 0}
    vision_config = {**_VISION, "hidden_size": 24, "num_attention_heads": 3}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision_config, projection_dim=16))


def _torch_transformer() -> nn.Module:
    model = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, 48, batch_first=True)
    # padding would be turned into nested tensors, of which torch warns that they are a prototype
    model.encoder.use_nested_tensor = False
    return model


def _grouped(**settings: object) -> dict:
    return {"key_value_heads": 2, "output": "layers.0.self_attn.o_proj.weight", **settings}


_ENCODER_DECODER = (
    _self("encoder.layers.{}.self_attn", output="encoder.layers.0.self_attn.out_proj.weight"),
    _decoder("decoder.layers.{}.self_attn", output="decoder.layers.0.self_attn.out_proj.weight"),
    _cross("decoder.layers.{}.encoder_attn", output="decoder.layers.0.encoder_attn.out_proj.weight"),
)
_BERT_LIKE = (_self("encoder.layer.{}.attention.self", output="encoder.layer.0.attention.output.dense.weight"),)

FAMILIES: tuple[Family, ...] = (
    Family("BERT", from_transformers("BertModel", "BertConfig", **_BERT), _text, _BERT_LIKE),
    Family("RoBERTa", from_transformers("RobertaModel", "RobertaConfig", **_BERT), _text, _BERT_LIKE),
    Family(
        "ELECTRA", from_transformers("ElectraModel", "ElectraConfig", **_BERT, embedding_size=16), _text, _BERT_LIKE
    ),
    Family(
        "BERT with cross-attention",
        from_transformers("BertModel", "BertConfig", **_BERT, is_decoder=True, add_cross_attention=True),
        _encoded,
        (
            _decoder("encoder.layer.{}.attention.self", output="encoder.layer.0.attention.output.dense.weight"),
            _cross("encoder.layer.{}.crossattention.self", output="encoder.layer.0.crossattention.output.dense.weight"),
        ),
    ),
    Family(
        "ALBERT",
        from_transformers("AlbertModel", "AlbertConfig", **_BERT, embedding_size=16),
        _text,
        (
            Attention(
                "self",
                "encoder.albert_layer_groups.0.albert_layers",
                ("encoder.albert_layer_groups.0.albert_layers.0.attention",),
                output="encoder.albert_layer_groups.0.albert_layers.0.attention.dense.weight",
                calls=LAYERS,
            ),
        ),
        note="one attention module, called once per layer",
    ),
    Family(
        "DistilBERT",
        from_transformers(
            "DistilBertModel",
            "DistilBertConfig",
            vocab_size=VOCABULARY,
            dim=WIDTH,
            n_layers=LAYERS,
            n_heads=HEADS,
            hidden_dim=48,
            max_position_embeddings=40,
        ),
        _text,
        (_self("transformer.layer.{}.attention", output="transformer.layer.0.attention.out_lin.weight"),),
    ),
    Family(
        "DeBERTa-v2",
        from_transformers(
            "DebertaV2Model",
            "DebertaV2Config",
            **_BERT,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=4,
            max_relative_positions=8,
        ),
        _text,
        _BERT_LIKE,
        interface=False,
        note="separate weights project its positions; they are not heads",
    ),
    Family(
        "DeBERTa-v3",
        from_transformers(
            "DebertaV2Model",
            "DebertaV2Config",
            **_BERT,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=4,
            max_relative_positions=8,
            share_att_key=True,
            norm_rel_ebd="layer_norm",
        ),
        _text,
        _BERT_LIKE,
        interface=False,
        note="its positions are projected with the query and key weights",
    ),
    Family(
        "ModernBERT",
        from_transformers(
            "ModernBertModel",
            "ModernBertConfig",
            **_BERT,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
            global_attn_every_n_layers=2,
            local_attention=6,
        ),
        _text,
        (_self("layers.{}.attn", layout="fused", output="layers.0.attn.Wo.weight"),),
    ),
    Family(
        "GPT-2",
        from_transformers(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=VOCABULARY,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            n_positions=40,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        ),
        _text,
        (_self("transformer.h.{}.attn", layout="fused", output="transformer.h.0.attn.c_proj.weight"),),
        note="Conv1D: columns are heads",
    ),
    Family(
        "GPT-2 with cross-attention",
        from_transformers(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=VOCABULARY,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            n_positions=40,
            add_cross_attention=True,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        ),
        _encoded,
        (
            _decoder("transformer.h.{}.attn", layout="fused", output="transformer.h.0.attn.c_proj.weight"),
            _cross(
                "transformer.h.{}.crossattention",
                layout="fused key-value",
                output="transformer.h.0.crossattention.c_proj.weight",
            ),
        ),
    ),
    Family(
        "GPT-NeoX",
        from_transformers("GPTNeoXModel", "GPTNeoXConfig", **_BERT),
        _text,
        (_self("layers.{}.attention", layout="interleaved", output="layers.0.attention.dense.weight"),),
    ),
    Family(
        "Llama",
        from_transformers("LlamaForCausalLM", "LlamaConfig", **_LLAMA),
        _text,
        (_self("model.layers.{}.self_attn", **_grouped(output="model.layers.0.self_attn.o_proj.weight")),),
    ),
    Family(
        "Mistral",
        from_transformers("MistralModel", "MistralConfig", **_LLAMA, sliding_window=4, head_dim=6),
        _text,
        (_self("layers.{}.self_attn", **_grouped(head_size=6)),),
    ),
    Family(
        "Qwen2",
        from_transformers("Qwen2Model", "Qwen2Config", **_LLAMA),
        _text,
        (_self("layers.{}.self_attn", **_grouped()),),
    ),
    Family(
        "Qwen3",
        from_transformers("Qwen3Model", "Qwen3Config", **_LLAMA, head_dim=12),
        _text,
        (_self("layers.{}.self_attn", **_grouped(head_size=12)),),
        note="queries and keys are normalized after projection",
    ),
    Family(
        "Gemma",
        from_transformers("GemmaModel", "GemmaConfig", **{**_LLAMA, "num_key_value_heads": 1}, head_dim=10),
        _text,
        (_self("layers.{}.self_attn", **_grouped(key_value_heads=1, head_size=10)),),
    ),
    Family(
        "Phi-3",
        from_transformers("Phi3Model", "Phi3Config", **_LLAMA),
        _text,
        (_self("layers.{}.self_attn", **_grouped(layout="fused")),),
    ),
    Family(
        "T5",
        from_transformers(
            "T5Model",
            "T5Config",
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=5,
            d_ff=48,
            num_layers=LAYERS,
            num_heads=HEADS,
            relative_attention_num_buckets=6,
            relative_attention_max_distance=9,
            decoder_start_token_id=0,
        ),
        _sequences,
        (
            _self(
                "encoder.block.{}.layer.0.SelfAttention",
                head_size=5,
                output="encoder.block.0.layer.0.SelfAttention.o.weight",
            ),
            _decoder(
                "decoder.block.{}.layer.0.SelfAttention",
                head_size=5,
                output="decoder.block.0.layer.0.SelfAttention.o.weight",
            ),
            _cross(
                "decoder.block.{}.layer.1.EncDecAttention",
                head_size=5,
                output="decoder.block.0.layer.1.EncDecAttention.o.weight",
            ),
        ),
    ),
    Family("BART", from_transformers("BartModel", "BartConfig", **_SEQ2SEQ), _sequences, _ENCODER_DECODER),
    Family("Marian", from_transformers("MarianModel", "MarianConfig", **_SEQ2SEQ), _sequences, _ENCODER_DECODER),
    Family(
        "Whisper",
        from_transformers(
            "WhisperModel",
            "WhisperConfig",
            **{k: v for k, v in _SEQ2SEQ.items() if k != "max_position_embeddings"},
            num_mel_bins=8,
            max_source_positions=10,
            max_target_positions=12,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        _speech_features,
        _ENCODER_DECODER,
        maskable=False,
        note="its keys have no bias",
    ),
    Family(
        "ViT",
        from_transformers("ViTModel", "ViTConfig", **_VISION),
        _pixels,
        (_self("layers.{}.attention", output="layers.0.attention.o_proj.weight"),),
        maskable=False,
    ),
    Family(
        "CLIP",
        _clip,
        _pixels_and_text,
        (
            _self(
                "text_model.encoder.layers.{}.self_attn", output="text_model.encoder.layers.0.self_attn.out_proj.weight"
            ),
            _self(
                "vision_model.encoder.layers.{}.self_attn",
                heads=3,
                key_value_heads=3,
                output="vision_model.encoder.layers.0.self_attn.out_proj.weight",
            ),
        ),
    ),
    Family(
        "Wav2Vec2",
        from_transformers(
            "Wav2Vec2Model",
            "Wav2Vec2Config",
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=48,
            conv_dim=(8, 8),
            conv_stride=(5, 4),
            conv_kernel=(10, 4),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            mask_time_prob=0.0,
        ),
        _waves,
        (_self("encoder.layers.{}.attention", output="encoder.layers.0.attention.out_proj.weight"),),
    ),
    Family(
        "torch.nn.Transformer",
        _torch_transformer,
        _vectors,
        (
            _self(
                "encoder.layers.{}.self_attn",
                layout="torch packed",
                output="encoder.layers.0.self_attn.out_proj.weight",
            ),
            _decoder(
                "decoder.layers.{}.self_attn",
                layout="torch packed",
                output="decoder.layers.0.self_attn.out_proj.weight",
            ),
            _cross(
                "decoder.layers.{}.multihead_attn",
                layout="torch packed",
                output="decoder.layers.0.multihead_attn.out_proj.weight",
            ),
        ),
        interface=False,
    ),
    Family(
        "timm ViT",
        lambda: vision.VisionTransformer(WIDTH, HEADS, LAYERS),
        _image,
        (_self("blocks.{}.attn", layout="fused", output="blocks.0.attn.proj.weight"),),
        interface=False,
        maskable=False,
        note="modules of the same structure",
    ),
    Family(
        "timm Swin",
        lambda: vision.SwinTransformer(WIDTH // 2, (2, 4), LAYERS),
        _image,
        (
            Attention(
                "self",
                "layers.0.blocks",
                _layers("layers.0.blocks.{}.attn"),
                "fused",
                heads=2,
                key_value_heads=2,
                output="layers.0.blocks.0.attn.proj.weight",
            ),
            Attention(
                "self",
                "layers.1.blocks",
                _layers("layers.1.blocks.{}.attn"),
                "fused",
                output="layers.1.blocks.0.attn.proj.weight",
            ),
        ),
        interface=False,
        maskable=False,
        note="modules of the same structure; windows are folded into the batch",
    ),
)
