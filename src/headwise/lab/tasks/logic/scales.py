"""The scales of the logical inference task: what a run of each size trains, on how much data.

Owns `Scale` and the named scales. The recipes of `demo` and `cpu` were chosen on dev, on one thread of a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headwise.errors import SettingError, require_integer, require_positive, require_range
from headwise.lab.experiment.task import Recipe


@dataclass(frozen=True)
class Scale:
    """How large a run is: the model, its training and the part of the data it sees.

    Attributes:
        name: Its name in records.
        width: Model width d.
        layers: Encoder layers.
        heads: Attention heads a layer.
        norm_first: Whether layers are pre-norm.
        dropout: Dropout after the FFN, in [0, 1).
        classifier_width: Hidden units of the classifier.
        learning_rate: Peak rate of Adam.
        batch_size: Examples a step.
        epochs: Passes over the training split.
        warmup_steps: Steps of linear warm-up.
        train_operators: Largest bin to train on.
        test_bins: Bins of the dev and the test split, rising.
        generated_draws: Draws of the generator when no folder is named.
        train_examples: Cap on the training examples, those with the smallest keys; None for all.
        dev_examples: Likewise for dev.
        queries: Trainable pooling queries.
        compile_routing: Whether routing is compiled: seconds once a process, repaid where a run takes minutes.

    Raises:
        SettingError: A value is outside its range.
    """

    name: str
    width: int
    layers: int
    heads: int
    norm_first: bool
    dropout: float
    classifier_width: int
    learning_rate: float
    batch_size: int
    epochs: int
    warmup_steps: int
    train_operators: int
    test_bins: tuple[int, ...]
    generated_draws: int
    train_examples: int | None = None
    dev_examples: int | None = None
    queries: int = 2
    compile_routing: bool = False

    def __post_init__(self) -> None:
        sizes = ("width", "layers", "heads", "classifier_width", "batch_size", "epochs", "generated_draws", "queries")
        for field in sizes:
            require_integer(field, getattr(self, field), low=1)
        for field in ("train_examples", "dev_examples"):
            if getattr(self, field) is not None:
                require_integer(field, getattr(self, field), low=1)
        require_integer("warmup_steps", self.warmup_steps)
        require_integer("train_operators", self.train_operators, high=12)
        require_range("dropout", self.dropout, low=0.0, high=0.999)
        require_positive("learning_rate", self.learning_rate)
        for number in self.test_bins:
            require_integer("test_bins", number, high=12)
        if not self.test_bins or list(self.test_bins) != sorted(set(self.test_bins)):
            raise SettingError(
                f"test_bins is {self.test_bins!r}; expected rising numbers of operators, such as (1, 2, 3)."
            )

    @property
    def recipe(self) -> Recipe:
        """How it is trained; the clip norm is that of Tran et al. 2018."""
        return Recipe(self.learning_rate, self.epochs, self.warmup_steps)


SCALES: Mapping[str, Scale] = {
    scale.name: scale
    for scale in (
        Scale(
            name="demo",
            width=32,
            layers=2,
            heads=4,
            norm_first=True,
            dropout=0.0,
            classifier_width=256,
            learning_rate=2e-3,
            batch_size=32,
            epochs=2,
            warmup_steps=500,
            train_operators=3,
            test_bins=(1, 2, 3),
            generated_draws=600_000,
        ),
        Scale(
            name="cpu",
            width=64,
            layers=2,
            heads=4,
            norm_first=True,
            dropout=0.0,
            classifier_width=256,
            learning_rate=2e-3,
            batch_size=64,
            epochs=3,
            warmup_steps=500,
            train_operators=6,
            test_bins=tuple(range(1, 13)),
            generated_draws=600_000,
            dev_examples=6_000,
            compile_routing=True,
        ),
        # Li et al. 2021 state width, layers, queries, dropout, rate and epochs; the rest follows Tran et al. 2018
        Scale(
            name="paper",
            width=256,
            layers=2,
            heads=4,
            norm_first=False,
            dropout=0.2,
            classifier_width=256,
            learning_rate=1e-4,
            batch_size=64,
            epochs=100,
            warmup_steps=200,
            train_operators=6,
            test_bins=tuple(range(1, 13)),
            generated_draws=600_000,
            compile_routing=True,
        ),
    )
}
