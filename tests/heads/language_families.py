"""Families of language models: encoders, decoders and both, also those with unusual attention and regular heads."""

from __future__ import annotations

from torch import Tensor, nn

from heads.family import (
    BERT,
    BERT_LIKE,
    ENCODER_DECODER,
    GPT,
    HEADS,
    LAYERS,
    LLAMA,
    SEQ2SEQ,
    SPECIAL,
    VOCABULARY,
    WIDTH,
    WORDS,
    Attention,
    Family,
    cross_attention,
    decoder_attention,
    draw_ids,
    encoded,
    grouped,
    make,
    one_attention,
    self_attention,
    sequences,
    text,
)
from heads.transformers_versions import CODEGEN_AND_GPTJ_USE_THE_INTERFACE

RELATIVE = {"relative_attention": True, "position_buckets": 4, "max_relative_positions": 8}
LATENT = {**LLAMA, "num_key_value_heads": HEADS, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 10}
LATENT |= {"qk_rope_head_dim": 4, "v_head_dim": 6, "first_k_dense_replace": LAYERS}
BERT_PARTS = {"output": "encoder.layer.0.attention.output.dense.weight"}
GPT2 = self_attention("transformer.h.{}.attn", "c_proj", layout="fused")
T5 = {**WORDS, "d_kv": 5, "d_ff": 48, "num_layers": LAYERS, "num_heads": HEADS, "decoder_start_token_id": 0}
T5 |= {"relative_attention_num_buckets": 6, "relative_attention_max_distance": 9}
MIMO = {**LLAMA, "head_dim": 8, "v_head_dim": 6, "n_routed_experts": 2, "num_experts_per_tok": 1}
MIMO |= {"moe_intermediate_size": 16, "layer_types": ["full_attention"] * LAYERS, "attention_value_scale": None}
NEOX = self_attention("layers.{}.attention", "dense", layout="interleaved")
OWN = self_attention("layers.{}.self_attn", "out_proj")
LATENT_ATTENTION = self_attention("layers.{}.self_attn", "o_proj", layout="latent", head_size=6)


def _characters(batch: int, _padded: bool) -> dict[str, Tensor]:
    return {"input_ids": draw_ids(batch, 32)}


def _neomme() -> nn.Module:
    model = make("NeoMME", **LLAMA, head_dim=16)()
    for parameter in model.parameters():
        # W_O and the share of the own value start at zero
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model


def _chameleon() -> nn.Module:
    """The decoder of Chameleon, without the tokenizer of images, whose projections are convolutions."""
    from transformers import ChameleonVQVAEConfig

    sizes = {"embed_dim": 8, "num_embeddings": 16, "latent_channels": 8, "resolution": 16, "base_channels": 32}
    images = ChameleonVQVAEConfig(**sizes, channel_multiplier=[1, 1])
    model: nn.Module = make("Chameleon", **LLAMA, vq_config=images, vocabulary_map={"<image>": 5})()
    del model.vqmodel
    return model


def _without(sizes: dict, *names: str) -> dict:
    return {name: size for name, size in sizes.items() if name not in names}


