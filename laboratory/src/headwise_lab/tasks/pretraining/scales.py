"""The sizes of pretraining and their presets.

`demo` and `gpu` have the same word pieces and length, so text prepared for one serves the other. `cpu` was chosen on
training losses, with plain heads, so that the generator learns more than word frequencies: narrow networks with wide
initialization, short rows, many small steps.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar

from headwise.errors import SettingError, require_integer
from headwise.settings import Count, Natural, NonNegative, Positive, Share
from headwise.texts.tables import USUAL, Columns
from headwise_lab.data.documents import KEY
from headwise_lab.experiment.scale import UNRECORDED, Scale, presets
from headwise_lab.models.electra import DEVIATION, ElectraSizes
from headwise_lab.packed_text.prepare import TextPreparation


@dataclass(frozen=True)
class PretrainingScale(Scale):
    """Sizes of pretraining; see `Scale` for the other attributes and `ElectraSizes` for those of the model.

    Attributes:
        embedding: Width of the shared embeddings.
        steps: Number of optimizer steps.
        rounds: Number of evaluations on dev.
        vocabulary_size: Number of word pieces learned from the text.
        length: Tokens per row.
        masked: Share of tokens that are masked, in (0, 1).
        weight_decay: Decoupled weight decay of matrices.
        all_layers: Whether rules act on all layers of the discriminator, not only on the first, where the arm names
            none.
        dev_rows: Maximum number of dev rows; None for all.
        test_rows: Maximum number of test rows; None for all.

    Raises:
        SettingError: A value is outside its range, or `steps` is no multiple of `rounds`.
    """

    training: ClassVar[Mapping[str, Any]] = {"epsilon": 1e-6, "bfloat16": True}

    name: str
    width: int
    hidden: int
    layers: int
    heads: int
    embedding: int
    steps: Count
    rounds: Count
    warmup_steps: Natural
    batch_size: Count
    learning_rate: Positive
    vocabulary_size: int
    length: Annotated[int, functools.partial(require_integer, low=5, high=512)] = 128
    generator: float = 0.25
    dropout: float = 0.1
    masked: Share = 0.15
    generator_weight: float = 1.0
    discriminator_weight: float = 50.0
    weight_decay: float = 0.01
    clip_norm: NonNegative = 1.0
    deviation: float = DEVIATION
    sinusoids: bool = False
    all_layers: bool = False
    dev_rows: Count | None = None
    test_rows: Count | None = None
    columns: Columns = field(default=USUAL, metadata=UNRECORDED)
    compile_routing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.columns.require(1, labels=False)
        if self.steps % self.rounds:
            raise SettingError(f"{self.steps} steps cannot be cut into {self.rounds} rounds of one length; change one.")
        assert self.sizes(self.vocabulary_size).heads == self.heads  # what the sizes refuse is refused here

    @property
    def epochs(self) -> int:
        """A round counts as an epoch."""
        return self.rounds

    @property
    def preparation(self) -> TextPreparation:
        """How text is prepared."""
        return TextPreparation(self.vocabulary_size, self.length, column=next(iter(self.columns.texts), KEY))

    def sizes(self, vocabulary: int) -> ElectraSizes:
        """Return the sizes of the model with `vocabulary` token ids."""
        others = {one.name: getattr(self, one.name) for one in fields(ElectraSizes) if one.name != "vocabulary"}
        return ElectraSizes(vocabulary, **others)


# cpu: two cores spend two fifths of a step on dropout, and a small text is read less than four times.
# gpu: ELECTRA-small on a small text, minutes on one GPU.
# paper: ELECTRA-small of Clark et al. 2020, as An et al. 2020 train it.
PRETRAINING_SCALES = presets(
    PretrainingScale,
    "demo cpu gpu paper",
    width=[64, 64, 256, 256],
    hidden=[128, 256, 1_024, 1_024],
    layers=[2, 3, 12, 12],
    heads=4,
    embedding=[32, 64, 128, 128],
    steps=[300, 16_000, 6_000, 1_000_000],
    rounds=[3, 8, 6, 100],
    warmup_steps=[30, 400, 600, 10_000],
    batch_size=[16, 64, 128, 128],
    learning_rate=[2e-3, 1e-3, 5e-4, 5e-4],
    vocabulary_size=[8_000, 2_000, 8_000, 30_522],
    length=[128, 32, 128, 128],
    generator=[0.25, 0.5, 0.25, 0.25],
    dropout=[0.1, 0.0, 0.1, 0.1],
    discriminator_weight=[50.0, 10.0, 50.0, 50.0],
    deviation=[DEVIATION, 0.125, DEVIATION, DEVIATION],
    sinusoids=[False, True, False, False],
    dev_rows=[128, 1_000, 512, None],
    test_rows=[256, 2_000, None, None],
)
