"""Settings checked by their annotations: `__post_init__ = check_fields` in a frozen dataclass."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

from headwise.errors import (
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
