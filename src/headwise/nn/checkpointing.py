"""Repeats the biases and observers of a checkpointed forward when it is recomputed in the backward pass.

By then those listeners may be gone, or others attached.
"""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils.checkpoint import CheckpointFunction

from headwise.errors import NotFired
from headwise.nn.scores import Bias, Observer, ScoreCall

# torch.compiler.disable, without the second that importing the compiler takes
outside_graphs = _disable_dynamo


@dataclass(frozen=True)
class Request:
    """What one call of an attention module computes in addition to its output.

    Attributes:
        biases: Added to its scores, each broadcastable to [B, H, Q, K].
        weights: Whether the attention weights are computed explicitly.
        mean_weights: Whether their mean over heads is computed.
        beside: Whether the weights are computed separately from the attention.
    """

    biases: tuple[Tensor, ...] = ()
    weights: bool = False
    mean_weights: bool = False
    beside: bool = False


class _CheckpointedForward:
    """The requests of each module's calls in one checkpointed forward."""

    def __init__(self) -> None:
        self.calls: dict[nn.Module, list[Request]] = {}
        self._served = Counter[tuple[int, int]]()

    def next(self, module: nn.Module) -> Request:
        """Return the request of the module's next call, in the recomputation that is running."""
        calls, key = self.calls.get(module, [Request()]), (torch._C._current_graph_task_id(), id(module))
        self._served[key] += 1
        return calls[min(self._served[key], len(calls)) - 1]


_forwards: WeakKeyDictionary[Any, _CheckpointedForward] = WeakKeyDictionary()


def is_recomputing() -> bool:
    """Return whether this is the recomputation of a checkpoint: a forward inside a backward."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def is_in_checkpoint() -> bool:
    """Return whether this forward runs inside an activation checkpoint, and so is run again in the backward pass."""
    if torch.compiler.is_compiling():
        return False
    return _checkpoint_frame()[0] is not None if torch.is_grad_enabled() else _in_reentrant_checkpoint()


def find_frame() -> Any:
    """Return the frame of the innermost checkpoint in whose first run this is, which lives until it is computed again.

    None outside of one, under torch.compile, and in one with use_reentrant=True, which has none.
    """
    if torch.compiler.is_compiling() or is_recomputing():
        return None
    frame, original = _checkpoint_frame()
    return frame if original else None


def resolve_request(
    module: nn.Module,
    observers: tuple[Observer, ...],
    biases: tuple[Bias, ...],
    call: ScoreCall,
    kept: Callable[[Any], None] | None = None,
) -> Request:
    """Return the request of a call of `module`: from its listeners, or in a recomputation that of its first forward.

    `kept` is called with the checkpoint's frame when the answer is kept for the recomputation.

    Raises:
        NotFired: The module is recomputed and the biases of its first run are unknown.
    """
    again = is_recomputing()
    if again:
        frame, original = _checkpoint_frame()
        if frame is not None and not original:
            forward = _forwards.get(frame)
            return Request() if forward is None else forward.next(module)
        if biases or any(one.biases for forward in _forwards.values() for one in forward.calls.get(module, ())):
            raise NotFired(
                f"{type(module).__name__} is computed again in a backward pass, and the checkpoint does not tell which "
                "forward it belongs to, so which bias its heads had is unknown; use torch.utils.checkpoint with "
                "use_reentrant=False, not nested in another checkpoint."
            )
    observers = tuple(observer for observer in observers if observer.active())
    weights = any(observer.weights for observer in observers)
    mean = any(observer.mean_weights for observer in observers)
    if not biases and not weights and not mean:
        return Request()
    compiling = torch.compiler.is_compiling()
    if biases and not compiling and not torch.is_grad_enabled() and _in_reentrant_checkpoint():
        raise NotFired(
            f"a bias on the heads of {type(module).__name__} cannot be kept for the recomputation of a reentrant "
            "activation checkpoint; use use_reentrant=False."
        )
    beside = all(observer.beside for observer in observers if observer.weights)
    answer = Request(tuple(tensor for bias in biases if (tensor := bias(call)) is not None), weights, mean, beside)
    frame = None if compiling or again else _checkpoint_frame()[0]
    if frame is not None:
        if frame not in _forwards:
            _forwards[frame] = _CheckpointedForward()
        _forwards[frame].calls.setdefault(module, []).append(answer)
        if kept is not None:
            kept(frame)
    return answer


# called between compiled graphs, where it would be compiled by itself
@outside_graphs
def _checkpoint_frame() -> tuple[Any, bool]:
    """Return the frame of the innermost checkpoint that is running and whether this is its first run, not a later one.

    torch keeps the frame in the variables of the hooks a checkpoint puts on saved tensors, and nowhere else.
    """
    autograd: Any = getattr(torch._C, "_autograd", None)
    hooks = autograd._top_saved_tensors_default_hooks(False)
    pack: Any = None if hooks is None else hooks[0]
    # the recomputation's hook is wrapped by torch._dynamo.disable
    while hasattr(pack, "__wrapped__"):
        pack = pack.__wrapped__
    code, cells = getattr(pack, "__code__", None), getattr(pack, "__closure__", None)
    if code is None or cells is None:
        return None, False
    variables = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    if "frame" in variables:
        return variables["frame"], True
    reference = variables.get("target_frame_ref")
    return (None, False) if reference is None else (reference(), False)


def _in_reentrant_checkpoint() -> bool:
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None
