"""Repeated calls of one attention module with chosen queries, keys and values, and copies to make them on.

Copies replace what Python does not copy: tensors with a graph, locks, generators, open files.
"""

from __future__ import annotations

import copy
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType, ModuleType
from typing import Any, NoReturn, TypeVar
from weakref import ProxyTypes

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from headwise.errors import HeadwiseError, LayoutError, NotFired
from headwise.heads.capture import split_heads
from headwise.heads.heads import Site
from headwise.heads.view import HeadView
from headwise.nn.hooks import read_first_argument

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


Edit = Callable[[Tensor], None]


class Uncalled(NotFired):
    """A projection of an attention that ran was not called."""


@dataclass(repr=False)
class RecordedCall:
    """The first call that a module got during a forward pass, to be made again in a precision of one's own."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        # the forward continues, and may write into what it passed
        self.args, self.kwargs = copy_deeply((self.args, self.kwargs))

    def again(self) -> None:
        """Make the call once more, with copies of what it got: a cache must not grow."""
        args, kwargs = copy_deeply(tree_map(partial(_convert, dtype=self.dtype), (self.args, self.kwargs)))
        self.module(*args, **kwargs)


class Replay:
    """One site, called again and again with drawn queries, keys and values.

    Args:
        site: The site, of a float64 model in evaluation mode; its output projection must be visible.
        call: A call that runs the site and its output projection.

    Attributes:
        draws: What queries, keys and values are replaced by, [..., M, e] each; known after the first call.
    """

    def __init__(self, site: Site, call: RecordedCall) -> None:
        self.site, self.call = site, call
        self.draws: dict[str, Tensor] = {}
        self._inputs: dict[int | None, tuple[Any, Any]] = {}

    def heads(self, edits: Mapping[str, Edit]) -> Tensor:
        """Return the concatenated heads [T, H, e] that reach W_O when q, k and v are drawn at random, then edited.

        Args:
            edits: For each projection to change, what changes its features [..., M, e] in place.
        """
        with self._take_over(edits):
            seen = self._record_outputs()
        missing = [head_slice.projection for head_slice in self.site.slices if head_slice.projection not in self.draws]
        if missing or not seen:
            silent = f"its {missing[0]} projection" if missing else "the module found as its W_O"
            raise Uncalled(f"{self.site.label}: {silent} was not called in a forward pass on the given inputs.")
        sizes = (self.site.num_heads, self.site.head_size)
        if seen[0].shape[-1] != sizes[0] * sizes[1]:
            self.refuse(f"its W_O takes {seen[0].shape[-1]} features, not {sizes[0]} heads of {sizes[1]}")
        return seen[0].unflatten(-1, sizes).flatten(0, -3)

    def outputs(self) -> Tensor:
        """Return the concatenated heads [.., H, e] that reach W_O when the call is made as it was."""
        seen = self._record_outputs()
        if not seen:
            raise Uncalled(f"{self.site.label}: the module found as its W_O was not called in a forward pass.")
        return split_heads(seen[0], self.site)

    def _record_outputs(self) -> list[Tensor]:
        seen: list[Tensor] = []

        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append(read_first_argument(module, args, kwargs).detach().clone())

        def see_returned(_module: nn.Module, _args: tuple[Any, ...], output: object) -> None:
            if isinstance(output, Tensor):
                seen.append(output.detach().clone())

        if self.site.output_projection is None:
            # heads of a list that are concatenated, and nothing more
            handle = self.site.module.register_forward_hook(see_returned)
        else:
            handle = self.site.expose().module.register_forward_pre_hook(see, with_kwargs=True)
        try:
            self.call.again()
        finally:
            handle.remove()
        return seen

    @contextmanager
    def _take_over(self, edits: Mapping[str, Edit]) -> Iterator[None]:
        """Inside the block, the first projection of each call of the site returns drawn and edited features."""
        done: set[int | None] = set()
        module: Any = self.site.module
        handles = []
        for projecting in {id(part.module): part.module for part in self.site.parts}.values():
            if projecting is None:
                module._project = self._make_project(edits)
            else:
                hook = self._make_hook(projecting, edits, done)
                handles.append(projecting.register_forward_hook(hook, with_kwargs=True))
        try:
            yield
        finally:
            module.__dict__.pop("_project", None)
            for handle in handles:
                handle.remove()

    def _make_hook(self, projecting: nn.Module, edits: Mapping[str, Edit], done: set[int | None]):
        places = [
            (head_slice, sum(before.heads for before in head_slice.parts[:index]), part)
            for head_slice in self.site.slices
            for index, part in enumerate(head_slice.parts)
            if part.module is projecting
        ]

        def returned(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
            if id(module) in done:
                # further calls project something else: the positions of DeBERTa
                return None
            done.add(id(module))
            self._inputs[id(module)] = tree_map(_draw_like, args), tree_map(_draw_like, kwargs)
            if not isinstance(output, Tensor):
                kind = places[0][0].projection
                self.refuse(f"its {kind} projection returns a {type(output).__name__}, not a tensor")
            output = output.clone()
            for head_slice, first, part in places:
                self._replace(head_slice, part.features(output), edits, first)
            return output

        return returned

    def _make_project(self, edits: Mapping[str, Edit]):
        def projected(*inputs: Tensor) -> tuple[Tensor, ...]:
            self._inputs[None] = tuple(_draw_like(tensor) for tensor in inputs), {}
            outputs = [output.clone() for output in self._torch_project(*inputs)]
            for head_slice, output in zip(self.site.slices, outputs, strict=True):
                self._replace(head_slice, output.unflatten(-1, (head_slice.heads, head_slice.head_size)), edits)
            return tuple(outputs)

        return projected

    def _replace(self, head_slice: HeadView, features: Tensor, edits: Mapping[str, Edit], first: int = 0) -> None:
        """Write drawn and edited features of the heads from `first` on."""
        if head_slice.projection not in self.draws:
            every = features.new_empty((*features.shape[:-2], head_slice.heads, features.shape[-1]))
            # on a grid without 0, so that a norm over all heads is exactly the same after a shift, also in float32
            drawn = draw_noise(every, seed=len(self.draws)).clamp(-3.0, 3.0)
            drawn = (drawn * 4.0).round() / 4.0
            self.draws[head_slice.projection] = torch.where(drawn == 0.0, 0.25, drawn)
        edited = self.draws[head_slice.projection].clone()
        if head_slice.projection in edits:
            edits[head_slice.projection](edited)
        features.copy_(edited.narrow(-2, first, features.shape[-2]))

    def project(self, head_slice: HeadView) -> Tensor:
        """Return the features of a head slice as its projection computes them from random inputs."""
        if head_slice.parts[0].module is None:
            args, _ = self._inputs[None]
            output = self._torch_project(*args)[self.site.slices.index(head_slice)]
            return output.unflatten(-1, (head_slice.heads, head_slice.head_size)).clone()
        return torch.cat([self._project_part(part) for part in head_slice.parts], -2)

    def _project_part(self, part: HeadView) -> Tensor:
        assert part.module is not None
        args, kwargs = self._inputs[id(part.module)]
        return part.features(part.module(*args, **kwargs))

    def _torch_project(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        module: Any = self.site.module
        return type(module)._project(module, *inputs)

    def refuse(self, finding: str) -> NoReturn:
        """Raise `LayoutError` with what was found out."""
        raise LayoutError(
            f"{self.site.label}: layout {self.site.layout!r} with {self.site.num_heads} heads of {self.site.head_size} "
            f"misreads {type(self.site.module).__name__}: {finding}. Pass a layout row that describes it to "
            "find_heads, or leave it out if it is no softmax attention."
        )


def record_calls(twin: nn.Module, sites: Sequence[Site], forward: Callable[[], object]) -> list[RecordedCall]:
    """Run the model once and return, for each site, the smallest call that runs it and its output projection."""
    names = {id(module): name for name, module in twin.named_modules()}
    seen: dict[str, RecordedCall] = {}

    def remember(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in seen:
                seen[name] = RecordedCall(module, args, kwargs)

        return called

    wanted: dict[str, list[str]] = {}
    for site in sites:
        projection = site.output_projection
        wanted[site.name] = (
            [site.name] if projection is None else _list_common_parents(site.name, names[id(projection.owner)])
        )
    around = {*(place for places in wanted.values() for place in places), *wanted}
    handles = [twin.get_submodule(name).register_forward_pre_hook(remember(name), with_kwargs=True) for name in around]
    try:
        forward()
    except HeadwiseError:
        raise
    except Exception as error:
        raise HeadwiseError(
            f"{type(twin).__name__} could not be run on the given inputs ({type(error).__name__}: {error}); "
            "give what the model itself takes: a mapping of names, or a sequence of positional arguments."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    silent = [site.label for site in sites if site.name not in seen]
    if silent:
        raise NotFired(
            f"{', '.join(silent[:6])} was not reached by a forward pass on the given inputs; give inputs that reach "
            "it, or select the heads that they reach: heads.where(...)."
        )
    return [next(seen[place] for place in wanted[site.name] if place in seen) for site in sites]


def _list_common_parents(first: str, second: str) -> list[str]:
    """Return the names of the modules that hold both modules, innermost first; the model, "", is last."""
    both = []
    for a, b in zip(first.split("."), second.split("."), strict=False):
        if a != b:
            break
        both.append(a)
    return [".".join(both[:depth]) for depth in range(len(both), -1, -1)]


def draw_noise(like: Tensor, seed: int = 50) -> Tensor:
    """Return standard normal numbers of the same shape, the same at each call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu").to(like)


def _draw_like(value: object) -> object:
    return draw_noise(value) if isinstance(value, Tensor) and value.is_floating_point() else value


def _convert(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, UserDict):
        # keys and values that layers of transformers hand on
        converted = copy.copy(value)
        converted.update(tree_map(partial(_convert, dtype=dtype), dict(value)))
        return converted
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
