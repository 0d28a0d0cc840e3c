"""Families that read images, sound or vectors."""

from __future__ import annotations

from torch import nn

from heads import vision
from heads.family import (
    BERT,
    ENCODER_DECODER,
    HEADS,
    LAYERS,
    SEQ2SEQ,
    VISION,
    VOCABULARY,
    WIDTH,
    Attention,
    Family,
    cross_attention,
    decoder_attention,
    from_transformers,
    image,
    layers_of,
    pixels,
    pixels_and_text,
    self_attention,
    speech_features,
    vectors,
    waves,
)


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


IMAGE_AND_SOUND: tuple[Family, ...] = (
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
