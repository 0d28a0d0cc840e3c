"""Arms as text: `svgd:alpha=0.5,step_size=0.1+em`, parsed into the fields of the frozen settings.

`+` combines arms, `:` starts the settings of one, `,` separates settings and arms: a piece that
begins with `name=` is a setting of the arm before it. The canonical text of an arm leaves out what is default.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from headwise.errors import DataError, SettingError, require_choice
from headwise.kernels import IMQ, RBF, Cosine, Fixed, Median, NormalizedRBF, RadialRBF, ReleasedMedian
from headwise.routing.algorithms import DistinctCapsules, PerHead, SharedTrunk
from headwise.routing.modules import Gate, Residual
from headwise.settings import from_json
from headwise.similarity.terms import GroupedQueries, PositionSquaredDifference, Sum
from headwise_lab.experiment.arm import Arm, combine, find_control, named_arms
from headwise_lab.experiment.run_folder import as_record

# Settings whose value is itself a value with settings: the words that choose one.
WORDS: Mapping[str, Mapping[str, Any]] = {
    "kernel": {
        "rbf": RBF(),
        "imq": IMQ(),
        "cosine": Cosine(),
        "normalized-rbf": NormalizedRBF(),
        "radial-rbf": RadialRBF(),
    },
    "bandwidth": {"median": Median(), "released": ReleasedMedian()},
    "votes": {"shared-trunk": SharedTrunk(), "per-head": PerHead(), "distinct-capsules": DistinctCapsules()},
}
# Not settable: what the arm's name already fixes, and options that change speed but not results.
HIDDEN = {"name", "control", "parts", "recompute", "model", "chunks", "per_head", "per", "token", "routing", "second"}
# What the loop of a run decides.
HIDDEN |= {"joint", "when", "noise", "every", "seed", "across"}
# Settings that choose where a method acts: without them it acts everywhere.
PLACES = {"layers", "kinds", "projections"}
LATE = {"layers": 1, "kinds": 2, "projections": 3, "grouping": 4}
# Settings that replace some roles of an arm, which its control has all.
REPLACED = {"drop", "random", "shuffled"}
# Settings that an arm and its control are each tuned in.
TUNED = {"learning_rate", "dropout"}
# What makes a control a control cannot be set.
FIXED = {
    "smooth": {"alpha", "smoothing"},
    "scaled": {"alpha", "smoothing", "kernel", "bandwidth"},
    "drophead": {"start"},
    "mixture-all": {"active"},
    "random-mask": REPLACED,
    "shuffled-parse": REPLACED,
}

# Classes that no named arm holds.
OTHERS = (Sum, GroupedQueries, PositionSquaredDifference, Fixed, Residual, Gate)

Path = tuple[str | int, ...]


def parse_arms(text: str) -> list[Arm]:
    """Return the arms of a comma-separated list.

    Raises:
        SettingError: An arm or setting is unknown, a value is of the wrong type or out of range, or an arm is
            named twice.

    >>> [arm.name for arm in parse_arms("plain,svgd:alpha=0.5,step_size=0.2,em+output")]
    ['plain', 'svgd:alpha=0.5,step_size=0.2', 'output+em']
    """
    pieces: list[str] = []
    for piece in text.split(","):
        if pieces and re.match(r"\s*\w+\s*=", piece):
            pieces[-1] += "," + piece
        else:
            pieces.append(piece)
    arms = [parse_arm(piece) for piece in pieces]
    for index, arm in enumerate(arms):
        if arm.name in [earlier.name for earlier in arms[:index]]:
            raise SettingError(f"arm {arm.name} is given twice; name each arm once.")
    return arms


def parse_arm(text: str) -> Arm:
    """Return the arm that a text such as "svgd:alpha=0.5+em" names."""
    order = list(named_arms())
    parts = [_parse_part(part) for part in re.split(r"\+(?=\s*[A-Za-z])", text.strip())]
    return combine(sorted(parts, key=lambda arm: order.index(arm.name.partition(":")[0])))


def list_settings(arm: Arm) -> dict[str, Path]:
    """Return the settings that a named arm has, each with its place in the arm.

    >>> list_settings(named_arms()["svgd-relative"])["ratio"]
    ('methods', 0, 'rule', 'alpha', 'ratio')
    """
    fixed = FIXED.get(arm.name, ())
    return {name: path for name, path in _find_leaves(arm, ()).items() if name not in fixed}


def with_settings(arm: Arm, settings: Mapping[str, str]) -> Arm:
    """Return a named arm with settings changed, under its canonical name.

    >>> with_settings(named_arms()["svgd"], {"alpha": "0.5", "step_size": "0.2"}).control
    'smooth:step_size=0.2'
    """
    changed = arm
    # a kernel chosen here may bring settings with it, so what is chosen by a word comes first
    order = [*WORDS, *(name for name in settings if name not in WORDS)]
    for name, text in sorted(settings.items(), key=lambda item: order.index(item[0])):
        known = list_settings(changed)
        if name not in known:
            raise SettingError(f"arm {arm.name} has no setting {name!r}; it has {', '.join(known)}.")
        changed = _replace(changed, known[name], _parse_value(changed, known[name], f"{arm.name}:{name}", text))
    found = {name: _get(changed, path) for name, path in list_settings(changed).items()}
    before = list_settings(arm)
    differing = {
        name: _write_value(name, value)
        for name, value in found.items()
        if name not in before or value != _get(arm, before[name])
    }
    written = ",".join(f"{name}={value}" for name, value in differing.items())
    control = find_control(changed.methods)
    if control is not None:
        # with the settings that both have, or the control would act elsewhere, or smooth otherwise
        shared = list_settings(named_arms()[control]).keys() - TUNED - REPLACED
        own = {name: value for name, value in differing.items() if name in shared}
        control = with_settings(named_arms()[control], own).name
    return dataclasses.replace(changed, name=f"{arm.name}:{written}" if differing else arm.name, control=control)


def _parse_part(text: str) -> Arm:
    name, _, rest = text.strip().partition(":")
    known = named_arms()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "choose"
        raise SettingError(f"there is no arm {name!r}; {hint} (all: {', '.join(known)}).")
    settings: dict[str, str] = {}
    for piece in rest.split(",") if rest else ():
        key, equals, value = (part.strip() for part in piece.partition("="))
        if not equals or not key or not value:
            raise SettingError(f"{piece!r} in arm {text!r} is not of the form setting=value.")
        if key in settings:
            raise SettingError(
                f"arm {text!r} sets {key} to {settings[key]} and to {value}; two arms are NAME:{key}={settings[key]},"
                f"NAME:{key}={value}."
            )
        settings[key] = value
    return with_settings(known[name], settings)


def _find_leaves(value: Any, path: Path) -> dict[str, Path]:
    """Return the settings of a dataclass in the order of its fields, those of what it holds in their places."""
    found: dict[str, Path] = {}
    # where a method acts comes after what it does, in the order of the names of finished runs
    for field in sorted(dataclasses.fields(value), key=lambda field: LATE.get(field.name, 0)):
        held, place = getattr(value, field.name), (*path, field.name)
        if field.name in HIDDEN:
            continue
        if field.name == "methods":
            for index, method in enumerate(held):
                found |= _find_leaves(method, (*place, index))
            continue
        if field.name in WORDS or not dataclasses.is_dataclass(held):
            found[field.name] = place
        # a bandwidth is chosen whole, by a word or a number
        if dataclasses.is_dataclass(held) and field.name != "bandwidth":
            found |= _find_leaves(held, place)
    return found


def _get(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step] if isinstance(step, int) else getattr(value, step)
    return value


def _replace(value: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    step, *rest = path
    if isinstance(step, int):
        return (*value[:step], _replace(value[step], tuple(rest), new), *value[step + 1 :])
    return dataclasses.replace(value, **{step: _replace(getattr(value, step), tuple(rest), new)})


def _parse_value(arm: Arm, path: Path, place: str, text: str) -> Any:
    """Return the value that a text gives the setting at a path."""
    name = str(path[-1])
    if name in WORDS:
        return _parse_word(place, text, name)
    hint = typing.get_type_hints(type(_get(arm, path[:-1])))[name]
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    kinds = typing.get_args(hint) if union else (hint,)
    if type(None) in kinds and text.lower() == ("all" if name in PLACES else "none"):
        return None
    kind = next(kind for kind in kinds if kind is not type(None))
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return tuple(piece.strip() if item is str else _parse_scalar(place, piece, item) for piece in text.split("/"))
    if typing.get_origin(kind) is Literal:
        require_choice(place, text, typing.get_args(kind))
        return text
    return _parse_scalar(place, text, kind)


def _parse_scalar(place: str, text: str, kind: type) -> Any:
    expected = {bool: "true or false", int: "an integer", float: "a number"}[kind]
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise SettingError(f"{place} is {text!r}; expected {expected}.") from None


def _parse_word(place: str, text: str, name: str) -> Any:
    words = WORDS[name]
    if text.lower() in words:
        return words[text.lower()]
    if name == "bandwidth":
        try:
            number = float(text)
        except ValueError:
            pass
        else:
            return Fixed(number)
    expected = ", ".join(words) + (" or a number" if name == "bandwidth" else "")
    raise SettingError(f"{place} is {text!r}; expected one of {expected}.")


def _write_value(name: str, value: Any) -> str:
    if name in WORDS:
        named = (word for word, meant in WORDS[name].items() if type(meant) is type(value))
        return next(named, None) or repr(getattr(value, "value", value))
    if isinstance(value, tuple):
        return "/".join(str(item) for item in value)
    if value is None:
        return "all" if name in PLACES else "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def record_arm(arm: Arm) -> dict[str, Any]:
    """Return an arm as JSON data, without what is None by default: a method may have a further setting later.

    >>> record_arm(named_arms()["drophead"])
    {'kind': 'Arm', 'name': 'drophead', 'methods': [{'kind': 'DropHeads', 'rate': 0.1}], 'control': 'plain'}
    """
    return as_record(arm, sparse=True)


def restore_arm(record: Any) -> Any:
    """Return the arm of a record.

    >>> restore_arm(record_arm(named_arms()["svgd"])) == named_arms()["svgd"]
    True
    """

    def unpack(held: Mapping[str, Any]) -> tuple[type, dict[str, Any]]:
        known = _list_classes()
        if held.get("kind") not in known:
            raise DataError(f"the record has a {held.get('kind')!r}; expected one of {', '.join(sorted(known))}.")
        return known[held["kind"]], {name: value for name, value in held.items() if name != "kind"}

    return from_json(record, unpack)


@cache
def _list_classes() -> Mapping[str, Any]:
    """Return the classes that arms are made of by name: those in the named ones, and those that words choose."""
    found: dict[str, Any] = {cls.__name__: cls for cls in OTHERS}

    def note(value: Any) -> None:
        if isinstance(value, Mapping | tuple):
            for item in value.values() if isinstance(value, Mapping) else value:
                note(item)
        elif dataclasses.is_dataclass(value):
            found[type(value).__name__] = type(value)
            note(tuple(getattr(value, field.name) for field in dataclasses.fields(value)))

    note(named_arms())
    note(WORDS)
    return found
