"""What `find_heads` refuses, and why: one table, used by the tests and by docs/any-model.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heads.family import BERT, HEADS, LAYERS, SIDES, SPECIAL, TOKENS, VOCABULARY, WIDTH, make


@dataclass(frozen=True)
class Refused:
    """A kind of model that is refused.

    Attributes:
        name: What the kind is called.
        families: Where it is found.
        make: Builds a tiny random one; call `build` instead.
        found: What `find_heads` says of it.
        why: The reason, for the documentation.
        way_out: What the user can do, for the documentation.
    """

    name: str
    families: str
    make: Callable[[], nn.Module]
    why: str
    way_out: str
    found: str

    def build(self) -> nn.Module:
        """The model, in evaluation mode, the same at each call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            return self.make().eval()

    def inputs(self) -> dict[str, Tensor]:
        """Keyword arguments of one forward pass."""
        return {"input_ids": torch.arange(2 * TOKENS).view(2, TOKENS) + 4}

    def __str__(self) -> str:
        return self.name


_OWN_ROW = "a layout of your own reads its projections all the same, for repulsion"
_LEFT_OUT = 'leave it out: `exclude=("...",)`'

LINEAR = {"num_key_heads": 2, "num_value_heads": 2, "key_head_dim": 4, "value_head_dim": 4}

REFUSED: tuple[Refused, ...] = (
    Refused(
        "linear attention mixed with softmax attention",
        "Qwen3-Next, Qwen3.5, MiniMax, OLMo Hybrid, Kimi Linear",
        make(
            "Qwen3Next",
            **{**BERT, **SPECIAL, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1},
            **{f"linear_{name}": size for name, size in LINEAR.items()},
            layer_types=["linear_attention", "full_attention"],
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
        why="it has no attention weights; the softmax layers are found",
        way_out='`exclude=("*.linear_attn",)`, or what the message names',
        found=r"1 attentions .* no regular heads, in addition to 1 that are:.*is linear attention: it keeps a state",
    ),
    Refused(
        "projections of three dimensions",
        "XLNet",
        make("XLNet", vocab_size=VOCABULARY, d_model=WIDTH, n_layer=LAYERS, n_head=HEADS, d_inner=48),
        why="its projections are [d, H, e] parameters with names of one letter, among others without heads",
        way_out='a layout, for repulsion: `SeparateParameters(query=("q",), key=("k",), value=("v",), axes="d h e")`',
        found="no attention heads found in XLNetModel",
    ),
    Refused(
        "convolutions as projections",
        "SqueezeBERT, CvT, the image tokenizers of Chameleon and Janus",
        make("SqueezeBert", **BERT, embedding_size=WIDTH),
        why="heads are read from matrices, and its projections are convolutions",
        way_out=_LEFT_OUT,
        found="SqueezeBertSelfAttention projects with convolutions",
    ),
    Refused(
        "several queries, keys or values per head",
        "Longformer, LUKE, LiLT",
        make("Longformer", **BERT, attention_window=4),
        why="a head has two query, key and value projections, and only half of it would be found",
        way_out='a layout that names the others: `SeparateLinears(beside=("query_global", ...))`',
        found="holds query_global, key_global, value_global in addition to key, query, value",
    ),
    Refused(
        "shared queries and keys",
        "Reformer",
        make(
            "Reformer",
            **{key: value for key, value in BERT.items() if key not in ("intermediate_size", "num_hidden_layers")},
            attention_head_size=8,
            attn_layers=["local", "lsh"],
            axial_pos_embds=False,
            feed_forward_size=48,
            is_decoder=False,
        ),
        why="one projection serves as query and key; the local attention is found",
        way_out=_LEFT_OUT,
        found="LSHSelfAttention has one projection for queries and keys",
    ),
    Refused(
        "quantized layers",
        "I-BERT",
        make("IBert", **BERT),
        why="its projections return a tensor and its scale",
        way_out="the model before it was quantized (RoBERTa)",
        found="IBertSelfAttention calls quantized projections",
    ),
    Refused(
        "differential attention",
        "DiffLlama",
        make("DiffLlama", **BERT, **SPECIAL, num_key_value_heads=HEADS),
        why="two heads share their values, and one is subtracted from the other",
        way_out=_OWN_ROW,
        found="DiffLlamaAttention is differential attention",
    ),
    Refused(
        "talking heads",
        "DeBERTa with `talking_head`, CaiT",
        make("Deberta", **BERT, talking_head=True),
        why="a matrix of heads by heads mixes the scores of all heads",
        way_out=_OWN_ROW,
        found="DisentangledSelfAttention mixes its 4 heads by head_logits_proj",
    ),
    Refused(
        "masks from the values of all heads",
        "Doge",
        make("Doge", **BERT, **SPECIAL, num_key_value_heads=2),
        why="which keys a head may attend to depends on the values of all heads",
        way_out=_OWN_ROW,
        found="DogeAttention masks the keys of a head by the values of all heads",
    ),
    Refused(
        "auto-correlation",
        "Autoformer",
        make(
            "Autoformer",
            prediction_length=5,
            context_length=8,
            lags_sequence=[1, 2, 7],
            num_time_features=2,
            **{"d_model": WIDTH, **SIDES, "moving_average": 3},
        ),
        why="all heads together choose delays, by which values are shifted; there are no attention weights",
        way_out=_OWN_ROW,
        found="AutoformerAttention is no softmax attention: all heads together choose delays",
    ),
    Refused(
        "weights of blocks",
        "MRA",
        make("Mra", **{**BERT, "max_position_embeddings": 64}),
        why="queries and keys of a block are averaged, so the query of one token changes what others get",
        way_out=_OWN_ROW,
        found="MraSelfAttention averages blocks of queries and keys",
    ),
    Refused(
        "two sequences in one call",
        "the encoder of PEGASUS-X",
        make(
            "PegasusX",
            **{"vocab_size": VOCABULARY, "d_model": WIDTH, **SIDES, **SPECIAL, "max_position_embeddings": 40},
            block_size=4,
            num_global_tokens=3,
        ),
        why="tokens and global tokens pass through the same projections, so a call has two outputs",
        way_out='`exclude=("encoder.layers.*.self_attn",)`',
        found=r"in addition to 4 that are:.*PegasusXGlobalLocalAttention projects two sequences.*encoder\.layers\.\*",
    ),
)
