"""Options that change a scale: where parses and word vectors come from, into how many folds data is cut, and sizes.

Owns the checking of such options against the fields a scale has, and the name of what comes out.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.errors import SettingError

if typing.TYPE_CHECKING:
    from headwise.lab.experiment.scale import Scale

KINDS: Mapping[type, str] = {int: "an integer", float: "a number", bool: "true or false"}
# Chosen by an option of their own, or by nothing.
APART = {"name", "pipeline", "embeddings", "out_of_domain", "pretrained", "folds", "fold"}


@dataclasses.dataclass(frozen=True)
class ScaleOptions:
    """What a command says of the scale.

    Attributes:
        scale: Its name.
        pipeline: Folder of a spaCy pipeline, for tasks whose texts are parsed.
        embeddings: File of word vectors, for tasks that start from them.
        folds: Parts of a cross-validation, for tasks that do one.
        sizes: Other fields, as "layers=4".
        out_of_domain: File of other texts, for tasks whose models are asked about such.
        pretrained: Folder of a model, or of runs, for tasks that fine-tune.
    """

    scale: str
    pipeline: Path | None = None
    embeddings: Path | None = None
    folds: int | None = None
    sizes: tuple[str, ...] = ()
    out_of_domain: Path | None = None
    pretrained: Path | None = None

    def words(self, *, for_others: bool = False) -> list[str]:
        """Return the options as they are typed.

        Args:
            for_others: Whether a place on disk is shown as its kind, since it has another name elsewhere.
        """
        found = ["--scale", self.scale]
        for name, kind in (
            ("pipeline", "DIR"),
            ("embeddings", "FILE"),
            ("out_of_domain", "FILE"),
            ("pretrained", "DIR"),
        ):
            place = getattr(self, name)
            found += [] if place is None else [f"--{name.replace('_', '-')}", kind if for_others else str(place)]
        found += [] if self.folds is None else ["--folds", str(self.folds)]
        return found + [word for size in self.sizes for word in ("--set", size)]


def with_options(scale: Scale, options: ScaleOptions, task: str) -> Any:
    """Return a scale with options; changed sizes and folds are part of its name, as in "cpu-layers=4".

    Args:
        scale: A scale of the task.
        options: The options.
        task: Name of the task, for messages.

    Raises:
        SettingError: The task's scales have no such field, or a value is of the wrong type or out of range.

    >>> from headwise.lab.tasks.logic.scales import LOGIC_SCALES
    >>> with_options(LOGIC_SCALES["cpu"], ScaleOptions("cpu", sizes=("layers=4",)), "logic").name
    'cpu-layers=4'
    """
    found = typing.get_type_hints(type(scale))
    hints = {field.name: found[field.name] for field in dataclasses.fields(typing.cast(Any, scale))}
    changes: dict[str, Any] = {}
    for name in ("pipeline", "embeddings", "out_of_domain", "pretrained", "folds"):
        value = getattr(options, name)
        if value is None:
            continue
        if name not in hints:
            raise SettingError(f"task {task} takes no --{name.replace('_', '-')}; leave it out.")
        # one part is no cross-validation, but the cut that other scales have
        changes[name] = None if name == "folds" and value == 1 else value
    sizes: dict[str, Any] = {}
    known = [name for name, hint in hints.items() if name not in APART and _kind(hint) is not None]
    for piece in options.sizes:
        name, equals, text = (part.strip() for part in piece.partition("="))
        if not equals or name not in known:
            raise SettingError(f"--set {piece}: expected size=value, with one of the sizes {', '.join(known)}.")
        sizes[name] = _typed(piece, text, hints[name])
    if not changes and not sizes:
        return scale
    named = sizes if options.folds is None else {**sizes, "folds": options.folds}
    name = "-".join([scale.name, *(f"{size}={value}" for size, value in named.items())])
    return dataclasses.replace(typing.cast(Any, scale), name=name, **changes, **sizes)


def _kind(hint: Any) -> type | None:
    """Return the plain type of a field that may be None besides, or None where it has no such type."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    kinds = [kind for kind in (typing.get_args(hint) if union else (hint,)) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 and kinds[0] in KINDS else None


def _typed(piece: str, text: str, hint: Any) -> Any:
    kind = _kind(hint)
    assert kind is not None
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise SettingError(f"--set {piece}: expected {KINDS[kind]}.") from None
