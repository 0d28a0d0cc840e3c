"""The sizes of the logic task and their presets; `demo` and `cpu` were chosen on dev, on one CPU thread."""

import functools
from dataclasses import dataclass
from typing import Annotated, ClassVar

from headwise.errors import SettingError, require_integer
from headwise.settings import Count, Dropout, Natural, Positive
from headwise_lab.experiment.scale import Scale, presets

BINS = tuple(range(1, 13))


@dataclass(frozen=True)
class LogicScale(Scale):
    """Sizes of the logic task; see `Scale` for the other attributes.

    Attributes:
        classifier_width: Hidden units of the classifier.
        train_operators: Largest bin to train on.
        test_bins: Bins of the dev and the test split, ascending.
        generated_draws: Draws of the generator when no folder is given.
        queries: Number of trainable pooling queries.
    """

    # its name in records
    record_kind: ClassVar[str] = "Scale"

    name: str
    width: Count
    layers: Count
    heads: Count
    norm_first: bool
    dropout: Dropout
    classifier_width: Count
    learning_rate: Positive
    batch_size: Count
    epochs: Count
    warmup_steps: Natural
    train_operators: Annotated[int, functools.partial(require_integer, high=12)]
    test_bins: tuple[int, ...]
    generated_draws: Count
    train_examples: Count | None = None
    dev_examples: Count | None = None
    queries: Count = 2
    compile_routing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for number in self.test_bins:
            require_integer("test_bins", number, high=12)
        if not self.test_bins or list(self.test_bins) != sorted(set(self.test_bins)):
            raise SettingError(
                f"test_bins is {self.test_bins!r}; expected ascending numbers of operators, such as (1, 2, 3)."
            )


# paper: width, layers, queries, dropout, rate and epochs are Li et al. 2021's; the others follow Tran et al. 2018
LOGIC_SCALES = presets(
    LogicScale,
    "demo cpu paper",
    width=[32, 64, 256],
    layers=2,
    heads=4,
    norm_first=[True, True, False],
    dropout=[0.0, 0.0, 0.2],
    classifier_width=256,
    learning_rate=[2e-3, 2e-3, 1e-4],
    batch_size=[32, 64, 64],
    epochs=[2, 3, 100],
    warmup_steps=[500, 500, 200],
    train_operators=[3, 6, 6],
    test_bins=[(1, 2, 3), BINS, BINS],
    generated_draws=600_000,
    dev_examples=[None, 6_000, None],
    compile_routing=[False, True, True],
)
