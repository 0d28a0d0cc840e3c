"""Attention modules that hand the weights of their projections to torch's function and call no projection (WavLM)."""

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from headwise.heads.irregular import list_functions
from headwise.nn.hooks import Hook, PerThread

WEIGHTS = ("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj_weight")


class _Entered:
    """The modes of the calls that are running."""

    def __init__(self) -> None:
        self.modes: list[_Calls] = []


@dataclass
class _Prepared:
    """The hooks of a module whose projections are called, and how many need that."""

    hooks: list[RemovableHandle] = field(default_factory=list)
    holders: int = 0


# A copy of a module is not among them.
_prepared: weakref.WeakKeyDictionary[nn.Module, _Prepared] = weakref.WeakKeyDictionary()


def hands_weights(module: nn.Module) -> bool:
    """Return whether a module's own code calls `torch.nn.functional.multi_head_attention_forward`.

    >>> hands_weights(nn.Linear(2, 2))
    False
    """
    names = {name for function in list_functions(module) for name in function.__code__.co_names}
    return "multi_head_attention_forward" in names


def call_projections(_model: nn.Module, module: nn.Module) -> Callable[[], None]:
    """Have the projections of such a module called in its forward, whose results stay the same to the bit.

    It ends when the last of those who asked for it calls the function returned.
    """
    prepared = _prepared.get(module)
    if prepared is None:
        prepared = _prepared[module] = _Prepared(_hook(module))
    prepared.holders += 1
    held = [prepared]

    def release() -> None:
        while held:
            one = held.pop()
            one.holders -= 1
            if one.holders == 0:
                _prepared.pop(module, None)
                for hook in one.hooks:
                    hook.remove()

    return release


def _hook(module: nn.Module) -> list[RemovableHandle]:
    entered = PerThread(_Entered)

    def enter(module: nn.Module, _args: tuple) -> None:
        entered.own.modes.append(_Calls(module))
        entered.own.modes[-1].__enter__()

    def leave(_module: nn.Module, _args: tuple, _output: object) -> None:
        entered.own.modes.pop().__exit__(None, None, None)

    return [
        module.register_forward_pre_hook(Hook(module, enter)),
        module.register_forward_hook(Hook(module, leave), always_call=True),
    ]


class _Calls(TorchFunctionMode):
    """Calls the Linears of a module whose weights torch's function is given, and gives it identities for them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __torch_function__(
        self, function: Callable[..., Any], _types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is not F.multi_head_attention_forward:
            return function(*args, **kwargs)
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        linears = {id(child.weight): child for child in self.module.children() if type(child) is nn.Linear}
        called = [linears.get(id(given[name])) for name in WEIGHTS]
        if any(linear is None for linear in called):
            return function(*args, **kwargs)
        *inputs, output_projection = [linear for linear in called if linear is not None]
        for name, linear in zip(("query", "key", "value"), inputs, strict=True):
            given[name] = _batch_first(linear, given[name])
        identity = torch.eye(given["embed_dim_to_check"], dtype=given["query"].dtype, device=given["query"].device)
        given |= dict.fromkeys(WEIGHTS, identity) | {"in_proj_bias": None, "out_proj_bias": None}
        output, weights = function(*bound.args, **bound.kwargs)
        return _batch_first(output_projection, output), weights


def _batch_first(linear: nn.Module, tensor: Tensor) -> Tensor:
    """Call a module with [B, L, d] where torch's function has [L, B, d]; it computes on the latter, to the bit."""
    if tensor.dim() != 3:
        return linear(tensor)
    with _LengthFirst():
        return linear(tensor.transpose(0, 1)).transpose(0, 1)


class _LengthFirst(TorchFunctionMode):
    """Multiplies [B, L, d] with a weight as [L, B, d]; for this thread, as every mode."""

    def __torch_function__(
        self, function: Callable[..., Any], _types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.linear and args[0].dim() == 3:
            return F.linear(args[0].transpose(0, 1), *args[1:], **(kwargs or {})).transpose(0, 1)
        return function(*args, **(kwargs or {}))
