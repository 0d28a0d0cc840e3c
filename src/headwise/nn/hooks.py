"""Hooks that serve one module, and handles that remove them.

Models compiled by torch.compile: reading them as they were before, running them so, and having hooks seen.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from headwise.errors import NotFired, SettingError, ShapeError, warn_renamed

# The name under which torch.compile keeps the module it wraps.
WRAPPED = "_orig_mod"


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile(module)` has wrapped, or the module itself.

    Example:
        >>> linear = nn.Linear(2, 2)
        >>> unwrap_compiled(torch.compile(linear, backend="eager")) is unwrap_compiled(linear) is linear
        True
    """
    return module.get_submodule(WRAPPED) if _is_wrapper(module) else module


def strip_wrappers(name: str) -> str:
    """Return the name of a module without the wrappers of torch.compile in it.

    Example:
        >>> strip_wrappers("encoder._orig_mod.layers.0")
        'encoder.layers.0'
    """
    return ".".join(part for part in name.split(".") if part != WRAPPED)


@contextmanager
def without_wrappers(model: nn.Module) -> Iterator[None]:
    """Have modules inside a model hold what torch.compile has wrapped, until the end of the block.

    Example:
        >>> model = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"))
        >>> with without_wrappers(model):
        ...     print([name for name, _ in model.named_modules()])
        ['', '0']
        >>> [name for name, _ in model.named_modules()]
        ['', '0', '0._orig_mod']
    """
    # torch.jit holds modules in no dict, and none that torch.compile has wrapped
    holders = [own._modules for own in model.modules() if not isinstance(own, torch.jit.ScriptModule)]
    places = [(held, name) for held in holders for name in held]
    wrappers = [
        (held, name, child) for held, name in places if (child := held[name]) is not None and _is_wrapper(child)
    ]
    for held, name, child in wrappers:
        held[name] = unwrap_compiled(child)
    try:
        yield
    finally:
        for held, name, child in wrappers:
            # what was replaced in the block stays so
            if held.get(name) is unwrap_compiled(child):
                held[name] = child


def guard_hooks() -> None:
    """Have torch.compile check, at each call of what it compiled, whether hooks were added since or removed.

    By default it does not look at modules without hooks: code compiled before a hook runs without it, and so does a
    layer that shares its code with a layer without hooks. The option stays set; what was compiled before is compiled
    again. Where torch.compile was never used this does nothing.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.config.skip_nnmodule_hook_guards:
        dynamo.config.skip_nnmodule_hook_guards = False
        dynamo.reset_code_caches()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run what torch.compile has compiled as it was before, until the end of the block.

    For measurements that attach something else for each of many forwards, which would be compiled for each.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _is_wrapper(module: nn.Module) -> bool:
    return WRAPPED in module._modules and type(module).__module__ == "torch._dynamo.eval_frame"


T = TypeVar("T")


class PerThread(threading.local, Generic[T]):
    """What the hooks of a running forward leave for one another: each thread has its `own`, made by `make`.

    Threads may run one model on different inputs. A copy or a pickle begins anew. Attributes of `own` are set, and not
    of this object, as torch.compile would forget these at the end of a graph.

    >>> inputs = PerThread(list)
    >>> inputs.own.append("what this thread gave")
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self.make, self.own = make, make()

    def __reduce__(self) -> tuple:
        # for copy and pickle
        return type(self), (self.make,)


