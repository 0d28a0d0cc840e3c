"""The sizes of the logic task; `task.toml` has their presets."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from headwise.errors import SettingError, require_integer
from headwise.settings import Count, Dropout, Natural, Positive
from headwise_lab.experiment.scale import Scale, read_presets


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


LOGIC_SCALES = read_presets(Path(__file__).with_name("task.toml"), LogicScale)
