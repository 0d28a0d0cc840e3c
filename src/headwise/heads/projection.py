"""How a module that projects queries, keys, values or outputs does so: its weight, and the weight's orientation."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from headwise.heads.adapters import find_lora_obstacle, find_saved, has_adapters
from headwise.heads.flattening import find_flattening

# Names under which wrappers keep their layer: adapters of peft, clipped and flexible Linears.
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
        lora: The LoRA layer among the wrappers, whose adapters add to the weight; None where there is none.
    """

    module: nn.Module = field(repr=False)
    owner: nn.Module = field(repr=False)
    path: str
    rows: int
    columns: int
    axis: int = 0
    bias: str | None = None
    obstacle: str | None = None
    lora: nn.Module | None = field(default=None, repr=False)


def read_projection(module: object) -> Projection | None:
    """Return how a module projects, or None when it is no linear projection.

    It is one of these: a matrix `weight` with `in_features` and `out_features` (`nn.Linear` and subclasses) or
    with `nf` (Conv1D); a layer that wraps one under `base_layer`, `linear` or `base`, or as the active one of peft's
    `modules_to_save`; a layer with sizes of a Linear and no such weight, which is quantized.

    Example:
        >>> projection = read_projection(nn.Linear(4, 6))
        >>> projection.rows, projection.columns, projection.axis, projection.bias
        (6, 4, 0, 'bias')
    """
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
        return None
    owner, path, wrappers = module, "", []
    while (inner := _find_inner(owner)) is not None:
        wrappers.append(owner)
        owner, path = owner.get_submodule(inner), f"{path}{inner}."
    sizes = _read_sizes(owner)
    if sizes is None:
        return None
    rows, columns, axis = sizes
    adapted = [wrapper for wrapper in (*wrappers, owner) if has_adapters(wrapper) or _is_adapted(wrapper)]
    obstacle = find_obstacle(owner, "weight")
    if len(adapted) > 1:
        names = " in ".join(type(wrapper).__name__ for wrapper in adapted[::-1])
        obstacle = f"is the base of several adapted layers ({names}); merge all adapters but one first"
    elif adapted and obstacle is None:
        obstacle = find_lora_obstacle(adapted[0])
    lora = adapted[0] if adapted and obstacle is None else None
    bias = "bias" if isinstance(owner._parameters.get("bias"), Tensor) else None
    return Projection(module, owner, path, rows, columns, axis, bias, obstacle, lora)


def find_obstacle(owner: nn.Module, attribute: str, axes: int = 2) -> str | None:
    """Return why `owner.attribute` cannot be read and written as heads along its axes; None when it can."""
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
    if weight.dim() != axes:
        return f"has {weight.dim()} dimensions, and heads are read from a matrix (a sharded or convolution weight?)"
    return None


def _find_inner(module: nn.Module) -> str | None:
    """Return the path from a wrapper to the layer it calls; None for a layer itself."""
    saved = find_saved(module)
    if saved is not None:
        return saved
    # peft's layers report the sizes of the layer they wrap
    if _read_sizes(module) is None or _is_adapted(module):
        return next((name for name in WRAPPED if isinstance(module._modules.get(name), nn.Module)), None)
    return None


def _is_adapted(module: nn.Module) -> bool:
    """Whether a module is a layer around another whose weight it may add to: every method of peft has this form."""
    return "weight" not in module._parameters and isinstance(module._modules.get("base_layer"), nn.Module)


def _read_sizes(module: nn.Module) -> tuple[int, int, int] | None:
    """Return rows, columns and axis of a layer that has the sizes of a projection."""
    weight = module._parameters.get("weight")
    if weight is not None and is_lazy(weight):
        return None
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
