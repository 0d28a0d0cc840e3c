"""`Scale`, the sizes of a task's runs; `Recipe`, how they are trained; and how their fields are checked.

Options that change a scale: pipeline, word vectors, folds and sizes, checked against its fields.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from headwise.errors import DataError, SettingError, require_integer, require_range
from headwise.input_files import read_whole
from headwise.settings import Count, Natural, NonNegative, Positive, check_fields
from headwise.texts.tables import USUAL, Columns

# Metadata of a field that holds a path: records leave it out, the digest of the data covers what the path holds.
UNRECORDED: Mapping[str, bool] = {"recorded": False}


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
        """Fields that other fields override, with the message shown when one is set anyway."""
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

    >>> from headwise_lab.tasks.logic.scales import LogicScale, LOGIC_SCALES
    >>> [(name, scale.width, scale.layers) for name, scale in LOGIC_SCALES.items()]
    [('demo', 32, 2), ('cpu', 64, 2), ('paper', 256, 2)]
    """
    split = names.split()
    columns = {name: value if isinstance(value, list) else [value] * len(split) for name, value in values.items()}
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    return {name: kind(name=name, **row) for name, row in zip(split, rows, strict=True)}


@functools.cache
def read_task_file(place: Path) -> dict[str, Any]:
    """Return the settings in a `task.toml`, whose lists are tuples here.

    Raises:
        DataError: The file cannot be read, or is not TOML.
    """
    try:
        return _freeze(tomllib.loads(read_whole(place).decode("utf-8")))
    except ValueError as error:
        raise DataError(f"{place}: {error}; expected the settings of a task as TOML in UTF-8.") from None


def read_presets(place: Path, kind: Callable[..., ScaleType]) -> dict[str, ScaleType]:
    """Return the presets in a `task.toml`: each table in `[scales]`, and the other values there for all of them.

    Raises:
        DataError: The file cannot be read, or a preset lacks a size or has one that is none.
        SettingError: A value is outside its range.
    """
    tables = read_task_file(place)["scales"]
    shared = {name: value for name, value in tables.items() if not isinstance(value, Mapping)}
    found = {}
    for name, own in tables.items():
        if name not in shared:
            try:
                found[name] = kind(name=name, **{**shared, **own})
            except TypeError as error:
                raise DataError(f"{place}, [scales.{name}]: {error}; correct the sizes.") from None
    return found


def _freeze(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_freeze(one) for one in value)
    return {name: _freeze(one) for name, one in value.items()} if isinstance(value, dict) else value


KINDS: Mapping[type, str] = {int: "an integer", float: "a number", bool: "true or false"}
# Not settable with --set.
APART = {
    "name",
    "pipeline",
    "embeddings",
    "out_of_domain",
    "pretrained",
    "trust_remote_code",
    "folds",
    "fold",
    "columns",
}


@dataclasses.dataclass(frozen=True)
class ScaleOptions:
    """A scale by name, and changes to it.

    Attributes:
        scale: Name of the preset.
        pipeline: Folder of a spaCy pipeline, for tasks that parse texts.
        embeddings: File of word vectors, for tasks that start from them.
        folds: Number of cross-validation folds, for tasks that have them.
        sizes: Other fields, as "layers=4".
        out_of_domain: File of texts from another domain, for tasks that measure uncertainty.
        pretrained: Folder of a model or of runs, for tasks that fine-tune.
        trust_remote_code: Whether code that this folder names may run.
        columns: Columns of the texts and labels, for tasks that read tables.
    """

    scale: str
    pipeline: Path | None = None
    embeddings: Path | None = None
    folds: int | None = None
    sizes: tuple[str, ...] = ()
    out_of_domain: Path | None = None
    pretrained: Path | None = None
    trust_remote_code: bool = False
    columns: Columns = USUAL

    def words(self, *, for_others: bool = False) -> list[str]:
        """Return the options as typed; `for_others` with DIR or FILE instead of paths."""
        found = ["--scale", self.scale]
        kinds = {"pipeline": "DIR", "embeddings": "FILE", "out_of_domain": "FILE", "pretrained": "DIR"}
        for name, kind in kinds.items():
            place = getattr(self, name)
            found += [] if place is None else [f"--{name.replace('_', '-')}", kind if for_others else str(place)]
        found += ["--trust-remote-code"] if self.trust_remote_code else []
        found += [] if self.folds is None else ["--folds", str(self.folds)]
        found += self.columns.words()
        return found + [word for size in self.sizes for word in ("--set", size)]


