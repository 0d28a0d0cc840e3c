"""Families of language models whose attention is unusual and whose heads are regular all the same."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from heads.family import (
    BERT,
    BERT_LIKE,
    HEADS,
    LAYERS,
    LLAMA,
    VOCABULARY,
    WIDTH,
    Attention,
    Family,
    draw_ids,
    from_transformers,
    grouped,
    self_attention,
    text,
)
from heads.transformers_versions import CODEGEN_AND_GPTJ_USE_THE_INTERFACE

GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    **LLAMA,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": LAYERS,
}


def _characters(batch: int, _padded: bool) -> dict[str, Tensor]:
    return {"input_ids": draw_ids(batch, 32)}


def _latent(**settings: object) -> Attention:
    return self_attention(
        "layers.{}.self_attn", layout="latent", head_size=6, output="layers.0.self_attn.o_proj.weight", **settings
    )


def _neomme() -> nn.Module:
    model = _make("NeoMME", **LLAMA, head_dim=16)()
    for parameter in model.parameters():
        # W_O and the share of the own value start at zero
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model


def _make(name: str, **settings: object) -> Callable[[], nn.Module]:
    return from_transformers(f"{name}Model", f"{name}Config", **settings)


def _make_chameleon() -> nn.Module:
    """The decoder of Chameleon, without the tokenizer of images, whose projections are convolutions."""
    from transformers import ChameleonVQVAEConfig

    images = ChameleonVQVAEConfig(
        embed_dim=8, num_embeddings=16, latent_channels=8, resolution=16, base_channels=32, channel_multiplier=[1, 1]
    )
    model: nn.Module = _make("Chameleon", **LLAMA, vq_config=images, vocabulary_map={"<image>": 5})()
    del model.vqmodel
    return model


UNUSUAL_LANGUAGE: tuple[Family, ...] = (
    Family(
        "Chameleon",
        _make_chameleon,
        text,
        (self_attention("layers.{}.self_attn", **grouped()),),
        note='each head has norms of its own; leave out the tokenizer of images: `exclude=("vqmodel.*",)`',
    ),
    Family(
        "Cohere",
        _make("Cohere", **LLAMA, use_qk_norm=True),
        text,
        (self_attention("layers.{}.self_attn", **grouped()),),
        note="each head has norms of its own",
    ),
    Family(
        "Falcon, 40B and 180B",
        _make(
            "Falcon",
            **{k: v for k, v in LLAMA.items() if k != "num_key_value_heads"},
            num_kv_heads=2,
            new_decoder_architecture=True,
        ),
        text,
        (
            self_attention(
                "h.{}.self_attention",
                layout="interleaved groups",
                key_value_heads=2,
                output="h.0.self_attention.dense.weight",
            ),
        ),
        interface=False,
        note="the queries of a group, its key and its value follow one another",
    ),
    Family(
        "CodeGen",
        _make("CodeGen", **{**GPT, "n_head": 8}, rotary_dim=4),
        text,
        (
            self_attention(
                "h.{}.attn",
                layout="fused in parts",
                heads=8,
                key_value_heads=8,
                head_size=4,
                output="h.0.attn.out_proj.weight",
            ),
        ),
        interface=CODEGEN_AND_GPTJ_USE_THE_INTERFACE,
        note="[query; value; key] for each of four devices; weights and biases since transformers 5.24",
    ),
    Family(
        "BitNet",
        _make("BitNet", **LLAMA),
        text,
        (self_attention("layers.{}.self_attn", **grouped(output="")),),
        replaceable=False,
        note="outputs are read before the norm over all heads, which stands before W_O",
    ),
    Family(
        "MiMo-V2-Flash",
        _make(
            "MiMoV2Flash",
            **LLAMA,
            head_dim=8,
            v_head_dim=6,
            n_routed_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=16,
            layer_types=["full_attention"] * LAYERS,
            attention_value_scale=None,
        ),
        text,
        (self_attention("layers.{}.self_attn", **grouped(head_size=6)),),
        note="values are narrower than queries and keys",
    ),
    Family("DeepSeek-V2", _make("DeepseekV2", **LATENT), text, (_latent(),), note="latent attention"),
    Family(
        "DeepSeek-V3",
        _make("DeepseekV3", **{**LATENT, "q_lora_rank": None}),
        text,
        (_latent(),),
        note="latent attention",
    ),
    Family(
        "NeoMME",
        _neomme,
        text,
        (
            self_attention(
                "layers.{}.self_attn",
                **grouped(head_size=16, output="layers.0.self_attn.output_projection.o_proj.weight"),
            ),
        ),
    ),
    Family(
        "GPT-OSS",
        _make(
            "GptOss",
            **LLAMA,
            head_dim=8,
            num_local_experts=2,
            num_experts_per_tok=1,
            sliding_window=4,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        text,
        (self_attention("layers.{}.self_attn", **grouped()),),
        note="attention sinks",
    ),
    Family(
        "GPT-J",
        _make("GPTJ", **GPT, rotary_dim=4),
        text,
        (self_attention("h.{}.attn", output="h.0.attn.out_proj.weight"),),
        interface=CODEGEN_AND_GPTJ_USE_THE_INTERFACE,
        note="weights and biases since transformers 5.24",
    ),
    Family(
        "Bloom",
        _make("Bloom", vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS),
        text,
        (self_attention("h.{}.self_attention", layout="interleaved", output="h.0.self_attention.dense.weight"),),
        interface=False,
    ),
    Family(
        "MPT",
        _make(
            "Mpt",
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            n_layers=LAYERS,
            n_heads=HEADS,
            max_seq_len=40,
            expansion_ratio=2,
        ),
        text,
        (self_attention("blocks.{}.attn", layout="fused", output="blocks.0.attn.out_proj.weight"),),
        interface=False,
    ),
    Family(
        "XGLM",
        _make(
            "XGLM",
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            num_layers=LAYERS,
            attention_heads=HEADS,
            ffn_dim=48,
            max_position_embeddings=40,
        ),
        text,
        (self_attention("layers.{}.self_attn", output="layers.0.self_attn.out_proj.weight"),),
        interface=False,
        note="proved in float32",
    ),
    Family(
        "CANINE",
        _make(
            "Canine",
            **{name: size for name, size in BERT.items() if name not in ("vocab_size", "max_position_embeddings")},
            max_position_embeddings=64,
            num_hash_buckets=64,
            local_transformer_stride=32,
            downsampling_rate=4,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        _characters,
        (
            *(
                Attention(
                    "self",
                    f"{stack}.layer",
                    (f"{stack}.layer.0.attention.self",),
                    output=f"{stack}.layer.0.attention.output.dense.weight",
                )
                for stack in ("initial_char_encoder", "final_char_encoder")
            ),
            *BERT_LIKE,
        ),
        interface=False,
        maskable=False,
        note="proved in float32; outputs of long texts are refused, as W_O takes the heads of several calls",
    ),
    Family(
        "RoFormer",
        _make("RoFormer", **BERT, rotary_value=True),
        text,
        BERT_LIKE,
        interface=False,
        note="its values are rotated",
    ),
    Family(
        "Funnel",
        _make(
            "Funnel",
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            n_head=HEADS,
            d_head=6,
            d_inner=48,
            block_sizes=[1, 1],
            num_decoder_layers=1,
        ),
        text,
        (
            *(
                Attention(
                    "self",
                    stack,
                    (f"{stack}.0.attention",),
                    head_size=6,
                    output=f"{stack}.0.attention.post_proj.weight",
                )
                for stack in ("encoder.blocks.0", "encoder.blocks.1", "decoder.layers")
            ),
        ),
        interface=False,
    ),
)
