"""`Scale`, the sizes of a task's runs; `Recipe`, how they are trained; and how their fields are checked."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from headwise.errors import SettingError, require_choice, require_integer, require_positive, require_range

# Metadata of a field that holds a path: records leave it out, the digest of the data covers what the path holds.
UNRECORDED: Mapping[str, bool] = {"recorded": False}


def _require_share(name: str, value: float) -> None:
    if not 0.0 < value < 1.0:
        raise SettingError(f"{name} is {value}; expected a share, between 0 and 1.")


# A number and its check, which `check_fields` calls with the field's name and value.
Count = Annotated[int, functools.partial(require_integer, low=1)]
Natural = Annotated[int, require_integer]
Positive = Annotated[float, require_positive]
NonNegative = Annotated[float, functools.partial(require_range, low=0.0)]
Real = Annotated[float, require_range]
Dropout = Annotated[float, functools.partial(require_range, low=0.0, high=0.999)]
Share = Annotated[float, _require_share]


@dataclass(frozen=True)
class Recipe:
    """How the model of a run is trained.

    Attributes:
        learning_rate: Peak learning rate.
        epochs: Number of passes over the training split.
        warmup_steps: Number of steps of linear warmup.
        warmup_share: Share of all steps that warm up where `warmup_steps` is 0, in [0, 1].
        schedule: How the rate falls after the warmup: linearly to zero, along half a cosine to zero, or with the
            inverse square root of the step.
        clip_norm: Maximum norm of the gradient, repulsion included; 0 disables clipping.
        betas: Adam's decay rates.
        epsilon: Adam's epsilon.
        weight_decay: Decoupled weight decay (AdamW); 0 is Adam as in Kingma and Ba (2015).
        accumulation: Number of batches per step.
        averaged: Number of last epochs whose weights are averaged for the test; 1 takes the last epoch.
        bfloat16: Whether a GPU computes under bfloat16 autocast; a CPU never does.
        optimizer: Adam, or SGD with momentum 0.9.

    Raises:
        SettingError: A value is outside its range.
    """

    learning_rate: Positive
    epochs: Count
    warmup_steps: Natural
    schedule: Literal["linear", "inverse_sqrt", "cosine"] = "linear"
    clip_norm: NonNegative = 5.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    accumulation: Count = 1
    averaged: int = 1
    bfloat16: bool = False
    # records of version 0.1 have no optimizer; a scale with one records it itself
    optimizer: Literal["adam", "sgd"] = field(default="adam", metadata=UNRECORDED)
    # a scale with such a share records it itself
    warmup_share: Annotated[float, functools.partial(require_range, low=0.0, high=1.0)] = field(
        default=0.0, metadata=UNRECORDED
    )

    def __post_init__(self) -> None:
        check_fields(self)
        require_integer("averaged", self.averaged, low=1, high=self.epochs)

    def warmup(self, steps: int) -> int:
        """Return how many of a run's steps warm up.

        >>> Recipe(1e-3, 3, 0, warmup_share=0.1).warmup(250)
        25
        """
        return self.warmup_steps or int(self.warmup_share * steps)


class Scale:
    """The sizes of a task's runs: model, training and data.

    Each task has a frozen dataclass that derives from this one and lists all of its fields, since records keep their
    order. Fields that several tasks have mean the same in each:

    Attributes:
        name: Name of the preset on the command line and in records.
        width: Model width d.
        hidden: Hidden units of the feed-forward layers.
        layers: Number of layers.
        heads: Number of attention heads per layer.
        head_size: Width e of a head; heads x head_size may differ from d.
        norm_first: Whether layers are pre-norm.
        dropout: Dropout probability, in [0, 1).
        learning_rate: Peak learning rate.
        batch_size: Examples per step.
        tokens: Maximum tokens per batch, padding included.
        epochs: Number of passes over the training split.
        warmup_steps: Number of steps of linear warmup.
        clip_norm: Maximum norm of the gradient, repulsion included.
        weight_decay: Decoupled weight decay.
        max_words: Maximum words per text; longer texts are truncated.
        min_count: Minimum occurrences in training of a word that gets its own id.
        beams: Beams of the search on test; dev is decoded greedily.
        length_penalty: p in the score log P / length^p of a hypothesis.
        train_examples: Maximum number of training examples, those with the smallest keys; None for all.
        dev_examples: Maximum number of dev examples; None for all.
        test_examples: Maximum number of test examples; None for all.
        pipeline: spaCy pipeline that parses the texts, a folder or an installed package; None for no parses.
        embeddings: File of word vectors to start from; None for random ones.
        columns: The columns of tables that hold texts and labels.
        compile_routing: Whether routing is compiled: seconds per process, repaid where a run takes minutes.
        training: Settings of the recipe that are the same in all presets.

    Raises:
        SettingError: A value is outside its range.
    """

    name: str
    compile_routing: bool
    training: ClassVar[Mapping[str, Any]] = {}

    def __post_init__(self) -> None:
        check_fields(self)
        assert self.recipe  # raises what a recipe refuses

    @property
    def unused(self) -> Mapping[str, str]:
        """The fields that say nothing beside the others, and what is said of one that is set."""
        return {}

    @property
    def sets_dropout(self) -> bool:
        """Whether the dropout of the model is the scale's to set."""
        return hasattr(self, "dropout") and "dropout" not in self.unused

    @property
    def recipe(self) -> Recipe:
        """How the model is trained: the scale's fields that a recipe has, and `training`."""
        names = [setting.name for setting in dataclasses.fields(Recipe) if hasattr(self, setting.name)]
        return Recipe(**{name: getattr(self, name) for name in names}, **self.training)


ScaleType = TypeVar("ScaleType", bound=Scale)


def presets(kind: Callable[..., ScaleType], names: str, **values: Any) -> dict[str, ScaleType]:
    """Return presets by name; a list holds one value per preset, any other value is that of all presets.

    >>> from headwise.lab.tasks.logic.scales import LogicScale, LOGIC_SCALES
    >>> [(name, scale.width, scale.layers) for name, scale in LOGIC_SCALES.items()]
    [('demo', 32, 2), ('cpu', 64, 2), ('paper', 256, 2)]
    """
    split = names.split()
    columns = {name: value if isinstance(value, list) else [value] * len(split) for name, value in values.items()}
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    return {name: kind(name=name, **row) for name, row in zip(split, rows, strict=True)}


def check_fields(settings: Any) -> None:
    """Check each field of a dataclass by its annotation: `Literal`, or `Annotated` with a check; None is optional's.

    Raises:
        SettingError: A value is outside its range.
    """
    for name, (optional, check) in _find_checks(type(settings)).items():
        value = getattr(settings, name)
        if value is not None or not optional:
            check(name, value)


@functools.cache
def _find_checks(kind: type) -> dict[str, tuple[bool, Callable[[str, Any], None]]]:
    """Return whether each checked field may be None, and its check."""
    found: dict[str, tuple[bool, Callable[[str, Any], None]]] = {}
    hints = typing.get_type_hints(kind, include_extras=True)
    for name in (setting.name for setting in dataclasses.fields(kind)):
        inner = [hint for hint in typing.get_args(hints[name]) if hint is not type(None)]
        optional = type(None) in typing.get_args(hints[name])
        hint = inner[0] if optional else hints[name]
        if typing.get_origin(hint) is Literal:
            found[name] = optional, functools.partial(require_choice, choices=typing.get_args(hint))
        elif typing.get_origin(hint) is Annotated:
            found[name] = optional, typing.get_args(hint)[1]
    return found
