"""The scales of the translation task: what a run of each size trains, on how much data.

Owns `TranslationScale` and the named scales. What was chosen by trying was chosen on dev.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from headwise.errors import require_choice, require_integer, require_positive, require_range
from headwise.lab.experiment.task import UNRECORDED, Recipe


@dataclass(frozen=True)
class TranslationScale:
    """How large a run is: the model, its training, its decoding and the part of the data it sees.

    Attributes:
        name: Its name in records.
        model: "seq2seq", ours, or "marian", Hugging Face's Marian of the same sizes.
        width: Model width d.
        hidden: Hidden units of the feed-forward layers.
        encoder_layers: Layers of the encoder.
        decoder_layers: Layers of the decoder.
        heads: Attention heads a layer.
        norm_first: Whether layers are pre-norm; Marian's are post-norm.
        dropout: Dropout, in [0, 1).
        vocabulary_size: Joint subwords learned from training.
        learning_rate: Peak rate of Adam.
        tokens: Most tokens of a batch, padding included, on its longer side.
        epochs: Passes over the training split.
        warmup_steps: Steps of linear warm-up, before the inverse square root.
        label_smoothing: Share of a target's probability spread over the vocabulary.
        weight_decay: Decoupled weight decay.
        accumulation: Batches a step.
        averaged: Last epochs whose weights are averaged.
        beams: Beams of the search on test; dev is decoded greedily.
        length_penalty: p in the score log P / length^p of a translation.
        train_examples: Cap on the training pairs; None for all.
        dev_examples: Cap on the dev pairs.
        test_examples: Cap on the test pairs.
        pipeline: spaCy pipeline that parses the sources, a folder or an installed package; None for no parses.
        compile_routing: Whether routing is compiled.

    Raises:
        SettingError: A value is outside its range.
    """

    name: str
    width: int
    hidden: int
    encoder_layers: int
    decoder_layers: int
    heads: int
    dropout: float
    vocabulary_size: int
    learning_rate: float
    tokens: int
    epochs: int
    warmup_steps: int
    model: Literal["seq2seq", "marian"] = "seq2seq"
    norm_first: bool = True
    label_smoothing: float = 0.1
    weight_decay: float = 1e-4
    accumulation: int = 1
    averaged: int = 1
    beams: int = 5
    length_penalty: float = 1.0
    train_examples: int | None = None
    dev_examples: int | None = None
    test_examples: int | None = None
    pipeline: Path | None = field(default=None, metadata=UNRECORDED)
    compile_routing: bool = True

    def __post_init__(self) -> None:
        sizes = ("width", "hidden", "encoder_layers", "decoder_layers", "heads", "vocabulary_size", "tokens", "beams")
        for name in sizes:
            require_integer(name, getattr(self, name), low=1)
        for name in ("train_examples", "dev_examples", "test_examples"):
            if getattr(self, name) is not None:
                require_integer(name, getattr(self, name), low=1)
        require_choice("model", self.model, ("seq2seq", "marian"))
        require_positive("learning_rate", self.learning_rate)
        require_range("length_penalty", self.length_penalty)
        require_range("dropout", self.dropout, low=0.0, high=0.999)
        require_range("label_smoothing", self.label_smoothing, low=0.0, high=0.999)
        assert self.recipe.epochs == self.epochs  # what the recipe refuses is refused here

    @property
    def recipe(self) -> Recipe:
        """How it is trained: as fairseq's recipe for IWSLT14, without clipping."""
        return Recipe(
            self.learning_rate,
            self.epochs,
            self.warmup_steps,
            schedule="inverse_sqrt",
            clip_norm=0.0,
            betas=(0.9, 0.98),
            weight_decay=self.weight_decay,
            accumulation=self.accumulation,
            averaged=self.averaged,
            bfloat16=True,
        )


TRANSLATION_SCALES: Mapping[str, TranslationScale] = {
    scale.name: scale
    for scale in (
        TranslationScale(
            name="demo",
            width=64,
            hidden=128,
            encoder_layers=2,
            decoder_layers=2,
            heads=4,
            dropout=0.0,
            vocabulary_size=2_000,
            learning_rate=3e-3,
            tokens=2_048,
            epochs=4,
            warmup_steps=200,
            beams=4,
            train_examples=10_000,
            dev_examples=100,
            test_examples=200,
        ),
        TranslationScale(
            name="cpu",
            width=128,
            hidden=256,
            encoder_layers=2,
            decoder_layers=2,
            heads=4,
            dropout=0.1,
            vocabulary_size=4_000,
            learning_rate=2e-3,
            tokens=2_048,
            epochs=4,
            warmup_steps=600,
            averaged=2,
            dev_examples=200,
        ),
        TranslationScale(
            name="gpu",
            width=256,
            hidden=1_024,
            encoder_layers=4,
            decoder_layers=4,
            heads=4,
            dropout=0.3,
            vocabulary_size=10_000,
            learning_rate=2e-3,
            tokens=8_192,
            epochs=40,
            warmup_steps=600,
            averaged=5,
        ),
        # fairseq's transformer_iwslt_de_en, which An et al. 2020 train on IWSLT14
        TranslationScale(
            name="paper",
            width=512,
            hidden=1_024,
            encoder_layers=6,
            decoder_layers=6,
            heads=4,
            norm_first=False,
            dropout=0.3,
            vocabulary_size=10_000,
            learning_rate=5e-4,
            tokens=4_096,
            epochs=60,
            warmup_steps=4_000,
            averaged=5,
        ),
        # Vaswani et al. 2017, base, as An et al. 2020 train it on WMT14
        TranslationScale(
            name="paper-base",
            width=512,
            hidden=2_048,
            encoder_layers=6,
            decoder_layers=6,
            heads=8,
            norm_first=False,
            dropout=0.1,
            vocabulary_size=32_000,
            learning_rate=7e-4,
            tokens=4_096,
            epochs=30,
            warmup_steps=8_000,
            weight_decay=0.0,
            accumulation=8,
            averaged=5,
            beams=4,
            length_penalty=0.6,
        ),
        *(
            TranslationScale(
                name=name,
                width=1_024,
                hidden=4_096,
                encoder_layers=6,
                decoder_layers=6,
                heads=heads,
                norm_first=False,
                dropout=0.3,
                vocabulary_size=32_000,
                learning_rate=5e-4,
                tokens=4_096,
                epochs=30,
                warmup_steps=8_000,
                weight_decay=0.0,
                accumulation=8,
                averaged=5,
                beams=4,
                length_penalty=0.6,
            )
            for name, heads in (("paper-big", 16), ("paper-big-8-heads", 8))
        ),
    )
}
