"""What `find_heads` refuses and `verify` disproves, and why: one table, used by the tests and by docs/any-model.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heads.families import HEADS, LAYERS, TOKENS, VOCABULARY, WIDTH, from_transformers


@dataclass(frozen=True)
class Refused:
    """A kind of model that is refused.

    Attributes:
        name: What the kind is called.
        families: Where it is found.
        make: Builds a tiny random one; call `build` instead.
        found: What `find_heads` says of it; empty when it finds heads and `verify` refuses them.
        disproved: What `verify` says of it.
        why: The reason, for the documentation.
        way_out: What the user can do, for the documentation.
    """

    name: str
    families: str
    make: Callable[[], nn.Module]
    why: str
    way_out: str
    found: str = ""
    disproved: str = ""

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


_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LEFT_OUT = 'leave it out: `exclude=("...",)`'

REFUSED: tuple[Refused, ...] = (
    Refused(
        "latent attention",
        "DeepSeek-V2 and V3, Kimi, GLM-5",
        from_transformers(
            "DeepseekV2Model",
            "DeepseekV2Config",
            **_SIZES,
            **_SPECIAL,
            num_key_value_heads=HEADS,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=8,
            first_k_dense_replace=LAYERS,
        ),
        why="all heads share one narrow key/value state, and a head's key and value differ in size",
        way_out="none yet",
        found="no attention heads found in DeepseekV2Model",
    ),
    Refused(
        "linear attention mixed with softmax attention",
        "Qwen3-Next, Qwen3.5, OLMo Hybrid, Kimi Linear",
        from_transformers(
            "Qwen3NextModel",
            "Qwen3NextConfig",
            **_SIZES,
            **_SPECIAL,
            num_key_value_heads=2,
            head_dim=8,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=4,
            linear_value_head_dim=4,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
        why="it has no attention weights; the softmax layers are found",
        way_out='`exclude=("*.linear_attn",)`',
        found=r"1 modules of Qwen3NextModel look like attention and fit no layout.*in addition to 1 that do",
    ),
    Refused(
        "heads fused per group",
        "Falcon 40B and 180B, InternLM2",
        from_transformers(
            "FalconModel",
            "FalconConfig",
            **_SIZES,
            **_SPECIAL,
            num_kv_heads=2,
            new_decoder_architecture=True,
        ),
        why="the keys of two groups have the query heads of a group between them, so heads are not evenly spaced",
        way_out="none yet",
        found="no attention heads found in FalconModel",
    ),
    Refused(
        "heads fused for several devices",
        "CodeGen",
        from_transformers(
            "CodeGenModel",
            "CodeGenConfig",
            vocab_size=VOCABULARY,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            rotary_dim=4,
            n_positions=40,
        ),
        why="as above: [query; value; key] for each of four devices",
        way_out="none yet",
        found="no attention heads found in CodeGenModel",
    ),
    Refused(
        "projections of three dimensions",
        "XLNet",
        from_transformers(
            "XLNetModel", "XLNetConfig", vocab_size=VOCABULARY, d_model=WIDTH, n_layer=LAYERS, n_head=HEADS, d_inner=48
        ),
        why="heads are read from matrices, and its projections are [d, H, e] parameters",
        way_out="none yet",
        found="no attention heads found in XLNetModel",
    ),
    Refused(
        "convolutions as projections",
        "SqueezeBERT, CvT",
        from_transformers("SqueezeBertModel", "SqueezeBertConfig", **_SIZES, embedding_size=WIDTH),
        why="heads are read from matrices, and its projections are grouped convolutions",
        way_out="none yet",
        found="no attention heads found in SqueezeBertModel",
    ),
    Refused(
        "several queries, keys or values per head",
        "Longformer, LUKE, LiLT",
        from_transformers("LongformerModel", "LongformerConfig", **_SIZES, attention_window=4),
        why="a head has two query, key and value projections, and only half of it would be found",
        way_out='a layout that names the others: `SeparateLinears(beside=("query_global", ...))`',
        found="holds query_global, key_global, value_global in addition to key, query, value",
    ),
    Refused(
        "shared queries and keys",
        "Reformer",
        from_transformers(
            "ReformerModel",
            "ReformerConfig",
            **{key: value for key, value in _SIZES.items() if key not in ("intermediate_size", "num_hidden_layers")},
            attention_head_size=8,
            attn_layers=["local", "lsh"],
            axial_pos_embds=False,
            feed_forward_size=48,
            is_decoder=False,
        ),
        why="one projection serves as query and key; the local attention is found",
        way_out=_LEFT_OUT,
        found="LSHSelfAttention with query_key.weight",
    ),
    Refused(
        "a norm over all heads before the output projection",
        "BitNet",
        from_transformers("BitNetModel", "BitNetConfig", **_SIZES, **_SPECIAL, num_key_value_heads=2),
        why="the input of W_O from one head depends on all other heads",
        way_out="repulsion is still correct; outputs, aggregators and ablation see normalized heads",
        disproved="changing the query features of head 0 changed the heads of heads 1, 2, 3",
    ),
    Refused(
        "differential attention",
        "DiffLlama",
        from_transformers("DiffLlamaModel", "DiffLlamaConfig", **_SIZES, **_SPECIAL, num_key_value_heads=HEADS),
        why="two heads share their values, and one is subtracted from the other",
        way_out="none yet",
        disproved="DiffLlamaAttention",
    ),
)
