"""The recorder: what modules are called with and return inside a block, calls that are made again, and copies for it.

Copies replace what Python does not copy: tensors with a graph, locks, generators, open files.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter, UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from headwise.errors import HeadwiseError, NotFired
from headwise.heads.heads import Site
from headwise.heads.view import HeadView
from headwise.nn.hooks import read_first_argument

T = TypeVar("T")
# A module, and what is called around its calls.
Watched = tuple[nn.Module, Callable[..., Any]]
# What is not shared between a model and its copy.
CONTAINERS = (nn.Module, nn.Parameter, Mapping, list, tuple, set, frozenset, deque)

_clock = count()


@contextmanager
def watching(before: Iterable[Watched] = (), after: Iterable[Watched] = (), *, prepend: bool = False) -> Iterator[None]:
    """Inside the block, call functions before and after the calls that modules get from this thread.

    A function (module, args, kwargs) before a call may return other arguments, one (module, args, kwargs, output) after
    it another output. With `prepend`, functions before a call come before other hooks.

    >>> linear = nn.Linear(2, 2)
    >>> with watching(after=[(linear, lambda module, args, kwargs, output: output + 1.0)]):
    ...     moved = linear(torch.zeros(2))
    >>> torch.equal(moved, linear(torch.zeros(2)) + 1.0)
    True
    """
    thread = threading.get_ident()

    def keep_own(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *call: function(*call) if threading.get_ident() == thread else None

    handles = [
        module.register_forward_pre_hook(keep_own(function), prepend=prepend, with_kwargs=True)
        for module, function in before
    ]
    handles += [module.register_forward_hook(keep_own(function), with_kwargs=True) for module, function in after]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, eq=False, repr=False)
class Call:
    """One call of a module.

    Arguments and output are empty where they were not kept. It ran from `start` to `end`, numbers that increase; a call
    that raised ends at -1.
    """

    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: Any = None
    start: int = -1
    end: int = -1

    @property
    def given(self) -> Tensor:
        """The first tensor it was called with; `ShapeError` if that is something else."""
        return read_first_argument(self.module, self.args, self.kwargs)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the module, in which the call is made again."""
        return next((one.dtype for one in self.module.parameters() if one.is_floating_point()), torch.float32)

    def again(self) -> Any:
        """Make the call once more in the precision the module has now, with copies: a cache must not grow."""
        args, kwargs = copy_deeply(tree_map(partial(_convert, dtype=self.dtype), (self.args, self.kwargs)))
        return self.module(*args, **kwargs)


def keep(value: T) -> T:
    """Return a value as it is."""
    return value


