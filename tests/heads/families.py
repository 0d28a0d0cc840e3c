"""The families of models headwise is tested on: one table, used by the tests and by docs/any-model.md.

Each is a tiny random model of the real class, built without a download, with inputs it takes and the attention
sites it really has. Head counts, head sizes and layer counts differ from one another wherever the family lets them.
"""

from __future__ import annotations

from torch import nn

from heads import vision
from heads.family import (
    BERT,
    BERT_LIKE,
    ENCODER_DECODER,
    HEADS,
    LAYERS,
    LLAMA,
    SEQ2SEQ,
    VISION,
    VOCABULARY,
    WIDTH,
    Attention,
    Family,
    cross_attention,
    decoder_attention,
    encoded,
    from_transformers,
    grouped,
    image,
    layers_of,
    pixels,
    pixels_and_text,
    self_attention,
    sequences,
    speech_features,
    text,
    vectors,
    waves,
)
from heads.further_families import FURTHER


def _clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {**BERT, "eos_token_id": VOCABULARY - 1, "bos_token_id": 1, "pad_token_id": 0}
    vision_config = {**VISION, "hidden_size": 24, "num_attention_heads": 3}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision_config, projection_dim=16))


def _torch_transformer() -> nn.Module:
    model = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, 48, batch_first=True)
    # padding would be turned into nested tensors, of which torch warns that they are a prototype
    model.encoder.use_nested_tensor = False
    return model


