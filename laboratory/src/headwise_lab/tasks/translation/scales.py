"""The sizes of the translation task and their presets. What was tuned was tuned on dev."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from headwise.settings import Count, Dropout, Natural, NonNegative, Positive, Real
from headwise_lab.experiment.scale import UNRECORDED, Scale, presets


@dataclass(frozen=True)
class TranslationScale(Scale):
    """Sizes of the translation task; see `Scale` and `Recipe` for the other attributes.

    Attributes:
        model: "seq2seq", our model, or "marian", Hugging Face's Marian of the same sizes.
        encoder_layers: Layers of the encoder.
        decoder_layers: Layers of the decoder.
        norm_first: Whether layers are pre-norm; Marian's are post-norm.
        vocabulary_size: Number of joint subwords learned from training.
        tokens: Maximum tokens per batch on its longer side, padding included.
        label_smoothing: Share of a target's probability that is spread over the vocabulary.
    """

    # fairseq's recipe for IWSLT14, without clipping
    training: ClassVar[Mapping[str, Any]] = {
        "schedule": "inverse_sqrt",
        "clip_norm": 0.0,
        "betas": (0.9, 0.98),
        "bfloat16": True,
    }

    name: str
    width: Count
    hidden: Count
    encoder_layers: Count
    decoder_layers: Count
    heads: Count
    dropout: Dropout
    vocabulary_size: Count
    learning_rate: Positive
    tokens: Count
    epochs: Count
    warmup_steps: Natural
    model: Literal["seq2seq", "marian"] = "seq2seq"
    norm_first: bool = True
    label_smoothing: Dropout = 0.1
    weight_decay: NonNegative = 1e-4
    accumulation: Count = 1
    averaged: int = 1
    beams: Count = 5
    length_penalty: Real = 1.0
    train_examples: Count | None = None
    dev_examples: Count | None = None
    test_examples: Count | None = None
    pipeline: Path | None = field(default=None, metadata=UNRECORDED)
    compile_routing: bool = True

    @property
    def unused(self) -> Mapping[str, str]:
        """Marian is post-norm in any case."""
        return {"norm_first": "says nothing to Marian, which is post-norm"} if self.model == "marian" else {}


# paper: fairseq's transformer_iwslt_de_en, which An et al. 2020 train on IWSLT14.
# paper-base, paper-big: those of Vaswani et al. 2017, as An et al. 2020 train them on WMT14.
TRANSLATION_SCALES = presets(
    TranslationScale,
    "demo cpu gpu paper paper-base paper-big paper-big-8-heads",
    width=[64, 128, 256, 512, 512, 1_024, 1_024],
    hidden=[128, 256, 1_024, 1_024, 2_048, 4_096, 4_096],
    encoder_layers=[2, 2, 4, 6, 6, 6, 6],
    decoder_layers=[2, 2, 4, 6, 6, 6, 6],
    heads=[4, 4, 4, 4, 8, 16, 8],
    dropout=[0.0, 0.1, 0.3, 0.3, 0.1, 0.3, 0.3],
    vocabulary_size=[2_000, 4_000, 10_000, 10_000, 32_000, 32_000, 32_000],
    learning_rate=[3e-3, 2e-3, 2e-3, 5e-4, 7e-4, 5e-4, 5e-4],
    tokens=[2_048, 2_048, 8_192, 4_096, 4_096, 4_096, 4_096],
    epochs=[4, 4, 40, 60, 30, 30, 30],
    warmup_steps=[200, 600, 600, 4_000, 8_000, 8_000, 8_000],
    norm_first=[True, True, True, False, False, False, False],
    weight_decay=[1e-4, 1e-4, 1e-4, 1e-4, 0.0, 0.0, 0.0],
    accumulation=[1, 1, 1, 1, 8, 8, 8],
    averaged=[1, 2, 5, 5, 5, 5, 5],
    beams=[4, 5, 5, 5, 4, 4, 4],
    length_penalty=[1.0, 1.0, 1.0, 1.0, 0.6, 0.6, 0.6],
    train_examples=[10_000, None, None, None, None, None, None],
    dev_examples=[100, 200, None, None, None, None, None],
    test_examples=[200, None, None, None, None, None, None],
)
