"""The scales of the classification task: what a run of each size trains, and how its data is read and cut.

Owns `ClassificationScale` and the named scales. The recipes of `demo` and `cpu` were chosen on dev, without roles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headwise.errors import SettingError, require_integer, require_positive, require_range
from headwise.lab.experiment.task import UNRECORDED, Recipe


@dataclass(frozen=True)
class ClassificationScale:
    """How large a run is: the model, its training and how texts are read.

    Attributes:
        name: Its name in records.
        width: Model width d, and width of a word's vector.
        layers: Encoder layers.
        heads: Attention heads a layer; role masks guide the first five.
        head_size: Width e of a head; heads x head_size need not be d.
        hidden: Hidden units of the feed-forward layers.
        norm_first: Whether layers are pre-norm.
        dropout: Dropout of words' vectors, of feed-forward outputs and of the pooled vector, in [0, 1).
        learning_rate: Peak rate of Adam.
        batch_size: Examples a step.
        epochs: Passes over the training split.
        warmup_steps: Steps of linear warm-up.
        max_words: Words of a text; what is longer is cut there.
        min_count: Occurrences in training from which a word has a vector of its own.
        train_examples: Cap on the training examples, those with the smallest keys; None for all.
        folds: Parts of a cross-validation, each the test set of one training; None for one cut of 80/10/10.
        fold: The part that is tested, from 0; None for all of them.
        pipeline: spaCy pipeline that parses the texts, a folder or an installed package; None for no parses.
        embeddings: File of word vectors to start from; None to draw them.
        compile_routing: Whether routing is compiled.

    Raises:
        SettingError: A value is outside its range.
    """

    name: str
    width: int
    layers: int
    heads: int
    head_size: int
    hidden: int
    norm_first: bool
    dropout: float
    learning_rate: float
    batch_size: int
    epochs: int
    warmup_steps: int
    max_words: int = 90
    min_count: int = 2
    train_examples: int | None = None
    folds: int | None = None
    fold: int | None = None
    pipeline: Path | None = field(default=None, metadata=UNRECORDED)
    embeddings: Path | None = field(default=None, metadata=UNRECORDED)
    compile_routing: bool = False

    def __post_init__(self) -> None:
        sizes = ("width", "layers", "heads", "head_size", "hidden", "batch_size", "epochs", "max_words", "min_count")
        for name in sizes:
            require_integer(name, getattr(self, name), low=1)
        if self.width % 2:
            raise SettingError(f"width is {self.width}; expected an even number, half for each kind of sinusoid.")
        require_integer("warmup_steps", self.warmup_steps)
        require_range("dropout", self.dropout, low=0.0, high=0.999)
        require_positive("learning_rate", self.learning_rate)
        if self.train_examples is not None:
            require_integer("train_examples", self.train_examples, low=1)
        if self.folds is not None:
            require_integer("folds", self.folds, low=3, high=100)
        if self.fold is not None:
            if self.folds is None:
                raise SettingError(f"fold is {self.fold} without folds; say into how many parts the data is cut.")
            require_integer("fold", self.fold, high=self.folds - 1)

    @property
    def recipe(self) -> Recipe:
        """How it is trained."""
        return Recipe(self.learning_rate, self.epochs, self.warmup_steps, clip_norm=1.0)


CLASSIFICATION_SCALES: Mapping[str, ClassificationScale] = {
    scale.name: scale
    for scale in (
        ClassificationScale(
            name="demo",
            width=48,
            layers=2,
            heads=6,
            head_size=8,
            hidden=96,
            norm_first=True,
            dropout=0.2,
            learning_rate=2e-3,
            batch_size=32,
            epochs=3,
            warmup_steps=100,
            train_examples=3_000,
        ),
        ClassificationScale(
            name="cpu",
            width=100,
            layers=2,
            heads=6,
            head_size=16,
            hidden=256,
            norm_first=True,
            dropout=0.3,
            learning_rate=2e-3,
            batch_size=32,
            epochs=6,
            warmup_steps=100,
            # caps the phrases of SST alone
            train_examples=10_000,
        ),
        # Wang et al. 2021 and its released code: widths, heads of 100 // 6, post-norm, ten folds, at most 30 epochs and
        # the middle of its grid for rate, dropout and batch; layers 2 to 8 and 6 or 8 heads are a matter of --set
        ClassificationScale(
            name="paper",
            width=100,
            layers=2,
            heads=6,
            head_size=16,
            hidden=256,
            norm_first=False,
            dropout=0.3,
            learning_rate=5e-4,
            batch_size=64,
            epochs=30,
            warmup_steps=0,
            folds=10,
        ),
    )
}
