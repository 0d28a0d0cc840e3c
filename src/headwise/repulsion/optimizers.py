"""The torch optimizers that hold the heads' parameters: unwrapped, hookable, and what a resumed run has for each."""

from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

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
            'hw.repel(optimizer.base, ..., when="manual"), and apply() before each step.'
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
