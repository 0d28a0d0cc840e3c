"""The torch optimizers that hold the heads' parameters: unwrapped, hookable, and watched for one that replaces another.

A trainer may build its model or its optimizer anew, for each trial of a search or each phase of a training. A repulsion
stays attached to the old ones and never acts again, which would go unnoticed. A warning is given when an optimizer that
holds the same parameters steps instead; or when the optimizer attached to is discarded (or the program ends) before its
first step, and another one with parameters of the same shapes, which repels nothing, steps.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from headwise.errors import LayoutError, SettingError, require_integer, require_range


def unwrap_optimizers(given: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return the torch optimizer inside each of those given, found by `.optimizer` and `.original_optimizer`.

    Raises:
        SettingError: Something given is no optimizer, or cannot be hooked.
    """
    refuse_flat_optimizer(given)
    if isinstance(given, Optimizer) or getattr(given, "optimizer", None) is not None:
        return [_innermost(given)]
    if not isinstance(given, list | tuple) or not given:
        base = getattr(given, "base", None)
        inside = (
            f" It wraps a {type(base).__name__}, and may step it with other numbers in the parameters: call "
            'hw.repel(heads, rule, optimizer.base, when="manual"), and apply() before each step.'
            if isinstance(base, Optimizer)
            else ""
        )
        raise SettingError(
            f"optimizer is {type(given).__name__}; expected a torch.optim.Optimizer or a list of them.{inside}"
        )
    return [_innermost(optimizer) for optimizer in given]


def find_holder(optimizers: Sequence[Optimizer], parameters: Sequence[Tensor], name: str) -> Optimizer:
    """Return the optimizer that holds these parameters of one particle group.

    Raises:
        LayoutError: No optimizer holds all of them.
        SettingError: Several optimizers do, or the one that does maximizes.
    """
    wanted = {id(parameter) for parameter in parameters}
    holders = list({id(optimizer): optimizer for optimizer in optimizers if wanted <= list_held(optimizer)}.values())
    if len(holders) > 1:
        raise SettingError(
            f"{name}: its parameters are held by {len(holders)} of the {len(optimizers)} optimizers, which would step "
            "on the same gradients; pass the one that updates these heads."
        )
    if not holders:
        raise LayoutError(
            f"{name}: its parameters are not held by "
            f"{'the optimizer' if len(optimizers) == 1 else f'any one of the {len(optimizers)} optimizers'}; "
            "pass the optimizer (or all of them, in a list) that updates these heads, or select other heads."
        )
    if any(options.get("maximize", False) for options in holders[0].param_groups):
        raise SettingError(
            "the optimizer has maximize=True, under which heads would attract; minimize minus the score."
        )
    return holders[0]


def list_held(optimizer: Optimizer) -> set[int]:
    """Return the id of every parameter of an optimizer."""
    return {id(parameter) for options in optimizer.param_groups for parameter in options["params"]}


def has_gradient(optimizer: Optimizer) -> bool:
    """Whether a step would move anything: whether some parameter of an optimizer has a gradient."""
    return any(parameter.grad is not None for options in optimizer.param_groups for parameter in options["params"])


def require_state(state: Mapping[str, Any], expected: int) -> None:
    """Raise `SettingError` unless this is what `Repulsion.state_dict` returned on `expected` optimizers."""
    names = ("steps", "turns", "strength")
    if not isinstance(state, Mapping) or any(name not in state for name in names):
        held = ", ".join(map(str, state)) or "nothing" if isinstance(state, Mapping) else f"a {type(state).__name__}"
        raise SettingError(f"the state holds {held}; expected {', '.join(names)}, as in a repulsion's state_dict().")
    steps, turns, strength = (state[name] for name in names)
    if not isinstance(steps, list) or not isinstance(turns, list) or not len(steps) == len(turns) == expected:
        raise SettingError(
            f"the state holds steps={steps!r} and turns={turns!r}; expected lists of {expected}, one per optimizer."
        )
    for name, counts in (("steps", steps), ("turns", turns)):
        for count in counts:
            require_integer(name, count)
    require_range("strength", strength, low=0.0)


def is_within_step(optimizer: Optimizer, caller: FrameType) -> bool:
    """Whether the step that called a hook of this optimizer, in frame `caller`, runs inside another step of it."""
    outer = caller.f_back
    while outer is not None:
        # torch wraps the step of every class in the same function
        if outer.f_code is caller.f_code and any(value is optimizer for value in outer.f_locals.values()):
            return True
        outer = outer.f_back
    return False


def refuse_flat_optimizer(optimizer: object) -> None:
    """Raise `SettingError` for DeepSpeed's engine and optimizers, and for what Accelerate wraps them in.

    >>> refuse_flat_optimizer(object())
    """
    for kind in type(optimizer).__mro__:
        if kind.__module__.partition(".")[0] == "deepspeed" or kind.__name__.startswith("DeepSpeed"):
            raise SettingError(
                f"optimizer is {type(optimizer).__name__} of DeepSpeed, which steps on parts of flat vectors in which "
                "no heads can be read; train with DistributedDataParallel or FSDP2 (torch.distributed.fsdp."
                "fully_shard) instead."
            )


