"""Settings of aggregators as plain JSON, with the names of their classes."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from headwise.errors import DataError
from headwise.routing.modules import Gate, Residual
from headwise.routing.settings import Chunks, EMRouting, SimpleRouting, Trunk
from headwise.routing.votes import DistinctCapsules, PerHead, SharedTrunk

SETTINGS: tuple[type, ...] = (
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


def record(value: Any) -> Any:
    """Return a setting as JSON: {"setting": its class, field: value, ...}; tuples become lists.

    Raises:
        DataError: A field holds something that JSON cannot represent.

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


def restore(value: Any, classes: Sequence[type] = ()) -> Any:
    """Return the setting that `record` wrote.

    Args:
        value: The result of `record`.
        classes: User-defined classes that may appear in it.

    Raises:
        DataError: A class is unknown, or does not have those fields.

    Example:
        >>> restore(record(Residual(SimpleRouting(iterations=4)))).routing.iterations
        4
    """
    if isinstance(value, list):
        return tuple(restore(item, classes) for item in value)
    if not isinstance(value, dict):
        return value
    name = str(value.get("setting"))
    known = {cls.__name__: cls for cls in (*SETTINGS, *classes)}
    if name not in known:
        raise DataError(
            f"the folder holds the setting {name!r}; expected one of {', '.join(sorted(known))}. If you defined it, "
            "pass its class: load(settings=(...,))."
        )
    try:
        return known[name](**{key: restore(item, classes) for key, item in value.items() if key != "setting"})
    except (TypeError, ValueError) as error:
        raise DataError(f"the setting {name} cannot be built from {value}: {error}") from error