LANGUAGE: tuple[Family, ...] = (
    Family("BERT", make("Bert", **BERT), text, BERT_LIKE),
    Family("RoBERTa", make("Roberta", **BERT), text, BERT_LIKE),
    Family("ELECTRA", make("Electra", **BERT, embedding_size=16), text, BERT_LIKE),
    Family(
        "BERT with cross-attention",
        make("Bert", **BERT, is_decoder=True, add_cross_attention=True),
        encoded,
        (
            decoder_attention("encoder.layer.{}.attention.self", **BERT_PARTS),
            cross_attention(
                "encoder.layer.{}.crossattention.self", output="encoder.layer.0.crossattention.output.dense.weight"
            ),
        ),
    ),
    Family(
        "ALBERT",
        make("Albert", **BERT, embedding_size=16),
        text,
        (one_attention("encoder.albert_layer_groups.0.albert_layers", "0.attention", "dense", calls=LAYERS),),
        note="one attention module, called once per layer",
    ),
    Family(
        "DistilBERT",
        make(
            "DistilBert",
            vocab_size=VOCABULARY,
            dim=WIDTH,
            n_layers=LAYERS,
            n_heads=HEADS,
            hidden_dim=48,
            max_position_embeddings=40,
        ),
        text,
        (self_attention("transformer.layer.{}.attention", "out_lin"),),
    ),
    Family(
        "DeBERTa",
        make("Deberta", **BERT, relative_attention=True, pos_att_type=["c2p", "p2c"]),
        text,
        (self_attention("encoder.layer.{}.attention.self", layout="interleaved", **BERT_PARTS),),
        interface=False,
        note="its queries and values have biases apart from their projection",
    ),
    Family(
        "DeBERTa-v2",
        make("DebertaV2", **BERT, **RELATIVE, pos_att_type=["p2c", "c2p"]),
        text,
        BERT_LIKE,
        interface=False,
        note="separate weights project its positions; they are not heads",
    ),
    Family(
        "DeBERTa-v3",
        make(
            "DebertaV2", **BERT, **RELATIVE, pos_att_type=["p2c", "c2p"], share_att_key=True, norm_rel_ebd="layer_norm"
        ),
        text,
        BERT_LIKE,
        interface=False,
        note="its positions are projected with the query and key weights",
    ),
    Family(
        "ModernBERT",
        make(
            "ModernBert",
            **{**BERT, **SPECIAL, "cls_token_id": 1, "sep_token_id": 2},
            global_attn_every_n_layers=2,
            local_attention=6,
        ),
        text,
        (self_attention("layers.{}.attn", "Wo", layout="fused"),),
    ),
    Family(
        "GPT-2", make("GPT2", "GPT2LMHeadModel", **GPT, pad_token_id=0), text, (GPT2,), note="Conv1D: columns are heads"
    ),
    Family(
        "GPT-2 with cross-attention",
        make("GPT2", "GPT2LMHeadModel", **GPT, pad_token_id=0, add_cross_attention=True),
        encoded,
        (
            decoder_attention("transformer.h.{}.attn", "c_proj", layout="fused"),
            cross_attention("transformer.h.{}.crossattention", "c_proj", layout="fused key-value"),
        ),
    ),
    Family("GPT-NeoX", make("GPTNeoX", **BERT), text, (NEOX,)),
    Family("Llama", make("Llama", "LlamaForCausalLM", **LLAMA), text, (grouped("model.layers.{}.self_attn"),)),
    Family("Mistral", make("Mistral", **LLAMA, sliding_window=4, head_dim=6), text, (grouped(head_size=6),)),
    Family("Qwen2", make("Qwen2", **LLAMA), text, (grouped(),)),
    Family(
        "Qwen3",
        make("Qwen3", **LLAMA, head_dim=12),
        text,
        (grouped(head_size=12),),
        note="queries and keys are normalized after projection",
    ),
    Family(
        "Gemma",
        make("Gemma", **{**LLAMA, "num_key_value_heads": 1}, head_dim=10),
        text,
        (grouped(key_value_heads=1, head_size=10),),
    ),
    Family("Phi-3", make("Phi3", **LLAMA), text, (grouped(layout="fused"),)),
    Family(
        "T5",
        make("T5", **T5),
        sequences,
        (
            self_attention("encoder.block.{}.layer.0.SelfAttention", "o", head_size=5),
            decoder_attention("decoder.block.{}.layer.0.SelfAttention", "o", head_size=5),
            cross_attention("decoder.block.{}.layer.1.EncDecAttention", "o", head_size=5),
        ),
    ),
    Family("BART", make("Bart", **SEQ2SEQ), sequences, ENCODER_DECODER),
    Family("Marian", make("Marian", **SEQ2SEQ), sequences, ENCODER_DECODER),
)