def with_options(scale: Scale, options: ScaleOptions, task: str) -> Any:
    """Return a scale with options; changed sizes and folds are part of its name, as in "cpu-layers=4".

    Args:
        scale: A scale of the task.
        options: The options.
        task: Name of the task, for messages.

    Raises:
        SettingError: The scale has no such field or does not use it, or a value is of the wrong type or out of range.

    >>> from headwise_lab.tasks.logic.scales import LOGIC_SCALES
    >>> with_options(LOGIC_SCALES["cpu"], ScaleOptions("cpu", sizes=("layers=4",)), "logic").name
    'cpu-layers=4'
    """
    found = typing.get_type_hints(type(scale))
    hints = {field.name: found[field.name] for field in dataclasses.fields(typing.cast(Any, scale))}
    changes: dict[str, Any] = {}
    for name in ("pipeline", "embeddings", "out_of_domain", "pretrained", "trust_remote_code", "folds", "columns"):
        value = getattr(options, name)
        if value is None or value is False or value == USUAL:
            continue
        if name not in hints:
            given = (options.columns.words() if name == "columns" else [f"--{name.replace('_', '-')}"])[0]
            raise SettingError(f"task {task} takes no {given}; omit it.")
        # one fold means no cross-validation
        changes[name] = None if name == "folds" and value == 1 else value
    sizes: dict[str, Any] = {}
    known = [name for name, hint in hints.items() if name not in APART and _find_kind(hint) is not None]
    for piece in options.sizes:
        name, equals, text = (part.strip() for part in piece.partition("="))
        if not equals or name not in known:
            raise SettingError(f"--set {piece}: expected size=value, with one of the sizes {', '.join(known)}.")
        sizes[name] = _parse_value(piece, text, hints[name])
    if not changes and not sizes:
        return scale
    named = sizes if options.folds is None else {**sizes, "folds": options.folds}
    name = "-".join([scale.name, *(f"{size}={value}" for size, value in named.items())])
    changed = dataclasses.replace(typing.cast(Any, scale), name=name, **changes, **sizes)
    for size, reason in changed.unused.items():
        if size in sizes:
            raise SettingError(f"--set {size}={sizes[size]}: {size} {reason}; omit it.")
    return changed


def was_set(scale: Scale, size: str) -> bool:
    """Return whether --set changed a size, which is part of the scale's name then.

    >>> from headwise_lab.tasks.logic.scales import LOGIC_SCALES
    >>> was_set(with_options(LOGIC_SCALES["cpu"], ScaleOptions("cpu", sizes=("layers=4",)), "logic"), "layers")
    True
    """
    return f"-{size}=" in scale.name


def _find_kind(hint: Any) -> Any:
    """Return the int, float, bool or `Literal` of a field, which may be optional; None for other types."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    kinds = [kind for kind in (typing.get_args(hint) if union else (hint,)) if kind is not type(None)]
    known = len(kinds) == 1 and (kinds[0] in KINDS or typing.get_origin(kinds[0]) is typing.Literal)
    return kinds[0] if known else None


def _parse_value(piece: str, text: str, hint: Any) -> Any:
    kind = _find_kind(hint)
    if words := typing.get_args(kind):
        if text not in words:
            raise SettingError(f"--set {piece}: expected {' or '.join(words)}.")
        return text
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise SettingError(f"--set {piece}: expected {KINDS[kind]}.") from None