class Hook:
    """A forward hook or pre-hook of one module; a call by another module is ignored.

    A deep copy must not be observed in place of the original, and a pickle cannot hold the observer: both get a hook
    that does nothing. The function is what torch's hook would be.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self.module, self.function = module, function
        guard_hooks()

    def __call__(self, module: nn.Module, *call: Any) -> Any:
        """Call the function for the module served.

        Raises:
            NotFired: The module called is a replica of it.
        """
        if module is self.module:
            return self.function(module, *call)
        # what is called after a forward that failed would only hide its error
        if sys.exc_info()[1] is None:
            require_original(module)
        return None

    def __reduce__(self) -> tuple:
        # for copy and pickle
        return _Forgotten, ()


def run_uncompiled(function: Callable[..., object]) -> None:
    """Have torch.compile run a function as it is where it is called between compiled code, and trace it inside."""
    dynamo: Any = getattr(torch._C, "_dynamo", None)
    frames = dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


# Hooks of a compiled model itself run outside its graph. They would be compiled one by one, until the limit on the
# graphs of one function is reached, as this is the same function for all of them.
run_uncompiled(Hook.__call__)


# What handles were asked by in earlier versions.
RENAMED = {
    "verify": "check",
    "add_to": "loss",
    "add_penalty": "loss",
    "read_metrics": "stats",
    "aggregate": "build",
}


class Handle:
    """Something attached to a model or an optimizer until `remove()` or the end of a `with` block.

    It serves each thread that runs the model. At the end of a block without an error `check` is called, unless the
    handle was removed inside. A copy of a handle, or an unpickled one, is attached to nothing.
    """

    def __init__(self) -> None:
        self._removers: list[Callable[[], object]] = []
        self._removed = False

    def __getattr__(self, name: str) -> Any:
        # names of before
        new = RENAMED.get(name)
        if new is None or not hasattr(type(self), new):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warn_renamed(f"{type(self).__name__}.{name}", new)
        return getattr(self, new)

    @property
    def attached(self) -> bool:
        """Whether it is still attached."""
        return not self._removed

    @property
    def added(self) -> tuple[nn.Module, ...]:
        """The modules that it has put into the model, whose parameters an optimizer must hold."""
        return ()

    def check(self) -> None:
        """Raise `NotFired` unless it acted since it was attached."""

    def loss(self, loss: Tensor, *, share: float = 1.0) -> Tensor:
        """Return the loss of a training step with what the method adds to it; in evaluation the loss as it is.

        Args:
            loss: The loss of the task, a scalar.
            share: Factor on what has a weight: 1 / n where the loop adds up n micro-batches without dividing their
                losses. A strength relative to the loss needs none.
        """
        term = self.compute_term(loss, share)
        return loss if term is None else loss + term

    def stats(self) -> dict[str, Tensor]:
        """Return what is worth logging since the last call, as scalars by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on alike, as plain JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            SettingError: It is no such state. Nothing is changed then.
        """
        if state != {}:
            raise SettingError(f"{type(self).__name__} has no state; expected an empty one, and not {state!r:.60}.")

    def remove(self) -> None:
        """Detach what is attached, and leave the model as it was before; a second time does nothing."""
        removers, self._removers, self._removed = self._removers, [], True
        # from the last to the first, and all of them also where one raises
        with ExitStack() as undo:
            for remove in removers:
                undo.callback(remove)

    def compute_term(self, loss: Tensor, share: float) -> Tensor | None:
        """Return what the method adds to a loss of the task; None for nothing."""

    @contextmanager
    def _attaching(self) -> Iterator[None]:
        """Detach what was attached in a block that raises."""
        try:
            yield
        except BaseException:
            self.remove()
            raise

    def hook_before(self, module: nn.Module, function: Callable[..., object], *, prepend: bool = False) -> None:
        """Call (module, args, kwargs) -> anything before each call of a module, until `remove()`."""
        handle = module.register_forward_pre_hook(Hook(module, function), prepend=prepend, with_kwargs=True)
        self._removers.append(handle.remove)

    def hook_after(self, module: nn.Module, function: Callable[..., object]) -> None:
        """Call (module, args, output) -> anything after each call of a module, until `remove()`."""
        self._removers.append(module.register_forward_hook(Hook(module, function)).remove)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._removed:
                self.check()
        finally:
            self.remove()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._describe()}{'' if self.attached else '; removed'})"

    def _describe(self) -> str:
        """Return what it does, in a few words."""
        return "attached" if self.attached else "not attached"

    def __getstate__(self) -> dict[str, Any]:
        # for copy and pickle: a copy must not detach the original
        return {**vars(self), "_removers": [], "_removed": True}


class Held(Protocol):
    """What was changed for as long as someone needs it."""

    holders: int


def hold(held: Held, undo: Callable[[], object]) -> Callable[[], None]:
    """Count one more that needs something; return what ends that need, and undoes the change after the last.

    >>> from types import SimpleNamespace
    >>> release = hold(SimpleNamespace(holders=0), lambda: print("undone"))
    >>> release(), release()
    undone
    (None, None)
    """
    held.holders += 1
    ended = False

    def release() -> None:
        nonlocal ended
        if not ended:
            ended = True
            held.holders -= 1
            if held.holders == 0:
                undo()

    return release


def require_original(module: nn.Module) -> None:
    """Raise `NotFired` for a replica that `nn.DataParallel` has made of a module for one forward.

    >>> require_original(nn.Linear(2, 2))
    """
    if getattr(module, "_is_replica", False):
        raise NotFired(
            f"{type(module).__name__} is called as a replica that nn.DataParallel made of the model, to which nothing "
            "of headwise is attached; use DistributedDataParallel, or one device."
        )


def read_first_argument(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Return the first tensor a module was called with, by position or by name; `ShapeError` if it is something else.

    >>> import torch
    >>> read_first_argument(nn.Linear(2, 2), (), {"input": torch.tensor([1.0, 2.0])})
    tensor([1., 2.])
    """
    given = args[0] if args else next(iter(kwargs.values()), None)
    if not isinstance(given, Tensor):
        raise ShapeError(f"{type(module).__name__} was called with a {type(given).__name__}; expected a tensor.")
    return given


def replace_first_argument(args: tuple, kwargs: dict[str, Any], tensor: Tensor) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments of a call with the first one replaced.

    >>> replace_first_argument((), {"input": 1, "out": 2}, 3)
    ((), {'input': 3, 'out': 2})
    """
    if args:
        return (tensor, *args[1:]), kwargs
    return args, {**kwargs, next(iter(kwargs)): tensor}


class _Forgotten:
    """A hook in a copy of the module that it served; it goes at the first call, with others inside the module."""

    def __call__(self, module: nn.Module, *_call: Any) -> None:
        """Remove such hooks; torch.compile would trace it, and leaves them."""
        if torch.compiler.is_compiling():
            return
        for part in module.modules():
            held = [hooks for name, hooks in vars(part).items() if name.startswith(("_forward_hooks", "_forward_pre_"))]
            gone = [number for hooks in held for number, hook in hooks.items() if isinstance(hook, _Forgotten)]
            for hooks in held:
                for number in gone:
                    hooks.pop(number, None)