COMMON: tuple[Family, ...] = (
    Family("BERT", from_transformers("BertModel", "BertConfig", **BERT), text, BERT_LIKE),
    Family("RoBERTa", from_transformers("RobertaModel", "RobertaConfig", **BERT), text, BERT_LIKE),
    Family("ELECTRA", from_transformers("ElectraModel", "ElectraConfig", **BERT, embedding_size=16), text, BERT_LIKE),
    Family(
        "BERT with cross-attention",
        from_transformers("BertModel", "BertConfig", **BERT, is_decoder=True, add_cross_attention=True),
        encoded,
        (
            decoder_attention(
                "encoder.layer.{}.attention.self", output="encoder.layer.0.attention.output.dense.weight"
            ),
            cross_attention(
                "encoder.layer.{}.crossattention.self", output="encoder.layer.0.crossattention.output.dense.weight"
            ),
        ),
    ),
    Family(
        "ALBERT",
        from_transformers("AlbertModel", "AlbertConfig", **BERT, embedding_size=16),
        text,
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
        text,
        (self_attention("transformer.layer.{}.attention", output="transformer.layer.0.attention.out_lin.weight"),),
    ),
    Family(
        "DeBERTa",
        from_transformers(
            "DebertaModel", "DebertaConfig", **BERT, relative_attention=True, pos_att_type=["c2p", "p2c"]
        ),
        text,
        (
            self_attention(
                "encoder.layer.{}.attention.self",
                layout="interleaved",
                output="encoder.layer.0.attention.output.dense.weight",
            ),
        ),
        interface=False,
        note="its queries and values have biases apart from their projection",
    ),
    Family(
        "DeBERTa-v2",
        from_transformers(
            "DebertaV2Model",
            "DebertaV2Config",
            **BERT,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=4,
            max_relative_positions=8,
        ),
        text,
        BERT_LIKE,
        interface=False,
        note="separate weights project its positions; they are not heads",
    ),
    Family(
        "DeBERTa-v3",
        from_transformers(
            "DebertaV2Model",
            "DebertaV2Config",
            **BERT,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=4,
            max_relative_positions=8,
            share_att_key=True,
            norm_rel_ebd="layer_norm",
        ),
        text,
        BERT_LIKE,
        interface=False,
        note="its positions are projected with the query and key weights",
    ),
    Family(
        "ModernBERT",
        from_transformers(
            "ModernBertModel",
            "ModernBertConfig",
            **BERT,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
            global_attn_every_n_layers=2,
            local_attention=6,
        ),
        text,
        (self_attention("layers.{}.attn", layout="fused", output="layers.0.attn.Wo.weight"),),
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
        text,
        (self_attention("transformer.h.{}.attn", layout="fused", output="transformer.h.0.attn.c_proj.weight"),),
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
        encoded,
        (
            decoder_attention("transformer.h.{}.attn", layout="fused", output="transformer.h.0.attn.c_proj.weight"),
            cross_attention(
                "transformer.h.{}.crossattention",
                layout="fused key-value",
                output="transformer.h.0.crossattention.c_proj.weight",
            ),
        ),
    ),
    Family(
        "GPT-NeoX",
        from_transformers("GPTNeoXModel", "GPTNeoXConfig", **BERT),
        text,
        (self_attention("layers.{}.attention", layout="interleaved", output="layers.0.attention.dense.weight"),),
    ),
    Family(
        "Llama",
        from_transformers("LlamaForCausalLM", "LlamaConfig", **LLAMA),
        text,
        (self_attention("model.layers.{}.self_attn", **grouped(output="model.layers.0.self_attn.o_proj.weight")),),
    ),
    Family(
        "Mistral",
        from_transformers("MistralModel", "MistralConfig", **LLAMA, sliding_window=4, head_dim=6),
        text,
        (self_attention("layers.{}.self_attn", **grouped(head_size=6)),),
    ),
    Family(
        "Qwen2",
        from_transformers("Qwen2Model", "Qwen2Config", **LLAMA),
        text,
        (self_attention("layers.{}.self_attn", **grouped()),),
    ),
    Family(
        "Qwen3",
        from_transformers("Qwen3Model", "Qwen3Config", **LLAMA, head_dim=12),
        text,
        (self_attention("layers.{}.self_attn", **grouped(head_size=12)),),
        note="queries and keys are normalized after projection",
    ),
    Family(
        "Gemma",
        from_transformers("GemmaModel", "GemmaConfig", **{**LLAMA, "num_key_value_heads": 1}, head_dim=10),
        text,
        (self_attention("layers.{}.self_attn", **grouped(key_value_heads=1, head_size=10)),),
    ),
    Family(
        "Phi-3",
        from_transformers("Phi3Model", "Phi3Config", **LLAMA),
        text,
        (self_attention("layers.{}.self_attn", **grouped(layout="fused")),),
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
        sequences,
        (
            self_attention(
                "encoder.block.{}.layer.0.SelfAttention",
                head_size=5,
                output="encoder.block.0.layer.0.SelfAttention.o.weight",
            ),
            decoder_attention(
                "decoder.block.{}.layer.0.SelfAttention",
                head_size=5,
                output="decoder.block.0.layer.0.SelfAttention.o.weight",
            ),
            cross_attention(
                "decoder.block.{}.layer.1.EncDecAttention",
                head_size=5,
                output="decoder.block.0.layer.1.EncDecAttention.o.weight",
            ),
        ),
    ),
    Family("BART", from_transformers("BartModel", "BartConfig", **SEQ2SEQ), sequences, ENCODER_DECODER),
    Family("Marian", from_transformers("MarianModel", "MarianConfig", **SEQ2SEQ), sequences, ENCODER_DECODER),
    Family(
        "Whisper",
        from_transformers(
            "WhisperModel",
            "WhisperConfig",
            **{k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"},
            num_mel_bins=8,
            max_source_positions=10,
            max_target_positions=12,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        speech_features,
        ENCODER_DECODER,
        maskable=False,
        note="its keys have no bias",
    ),
    Family(
        "ViT",
        from_transformers("ViTModel", "ViTConfig", **VISION),
        pixels,
        (self_attention("layers.{}.attention", output="layers.0.attention.o_proj.weight"),),
        maskable=False,
    ),
    Family(
        "CLIP",
        _clip,
        pixels_and_text,
        (
            self_attention(
                "text_model.encoder.layers.{}.self_attn", output="text_model.encoder.layers.0.self_attn.out_proj.weight"
            ),
            self_attention(
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
        waves,
        (self_attention("encoder.layers.{}.attention", output="encoder.layers.0.attention.out_proj.weight"),),
    ),
    Family(
        "torch.nn.Transformer",
        _torch_transformer,
        vectors,
        (
            self_attention(
                "encoder.layers.{}.self_attn",
                layout="torch packed",
                output="encoder.layers.0.self_attn.out_proj.weight",
            ),
            decoder_attention(
                "decoder.layers.{}.self_attn",
                layout="torch packed",
                output="decoder.layers.0.self_attn.out_proj.weight",
            ),
            cross_attention(
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
        image,
        (self_attention("blocks.{}.attn", layout="fused", output="blocks.0.attn.proj.weight"),),
        interface=False,
        maskable=False,
        note="modules of the same structure",
    ),
    Family(
        "timm Swin",
        lambda: vision.SwinTransformer(WIDTH // 2, (2, 4), LAYERS),
        image,
        (
            Attention(
                "self",
                "layers.0.blocks",
                layers_of("layers.0.blocks.{}.attn"),
                "fused",
                heads=2,
                key_value_heads=2,
                output="layers.0.blocks.0.attn.proj.weight",
            ),
            Attention(
                "self",
                "layers.1.blocks",
                layers_of("layers.1.blocks.{}.attn"),
                "fused",
                output="layers.1.blocks.0.attn.proj.weight",
            ),
        ),
        interface=False,
        maskable=False,
        note="modules of the same structure; windows are folded into the batch",
    ),
)

FAMILIES = (*COMMON, *FURTHER)
