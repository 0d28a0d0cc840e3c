"""The sizes of pretraining; `task.toml` has their presets."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

from headwise.errors import require_integer
from headwise.settings import Count, Natural, NonNegative, Positive, Share
from headwise.texts.tables import USUAL, Columns
from headwise_lab.experiment.scale import UNRECORDED, read_presets
from headwise_lab.models.electra import DEVIATION, ElectraSizes
from headwise_lab.packed_text.prepare import PackedScale


@dataclass(frozen=True)
class PretrainingScale(PackedScale):
    """Sizes of pretraining; see `Scale` and `PackedScale`, and `ElectraSizes` for the model.

    Attributes:
        embedding: Width of the shared embeddings.
        masked: Share of tokens that are masked, in (0, 1).
        weight_decay: Decoupled weight decay of matrices.
        all_layers: Whether rules act on all layers of the discriminator, not only on the first, where the arm names
            none.
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
        assert self.sizes(self.vocabulary_size).heads == self.heads  # what the sizes refuse is refused here

    def sizes(self, vocabulary: int) -> ElectraSizes:
        """Return the sizes of the model with `vocabulary` token ids."""
        others = {one.name: getattr(self, one.name) for one in fields(ElectraSizes) if one.name != "vocabulary"}
        return ElectraSizes(vocabulary, **others)


PRETRAINING_SCALES = read_presets(Path(__file__).with_name("task.toml"), PretrainingScale)
