"""The rows that `find_heads` tries, in order: the attention modules of the libraries that people use."""

from __future__ import annotations

from headwise.heads.layouts.parameters import FusedParameter, SeparateParameters
from headwise.heads.layouts.rows import (
    AdditiveQueries,
    FusedLinear,
    HeadList,
    LatentLinears,
    Layout,
    SeparateLinears,
    SharedLinears,
    TorchMultihead,
)
from headwise.heads.layouts.steps import AMBIGUOUS, NORMS

# Falcon and GPT-BigCode store the same attribute in several ways; these flags tell which.
_PLAIN_FALCON = ("new_decoder_architecture", (None, False))

# Names that need no more than this to tell what they hold; those above them tell it with others.
FUSED = (
    *("qkv", "Wqkv", "W_qkv", "W_QKV", "w_qkv", "wqkv", "qkv_proj", "to_qkv", "att_proj", "qkv_linear", "linear_qkv"),
    *("qkv_layer", "proj_qkv", "attn_qkv", "qkv_projection", "fc_qkv", "qkv_dense", "c_attn", "in_proj_qkv"),
)
KEY_VALUE = (
    *("to_kv", "kv", "kv_proj", "W_kv", "Wkv", "wkv", "linear_kv", "kv_linear", "kv_layer", "proj_kv", "fc_kv"),
    *("key_value", "kv_projection", "kv_net"),
)
OUTPUT = tuple(name for name in SeparateLinears.output if name not in (*NORMS, *AMBIGUOUS))

LAYOUTS: tuple[Layout, ...] = (
    TorchMultihead(),
    AdditiveQueries(),
    SeparateLinears(),
    SharedLinears(),
    LatentLinears(),
    # timm's MaxViT has both orders
    FusedLinear("interleaved", ("qkv",), ("proj",), interleaved=True, when=(("head_first", (True,)),)),
    FusedLinear("fused", ("qkv",), ("proj", "projection", "..output.dense"), when=(("head_first", (None, False)),)),
    FusedLinear("fused", ("Wqkv",), ("Wo", "out_proj")),
    FusedLinear("fused", ("qkv_proj",), ("o_proj",)),
    FusedLinear("fused", ("to_qkv",), ("to_out.0", "to_out")),
    FusedLinear("fused", ("att_proj",), ("out_proj",)),
    FusedLinear("fused", ("qkv_linear",), ("..output.dense",)),
    FusedLinear(
        "fused key-value",
        ("c_attn", "to_kv", "kv", "kv_proj"),
        ("c_proj", "to_out.0", "to_out", "proj", "o_proj", "out_proj"),
        order=("key", "value"),
        query=("q_attn", "to_q", "q", "q_proj"),
    ),
    FusedLinear("fused", ("c_attn",), ("c_proj",), when=(("multi_query", (None, True)),)),
    FusedLinear("interleaved", ("c_attn",), ("c_proj",), interleaved=True, when=(("multi_query", (False,)),)),
    FusedLinear("fused", ("query_key_value",), ("dense",), when=(_PLAIN_FALCON, ("multi_query", (True,)))),
    FusedLinear(
        "interleaved",
        ("query_key_value",),
        ("dense",),
        interleaved=True,
        when=(_PLAIN_FALCON, ("multi_query", (None, False))),
    ),
    FusedLinear(
        "interleaved groups",
        ("query_key_value",),
        ("dense",),
        interleaved=True,
        when=(("new_decoder_architecture", (True,)),),
    ),
    FusedLinear("interleaved", ("in_proj",), ("..output.dense",), interleaved=True),
    # CodeGen: the parts of four devices; its mark since transformers 5.24, and before
    *(
        FusedLinear(
            "fused in parts", ("qkv_proj",), ("out_proj",), order=("query", "value", "key"), parts=4, when=(mark,)
        )
        for mark in (("mp_num", (4,)), ("pos_embd_dim", (...,)))
    ),
    FusedLinear(
        "interleaved groups", ("attn",), ("proj",), interleaved=True, when=(("config.n_query_groups", (...,)),)
    ),
    # four projections in one list, or three and W_O
    *(
        SeparateLinears(
            query=(f"{held}.0",), key=(f"{held}.1",), value=(f"{held}.2",), output=(output,), when=(("d_k", (...,)),)
        )
        for held, output in (("linears", "linears.3"), ("linear_layers", "output_linear"))
    ),
    FusedLinear("fused", FUSED, OUTPUT),
    FusedLinear("fused key-value", KEY_VALUE, OUTPUT, order=("key", "value"), query=SeparateLinears.query),
    SeparateParameters(),
    FusedParameter(),
    HeadList(),
)
