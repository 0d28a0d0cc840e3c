"""Exception types, and the checks behind every message a user sees.

A message says what was given, what was expected and what to do, with names and numbers.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DataError", "HeadwiseError", "LayoutError", "MaskError", "NotFired", "SettingError", "ShapeError"]

# The largest float; an int beyond it cannot be compared as one.
_MOST = sys.float_info.max


class HeadwiseError(Exception):
    """Base class of all exceptions raised by headwise."""


class SettingError(HeadwiseError, ValueError):
    """A setting is outside its range or two settings contradict each other."""


class ShapeError(HeadwiseError, ValueError):
    """A tensor has a shape or dtype the operation cannot take."""


class LayoutError(HeadwiseError):
    """The heads of a module cannot be found, or a layout row does not describe it."""


class MaskError(HeadwiseError, ValueError):
    """A mask has the wrong dtype, shape or polarity."""


class NotFired(HeadwiseError, RuntimeError):
    """A method was attached but did not act when it should have."""


class DataError(HeadwiseError):
    """An input file or folder is missing or malformed; the message names file and line."""


def require_range(
    name: str,
    value: float,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    low_open: bool = False,
) -> None:
    """Raise `SettingError` unless `value` is a finite number with low <= value <= high.

    >>> require_range("alpha", 0.5, low=0.0)
    """
    bracket = "(" if low_open else "["
    expected = f"a finite number in {bracket}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_MOST <= value <= _MOST:
        raise SettingError(f"{name} is {value!r}; expected {expected}.")
    if value < low or value > high or (low_open and value == low):
        raise SettingError(f"{name} is {value!r}; expected {expected}.")


def require_positive(name: str, value: float) -> None:
    """Raise `SettingError` unless `value` is a finite number above zero."""
    require_range(name, value, low=0.0, low_open=True)


def require_integer(name: str, value: int, *, low: int = 0, high: int | None = None) -> None:
    """Raise `SettingError` unless `value` is an int (not a bool) with low <= value <= high."""
    expected = f"an integer of at least {low}" + ("" if high is None else f" and at most {high}")
    wrong_type = isinstance(value, bool) or not isinstance(value, int)
    if wrong_type or value < low or (high is not None and value > high):
        raise SettingError(f"{name} is {value!r}; expected {expected}.")


def require_boolean(name: str, value: bool) -> None:
    """Raise `SettingError` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise SettingError(f"{name} is {value!r}; expected True or False.")


def require_names(name: str, value: tuple[str, ...]) -> None:
    """Raise `SettingError` unless `value` is a tuple or list of strings; one string would be read letter by letter.

    >>> require_names("query", ("wq",))
    """
    if not isinstance(value, tuple | list) or not all(isinstance(item, str) for item in value):
        raise SettingError(f"{name} is {value!r}; expected a tuple of names, such as ('wq',).")


def require_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise `SettingError` unless `value` is one of `choices`."""
    allowed = list(choices)
    if value not in allowed:
        raise SettingError(f"{name} is {value!r}; expected one of {', '.join(allowed)}.")


def require_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise `ShapeError` unless `tensor` has `shape`; None stands for any size along that axis.

    >>> import torch
    >>> require_shape("weights", torch.zeros(2, 3), (None, 3))
    """
    # here, so that the exceptions can be imported without torch
    from torch import Tensor

    if not isinstance(tensor, Tensor):
        raise ShapeError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor.")
    fits = tensor.dim() == len(shape) and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; expected ({wanted}).")


def warn_renamed(old: str, new: str) -> None:
    """Warn whoever uses a name of an earlier version, two calls up, that it works until version 0.4."""
    warnings.warn(f"{old} is now {new}, and goes in version 0.4.", DeprecationWarning, stacklevel=3)
