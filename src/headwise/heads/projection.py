"""How a module that projects queries, keys, values or outputs does so: its weight, and the weight's orientation."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.parallel import find_flattening

# Names under which wrappers keep their layer: LoRA of peft, clipped and flexible Linears.
WRAPPED = ("base_layer", "linear", "base")


@dataclass(frozen=True, eq=False)
class Projection:
    """A module read as a projection [..., d_in] -> [..., d_out].

    Attributes:
        module: The module that is called.
        owner: The module that holds the weight: `module`, or what it wraps.
        path: Dotted path from `module` to `owner`, ending in a dot; empty when they are the same.
        rows: Output features d_out.
        columns: Input features d_in.
        axis: 0 when output features are the weight's rows (`nn.Linear`), 1 when its columns (Conv1D of GPT-2).
        bias: Attribute name of the bias on `owner`; None when there is none.
        obstacle: Why the weight cannot be read and written as heads, a clause that follows its name; None when it can.
    """

    module: nn.Module
    owner: nn.Module
    path: str
    rows: int
    columns: int
    axis: int = 0
    bias: str | None = None
    obstacle: str | None = None


def read_projection(module: object) -> Projection | None:
    """Return how a module projects, or None when it is no linear projection.

    It is one of these: a matrix `weight` with `in_features` and `out_features` (`nn.Linear` and subclasses) or
    with `nf` (Conv1D); a layer that wraps one under `base_layer`, `linear` or `base`; a layer with sizes of a Linear
    and no such weight, which is quantized.

    Example:
        >>> projection = read_projection(nn.Linear(4, 6))
        >>> projection.rows, projection.columns, projection.axis, projection.bias
        (6, 4, 0, 'bias')
    """
    if not isinstance(module, nn.Module):
        return None
    owner, path = module, ""
    while _read_sizes(owner) is None or _is_wrapper(owner):
        inner = next((name for name in WRAPPED if isinstance(owner._modules.get(name), nn.Module)), None)
        if inner is None:
            return None
        owner, path = owner.get_submodule(inner), f"{path}{inner}."
    sizes = _read_sizes(owner)
    assert sizes is not None  # the loop above ends with an owner that has them
    rows, columns, axis = sizes
    obstacle = find_obstacle(owner, "weight")
    if _has_lora(module) or _has_lora(owner):
        obstacle = (
            "is the base of a LoRA layer: its heads are W + B A and are trained through B and A, which repulsion of W "
            "alone would not separate; merge the adapter, or use a penalty or an aggregator"
        )
    bias = "bias" if isinstance(owner._parameters.get("bias"), Tensor) else None
    return Projection(module, owner, path, rows, columns, axis, bias, obstacle)


def find_obstacle(owner: nn.Module, attribute: str) -> str | None:
    """Return why `owner.attribute` cannot be read and written as a matrix of heads; None when it can."""
    weight = owner._parameters.get(attribute)
    parametrizations = getattr(owner, "parametrizations", None)
    if isinstance(parametrizations, nn.ModuleDict) and attribute in parametrizations:
        names = ", ".join(type(step).__name__.lstrip("_") for step in parametrizations[attribute].children())
        return (
            f"is recomputed at each use by a parametrization ({names}), so that what is written to it is lost; remove "
            f"it with torch.nn.utils.parametrize.remove_parametrizations(module, {attribute!r})"
        )
    if f"{attribute}_g" in owner._parameters or f"{attribute}_orig" in owner._parameters:
        return (
            "is recomputed before each forward by a hook of torch.nn.utils (weight norm, spectral norm or pruning), "
            "so that what is written to it is lost; remove the hook first"
        )
    reason = find_flattening(owner, weight)
    if reason is not None:
        return reason
    if weight is None:
        return f"is not a parameter of {type(owner).__name__}, as in quantized layers; use the full-precision weights"
    if not torch.is_floating_point(weight):
        return f"is quantized ({str(weight.dtype).removeprefix('torch.')}); use the full-precision weights"
    if weight.dim() != 2:
        return f"has {weight.dim()} dimensions, and heads are read from a matrix (a sharded or convolution weight?)"
    return None


def _has_lora(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") or hasattr(module, "lora_embedding_A")


def _is_wrapper(module: nn.Module) -> bool:
    # peft's layers report the sizes of the layer they wrap
    return "weight" not in module._parameters and isinstance(module._modules.get("base_layer"), nn.Module)


def _read_sizes(module: nn.Module) -> tuple[int, int, int] | None:
    """Return rows, columns and axis of a layer that has the sizes of a projection."""
    weight = module._parameters.get("weight")
    outputs, inputs = getattr(module, "nf", None), getattr(module, "nx", None)
    if isinstance(outputs, int) and isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[1] == outputs:
        return outputs, weight.shape[0] if not isinstance(inputs, int) else inputs, 1
    outputs, inputs = getattr(module, "out_features", None), getattr(module, "in_features", None)
    if not isinstance(outputs, int) or not isinstance(inputs, int):
        return None
    if isinstance(weight, Tensor) and weight.is_floating_point() and weight.dim() == 2:
        # a layer whose rows were pruned or sharded keeps the sizes it was created with
        return weight.shape[0], weight.shape[1], 0
    return outputs, inputs, 0
