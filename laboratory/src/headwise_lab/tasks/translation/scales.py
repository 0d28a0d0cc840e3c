"""The sizes of the translation task; `task.toml` has their presets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from headwise.settings import Count, Dropout, Natural, NonNegative, Positive, Real
from headwise_lab.experiment.scale import UNRECORDED, Scale, read_presets


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


TRANSLATION_SCALES = read_presets(Path(__file__).with_name("task.toml"), TranslationScale)
