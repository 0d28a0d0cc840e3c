"""The scales of the sentence task: what a run of each size trains, and how its texts are read.

Owns `SentenceScale` and the named scales. The recipes of `demo` and `cpu` were chosen on dev, with plain attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headwise.errors import SettingError, require_integer, require_positive, require_range
from headwise.lab.experiment.task import UNRECORDED, Recipe


@dataclass(frozen=True)
class SentenceScale:
    """How large a run is: the model, its training and how texts are read.

    Attributes:
        name: Its name in records.
        width: Width of a word's vector.
        units: Units u of the LSTM in each direction; a head's output has 2u numbers.
        attention: Hidden units of the attention.
        heads: Attention heads r.
        hidden: Hidden units of the classifier.
        dropout: Dropout of words' vectors and before both layers of the classifier, in [0, 1).
        learning_rate: Peak rate of Adam.
        batch_size: Examples a step.
        epochs: Passes over the training split.
        warmup_steps: Steps of linear warm-up.
        clip_norm: Largest norm of the gradient, repulsion included.
        max_words: Words of a text; what is longer is cut there.
        min_count: Occurrences in training from which a word has a vector of its own.
        train_examples: Cap on the training examples, those with the smallest keys; None for all.
        positive: Share of the texts with label 1, of two labels 0 and 1: the others with it are left out by key; None
            for the texts as they are.
        embeddings: File of word vectors to start from; None to draw them.
        out_of_domain: File of other texts, whose predictions the figures of uncertainty are about; None for none.
        compile_routing: Whether routing is compiled.

    Raises:
        SettingError: A value is outside its range.
    """

    name: str
    width: int
    units: int
    attention: int
    heads: int
    hidden: int
    dropout: float
    learning_rate: float
    batch_size: int
    epochs: int
    warmup_steps: int
    clip_norm: float = 1.0
    max_words: int = 100
    min_count: int = 2
    train_examples: int | None = None
    positive: float | None = None
    embeddings: Path | None = field(default=None, metadata=UNRECORDED)
    out_of_domain: Path | None = field(default=None, metadata=UNRECORDED)
    compile_routing: bool = False

    def __post_init__(self) -> None:
        sizes = ("width", "units", "attention", "heads", "hidden", "batch_size", "epochs", "max_words", "min_count")
        for name in sizes:
            require_integer(name, getattr(self, name), low=1)
        require_integer("warmup_steps", self.warmup_steps)
        require_range("dropout", self.dropout, low=0.0, high=0.999)
        require_positive("learning_rate", self.learning_rate)
        require_positive("clip_norm", self.clip_norm)
        if self.train_examples is not None:
            require_integer("train_examples", self.train_examples, low=1)
        if self.positive is not None and not 0.0 < self.positive < 1.0:
            raise SettingError(f"positive is {self.positive}; expected a share of the texts, between 0 and 1.")

    @property
    def layers(self) -> int:
        """Layers of attention: one."""
        return 1

    @property
    def recipe(self) -> Recipe:
        """How it is trained."""
        return Recipe(self.learning_rate, self.epochs, self.warmup_steps, clip_norm=self.clip_norm)


SENTENCE_SCALES: Mapping[str, SentenceScale] = {
    scale.name: scale
    for scale in (
        SentenceScale(
            name="demo",
            width=48,
            units=32,
            attention=32,
            heads=8,
            hidden=64,
            dropout=0.3,
            learning_rate=3e-3,
            batch_size=32,
            epochs=3,
            warmup_steps=50,
            max_words=60,
            train_examples=3_000,
        ),
        SentenceScale(
            name="cpu",
            width=100,
            units=64,
            attention=64,
            heads=30,
            hidden=256,
            dropout=0.3,
            learning_rate=2e-3,
            batch_size=32,
            epochs=4,
            warmup_steps=100,
        ),
        SentenceScale(
            name="paper",
            width=300,
            units=300,
            attention=350,
            heads=30,
            hidden=3_000,
            dropout=0.3,
            learning_rate=5e-4,
            batch_size=128,
            epochs=30,
            warmup_steps=0,
            clip_norm=0.5,
            max_words=500,
            min_count=1,
        ),
    )
}
