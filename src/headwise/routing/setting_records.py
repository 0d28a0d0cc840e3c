"""Settings of aggregators as plain JSON, by the names of their classes; no code is stored.

Owns the two directions. Must not know models or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from headwise.errors import DataError
from headwise.routing.gate import Gate
from headwise.routing.modules import Residual, ResidualAggregator, Setting
from headwise.routing.settings import Chunks, EMRouting, SimpleRouting, Trunk
from headwise.routing.votes import DistinctCapsules, PerHead, SharedTrunk

KNOWN: tuple[type, ...] = (
    Chunks,
    DistinctCapsules,
    EMRouting,
    Gate,
    PerHead,
    Residual,
    SharedTrunk,
    SimpleRouting,
    Trunk,
)


def setting_of(aggregator: Any) -> Setting:
    """Return the setting an aggregator was built from."""
    if isinstance(aggregator, ResidualAggregator):
        routed: Any = aggregator.aggregator
        return Residual(routed.setting)
    return aggregator.setting


def record(value: Any) -> Any:
    """Return a setting as JSON: {"setting": its class, field: value, ...}; tuples as lists.

    Raises:
        DataError: A field holds something JSON has no form for.

    Example:
        >>> record(EMRouting(iterations=2))["inverse_temperature"]
        [1.0, 3.0]
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {"setting": type(value).__name__, **{f.name: record(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, tuple):
        return [record(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise DataError(f"a setting holds a {type(value).__name__}; expected numbers, strings, tuples or settings.")


def restored(value: Any, classes: Sequence[type] = ()) -> Any:
    """Return the setting of a record.

    Args:
        value: What `record` gave.
        classes: Classes of your own that may appear in it, beside headwise's.

    Raises:
        DataError: A class is neither headwise's nor given, or does not have those fields.

    Example:
        >>> restored(record(Residual(SimpleRouting(iterations=4)))).routing.iterations
        4
    """
    if isinstance(value, list):
        return tuple(restored(item, classes) for item in value)
    if not isinstance(value, dict):
        return value
    name = value.get("setting")
    known = {cls.__name__: cls for cls in (*KNOWN, *classes)}
    if name not in known:
        raise DataError(
            f"the folder holds the setting {name!r}; expected one of {', '.join(sorted(known))}: if it is your own, "
            "give its class to load(settings=(...,))."
        )
    try:
        return known[name](**{key: restored(item, classes) for key, item in value.items() if key != "setting"})
    except (TypeError, ValueError) as error:
        raise DataError(f"the setting {name} cannot be made from {value}: {error}") from error
