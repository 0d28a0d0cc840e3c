"""Hooks on the optimizers that update particle groups, and whether the present gradients were acted on."""

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from headwise.errors import LayoutError, SettingError, require_integer, require_range
from headwise.parallel import refuse_flat_optimizer
from headwise.repulsion.groups import ForceNorms, ParticleGroup

BeforeStep = Callable[["Attachment", Tensor | None], None]


@dataclass(eq=False)
class Attachment:
    """One optimizer, the particle groups whose parameters it holds, and its progress through the current step.

    Attributes:
        optimizer: The innermost torch optimizer.
        groups: What is acted on before its steps.
        steps: Number of its steps since the attachment.
        turn: 0, or the number of earlier attachments with the same parameter names (two models may have equal names),
            so that each gets different noise.
        last: What the last step did.
        idle: Names of the groups that never had a gradient.
        noisy: Whether the gradients that were acted on have their noise.
    """

    optimizer: Optimizer
    groups: tuple[ParticleGroup, ...]
    steps: int = 0
    turn: int = 0
    last: ForceNorms | None = None
    idle: set[str] = field(default_factory=set)
    noisy: bool = False
    _stepping: bool = field(default=False, repr=False)
    _applied_to: tuple[weakref.ref[Tensor], ...] = field(default=(), repr=False)
    _before: BeforeStep | None = field(default=None, repr=False)
    _handles: tuple[RemovableHandle, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        self._slices = [head_slice for group in self.groups for head_slice in group.slices]
        self._parameters = [head_slice.parameter for head_slice in self._slices]
        self.idle = {group.name for group in self.groups}

    @property
    def keys(self) -> dict[tuple[int, int], str]:
        """Parameter and first row of everything acted on, and its name for messages."""
        return {key: name for group in self.groups for key, name in group.keys.items()}

    @property
    def attached(self) -> bool:
        """Whether the optimizer still calls the hooks: a copy of it, or an unpickled one, has none."""
        return any(own is self for own in find_attachments(self.optimizer))

    @property
    def applied(self) -> bool:
        """Whether the present gradients were acted on; new tensors were not, nor what a later backward added."""
        present = self._gradients()
        return (
            bool(self._applied_to)
            and len(present) == len(self._applied_to)
            and all(was() is now for was, now in zip(self._applied_to, present, strict=True))
        )

    def attach(self, before: BeforeStep) -> None:
        """Call `before(self, scale)` once per step, when gradients are complete; `scale` is what multiplies them."""
        others = find_attachments(self.optimizer)
        names = set(self.keys.values())
        taken = {other.turn for other in others if names & set(other.keys.values())}
        self.turn = min(set(range(len(others) + 1)) - taken)
        self._before = before
        clear = _make_clearing_hook(weakref.ref(self))
        self._handles = (
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
            *(parameter.register_post_accumulate_grad_hook(clear) for parameter in self._parameters),
        )

    def detach(self) -> None:
        """Remove the hooks from the optimizer and its parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = ()

    def mark(self) -> None:
        """Remember that the present gradients were acted on."""
        self._applied_to = tuple(weakref.ref(gradient) for gradient in self._gradients())

    def clear(self) -> None:
        """Forget it: the step was taken, or there are new gradients."""
        self._applied_to, self.noisy = (), False

    def record(self, forces: ForceNorms) -> None:
        """Keep what a step did."""
        self.last = forces
        if self.idle:
            self.idle.intersection_update(forces.skipped)

    def require_current(self) -> None:
        """Raise `LayoutError` unless model and optimizer still hold the very parameters that were attached."""
        held = _held(self.optimizer)
        for head_slice, parameter in zip(self._slices, self._parameters, strict=True):
            if head_slice.parameter is not parameter:
                raise LayoutError(
                    f"{head_slice.name} is another tensor than when hw.repel was called: something replaced the "
                    "parameter (load_state_dict(assign=True) does). Build the optimizer from the model as it is now, "
                    "and call hw.repel on it."
                )
            if id(parameter) not in held:
                raise LayoutError(
                    f"{head_slice.name} is no longer held by {type(self.optimizer).__name__}: its param_groups "
                    "changed after hw.repel was called. Call .remove() on the handle and hw.repel on the optimizer "
                    "in use."
                )

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[tuple, dict] | None:
        # a step() that calls its parent's fires once for each of them; a step that raised has not reached its end
        if self._stepping and (torch.compiler.is_compiling() or _within_step(optimizer, sys._getframe(1))):
            return None
        before = self._before
        assert before is not None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._stepping = False
        if closure is None:
            before(self, getattr(optimizer, "grad_scale", None))
            self._stepping = True
            return None

        def closure_then_act() -> Any:
            self.clear()
            try:
                loss = closure()
                before(self, None)
            except BaseException:
                self._stepping = False
                raise
            return loss

        self._stepping = True
        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure_then_act}
        return (args[0], closure_then_act, *args[2:]), kwargs

    def _after_step(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._stepping:
            self._stepping = False
            self.steps += 1
        self.clear()


def _make_clearing_hook(own: weakref.ref[Attachment]) -> Callable[[Tensor], None]:
    """Return a hook on parameters that clears an attachment, without keeping it or its optimizer alive."""

    def clear(_parameter: Tensor) -> None:
        attachment = own()
        if attachment is not None:
            attachment.clear()

    return clear


def _within_step(optimizer: Optimizer, caller: FrameType) -> bool:
    """Whether the step that called a hook of this optimizer, in frame `caller`, runs inside another step of it."""
    outer = caller.f_back
    while outer is not None:
        # torch wraps the step of every class in the same function
        if outer.f_code is caller.f_code and any(value is optimizer for value in outer.f_locals.values()):
            return True
        outer = outer.f_back
    return False


def find_attachments(optimizer: Optimizer) -> list[Attachment]:
    """Return what is attached to an optimizer now, in order."""
    owners = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values())
    return [owner for owner in owners if isinstance(owner, Attachment)]


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
            'hw.repel(optimizer.base, ..., when="manual"), and apply() before each step.'
            if isinstance(base, Optimizer)
            else ""
        )
        raise SettingError(
            f"optimizer is {type(given).__name__}; expected a torch.optim.Optimizer or a list of them.{inside}"
        )
    return [_innermost(optimizer) for optimizer in given]


def assign(optimizers: Sequence[Optimizer], groups: Sequence[ParticleGroup]) -> list[Attachment]:
    """Return an attachment for each optimizer that holds some of the groups' parameters; nothing is hooked yet.

    Raises:
        LayoutError: The parameters of a group are not held by any one of the optimizers.
        SettingError: An optimizer maximizes, or its attachments act on some of these heads already, or several
            optimizers hold the same heads.
    """
    if any(options.get("maximize", False) for optimizer in optimizers for options in optimizer.param_groups):
        raise SettingError(
            "the optimizer has maximize=True, under which heads would attract; minimize minus the score."
        )
    held = [_held(optimizer) for optimizer in optimizers]
    assigned: list[list[ParticleGroup]] = [[] for _ in optimizers]
    for group in groups:
        wanted = {id(head_slice.parameter) for head_slice in group.slices}
        owners = [index for index, parameters in enumerate(held) if wanted <= parameters]
        if len({id(optimizers[index]) for index in owners}) > 1:
            raise SettingError(
                f"{group.name}: its parameters are held by {len(owners)} of the {len(optimizers)} optimizers, which "
                "would step on the same gradients; pass the one that updates these heads."
            )
        if not owners:
            raise LayoutError(
                f"{group.name}: its parameters are not held by "
                f"{'the optimizer' if len(optimizers) == 1 else f'any one of the {len(optimizers)} optimizers'}; "
                "pass the optimizer (or all of them, in a list) that updates these heads, or select other heads."
            )
        assigned[owners[0]].append(group)
    attachments = [Attachment(o, tuple(own)) for o, own in zip(optimizers, assigned, strict=True) if own]
    for attachment in attachments:
        claimed = {key for other in find_attachments(attachment.optimizer) for key in other.keys}
        taken = sorted(name for key, name in attachment.keys.items() if key in claimed)
        if taken:
            raise SettingError(
                f"the {taken[0]} are repelled by this optimizer already; call .remove() on the earlier handle first."
            )
    return attachments


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


def _held(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for options in optimizer.param_groups for parameter in options["params"]}


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