UNUSUAL_LANGUAGE: tuple[Family, ...] = (
    Family(
        "Chameleon",
        _chameleon,
        text,
        (grouped(),),
        note='each head has norms of its own; leave out the tokenizer of images: `exclude=("vqmodel.*",)`',
    ),
    Family(
        "Cohere", make("Cohere", **LLAMA, use_qk_norm=True), text, (grouped(),), note="each head has norms of its own"
    ),
    Family(
        "Falcon, 40B and 180B",
        make("Falcon", **_without(LLAMA, "num_key_value_heads"), num_kv_heads=2, new_decoder_architecture=True),
        text,
        (self_attention("h.{}.self_attention", "dense", layout="interleaved groups", key_value_heads=2),),
        interface=False,
        note="the queries of a group, its key and its value follow one another",
    ),
    Family(
        "CodeGen",
        make("CodeGen", **{**GPT, "n_head": 8}, rotary_dim=4),
        text,
        (self_attention("h.{}.attn", "out_proj", layout="fused in parts", heads=8, key_value_heads=8, head_size=4),),
        interface=CODEGEN_AND_GPTJ_USE_THE_INTERFACE,
        note="[query; value; key] for each of four devices; weights and biases since transformers 5.24",
    ),
    Family(
        "BitNet",
        make("BitNet", **LLAMA),
        text,
        (grouped(attribute=""),),
        replaceable=False,
        note="outputs are read before the norm over all heads, which stands before W_O",
    ),
    Family(
        "MiMo-V2-Flash",
        make("MiMoV2Flash", **MIMO),
        text,
        (grouped(head_size=6),),
        note="values are narrower than queries and keys",
    ),
    Family("DeepSeek-V2", make("DeepseekV2", **LATENT), text, (LATENT_ATTENTION,), note="latent attention"),
    Family(
        "DeepSeek-V3",
        make("DeepseekV3", **{**LATENT, "q_lora_rank": None}),
        text,
        (LATENT_ATTENTION,),
        note="latent attention",
    ),
    Family("NeoMME", _neomme, text, (grouped(attribute="output_projection.o_proj", head_size=16),)),
    Family(
        "GPT-OSS",
        make(
            "GptOss",
            **{**LLAMA, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4},
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        text,
        (grouped(),),
        note="attention sinks",
    ),
    Family(
        "GPT-J",
        make("GPTJ", **GPT, rotary_dim=4),
        text,
        (self_attention("h.{}.attn", "out_proj"),),
        interface=CODEGEN_AND_GPTJ_USE_THE_INTERFACE,
        note="weights and biases since transformers 5.24",
    ),
    Family(
        "Bloom",
        make("Bloom", vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS),
        text,
        (self_attention("h.{}.self_attention", "dense", layout="interleaved"),),
        interface=False,
    ),
    Family(
        "MPT",
        make("Mpt", **WORDS, n_layers=LAYERS, n_heads=HEADS, max_seq_len=40, expansion_ratio=2),
        text,
        (self_attention("blocks.{}.attn", "out_proj", layout="fused"),),
        interface=False,
    ),
    Family(
        "XGLM",
        make("XGLM", **WORDS, num_layers=LAYERS, attention_heads=HEADS, ffn_dim=48, max_position_embeddings=40),
        text,
        (OWN,),
        interface=False,
        note="proved in float32",
    ),
    Family(
        "CANINE",
        make(
            "Canine",
            **{**_without(BERT, "vocab_size"), **SPECIAL, "max_position_embeddings": 64, "num_hash_buckets": 64},
            local_transformer_stride=32,
            downsampling_rate=4,
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
        make("RoFormer", **BERT, rotary_value=True),
        text,
        BERT_LIKE,
        interface=False,
        note="its values are rotated",
    ),
    Family(
        "Funnel",
        make("Funnel", **WORDS, n_head=HEADS, d_head=6, d_inner=48, block_sizes=[1, 1], num_decoder_layers=1),
        text,
        tuple(
            one_attention(stack, "0.attention", "post_proj", head_size=6)
            for stack in ("encoder.blocks.0", "encoder.blocks.1", "decoder.layers")
        ),
        interface=False,
    ),
)
