"""What a module that projects queries, keys, values or outputs really holds.

Owns the reading of one module as a projection: which of its parameters is the weight, which way it lies, and why its
heads cannot be written to where they cannot. Must not know about heads, sites or layouts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.parallel import find_flattening

# Wrappers that keep the layer they wrap under one of these names: LoRA of peft, clipped and flexible Linears.
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

    Read by structure: a matrix `weight` with `in_features` and `out_features` (`nn.Linear` and what derives from it),
    or with `nf` (Conv1D); a layer that wraps one of these under `base_layer`, `linear` or `base`; and layers that
    have the sizes of a Linear but no such weight, which are quantised.

    Example:
        >>> projection = read_projection(nn.Linear(4, 6))
        >>> projection.rows, projection.columns, projection.axis, projection.bias
        (6, 4, 0, 'bias')
    """
    if not isinstance(module, nn.Module):
        return None
    owner, path = module, ""
    while _sizes(owner) is None or _is_wrapper(owner):
        inner = next((name for name in WRAPPED if isinstance(owner._modules.get(name), nn.Module)), None)
        if inner is None:
            return None
        owner, path = owner.get_submodule(inner), f"{path}{inner}."
    sizes = _sizes(owner)
    assert sizes is not None  # the loop above ends with an owner that has them
    rows, columns, axis = sizes
    obstacle = obstacle_to(owner, "weight")
    if _is_adapted(module) or _is_adapted(owner):
        obstacle = (
            "is the base of a LoRA layer: its heads are W + B A and are trained through B and A, which repulsion of W "
            "alone would not separate; merge the adapter, or take a penalty or an aggregator"
        )
    bias = "bias" if isinstance(owner._parameters.get("bias"), Tensor) else None
    return Projection(module, owner, path, rows, columns, axis, bias, obstacle)


def obstacle_to(owner: nn.Module, attribute: str) -> str | None:
    """Return why `owner.attribute` cannot be read and written as a matrix of heads; None when it can."""
    weight = owner._parameters.get(attribute)
    parametrizations = getattr(owner, "parametrizations", None)
    if isinstance(parametrizations, nn.ModuleDict) and attribute in parametrizations:
        names = ", ".join(type(step).__name__.lstrip("_") for step in parametrizations[attribute].children())
        return (
            f"is computed anew at each use by a parametrisation ({names}), so that what is written to it is lost; take "
            f"it off with torch.nn.utils.parametrize.remove_parametrizations(module, {attribute!r})"
        )
    if f"{attribute}_g" in owner._parameters or f"{attribute}_orig" in owner._parameters:
        return (
            "is computed anew before each forward by a hook of torch.nn.utils (weight norm, spectral norm or pruning), "
            "so that what is written to it is lost; take it off before"
        )
    reason = find_flattening(owner, weight)
    if reason is not None:
        return reason
    if weight is None:
        return f"is not a parameter of {type(owner).__name__}, which is how quantised layers are; use the full weights"
    if not torch.is_floating_point(weight):
        return f"is quantised ({str(weight.dtype).removeprefix('torch.')}); use the full weights"
    if weight.dim() != 2:
        return f"has {weight.dim()} dimensions, and heads are read in a matrix (a sharded or convolution weight?)"
    return None


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") or hasattr(module, "lora_embedding_A")


def _is_wrapper(module: nn.Module) -> bool:
    # peft's layers answer for the sizes of the layer they wrap
    return "weight" not in module._parameters and isinstance(module._modules.get("base_layer"), nn.Module)


def _sizes(module: nn.Module) -> tuple[int, int, int] | None:
    """Return rows, columns and axis of a layer that has the sizes of a projection."""
    weight = module._parameters.get("weight")
    outputs, inputs = getattr(module, "nf", None), getattr(module, "nx", None)
    if isinstance(outputs, int) and isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[1] == outputs:
        return outputs, weight.shape[0] if not isinstance(inputs, int) else inputs, 1
    outputs, inputs = getattr(module, "out_features", None), getattr(module, "in_features", None)
    if not isinstance(outputs, int) or not isinstance(inputs, int):
        return None
    if isinstance(weight, Tensor) and weight.is_floating_point() and weight.dim() == 2:
        # a layer whose rows were pruned or sharded keeps the sizes it was made with
        return weight.shape[0], weight.shape[1], 0
    return outputs, inputs, 0
