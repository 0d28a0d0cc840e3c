"""Arms as text: `svgd:alpha=0.5,step_size=0.1+em`, parsed into the fields of the frozen settings.

`+` combines arms, `:` starts the settings of one, `,` separates settings and arms: a piece that
begins with `name=` is a setting of the arm before it. The canonical text of an arm leaves out what is default.

The record of an arm: flat JSON with one key per field of a method, whether the method is on or not.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from headwise.disagreement.invariant import (
    CKA,
    HSIC,
    CrossCorrelation,
    LogDeterminant,
    MapCosine,
    SpanOverlap,
    SquaredCosine,
)
from headwise.disagreement.penalty import Penalize
from headwise.disagreement.terms import (
    Frobenius,
    GroupedQueries,
    Output,
    Position,
    PositionSquaredDifference,
    Subspace,
    Sum,
)
from headwise.errors import SettingError, require_choice
from headwise.gating.gates import MixtureOfHeads, SigmoidGate
from headwise.repulsion.function_space import FunctionSVGD, SpanSVGD
from headwise.repulsion.kernels import IMQ, RBF, Cosine, Fixed, Median, NormalizedRBF, RadialRBF, ReleasedMedian
from headwise.repulsion.repel import Repel
from headwise.repulsion.rules import SGLD, SPOS, SVGD, CosinePenalty, CosineRepulsion
from headwise.routing.aggregate import Aggregate
from headwise.routing.algorithms import DistinctCapsules, PerHead, SharedTrunk
from headwise.routing.save import restore
from headwise.strength import Relative, Target
from headwise_lab.experiment.arm import (
    Arm,
    DropHeads,
    GateHeads,
    Guided,
    LengthenQueries,
    Method,
    MixHeads,
    Orthogonalize,
    OtherModel,
    PairHeads,
    Widen,
    combine,
    find_control,
    named_arms,
    sort_methods,
)
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
# What the name of an arm chooses; and how a term is computed or an aggregator walks through its tokens, which changes
# no number of a run.
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
    """Return the arm that a text such as "svgd:alpha=0.5+em" names.

    Raises:
        SettingError: As `parse_arms`.
    """
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

    Args:
        arm: One of the named arms, as it is.
        settings: Setting name to the text of its value.

    Raises:
        SettingError: The arm has no such setting or cannot take that value.

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
        value = _parse_value(f"{arm.name}:{name}", text, name, _find_types(changed, known[name]))
        changed = _replace(changed, known[name], value)
    differing = {
        name: _write_value(name, _get(changed, path))
        for name, path in list_settings(changed).items()
        if not _has(arm, path) or _get(changed, path) != _get(arm, path)
    }
    written = ",".join(f"{name}={value}" for name, value in differing.items())
    name = f"{arm.name}:{written}" if differing else arm.name
    return dataclasses.replace(changed, name=name, control=_parse_control(changed, differing))


def _parse_control(arm: Arm, settings: Mapping[str, str]) -> str | None:
    """Return the name of an arm's control, with those settings of the arm that the control has too.

    Otherwise a control would act elsewhere, or smooth otherwise, and the arm differ from it in more than one thing.
    """
    control = find_control(arm.methods)
    if control is None:
        return None
    shared = list_settings(named_arms()[control]).keys() - TUNED - REPLACED
    return with_settings(named_arms()[control], {name: settings[name] for name in settings if name in shared}).name


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


def _has(value: Any, path: Path) -> bool:
    try:
        _get(value, path)
    except AttributeError:
        return False
    return True


def _replace(value: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    step, *rest = path
    if isinstance(step, int):
        return (*value[:step], _replace(value[step], tuple(rest), new), *value[step + 1 :])
    return dataclasses.replace(value, **{step: _replace(getattr(value, step), tuple(rest), new)})


def _find_types(arm: Arm, path: Path) -> tuple[Any, ...]:
    """Return the types a field may hold."""
    owner = _get(arm, path[:-1])
    hint = typing.get_type_hints(type(owner))[str(path[-1])]
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _parse_value(place: str, text: str, name: str, allowed: tuple[Any, ...]) -> Any:
    if name in WORDS:
        return _parse_word(place, text, name)
    if type(None) in allowed and text.lower() == ("all" if name in PLACES else "none"):
        return None
    kind = next(kind for kind in allowed if kind is not type(None))
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
            return Fixed(float(text))
        except ValueError as error:
            if isinstance(error, SettingError):
                raise
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


# What a record holds where no method is on.
OFF: Mapping[str, Any] = {
    "rule": None,
    "layers": None,
    "kinds": None,
    "projections": None,
    "term": None,
    "penalty_weight": 1.0,
    "kind_weights": None,
    "aggregation": None,
    "aggregation_layers": None,
    "aggregation_kinds": None,
    "drophead": 0.0,
    "guided": None,
    "model": None,
}
PLACE = {"layers": "layers", "kinds": "kinds"}
# Where each field of a method goes; the first key of a method tells whether it is on.
KEYS: Mapping[type[Repel | Penalize | Aggregate | DropHeads | OtherModel], Mapping[str, str]] = {
    Repel: {"rule": "rule", **PLACE, "projections": "projections", "grouping": "grouping"},
    Penalize: {
        "term": "term",
        "weight": "penalty_weight",
        "kind_weights": "kind_weights",
        **PLACE,
        "grouping": "penalty_grouping",
    },
    Aggregate: {"setting": "aggregation", "layers": "aggregation_layers", "kinds": "aggregation_kinds"},
    DropHeads: {"rate": "drophead", "start": "drophead_start"},
    OtherModel: {"model": "model"},
}
# Methods that a record holds whole. They and `LATER` are in a record only where they are on, unless `OFF` has them, so
# that what was recorded before they came stays as it is.
WHOLE: Mapping[type[Guided | MixHeads | GateHeads | PairHeads | Widen | Orthogonalize | LengthenQueries], str] = {
    Guided: "guided",
    MixHeads: "talking",
    GateHeads: "gates",
    PairHeads: "pairs",
    Widen: "wider",
    Orthogonalize: "muon",
    LengthenQueries: "queries",
}
# What a record calls a class, where that is not its name.
RECORDED: Mapping[type, str] = {MixHeads: "Talk"}
LATER = ("drophead_start", "grouping", "penalty_grouping")
# The classes a record may name; `restore` knows those of aggregators.
CLASSES = (
    *(SVGD, SPOS, SGLD, FunctionSVGD, SpanSVGD, CosinePenalty, CosineRepulsion, Relative, Target),
    *(RBF, IMQ, Cosine, NormalizedRBF, RadialRBF, Median, ReleasedMedian, Fixed),
    *(Sum, Subspace, Position, PositionSquaredDifference, Output, Frobenius, *WHOLE),
    *(SigmoidGate, MixtureOfHeads),
    *(GroupedQueries, SquaredCosine, CKA, HSIC, CrossCorrelation, LogDeterminant, SpanOverlap, MapCosine),
)


def record_arm(arm: Arm) -> dict[str, Any]:
    """Return the record of an arm.

    >>> from headwise_lab.experiment.arm import named_arms
    >>> {key: value for key, value in record_arm(named_arms()["drophead"]).items() if value}
    {'kind': 'Arm', 'name': 'drophead', 'penalty_weight': 1.0, 'drophead': 0.1, 'control': 'plain'}
    """
    values = dict(OFF)
    for method in arm.methods:
        if isinstance(method, Guided | MixHeads | GateHeads | PairHeads | Widen | Orthogonalize | LengthenQueries):
            whole = as_record(method) | {"kind": RECORDED.get(type(method), type(method).__name__)}
            off = {key for key in PLACE if whole.get(key) is None}
            values[WHOLE[type(method)]] = {key: held for key, held in whole.items() if key not in off}
        else:
            held = {key: as_record(getattr(method, field)) for field, key in KEYS[type(method)].items()}
            values |= {key: value for key, value in held.items() if key not in LATER or value is not None}
    values["learning_rate"] = arm.learning_rate
    if arm.dropout is not None:
        values["dropout"] = arm.dropout
    return {"kind": "Arm", "name": arm.name, **values, "control": arm.control}


def restore_arm(record: Mapping[str, Any]) -> Arm:
    """Return the arm of a record; a method whose keys it lacks is off.

    Raises:
        DataError: It names a class that is not headwise's.
        SettingError: A value is out of range.
        KeyError: It has no name.
    """
    known = {**dict.fromkeys((*LATER, *WHOLE.values())), **OFF}
    values = {key: restore(_name_settings(record.get(key, off)), CLASSES) for key, off in known.items()}
    methods: list[Method] = []
    for kind, keys in KEYS.items():
        first = next(iter(keys.values()))
        if values[first] != OFF[first]:
            methods.append(kind(**{field: values[key] for field, key in keys.items()}))
    methods += [values[key] for key in WHOLE.values() if values[key] is not None]
    return Arm(
        record["name"],
        sort_methods(methods),
        record.get("learning_rate"),
        record.get("dropout"),
        record.get("control", "plain"),
    )


def _name_settings(value: Any) -> Any:
    """Return a value of `as_record` as `restore` reads it."""
    if isinstance(value, dict):
        named = {"setting" if name == "kind" else name: _name_settings(inner) for name, inner in value.items()}
        own = {name: cls.__name__ for cls, name in RECORDED.items()}
        return named if "kind" not in value else {**named, "setting": own.get(value["kind"], value["kind"])}
    return [_name_settings(inner) for inner in value] if isinstance(value, list) else value
