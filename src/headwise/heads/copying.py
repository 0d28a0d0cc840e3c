"""Copies of modules that hold what Python does not copy: tensors with a graph, locks, generators, open files."""

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import MethodType, ModuleType
from typing import Any, TypeVar
from weakref import ProxyTypes

from torch import Tensor, nn

from headwise.errors import HeadwiseError

T = TypeVar("T")
# What is not looked into: it would lead to all that Python has loaded, or to the model around a module.
SHARED = (ModuleType, *ProxyTypes)


def copy_deeply(value: T, memo: dict[int, Any] | None = None) -> T:
    """Return a deep copy, in which a tensor with a graph is a detached copy and what cannot be copied is shared.

    Args:
        value: A module, or anything else.
        memo: As in `copy.deepcopy`: copies by the ids of what they are copies of.

    Raises:
        HeadwiseError: It refuses to be copied even so.

    Example:
        >>> import threading
        >>> layer = nn.Linear(2, 2)
        >>> layer.lock, layer.cache = threading.Lock(), layer.weight * 2.0
        >>> twin = copy_deeply(layer)
        >>> twin.lock is layer.lock, twin.cache is layer.cache
        (True, False)
    """
    memo = {} if memo is None else memo
    given = dict(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        memo.clear()
        memo |= given
    _share_uncopied(value, memo, set())
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise HeadwiseError(
            f"{_name_uncopied(value)} refuses to be copied ({type(error).__name__}: {error}), and the experiments of "
            "headwise run on a copy; take it off the model meanwhile, or give its class a __deepcopy__ that works."
        ) from error


def _share_uncopied(value: Any, memo: dict[int, Any], seen: set[int]) -> None:
    """Enter a copy of what cannot be copied in `value`, or the thing itself, in `memo`."""
    if id(value) in memo or id(value) in seen:
        return
    seen.add(id(value))
    if type(value) in SHARED:
        memo[id(value)] = value
        return
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            memo[id(value)] = value.detach().clone()
        return
    for held in _list_held(value):
        _share_uncopied(held, memo, seen)
    if isinstance(value, nn.Module | Mapping | list | tuple | set | frozenset | deque):
        return
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:
        memo[id(value)] = value


def _list_held(value: Any) -> Iterator[Any]:
    """Yield what a container or an object holds, where a deep copy would go on."""
    if isinstance(value, type):
        return
    if isinstance(value, Mapping):
        yield from [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from [*value]
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    yield from [*getattr(value, "__dict__", {}).values()]
    for name in (name for kind in type(value).__mro__ for name in _list_slots(kind)):
        if hasattr(value, name):
            yield getattr(value, name)


def _list_slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _name_uncopied(value: object) -> str:
    """Return the name of what cannot be copied: a module's attribute, or a module."""
    if not isinstance(value, nn.Module):
        return f"a {type(value).__name__}"
    memo: dict[int, Any] = {id(part): part for part in value.modules()}
    for name, part in value.named_modules():
        for attribute, held in vars(part).items():
            # a module is copied by its own class, below
            items = held.items() if attribute in ("_parameters", "_buffers") else [(attribute, held)]
            for own, thing in items:
                try:
                    copy.deepcopy(thing, dict(memo))
                except Exception:
                    return f"{name}.{own}" if name else own
    return next(
        (f"{name or 'the model'} ({type(part).__name__})" for name, part in value.named_modules() if _refuses(part)),
        type(value).__name__,
    )


def _refuses(module: nn.Module) -> bool:
    memo: dict[int, Any] = {id(part): part for part in module.modules() if part is not module}
    try:
        copy.deepcopy(module, memo)
    except Exception:
        return True
    return False
