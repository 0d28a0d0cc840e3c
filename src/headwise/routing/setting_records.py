"""Settings of aggregators as plain JSON, with the names of their classes."""

import re
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
# Fields that would be taken for the name of the class.
TAGGED = re.compile("setting_*")


def record(value: Any) -> Any:
    """Return a setting as JSON: {"setting": its class, field: value, ...}; tuples become lists.

    A field that is itself called `setting` is written as "setting_", one called `setting_` as "setting__", and so on.

    Raises:
        DataError: A field holds something that JSON cannot represent, or the class has the name of one of headwise's.

    Example:
        >>> record(EMRouting(iterations=2))["inverse_temperature"]
        [1.0, 3.0]
    """
    if is_dataclass(value) and not isinstance(value, type):
        name = type(value).__name__
        if type(value) not in SETTINGS and name in {cls.__name__ for cls in SETTINGS}:
            raise DataError(f"the setting {name} is not headwise's {name}, as which it would be loaded; rename it.")
        # what a class computes itself it will compute again
        held = {f.name: record(getattr(value, f.name)) for f in fields(value) if f.init}
        return {"setting": name, **{f"{key}_" if TAGGED.fullmatch(key) else key: item for key, item in held.items()}}
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
    held = {key.removesuffix("_") if TAGGED.fullmatch(key) else key: key for key in value if key != "setting"}
    name = str(value.get("setting"))
    known = {cls.__name__: cls for cls in (*SETTINGS, *classes)}
    if name not in known:
        raise DataError(
            f"the folder holds the setting {name!r}; expected one of {', '.join(sorted(known))}. If you defined it, "
            "pass its class: load(settings=(...,))."
        )
    try:
        return known[name](**{key: restore(value[written], classes) for key, written in held.items()})
    except (TypeError, ValueError) as error:
        raise DataError(f"the setting {name} cannot be built from {value}: {error}") from error
