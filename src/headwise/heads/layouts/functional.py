"""Attention modules that hand the weights of their projections to a function of torch and do not call these.

WavLM gives all of them to `multi_head_attention_forward`; BEiT, EVA-02 and Swin V2 give that of queries, keys and
values to `linear`, with biases that they hold apart.
"""

from __future__ import annotations

import dis
import inspect
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from headwise.heads.heads import Site
from headwise.heads.layouts.steps import FUSED_BIASES, list_functions
from headwise.nn.checkpointing import find_frame
from headwise.nn.hooks import Hook, PerThread, hold

BIASES = ("q_bias", "k_bias", "v_bias", *FUSED_BIASES)
WEIGHTS = ("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj_weight")


@dataclass
class _Prepared:
    """The hooks of a module whose projections are called, and how many need that."""

    hooks: list[RemovableHandle] = field(default_factory=list)
    holders: int = 0


# A copy of a module is not among them.
_prepared: weakref.WeakKeyDictionary[nn.Module, _Prepared] = weakref.WeakKeyDictionary()


# What is asked of a weight that is not used.
_ASKED = ("dtype", "device", "shape", "size", "dim", "ndim", "numel", "requires_grad", "is_cuda", "data_ptr", "is_meta")
_STARTS = re.compile("init|reset|extra_repr")


def hands_weights(module: nn.Module, *, known: bool = False) -> bool:
    """Return whether a module's own code uses weights of modules in it, and does not call these alone.

    A `known` library calls its projections where it does not hand all of them: the weights that its other ways use
    (Bloom's `slow_but_exact`) do not count.
    """
    return _names_attention(module) or (not known and bool([name for name, called in _list_used(module) if not called]))


def is_handing(site: Site) -> bool:
    """Return whether `find_heads` saw that the module of a site hands weights."""
    return site.prepare is call_projections


def hands_to_attention(site: Site) -> bool:
    """Return whether the module of a site gives all its weights to `multi_head_attention_forward`."""
    return is_handing(site) and _names_attention(site.module)


def hands_output(site: Site) -> bool:
    """Return whether the code of a site's module uses the weight of its W_O, whose place nothing can take then."""
    projection, used = site.output_projection, {*_list_used(site.module)}
    own = projection is not None and projection.owner is site.module and (projection.attribute, False) in used
    called = projection is not None and (projection.attribute, True) in used
    return is_handing(site) and ((own and not called) or _names_attention(site.module))


def _names_attention(module: nn.Module) -> bool:
    names = {name for function in list_functions(module) for name in function.__code__.co_names}
    return "multi_head_attention_forward" in names


def explain_uncalled(site: Site, what: str) -> str:
    """Return a sentence on why a projection of a site was not called, so that "values" or "outputs" were not read."""
    if is_handing(site):
        other = "outputs or weights" if what == "values" else "values or weights"
        return (
            f"its forward uses the weight of a projection in an expression of its own, such as x @ weight.T, so that "
            f"its {what} pass through no module. Have it call the projection, or F.linear with that weight; or read "
            f"{other}."
        )
    if what == "values":
        return (
            "the module that projects them may have been replaced after this was attached, or its forward takes "
            "another way. Call find_heads again, and attach again."
        )
    return (
        "its output projection may have been replaced after this was attached, or takes the heads of several calls. "
        "Attach after aggregate()."
    )


def _list_used(module: nn.Module) -> Iterator[tuple[str, bool]]:
    """Yield the names of the modules in a module that its own code calls, True, or whose `weight` it reads, False.

    The name is "" where the code has another one for it.
    """
    codes, replaced = [], set()
    for function in list_functions(module):
        if function.__name__ not in replaced and _STARTS.search(function.__name__) is None:
            codes.append(function.__code__)
        # a method of a base class runs where the one in its place calls super()
        if "__class__" not in function.__code__.co_freevars:
            replaced.add(function.__name__)
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PRECALL")]
        for before, step, after in zip(steps, steps[1:], steps[2:], strict=False):
            if step.argval in module._modules and after.opname != "LOAD_ATTR":
                yield str(step.argval), True
            if step.opname != "LOAD_ATTR" or step.argval != "weight" or after.argval in _ASKED:
                continue
            if before.opname != "LOAD_ATTR":
                yield "", False
            elif before.argval in module._modules:
                yield str(before.argval), False