def clone(value: T) -> T:
    """Return a value whose tensors are copies without a graph, as the forward goes on and may write into them."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)


def list_tensors(output: object) -> Iterator[Tensor]:
    """Yield the tensors in the output of a module, also inside tuples, lists and mappings.

    >>> [len(one) for one in list_tensors({"a": torch.zeros(2), "b": [torch.zeros(3), None]})]
    [2, 3]
    """
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | list | tuple):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from list_tensors(value)


@contextmanager
def restored(tensors: Iterable[Tensor], value: float | None = None) -> Iterator[None]:
    """Give tensors a value inside the block, or let them be changed there; they are what they were at its end."""
    saved = [(tensor, tensor.clone()) for tensor in tensors]
    if value is not None:
        for tensor, _ in saved:
            tensor.fill_(value)
    try:
        yield
    finally:
        for tensor, before in saved:
            tensor.copy_(before)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and restore the mode of every module at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def record(
    modules: Iterable[nn.Module],
    *,
    inputs: Callable[[Any], Any] | None = None,
    outputs: Callable[[Any], Any] | None = None,
    prepend: bool = False,
) -> Iterator[list[Call]]:
    """Record the calls that modules get from this thread inside the block, in the order in which they begin.

    `inputs` and `outputs` are `keep`, `clone` or `copy_deeply`, by which (args, kwargs) and outputs are kept, or None.
    With `prepend`, inputs are kept before other hooks change them.

    >>> linear = nn.Linear(2, 3)
    >>> with record([linear], inputs=keep, outputs=keep) as calls:
    ...     _ = linear(torch.zeros(4, 2))
    >>> [(call.given.shape, call.output.shape) for call in calls]
    [(torch.Size([4, 2]), torch.Size([4, 3]))]
    """
    calls: list[Call] = []
    running: dict[nn.Module, list[int]] = {module: [] for module in modules}

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running[module].append(len(calls))
        args, kwargs = ((), {}) if inputs is None else inputs((args, kwargs))
        calls.append(Call(module, args, kwargs, start=next(_clock)))

    def end(module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any) -> None:
        place = running[module].pop()
        kept = None if outputs is None else outputs(output)
        calls[place] = replace(calls[place], output=kept, end=next(_clock))

    with watching([(one, begin) for one in running], [(one, end) for one in running], prepend=prepend):
        yield calls


@contextmanager
def returning(model: nn.Module, recorded: Mapping[nn.Module, Sequence[Any]]) -> Iterator[None]:
    """Have the first calls that modules get in each forward of a model return what was recorded, unless they run.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        >>> with returning(model, {model[0]: [torch.zeros(1)]}):
        ...     model(torch.ones(2))
        tensor([0.])
    """
    numbers: Counter[nn.Module] = Counter()
    before = {module: vars(module).get("forward") for module in recorded}

    def make(module: nn.Module, outputs: Sequence[Any]) -> Callable[..., Any]:
        forward = module.forward

        def replay(*args: Any, **kwargs: Any) -> Any:
            numbers[module] += 1
            return outputs[numbers[module] - 1] if numbers[module] <= len(outputs) else forward(*args, **kwargs)

        return replay

    try:
        for module, outputs in recorded.items():
            module.__dict__["forward"] = make(module, outputs)
        with watching([(model, lambda *_: numbers.clear())]):
            yield
    finally:
        for module, own in before.items():
            module.__dict__.pop("forward", None)
            if own is not None:
                module.__dict__["forward"] = own


def record_sites(model: nn.Module, sites: Sequence[Site], forward: Callable[[], object]) -> list[Call]:
    """Run a model once and return, for each site, the smallest call that runs it and its output projection.

    Raises:
        NotFired: A site was not called.
        HeadwiseError: The forward failed.
    """
    wanted = [_list_around(model, site) for site in sites]
    seen: dict[nn.Module, Call] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module not in seen:
            # the forward continues, and may write into what it passed
            seen[module] = Call(module, *copy_deeply((args, kwargs)))

    around = dict.fromkeys([*(module for own in wanted for module in own), *(site.module for site in sites)])
    try:
        with watching([(module, note) for module in around]):
            forward()
    except HeadwiseError:
        raise
    except Exception as error:
        raise HeadwiseError(
            f"{type(model).__name__} could not be run on the given inputs ({type(error).__name__}: {error}); "
            "give what the model itself takes: a mapping of names, or a sequence of positional arguments."
        ) from error
    silent = [site.label for site in sites if site.module not in seen]
    if silent:
        raise NotFired(
            f"{', '.join(silent[:6])} was not reached by a forward pass on the given inputs; give inputs that reach "
            "it, or select the heads that they reach: heads.where(...)."
        )
    return [next(seen[module] for module in own if module in seen) for own in wanted]


def _list_around(model: nn.Module, site: Site) -> list[nn.Module]:
    """Return the modules that hold a site and its output projection, innermost first; the model is last."""
    if site.output_projection is None:
        return [site.module]
    owner, parts = site.output_projection.owner, site.name.split(".")
    places = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1)]
    return [place for place in places if any(part is owner for part in place.modules())]


def _convert(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, UserDict):
        # keys and values that layers of transformers hand on
        converted = copy.copy(value)
        converted.update(tree_map(partial(_convert, dtype=dtype), dict(value)))
        return converted
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def copy_site(site: Site, model: nn.Module, memo: Mapping[int, Any]) -> Site | None:
    """Return a site as it is read in a copy of its model or module, with the memo of `copy_deeply`.

    None where the copy does not hold its projections.
    """

    def find(module: nn.Module | None) -> nn.Module | None:
        found = None if module is None else memo.get(id(module))
        return found if isinstance(found, nn.Module) else None

    def copy_part(part: HeadView) -> HeadView:
        modules = {name: find(getattr(part, name)) for name in ("module", "bias_owner", "lora")}
        owner = find(part.owner)
        return replace(part, owner=owner, **modules)

    module, projection = find(site.module), site.output_projection
    owner = None if projection is None else find(projection.owner)
    parts = [part for head_slice in site.slices for part in head_slice.parts]
    if module is None or any(find(part.owner) is None for part in parts):
        return None
    return replace(
        site,
        model=model,
        module=module,
        slices=tuple(head_slice.map(copy_part) for head_slice in site.slices),
        # an aggregator may have replaced W_O since the heads were found
        output=None if site.output is None or find(site.output.owner) is None else copy_part(site.output),
        output_projection=None if projection is None or owner is None else replace(projection, owner=owner),
        value_module=find(site.value_module),
    )


def copy_deeply(value: T, memo: dict[int, Any] | None = None) -> T:
    """Return a deep copy, in which a tensor with a graph is a detached copy and what cannot be copied is shared.

    Raises:
        HeadwiseError: It refuses to be copied even so.

    >>> layer = nn.Linear(2, 2)
    >>> layer.lock, layer.cache = threading.Lock(), layer.weight * 2.0
    >>> twin = copy_deeply(layer)
    >>> twin.lock is layer.lock, twin.cache is layer.cache
    (True, False)
    """
    memo = {} if memo is None else memo
    given, shared = dict(memo), {}
    while True:
        try:
            return copy.deepcopy(value, memo)
        except Exception as error:
            stuck = _find_stuck(error)
            if isinstance(stuck, CONTAINERS) or id(stuck) in shared:
                raise HeadwiseError(
                    f"{_name_stuck(value, stuck)} refuses to be copied ({type(error).__name__}: {error}), and the "
                    "experiments of headwise run on a copy; take it off the model meanwhile, or give its class a "
                    "__deepcopy__ that works."
                ) from error
            shared[id(stuck)] = stuck.detach().clone() if isinstance(stuck, Tensor) else stuck
            # tensors are not copied once more; what else was begun is not whole
            alive = {id(memo): memo.get(id(memo), [])}
            whole = {key: one for key, one in memo.items() if isinstance(one, Tensor)}
            memo.clear()
            memo |= whole | alive | given | shared


def _find_stuck(error: Exception) -> Any:
    """Return what could not be copied: what the innermost call of `deepcopy` was given."""
    stuck, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is copy.deepcopy.__code__:
            stuck = trace.tb_frame.f_locals["x"]
        trace = trace.tb_next
    return stuck


def _name_stuck(value: object, stuck: object) -> str:
    """Return the name of what cannot be copied: a module, or its attribute."""
    for name, part in value.named_modules() if isinstance(value, nn.Module) else ():
        if part is stuck:
            return f"{name or 'the model'} ({type(part).__name__})"
        for own, thing in {**vars(part), **part._parameters, **part._buffers}.items():
            if thing is stuck:
                return f"{name}.{own}".removeprefix(".")
    return f"a {type(stuck).__name__}"
