"""Settings checked by their annotations, `__post_init__ = check_fields` in a frozen dataclass, and their JSON form."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from headwise.errors import (
    DataError,
    SettingError,
    require_boolean,
    require_choice,
    require_integer,
    require_positive,
    require_range,
)

Check = Callable[[str, Any], None]


def _require_share(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < 1.0:
        raise SettingError(f"{name} is {value!r}; expected a share, between 0 and 1.")


# A number and its check, which is called with the names of the class and field, and the value.
Count = Annotated[int, functools.partial(require_integer, low=1)]
Natural = Annotated[int, require_integer]
Positive = Annotated[float, require_positive]
NonNegative = Annotated[float, functools.partial(require_range, low=0.0)]
Real = Annotated[float, require_range]
Rate = Annotated[float, functools.partial(require_range, low=0.0, high=0.99)]
Dropout = Annotated[float, functools.partial(require_range, low=0.0, high=0.999)]
Share = Annotated[float, _require_share]


def check_fields(settings: Any) -> None:
    """Check each field of a dataclass by its annotation: `bool`, `Literal`, or `Annotated` with a check.

    Raises:
        SettingError: A value is outside its range.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Window:
        ...     size: Count
        ...     __post_init__ = check_fields
        >>> Window(0)
        Traceback (most recent call last):
        headwise.errors.SettingError: Window.size is 0; expected an integer of at least 1.
    """
    for name, (optional, check) in _find_checks(type(settings)).items():
        value = getattr(settings, name)
        if value is not None or not optional:
            check(f"{type(settings).__name__}.{name}", value)


@functools.cache
def _find_checks(kind: type) -> dict[str, tuple[bool, Check]]:
    """Return whether each checked field may be None, and its check."""
    found: dict[str, tuple[bool, Check]] = {}
    hints = typing.get_type_hints(kind, include_extras=True)
    for name in (setting.name for setting in dataclasses.fields(kind)):
        inner = [hint for hint in typing.get_args(hints[name]) if hint is not type(None)]
        optional = type(None) in typing.get_args(hints[name])
        hint = inner[0] if optional else hints[name]
        if hint is bool:
            found[name] = optional, require_boolean
        elif typing.get_origin(hint) is Literal:
            found[name] = optional, functools.partial(require_choice, choices=typing.get_args(hint))
        elif typing.get_origin(hint) is Annotated:
            found[name] = optional, typing.get_args(hint)[1]
    return found


def to_json(value: Any, pack: Callable[[Any, dict[str, Any]], Any], leaf: Callable[[Any], Any]) -> Any:
    """Return settings as JSON data: `pack(settings, fields)` for a dataclass, a list for a tuple, else `leaf(value)`.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Window:
        ...     size: int
        >>> to_json((Window(3), 2), lambda settings, fields: {type(settings).__name__: fields}, lambda value: value)
        [{'Window': {'size': 3}}, 2]
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {field.name: to_json(getattr(value, field.name), pack, leaf) for field in dataclasses.fields(value)}
        return pack(value, held)
    return [to_json(item, pack, leaf) for item in value] if isinstance(value, tuple) else leaf(value)


def from_json(value: Any, unpack: Callable[[Mapping[str, Any]], tuple[type, Mapping[str, Any]]]) -> Any:
    """Return the settings that `to_json` wrote; `unpack` gives the class and the fields of an object.

    Raises:
        DataError: The class has no such fields, or refuses a value.

    Example:
        >>> from_json([{"size": 3}, 2], lambda held: (dict, held))
        ({'size': 3}, 2)
    """
    if isinstance(value, list):
        return tuple(from_json(item, unpack) for item in value)
    if not isinstance(value, Mapping):
        return value
    kind, held = unpack(value)
    try:
        return kind(**{name: from_json(item, unpack) for name, item in held.items()})
    except (TypeError, ValueError) as error:
        raise DataError(f"the setting {kind.__name__} cannot be built from {held}: {error}") from error
