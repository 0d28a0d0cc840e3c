"""The sizes of the classification task and their presets; `demo` and `cpu` were chosen on dev, without roles."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from headwise.errors import SettingError, require_integer
from headwise.settings import Count, Dropout, Natural, Positive
from headwise.texts.tables import USUAL, Columns
from headwise_lab.experiment.scale import UNRECORDED, Scale, presets


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


# cpu: train_examples caps the phrases of SST only.
# paper: Wang et al. 2021 and its released code: width, heads of 100 // 6, post-norm, ten folds, at most 30 epochs and
# the middle of its grid for rate, dropout and batch size; set layers (2 to 8) and heads (6 or 8) with --set.
CLASSIFICATION_SCALES = presets(
    ClassificationScale,
    "demo cpu paper",
    width=[48, 100, 100],
    layers=2,
    heads=6,
    head_size=[8, 16, 16],
    hidden=[96, 256, 256],
    norm_first=[True, True, False],
    dropout=[0.2, 0.3, 0.3],
    learning_rate=[2e-3, 2e-3, 5e-4],
    batch_size=[32, 32, 64],
    epochs=[3, 6, 30],
    warmup_steps=[100, 100, 0],
    train_examples=[3_000, 10_000, None],
    folds=[None, None, 10],
)