def _innermost(optimizer: object) -> Optimizer:
    inner = optimizer
    for _ in range(8):
        refuse_flat_optimizer(inner)
        wrapped = getattr(inner, "optimizer", None) or getattr(inner, "original_optimizer", None)
        if wrapped is None:
            break
        inner = wrapped
    if not isinstance(inner, Optimizer):
        raise SettingError(f"optimizer is {type(optimizer).__name__}; expected a torch.optim.Optimizer.")
    if not hasattr(inner, "_optimizer_step_pre_hooks") or not getattr(type(inner).step, "hooked", False):
        raise SettingError(
            f"{type(inner).__name__} does not call torch.optim.Optimizer.__init__, so its step() fires no hooks; call "
            "it there, or pass the optimizer that it wraps."
        )
    return inner


_watches: set[Watch] = set()
_hooks: list[RemovableHandle] = []
# Optimizers that were discarded before their first step: the class's name, by the hash of what `_describe` returns.
_discarded: dict[int, str] = {}
# That hash of optimizers that step; None for an optimizer that replaces no other.
_stepping: weakref.WeakKeyDictionary[Optimizer, int | None] = weakref.WeakKeyDictionary()


class Watch:
    """Looks at the steps of other optimizers for one that a repulsion is attached to, without keeping it alive.

    `steps`, on which the repulsion has acted, and `stepping`, whether its optimizer is in the middle of a step, are
    kept by the attachment.
    """

    def __init__(self) -> None:
        self.steps, self.stepping, self._twin_stepped = 0, False, False
        self._kind: tuple[object, ...] = ()
        self._parameters: frozenset[int] = frozenset()
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._finalizer: weakref.finalize | None = None
        self._known: weakref.WeakKeyDictionary[Optimizer, int | None] = weakref.WeakKeyDictionary()

    def start(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Begin to look, for these parameters of an optimizer."""
        self._kind, self._parameters = _describe(optimizer), frozenset(map(id, parameters))
        self._optimizer = weakref.ref(optimizer)
        self._finalizer = weakref.finalize(optimizer, self._on_discard)
        _watches.add(self)
        # it was called again, on what was built in the place of one that was discarded
        _discarded.pop(hash(self._kind), None)
        if not _hooks:
            _hooks.append(register_optimizer_step_post_hook(_look))

    def remove(self) -> None:
        """Stop looking."""
        if self._finalizer is not None:
            self._finalizer.detach()
        _watches.discard(self)
        if not _watches and not _discarded:
            while _hooks:
                _hooks.pop().remove()

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that a repulsion is attached to, if it is alive."""
        return None if self._optimizer is None else self._optimizer()

    def look(self, other: Optimizer) -> None:
        """Take note of a step of any optimizer."""
        own = self.optimizer
        # an optimizer that runs inside the one attached to does not replace it
        if own is other or self.stepping:
            return
        if other not in self._known:
            shares = own is not None and not self._parameters.isdisjoint(list_held(other))
            self._known[other] = self.steps if shares else None
            if shares:
                _stepping[other] = None
            elif self.steps == 0 and _describe(other) == self._kind and not _is_watched(other):
                self._twin_stepped = True
            return
        before = self._known[other]
        if before is None or own is None:
            return
        # nor is one that steps the one attached to, or takes turns with it
        if before == self.steps:
            warnings.warn(
                f"another {type(other).__name__} than the {type(own).__name__} that hw.repel was called on steps the "
                f"same heads, which do not repel one another there ({self.steps} steps with repulsion so far). If the "
                "optimizer was built anew, call hw.repel on the one in use; headwise.integrations does so in the loops "
                "of transformers, Lightning and Accelerate.",
                stacklevel=2,
            )
        self._known[other] = None if before == self.steps else self.steps

    def _on_discard(self) -> None:
        if self.steps == 0 and not self._twin_stepped:
            _discarded[hash(self._kind)] = str(self._kind[0])
        self.remove()
        if self.steps == 0 and self._twin_stepped:
            _say_discarded(str(self._kind[0]))

    def __reduce__(self) -> tuple:
        # a copy watches nothing
        return Watch, ()


def _say_discarded(name: str) -> None:
    warnings.warn(
        f"hw.repel was called on an {name} that never took a step, and another one with parameters of the same shapes "
        "did: if the trainer built its model or optimizer anew (as Trainer(model_init=...) does), nothing was "
        "repelled. Call hw.repel on the optimizer in use, or use headwise.integrations, which attaches again.",
        stacklevel=2,
    )


def _describe(optimizer: Optimizer) -> tuple[object, ...]:
    """Return the class of an optimizer and the shapes of its parameters, in order."""
    return type(optimizer).__name__, *(tuple(p.shape) for group in optimizer.param_groups for p in group["params"])


def _is_watched(optimizer: Optimizer) -> bool:
    return any(watch.optimizer is optimizer for watch in _watches)


def _look(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        for watch in list(_watches):
            watch.look(optimizer)
        if _discarded and optimizer not in _stepping:
            _stepping[optimizer] = hash(_describe(optimizer))
        name = _discarded.get(_stepping[optimizer] or 0) if _discarded else None
        if name is not None and not _is_watched(optimizer):
            del _discarded[hash(_describe(optimizer))]
            _say_discarded(name)
