"""Options that change a scale: pipeline, word vectors, folds and sizes, checked against its fields."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.errors import SettingError
from headwise.lab.data.tables import USUAL, Columns

if typing.TYPE_CHECKING:
    from headwise.lab.experiment.scale import Scale

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

    >>> from headwise.lab.tasks.logic.scales import LOGIC_SCALES
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

    >>> from headwise.lab.tasks.logic.scales import LOGIC_SCALES
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
