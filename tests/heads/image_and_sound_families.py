"""Families that read images, sound, points or vectors, also those with unusual attention and regular heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heads import vision
from heads.family import (
    BERT,
    ENCODER_DECODER,
    HEADS,
    LAYERS,
    SEQ2SEQ,
    SPECIAL,
    VISION,
    VOCABULARY,
    WAVES,
    WIDTH,
    Family,
    cross_attention,
    decoder_attention,
    draw_ids,
    image,
    make,
    one_attention,
    pixels,
    pixels_and_text,
    self_attention,
    speech_features,
    text,
    vectors,
    waves,
)

PERCEIVER = {"d_model": WIDTH, "num_latents": 6, "d_latents": 24, "num_blocks": 1, "num_self_attends_per_block": 2}
PERCEIVER |= {"num_self_attention_heads": HEADS, "num_cross_attention_heads": 2, "qk_channels": 16, "v_channels": 24}


def _clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    words = {**BERT, **SPECIAL, "eos_token_id": VOCABULARY - 1}
    vision_config = {**VISION, "hidden_size": 24, "num_attention_heads": 3}
    return CLIPModel(CLIPConfig(text_config=words, vision_config=vision_config, projection_dim=16))


def _torch_transformer() -> nn.Module:
    model = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, 48, batch_first=True)
    # padding would be turned into nested tensors, of which torch warns that they are a prototype
    model.encoder.use_nested_tensor = False
    return model


def _unpadded_waves(batch: int, _padded: bool) -> dict[str, Tensor]:
    return {"input_values": torch.randn(batch, 400)}


def _ids_alone(batch: int, _padded: bool) -> dict[str, Tensor]:
    return {"input_ids": draw_ids(batch)}


def _points(batch: int, _padded: bool) -> dict[str, Tensor]:
    return {"inputs": torch.randn(batch, 9, WIDTH)}


def _mel_spectrum(batch: int, _padded: bool) -> dict[str, Tensor]:
    return {"audio_mel": torch.randn(batch, 40, 16), "audio_mel_mask": torch.zeros(batch, 40, dtype=torch.bool)}


def _grounded(batch: int, padded: bool) -> dict[str, Tensor]:
    places = torch.tensor([[0, 1, 1, 0, 0, 0, 0]]).expand(batch, -1)
    return {**text(batch, padded), "pixel_values": torch.randn(batch, 3, 8, 8), "image_embeds_position_mask": places}


def _clvp() -> nn.Module:
    from transformers import ClvpEncoder, ClvpEncoderConfig

    # the part of a head that is rotated has 32 features at least
    sizes = {**BERT, "hidden_size": 40 * HEADS, "projection_dim": 16, "bos_token_id": 1, "eos_token_id": 0}
    return ClvpEncoder(ClvpEncoderConfig(**sizes))


def _gemma3n_audio() -> nn.Module:
    from transformers import Gemma3nAudioConfig
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nAudioEncoder

    sizes = {"num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "conv_kernel_size": 3, "reduction_factor": 1}
    sizes |= {"attention_chunk_size": 4, "attention_context_left": 5, "attention_context_right": 0}
    conformer = {f"conf_{name}": size for name, size in sizes.items()}
    config = Gemma3nAudioConfig(
        vocab_size=8, hidden_size=WIDTH, input_feat_size=16, sscp_conv_channel_size=(8, 4), **conformer
    )
    return Gemma3nAudioEncoder(config)


def _kosmos2() -> nn.Module:
    from transformers import Kosmos2Config, Kosmos2Model

    words = {"vocab_size": VOCABULARY, "embed_dim": WIDTH, "layers": LAYERS, "ffn_dim": 48, "attention_heads": HEADS}
    words |= {"max_position_embeddings": 40, "pad_token_id": 1}
    return Kosmos2Model(Kosmos2Config(text_config=words, vision_config=VISION, latent_query_num=2))


IMAGE_AND_SOUND: tuple[Family, ...] = (
    Family(
        "Whisper",
        make(
            "Whisper",
            **{name: size for name, size in SEQ2SEQ.items() if name != "max_position_embeddings"},
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
    Family("ViT", make("ViT", **VISION), pixels, (self_attention("layers.{}.attention", "o_proj"),), maskable=False),
    Family(
        "CLIP",
        _clip,
        pixels_and_text,
        (
            self_attention("text_model.encoder.layers.{}.self_attn", "out_proj"),
            self_attention("vision_model.encoder.layers.{}.self_attn", "out_proj", heads=3, key_value_heads=3),
        ),
    ),
    Family("Wav2Vec2", make("Wav2Vec2", **WAVES), waves, (self_attention("encoder.layers.{}.attention", "out_proj"),)),
    Family(
        "torch.nn.Transformer",
        _torch_transformer,
        vectors,
        (
            self_attention("encoder.layers.{}.self_attn", "out_proj", layout="torch packed"),
            decoder_attention("decoder.layers.{}.self_attn", "out_proj", layout="torch packed"),
            cross_attention("decoder.layers.{}.multihead_attn", "out_proj", layout="torch packed"),
        ),
        interface=False,
    ),
    Family(
        "timm ViT",
        lambda: vision.VisionTransformer(WIDTH, HEADS, LAYERS),
        image,
        (self_attention("blocks.{}.attn", "proj", layout="fused"),),
        interface=False,
        maskable=False,
        note="modules of the same structure",
    ),
    Family(
        "timm Swin",
        lambda: vision.SwinTransformer(WIDTH // 2, (2, 4), LAYERS),
        image,
        (
            self_attention("layers.0.blocks.{}.attn", "proj", layout="fused", heads=2, key_value_heads=2),
            self_attention("layers.1.blocks.{}.attn", "proj", layout="fused"),
        ),
        interface=False,
        maskable=False,
        note="modules of the same structure; windows are folded into the batch",
    ),
)

UNUSUAL_IMAGE_AND_SOUND: tuple[Family, ...] = (
    Family(
        "CLVP",
        _clvp,
        _ids_alone,
        (self_attention("layers.{}.self_attn", "out_proj", head_size=40),),
        interface=False,
        maskable=False,
        note="its values are rotated",
    ),
    Family(
        "WavLM",
        make("WavLM", **WAVES, num_buckets=8, max_bucket_distance=12),
        _unpadded_waves,
        (self_attention("encoder.layers.{}.attention", "out_proj"),),
        interface=False,
        maskable=False,
        replaceable=False,
        note="it calls none of its projections; they are called once something was attached",
    ),
    Family(
        "Perceiver",
        make("Perceiver", **PERCEIVER),
        _points,
        (
            one_attention(
                "",
                "encoder.cross_attention.attention.self",
                kind="cross",
                heads=2,
                key_value_heads=2,
                head_size=12,
                output="encoder.cross_attention.attention.output.dense.weight",
            ),
            self_attention(
                "encoder.self_attends.{}.attention.self",
                head_size=6,
                output="encoder.self_attends.0.attention.output.dense.weight",
            ),
        ),
        interface=False,
        maskable=False,
        note="values are wider than queries and keys",
    ),
    Family(
        "Gemma 3n audio",
        _gemma3n_audio,
        _mel_spectrum,
        (self_attention("conformer.{}.attention.attn", output="conformer.0.attention.post.weight"),),
        interface=False,
        maskable=False,
    ),
    Family(
        "Kosmos-2",
        _kosmos2,
        _grounded,
        (
            self_attention("text_model.model.layers.{}.self_attn"),
            self_attention("vision_model.model.encoder.layers.{}.self_attn", "out_proj"),
            one_attention("", "image_to_text_projection.x_attn", "out_proj"),
        ),
        replaceable=False,
        note="outputs of the text are read before the norm over all heads, which stands before W_O",
    ),
)