def call_projections(_model: nn.Module, module: nn.Module) -> Callable[[], None]:
    """Have the projections of such a module called in its forward, whose results stay the same to the bit.

    It ends when the last of those who asked for it calls the function returned.
    """
    prepared = _prepared.get(module)
    if prepared is None:
        prepared = _prepared[module] = _Prepared(_hook(module))

    def undo() -> None:
        _prepared.pop(module, None)
        for hook in prepared.hooks:
            hook.remove()

    return hold(prepared, undo)


def _hook(module: nn.Module) -> list[RemovableHandle]:
    # the modes of the calls that are running
    entered: PerThread[list[_Calls]] = PerThread(list)
    projections = [part for part in module.modules() if type(part).forward is nn.Linear.forward]

    def enter(module: nn.Module, _args: tuple) -> None:
        frame = find_frame()
        if frame is not None:
            # the recomputation of a checkpoint must save the tensors that were saved before
            weakref.finalize(frame, call_projections(module, module)).atexit = False
        entered.own.append(_Calls(module, projections).__enter__())

    def leave(_module: nn.Module, _args: tuple, _output: object) -> None:
        entered.own.pop().__exit__(None, None, None)

    def begin(projection: nn.Module, _args: tuple) -> None:
        for mode in entered.own[-1:]:
            mode.running.append(projection)

    def end(_projection: nn.Module, _args: tuple, _output: object) -> None:
        for mode in entered.own[-1:]:
            mode.running.pop()

    return [
        module.register_forward_pre_hook(Hook(module, enter)),
        module.register_forward_hook(Hook(module, leave), always_call=True),
        *(one.register_forward_pre_hook(Hook(one, begin)) for one in projections),
        *(one.register_forward_hook(Hook(one, end), always_call=True) for one in projections),
    ]


class _Calls(TorchFunctionMode):
    """Calls the Linears of a module whose weights torch's functions are given.

    `linear` returns what they return, and `multi_head_attention_forward` gets identities for their weights.
    """

    def __init__(self, module: nn.Module, projections: Sequence[nn.Module]) -> None:
        super().__init__()
        self.module, self.projections = module, projections
        # those whose own forward it is that calls `linear`
        self.running: list[nn.Module] = []

    def __torch_function__(
        self, function: Callable[..., Any], _types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.linear:
            return self._project(*(kwargs.pop("input"),) if "input" in kwargs else args, **kwargs)
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

    def _project(self, given: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Call the module whose weight this is, unless it is the caller."""
        module = next((one for one in self.projections if one._parameters.get("weight") is weight), None)
        if module is None or module in self.running:
            return F.linear(given, weight, bias)
        # biases of queries, keys and values that the attention holds are added to what a projection returns
        held = {*self.module._parameters, *self.module._buffers}
        added = module._parameters.get("bias") is None and not held.isdisjoint(BIASES)
        called = _Given(weight, None if added else bias)
        with called:
            output = module(given)
        if not added or bias is None:
            return output
        if output is called.output and output._version == called.version:
            return F.linear(called.input, weight, bias)
        return output + bias


def _batch_first(linear: nn.Module, tensor: Tensor) -> Tensor:
    """Call a module with [B, L, d] where torch's function has [L, B, d]; it computes on the latter, to the bit."""
    if tensor.dim() != 3:
        return linear(tensor)
    with _LengthFirst():
        return linear(tensor.transpose(0, 1)).transpose(0, 1)


class _Given(TorchFunctionMode):
    """Has one module multiply with its weight and add another bias than its own."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias, self.version = weight, bias, -1
        self.input: Any = None
        self.output: Any = None

    def __torch_function__(
        self, function: Callable[..., Any], _types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is not F.linear or len(args) < 2 or args[1] is not self.weight:
            return function(*args, **(kwargs or {}))
        self.input, self.output = args[0], F.linear(args[0], self.weight, self.bias)
        self.version = self.output._version
        return self.output


class _LengthFirst(TorchFunctionMode):
    """Multiplies [B, L, d] with a weight as [L, B, d]; for this thread, as every mode."""

    def __torch_function__(
        self, function: Callable[..., Any], _types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.linear and args[0].dim() == 3:
            return F.linear(args[0].transpose(0, 1), *args[1:], **(kwargs or {})).transpose(0, 1)
        return function(*args, **(kwargs or {}))
