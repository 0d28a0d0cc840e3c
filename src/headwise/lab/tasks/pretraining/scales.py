"""The scales of pre-training: what a run of each size trains, and for how many steps.

Owns `PretrainingScale` and the named scales. demo and gpu have the same word pieces and length, so that text is
prepared once for both. cpu was chosen on losses in training, with plain heads, for leaving the plateau where the
generator knows how frequent words are and no more: narrow networks, drawn wide, short rows, many small steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headwise.errors import SettingError, require_integer, require_positive, require_range
from headwise.lab.experiment.task import Recipe
from headwise.lab.models.electra import ElectraSizes
from headwise.lab.models.normal_start import DEVIATION
from headwise.lab.tasks.pretraining.prepare import TextPreparation


@dataclass(frozen=True)
class PretrainingScale:
    """How large a run is: the model, its training and how text is cut.

    Attributes:
        name: Its name in records.
        width: Width of the discriminator.
        hidden: Hidden units of its feed-forward layers.
        layers: Layers of each network.
        heads: Attention heads of a layer of the discriminator.
        embedding: Width of the shared embeddings.
        steps: Optimizer steps.
        rounds: Times that dev is looked at.
        warmup_steps: Steps of linear warm-up.
        batch_size: Rows a step.
        learning_rate: Peak rate of Adam.
        vocabulary_size: Word pieces learned from the text.
        length: Tokens of a row.
        generator: Share of the discriminator's width, hidden units and heads that the generator has.
        dropout: Dropout, in [0, 1).
        masked: Share of tokens that are masked, in (0, 1).
        generator_weight: Weight of the generator's loss.
        discriminator_weight: Weight of the discriminator's loss.
        weight_decay: Decoupled weight decay, of matrices alone.
        clip_norm: Largest norm of the gradient, repulsion included.
        deviation: Standard deviation that weights are drawn with.
        sinusoids: Whether positions begin as sinusoids.
        all_layers: Whether rules act on all layers of the discriminator where the arm names none, not on the first.
        dev_rows: Most rows of dev.
        test_rows: Most rows of test.
        compile_routing: Whether routing is compiled.

    Raises:
        SettingError: A value is outside its range, or the steps cannot be cut into the rounds.
    """

    name: str
    width: int
    hidden: int
    layers: int
    heads: int
    embedding: int
    steps: int
    rounds: int
    warmup_steps: int
    batch_size: int
    learning_rate: float
    vocabulary_size: int
    length: int = 128
    generator: float = 0.25
    dropout: float = 0.1
    masked: float = 0.15
    generator_weight: float = 1.0
    discriminator_weight: float = 50.0
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    deviation: float = DEVIATION
    sinusoids: bool = False
    all_layers: bool = False
    dev_rows: int | None = None
    test_rows: int | None = None
    compile_routing: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "rounds", "batch_size"):
            require_integer(name, getattr(self, name), low=1)
        require_integer("length", self.length, low=5, high=512)
        require_integer("warmup_steps", self.warmup_steps)
        require_positive("learning_rate", self.learning_rate)
        require_range("clip_norm", self.clip_norm, low=0.0)
        for name in ("dev_rows", "test_rows"):
            if getattr(self, name) is not None:
                require_integer(name, getattr(self, name), low=1)
        if self.steps % self.rounds:
            raise SettingError(f"{self.steps} steps cannot be cut into {self.rounds} rounds of one length; change one.")
        if not 0.0 < self.masked < 1.0:
            raise SettingError(f"masked is {self.masked}; expected a share of the tokens, between 0 and 1.")
        assert self.sizes(self.vocabulary_size).heads == self.heads  # what the sizes refuse is refused here

    @property
    def recipe(self) -> Recipe:
        """How it is trained; a round is an epoch of it."""
        return Recipe(
            self.learning_rate,
            self.rounds,
            self.warmup_steps,
            clip_norm=self.clip_norm,
            epsilon=1e-6,
            weight_decay=self.weight_decay,
            bfloat16=True,
        )

    @property
    def preparation(self) -> TextPreparation:
        """How text is prepared for it."""
        return TextPreparation(self.vocabulary_size, self.length)

    def sizes(self, vocabulary: int) -> ElectraSizes:
        """Return the sizes of its model with so many token ids."""
        return ElectraSizes(
            vocabulary,
            self.width,
            self.hidden,
            self.layers,
            self.heads,
            self.embedding,
            self.generator,
            self.dropout,
            self.generator_weight,
            self.discriminator_weight,
            self.deviation,
            self.sinusoids,
        )


PRETRAINING_SCALES: Mapping[str, PretrainingScale] = {
    scale.name: scale
    for scale in (
        PretrainingScale(
            name="demo",
            width=64,
            hidden=128,
            layers=2,
            heads=4,
            embedding=32,
            steps=300,
            rounds=3,
            warmup_steps=30,
            batch_size=16,
            learning_rate=2e-3,
            vocabulary_size=8_000,
            dev_rows=128,
            test_rows=256,
        ),
        PretrainingScale(
            name="cpu",
            width=64,
            hidden=256,
            layers=3,
            heads=4,
            embedding=64,
            steps=16_000,
            rounds=8,
            warmup_steps=400,
            batch_size=64,
            learning_rate=1e-3,
            vocabulary_size=2_000,
            length=32,
            generator=0.5,
            # two cores spend two fifths of a step on dropout, and a small text is passed over less than four times
            dropout=0.0,
            discriminator_weight=10.0,
            deviation=0.125,
            sinusoids=True,
            dev_rows=1_000,
            test_rows=2_000,
        ),
        # ELECTRA-small on a small text: minutes of one GPU
        PretrainingScale(
            name="gpu",
            width=256,
            hidden=1_024,
            layers=12,
            heads=4,
            embedding=128,
            steps=6_000,
            rounds=6,
            warmup_steps=600,
            batch_size=128,
            learning_rate=5e-4,
            vocabulary_size=8_000,
            dev_rows=512,
        ),
        # ELECTRA-small of Clark et al. 2020, as An et al. 2020 train it
        PretrainingScale(
            name="paper",
            width=256,
            hidden=1_024,
            layers=12,
            heads=4,
            embedding=128,
            steps=1_000_000,
            rounds=100,
            warmup_steps=10_000,
            batch_size=128,
            learning_rate=5e-4,
            vocabulary_size=30_522,
        ),
    )
}
