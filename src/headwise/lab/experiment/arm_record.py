"""The record of an arm: flat JSON with one key per field of a method, whether the method is on or not."""

from collections.abc import Mapping
from typing import Any

from headwise.disagreement.grouped import GroupedQueries
from headwise.disagreement.invariant import (
    CKA,
    HSIC,
    CrossCorrelation,
    LogDeterminant,
    MapCosine,
    SpanOverlap,
    SquaredCosine,
)
from headwise.disagreement.similarities import Frobenius, Output, Position, PositionSquaredDifference, Subspace, Sum
from headwise.gating.settings import MixtureOfHeads, SigmoidGate
from headwise.integrations.methods import Aggregate, Penalize, Repel
from headwise.lab.experiment.arm import Arm, sort_methods
from headwise.lab.experiment.guided import Guided
from headwise.lab.experiment.method import (
    DropHeads,
    GateHeads,
    LengthenQueries,
    Method,
    Orthogonalize,
    OtherModel,
    PairHeads,
    Talk,
    Widen,
)
from headwise.lab.experiment.run_folder import as_record
from headwise.repulsion.function_space import FunctionSVGD
from headwise.repulsion.kernels import IMQ, RBF, Cosine, Fixed, Median, NormalizedRBF, RadialRBF, ReleasedMedian
from headwise.repulsion.rules import SGLD, SPOS, SVGD, CosinePenalty, CosineRepulsion
from headwise.repulsion.spans import SpanSVGD
from headwise.routing.setting_records import restore
from headwise.strength import Relative, Target

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
WHOLE: Mapping[type[Guided | Talk | GateHeads | PairHeads | Widen | Orthogonalize | LengthenQueries], str] = {
    Guided: "guided",
    Talk: "talking",
    GateHeads: "gates",
    PairHeads: "pairs",
    Widen: "wider",
    Orthogonalize: "muon",
    LengthenQueries: "queries",
}
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

    >>> from headwise.lab.experiment.arm import named_arms
    >>> {key: value for key, value in record_arm(named_arms()["drophead"]).items() if value}
    {'kind': 'Arm', 'name': 'drophead', 'penalty_weight': 1.0, 'drophead': 0.1, 'control': 'plain'}
    """
    values = dict(OFF)
    for method in arm.methods:
        if isinstance(method, Guided | Talk | GateHeads | PairHeads | Widen | Orthogonalize | LengthenQueries):
            values[WHOLE[type(method)]] = as_record(method)
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
        return {"setting" if name == "kind" else name: _name_settings(inner) for name, inner in value.items()}
    return [_name_settings(inner) for inner in value] if isinstance(value, list) else value
