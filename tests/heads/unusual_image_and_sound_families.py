"""Families that read images, sound or points, with unusual attention and regular heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from heads.family import (
    BERT,
    HEADS,
    LAYERS,
    VISION,
    VOCABULARY,
    WIDTH,
    Attention,
    Family,
    draw_ids,
    from_transformers,
    self_attention,
    text,
)


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
    return {
        **text(batch, padded),
        "pixel_values": torch.randn(batch, 3, 8, 8),
        "image_embeds_position_mask": places,
    }


def _clvp() -> nn.Module:
    from transformers import ClvpEncoder, ClvpEncoderConfig

    # the part of a head that is rotated has 32 features at least
    sizes = {**BERT, "hidden_size": 40 * HEADS, "projection_dim": 16, "bos_token_id": 1, "eos_token_id": 0}
    return ClvpEncoder(ClvpEncoderConfig(**sizes))


def _gemma3n_audio() -> nn.Module:
    from transformers import Gemma3nAudioConfig
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nAudioEncoder

    return Gemma3nAudioEncoder(
        Gemma3nAudioConfig(
            vocab_size=8,
            hidden_size=WIDTH,
            input_feat_size=16,
            conf_num_attention_heads=HEADS,
            conf_num_hidden_layers=LAYERS,
            conf_attention_chunk_size=4,
            conf_attention_context_left=5,
            conf_attention_context_right=0,
            conf_reduction_factor=1,
            sscp_conv_channel_size=(8, 4),
            conf_conv_kernel_size=3,
        )
    )


def _kosmos2() -> nn.Module:
    from transformers import Kosmos2Config, Kosmos2Model

    words = {
        "vocab_size": VOCABULARY,
        "embed_dim": WIDTH,
        "layers": LAYERS,
        "ffn_dim": 48,
        "attention_heads": HEADS,
        "max_position_embeddings": 40,
        "pad_token_id": 1,
    }
    return Kosmos2Model(Kosmos2Config(text_config=words, vision_config=VISION, latent_query_num=2))


def _make(name: str, **settings: object) -> Callable[[], nn.Module]:
    return from_transformers(f"{name}Model", f"{name}Config", **settings)


UNUSUAL_IMAGE_AND_SOUND: tuple[Family, ...] = (
    Family(
        "CLVP",
        _clvp,
        _ids_alone,
        (self_attention("layers.{}.self_attn", head_size=40, output="layers.0.self_attn.out_proj.weight"),),
        interface=False,
        maskable=False,
        note="its values are rotated",
    ),
    Family(
        "WavLM",
        _make(
            "WavLM",
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
            num_buckets=8,
            max_bucket_distance=12,
        ),
        _unpadded_waves,
        (self_attention("encoder.layers.{}.attention", output="encoder.layers.0.attention.out_proj.weight"),),
        interface=False,
        maskable=False,
        replaceable=False,
        note="it calls none of its projections; they are called once something was attached",
    ),
    Family(
        "Perceiver",
        _make(
            "Perceiver",
            d_model=WIDTH,
            num_latents=6,
            d_latents=24,
            num_blocks=1,
            num_self_attends_per_block=2,
            num_self_attention_heads=HEADS,
            num_cross_attention_heads=2,
            qk_channels=16,
            v_channels=24,
        ),
        _points,
        (
            Attention(
                "cross",
                "",
                ("encoder.cross_attention.attention.self",),
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
            self_attention(
                "vision_model.model.encoder.layers.{}.self_attn",
                output="vision_model.model.encoder.layers.0.self_attn.out_proj.weight",
            ),
            Attention(
                "self",
                "",
                ("image_to_text_projection.x_attn",),
                output="image_to_text_projection.x_attn.out_proj.weight",
            ),
        ),
        replaceable=False,
        note="outputs of the text are read before the norm over all heads, which stands before W_O",
    ),
)
