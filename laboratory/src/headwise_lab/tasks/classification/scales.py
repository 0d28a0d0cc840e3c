"""The sizes of the classification and probing tasks; `task.toml` and `probing.toml` have their presets."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from headwise.errors import SettingError, require_integer
from headwise.settings import Count, Dropout, Natural, Positive
from headwise.texts.tables import USUAL, Columns
from headwise_lab.experiment.scale import UNRECORDED, Scale, read_presets


@dataclass(frozen=True)
class ClassificationScale(Scale):
    """Sizes of the classification and probing tasks; see `Scale` for the other attributes.

    Attributes:
        folds: Number of cross-validation folds; None for one split of 80/10/10.
        fold: The fold that is tested, from 0; None for all of them.
    """

    training: ClassVar[Mapping[str, Any]] = {"clip_norm": 1.0}

    name: str
    width: Count
    layers: Count
    heads: Count
    head_size: Count
    hidden: Count
    norm_first: bool
    dropout: Dropout
    learning_rate: Positive
    batch_size: Count
    epochs: Count
    warmup_steps: Natural
    max_words: Count = 90
    min_count: Count = 2
    train_examples: Count | None = None
    folds: Annotated[int, functools.partial(require_integer, low=3, high=100)] | None = None
    fold: int | None = None
    pipeline: Path | None = field(default=None, metadata=UNRECORDED)
    embeddings: Path | None = field(default=None, metadata=UNRECORDED)
    columns: Columns = field(default=USUAL, metadata=UNRECORDED)
    compile_routing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.columns.require(1)
        if self.width % 2:
            raise SettingError(f"width is {self.width}; expected an even number, half for each kind of sinusoid.")
        if self.fold is not None:
            if self.folds is None:
                raise SettingError(f"fold is {self.fold} without folds; set folds to the number of folds.")
            require_integer("fold", self.fold, high=self.folds - 1)


CLASSIFICATION_SCALES, PROBING_SCALES = (
    read_presets(Path(__file__).with_name(file), ClassificationScale) for file in ("task.toml", "probing.toml")
)
