"""The scales of the graph-to-text task: what a run of each size trains.

Owns `GraphScale` and the named scales. The recipes of `demo` and `cpu`, and how they write, were chosen on dev with
plain attention: a model of a thousand texts writes one clause again and again unless it may not, and of several beams
the one that ends first is the best by its own measure and far too short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headwise.errors import SettingError, require_choice, require_integer, require_positive, require_range
from headwise.lab.experiment.task import Recipe


@dataclass(frozen=True)
class GraphScale:
    """How large a run is: the model, its training, its decoding and the part of the data it sees.

    Attributes:
        name: Its name in records.
        width: Width d of words, nodes and states; even.
        layers: Blocks of the graph encoder.
        heads: Attention heads of each block and of the decoder's attentions; must divide `width`.
        dropout: Dropout, in [0, 1).
        learning_rate: Peak rate.
        tokens: Most words of a batch's texts, padding included.
        epochs: Passes over the training split.
        warmup_steps: Steps of linear warm-up.
        clip_norm: Largest norm of the gradient, repulsion included.
        optimizer: Adam, or SGD with momentum 0.9 as the released code has it.
        min_count: Occurrences in training from which a word has an id of its own.
        longest: Words of a training text, which is cut there, and of a text that is written.
        beams: Beams of the search on test; dev is written greedily.
        length_penalty: p in the score log P / length^p of a text.
        no_repeat: Words in a row that are not written twice in a text, at least 2; 0 for no such rule.
        released: Whether the model has the released code's departures from the paper; see `models.graph_encoder`.
        train_examples: Cap on the training graphs; None for all.
        dev_examples: Cap on the dev graphs.
        test_examples: Cap on the test graphs.
        compile_routing: Whether routing is compiled.

    Raises:
        SettingError: A value is outside its range.
    """

    name: str
    width: int
    layers: int
    heads: int
    dropout: float
    learning_rate: float
    tokens: int
    epochs: int
    warmup_steps: int
    clip_norm: float = 1.0
    optimizer: Literal["adam", "sgd"] = "adam"
    min_count: int = 2
    longest: int = 200
    beams: int = 4
    length_penalty: float = 1.0
    no_repeat: int = 0
    released: bool = False
    train_examples: int | None = None
    dev_examples: int | None = None
    test_examples: int | None = None
    compile_routing: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "tokens", "epochs", "min_count", "longest", "beams"):
            require_integer(name, getattr(self, name), low=1)
        for name in ("train_examples", "dev_examples", "test_examples"):
            if getattr(self, name) is not None:
                require_integer(name, getattr(self, name), low=1)
        if self.width % 2 or self.width % self.heads:
            raise SettingError(
                f"width is {self.width} with {self.heads} heads; expected an even multiple of the number of heads."
            )
        if self.tokens <= self.longest:
            raise SettingError(f"tokens is {self.tokens}; expected more than longest, {self.longest}, and its end.")
        require_integer("warmup_steps", self.warmup_steps)
        if self.no_repeat:
            require_integer("no_repeat", self.no_repeat, low=2)
        require_range("dropout", self.dropout, low=0.0, high=0.999)
        require_range("length_penalty", self.length_penalty)
        require_positive("learning_rate", self.learning_rate)
        require_positive("clip_norm", self.clip_norm)
        require_choice("optimizer", self.optimizer, ("adam", "sgd"))

    @property
    def recipe(self) -> Recipe:
        """How it is trained."""
        return Recipe(
            self.learning_rate, self.epochs, self.warmup_steps, clip_norm=self.clip_norm, optimizer=self.optimizer
        )


GRAPH_SCALES: Mapping[str, GraphScale] = {
    scale.name: scale
    for scale in (
        GraphScale(
            name="demo",
            width=64,
            layers=2,
            heads=4,
            dropout=0.1,
            learning_rate=3e-3,
            tokens=2_048,
            epochs=8,
            warmup_steps=50,
            longest=100,
            beams=1,
            no_repeat=3,
            train_examples=400,
            dev_examples=50,
            test_examples=100,
        ),
        GraphScale(
            name="cpu",
            width=64,
            layers=6,
            heads=4,
            dropout=0.2,
            learning_rate=3e-3,
            tokens=2_048,
            epochs=12,
            warmup_steps=50,
            min_count=3,
            longest=120,
            beams=1,
            no_repeat=3,
            dev_examples=100,
        ),
        GraphScale(
            name="gpu",
            width=256,
            layers=6,
            heads=4,
            dropout=0.3,
            learning_rate=1e-3,
            tokens=4_096,
            epochs=40,
            warmup_steps=200,
        ),
        # Koncel-Kedziorski et al. 2019, as their code trains it; 3,200 words are about its 32, 16 or 8 texts a batch
        GraphScale(
            name="paper",
            width=500,
            layers=6,
            heads=4,
            dropout=0.1,
            learning_rate=0.1,
            tokens=3_200,
            epochs=20,
            warmup_steps=0,
            optimizer="sgd",
            min_count=5,
            longest=400,
            compile_routing=True,
        ),
    )
}
