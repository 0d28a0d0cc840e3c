"""The heads in one parameter, and the module that plays W_O.

The heads of a projection are one slice of a parameter, several runs of it with other rows between them, or a parameter
for each head. Engines that flatten parameters leave no matrix to read heads in: FSDP1 and DeepSpeed's ZeRO-3.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from headwise.errors import HeadwiseError, LayoutError
from headwise.heads.adapters import Adapter, find_lora_obstacle, find_saved, find_untrained, has_adapters, list_adapters

# Engines that keep parameters as parts of flat vectors, where a process holds no rows nor columns of a head.
FSDP1 = (
    "is flattened by FSDP1 (FullyShardedDataParallel), which leaves no matrix to read heads in; shard the model with "
    "FSDP2 instead (torch.distributed.fsdp.fully_shard; in Accelerate fsdp_version: 2)"
)
ZERO3 = (
    "is partitioned by DeepSpeed's ZeRO-3, which leaves no matrix to read heads in; shard the model with FSDP2 instead "
    "(torch.distributed.fsdp.fully_shard)"
)


def find_flattening(owner: nn.Module, parameter: Tensor | None) -> str | None:
    """Return why a parameter is no longer a matrix, a clause that follows its name; None where it is one.

    >>> find_flattening(nn.Linear(2, 2), None) is None
    True
    """
    if parameter is not None and (hasattr(parameter, "ds_id") or hasattr(parameter, "ds_tensor")):
        return ZERO3
    # FSDP2 marks modules too, but leaves a matrix
    if getattr(owner, "_is_fsdp_managed_module", False) and (parameter is None or parameter.dim() < 2):
        return FSDP1
    return None


class HeadAxes(NamedTuple):
    """The axes of a parameter along which heads, the features of a head, inputs and the start are counted."""

    heads: int
    features: int
    inputs: int
    start: int


@dataclass(frozen=True, eq=False)
class HeadSlice:
    """The part of one parameter that belongs to the heads of one projection of one site.

    Feature j of head i is row (column when `axis` is 1) `start + i * stride + j * step` of a matrix. A parameter of
    more axes has its heads, the features of a head and the inputs along axes of their own: [H, d, e] is `axis=0,
    feature_axis=2, input_axis=1`, and the keys of [3, d, H, e] are `axis=2, feature_axis=3, input_axis=1,
    start_axis=0, start=1`.

    Attributes:
        projection: "query", "key", "value", or "output" for W_O.
        name: Dotted name of the parameter in the model, for example "layers.0.self_attn.in_proj_weight".
        owner: The module that holds the parameter.
        attribute: Its attribute name on `owner`.
        heads: Number of heads M (key/value heads under grouped queries).
        head_size: Rows (or columns) of one head, e.
        start: First row (or column) of head 0; its index along `start_axis` where there is one.
        stride: Rows (or columns) from one head's start to the next one's; when 0, `head_size`, or 1 where features
            have an axis of their own.
        axis: Axis of the parameter along which heads are counted: 0 when heads are rows, 1 when they are columns.
        bias: Attribute name of the bias on `bias_owner`; None when there is none.
        bias_start: First entry of head 0 in the bias, flattened; the weight's `start` when negative.
        module: The module whose call computes the projection: `owner` when not given, or what wraps it (LoRA); None
            where no module call does: in `nn.MultiheadAttention`, and where `called` is False.
        along: Size of the weight along `axis`; taken from the parameter when 0.
        across: Its size along the other axis; likewise.
        obstacle: Why the parameter cannot be read and written as heads (parametrized, quantized, under an adapter that
            is not plain LoRA); None when it can. Features can be read all the same.
        step: Rows (or columns) from one feature of a head to the next: 1, or H where heads alternate feature by
            feature ("(e h)").
        feature_axis: Axis of the features of a head; `axis` when negative.
        input_axis: Axis of the inputs (of the outputs, for "output"); the other axis of a matrix when negative.
        start_axis: Axis along which `start` counts; `axis` when negative.
        bias_owner: The module that holds the bias: `owner` when None. A bias of another module is added to what
            `module` returns.
        bias_stride: Entries of the flattened bias from one head to the next; when 0, `stride`, or `head_size` where
            features have an axis of their own.
        called: Whether a module call computes the projection, and not the attention's own forward.
        run: Which run of heads this is, where they lie in several (`HeadRuns`); noise of each is its own.
        lora: The LoRA layer whose adapters add to the weight; None where there is none.
        returned: The axes of what `module` returns, in the order (batch, tokens, features ...), where its features are
            not along the last one: (0, 2, 1, 3) for [B, H, T, e]; empty otherwise.
    """

    projection: str
    name: str
    owner: nn.Module = field(repr=False)
    attribute: str
    heads: int
    head_size: int
    start: int = 0
    stride: int = 0
    axis: int = 0
    bias: str | None = None
    bias_start: int = -1
    module: nn.Module | None = field(default=None, repr=False)
    along: int = 0
    across: int = 0
    obstacle: str | None = None
    step: int = 1
    feature_axis: int = -1
    input_axis: int = -1
    start_axis: int = -1
    bias_owner: nn.Module | None = field(default=None, repr=False)
    bias_stride: int = 0
    called: bool = True
    run: int = 0
    lora: nn.Module | None = field(default=None, repr=False)
    returned: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        def settle(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        if self.stride == 0:
            settle("stride", self.head_size if self.feature_axis in (-1, self.axis) else 1)
        if self.bias_start < 0:
            settle("bias_start", self.start)
        if self.module is None and self.called and not isinstance(self.owner, nn.MultiheadAttention):
            settle("module", self.owner)
        weight = self.owner._parameters.get(self.attribute)
        if self.along == 0 and weight is not None and weight.dim() == len(set(self.axes)):
            settle("along", weight.shape[self.axis])
            settle("across", weight.shape[self.axes.inputs])

    @cached_property
    def axes(self) -> HeadAxes:
        """Along which axes of the parameter its heads, their features, the inputs and `start` are counted."""
        features = self.axis if self.feature_axis < 0 else self.feature_axis
        inputs = 1 - self.axis if self.input_axis < 0 else self.input_axis
        return HeadAxes(self.axis, features, inputs, self.axis if self.start_axis < 0 else self.start_axis)

    @property
    def parts(self) -> tuple[HeadSlice, ...]:
        """The slices of single parameters that it is made of: itself, or one for each head (`HeadStack`)."""
        return (self,)

    @cached_property
    def transposed(self) -> bool:
        """Whether its views are [M, d, e] rather than [M, e, d]: features of heads come after the inputs."""
        return self.axes.features > self.axes.inputs

    @property
    def rows(self) -> list[int]:
        """The rows (columns) of its heads, head by head; of a parameter of more axes, all but the inputs flattened."""
        weight, axes = self.owner._parameters.get(self.attribute), self.axes
        unit = dict.fromkeys(axes, 1)
        if weight is not None and len(unit) > 2:
            counted = sorted(set(axes) - {axes.inputs})
            for axis, after in zip(counted[-2::-1], counted[:0:-1], strict=True):
                unit[axis] = unit[after] * weight.shape[after]
        first, head, feature = (
            self.start * unit[axes.start],
            self.stride * unit[axes.heads],
            self.step * unit[axes.features],
        )
        return [first + i * head + j * feature for i in range(self.heads) for j in range(self.head_size)]

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter itself, looked up at each use so that a moved or reloaded model stays right.

        Raises:
            LayoutError: It cannot be read and written as heads; the message says why.
        """
        if self.obstacle is not None:
            raise LayoutError(f"{self.name} {self.obstacle}.")
        held = self.owner._parameters.get(self.attribute)
        if held is None:
            raise LayoutError(self.vanished)
        if held.dim() == len(set(self.axes)) and held.shape[self.axis] != self.along:
            raise LayoutError(
                f"{self.name} has {held.shape[self.axis]} {'rows' if self.axis == 0 else 'columns'}, and had "
                f"{self.along} when its heads were found: heads were removed or merged since; call find_heads again."
            )
        return held

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The LoRA adapters that the model's next call adds to the parameter; none without LoRA, or where merged.

        Raises:
            LayoutError: What it computes with is not W + sum_a s_a B_a A_a; the message says why.
        """
        if self.lora is None:
            return ()
        reason = find_lora_obstacle(self.lora)
        if reason is not None:
            raise LayoutError(f"{self.name} {reason}.")
        return list_adapters(self.lora)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters through which the heads are trained, by name: W itself, or A and B of the active adapters."""
        if self.lora is None:
            return {self.name: self.parameter}
        layer = self._lora_name
        return {layer + name: factor for adapter in self.adapters for name, factor in adapter.factors.items()}

    @cached_property
    def _lora_name(self) -> str:
        """The name of the LoRA layer, ending in a dot."""
        layers = {} if self.lora is None else {id(module): path for path, module in self.lora.named_modules()}
        return self.name.removesuffix(f"{layers.get(id(self.owner), '')}.{self.attribute}")

    def divide(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Return B and A of an adapter, or tensors of their shapes, with what belongs to one head apart, as a view.

        They are B_h [M, e, r] and A [r, d_in]; for W_O, whose heads are columns, B [d_out, r] and A_h [M, r, e].
        """
        rows = first.mT if self.projection == "output" else second
        unit, other = rows.stride()
        size, steps = (self.heads, self.head_size, rows.shape[1]), (self.stride * unit, self.step * unit, other)
        heads = rows.as_strided(size, steps, rows.storage_offset() + self.start * unit)
        return (second, heads.mT) if self.projection == "output" else (heads, first)

    def orient(self, product: Tensor) -> Tensor:
        """Return heads of B A as the views of the weight have them, and back: Conv1D stores [d_in, d_out]."""
        return product.mT if self.transposed is (self.projection != "output") else product

    @property
    def vanished(self) -> str:
        """The refusal of a parameter that was there when its heads were found."""
        reason = find_flattening(self.owner, None)
        if reason is not None:
            return f"{self.name} {reason}."
        return (
            f"{self.name} is no longer a parameter of {type(self.owner).__name__}: it was replaced after its "
            "heads were found (a parametrization, pruning, sharding). Undo that, or call find_heads again, which "
            "tells what can still be done."
        )

    def view(self, tensor: Tensor) -> Tensor:
        """Return the heads of `tensor` (the parameter, its gradient, or anything shaped like it) without a copy.

        Args:
            tensor: A tensor with the shape of the parameter, any strides.

        Returns:
            A view [M, e, d], with the inputs d first where they come first in the parameter: [M, d, e] when heads are
            columns. Writing to it writes to `tensor`.

        Raises:
            LayoutError: `tensor` does not have the parameter's shape.
        """
        if tensor.shape != self.parameter.shape:
            raise LayoutError(
                f"{self.name}: a tensor of shape {tuple(tensor.shape)} was given to be read as heads; "
                f"the parameter has shape {tuple(self.parameter.shape)}."
            )
        if is_sharded(tensor):
            raise LayoutError(
                f"{self.name} is sharded over processes (DTensor) and its heads are spread over them; read them in "
                "its full_tensor()."
            )
        return self.part(tensor)

    def part(self, tensor: Tensor) -> Tensor:
        """Return the heads of some inputs of the parameter: as `view`, of what there is."""
        strides, axes = tensor.stride(), self.axes
        heads, feature, across = self.stride * strides[axes.heads], self.step * strides[axes.features], axes.inputs
        start = tensor.storage_offset() + self.start * strides[axes.start]
        if self.transposed:
            size, steps = (self.heads, tensor.shape[across], self.head_size), (heads, strides[across], feature)
        else:
            size, steps = (self.heads, self.head_size, tensor.shape[across]), (heads, feature, strides[across])
        return tensor.as_strided(size, steps, start)

    def with_parts(self, parts: Sequence[HeadSlice]) -> HeadSlice:
        """Return what `parts` of the same shapes make up together."""
        (part,) = parts
        return part

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the heads of tensors shaped like the parameters of `parts`: a view where there is one."""
        (tensor,) = tensors
        return self.view(tensor)

    def read(self) -> Tensor:
        """Return the heads as they are now, without gradients: [M, e, d], or [M, d, e] where they are `transposed`.

        They are those of the weight that the model computes with: under LoRA, in a copy, of W + sum_a s_a B_a A_a.
        """
        return self.compute(torch.Tensor.detach)

    def compute(self, get: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the heads as `read` does, from what `get` makes of each parameter, with its gradients."""
        if self.parts != (self,):
            return torch.cat([part.compute(get) for part in self.parts])
        heads = self.view(get(self.parameter))
        for adapter in self.adapters:
            second, first = self.divide(get(adapter.first), get(adapter.second))
            heads = heads + adapter.scaling * self.orient(second @ first)
        return heads

    def turn(self, view: Tensor) -> Tensor:
        """Return a view of heads with its inputs first, [M, d, e], and such a view as it is in the parameter."""
        return view if self.transposed else view.mT

    def features(self, tensor: Tensor) -> Tensor:
        """Return the heads among the features of a call of the module that holds this head slice, without a copy.

        For query, key and value these are features of the module's output: a fused projection returns all three in
        one tensor, and this is the part of one of them, so values can be read where they are projected in every
        layout. For "output" they are features of the module's input, the concatenated heads.

        Args:
            tensor: Output (input, for "output") of the module, [..., F], any strides; F is the number of rows of the
                weight, or of columns when `axis` is 1. Or an output with the axes of `returned`.

        Returns:
            A view [..., M, e]. Writing to it writes to `tensor`; gradients flow through it.

        Raises:
            LayoutError: The last axis does not have F features.

        Example:
            >>> owner = nn.Linear(4, 18)  # [query; key; value] of 2 heads of 3
            >>> value = HeadSlice("value", "qkv.weight", owner, "weight", heads=2, head_size=3, start=12)
            >>> value.features(owner(torch.randn(5, 7, 4))).shape
            torch.Size([5, 7, 2, 3])
        """
        if self.returned and tensor.dim() == len(self.returned):
            return self._select(tensor.permute(self.returned))
        if tensor.dim() < 1 or tensor.shape[-1] != self.along:
            raise LayoutError(
                f"{self.name}: a tensor of shape {tuple(tensor.shape)} was given to be read as the features of "
                f"{self.projection} heads; expected {self.along} features along its last axis."
            )
        span = (self.head_size - 1) * self.step + 1
        own = tensor.narrow(-1, self.start, (self.heads - 1) * self.stride + span)
        if self.stride == span:
            return own.unflatten(-1, (self.heads, span))
        return own.unfold(-1, span, self.stride)[..., :: self.step]

    def _select(self, tensor: Tensor) -> Tensor:
        """Return the heads [B, T, M, e] in [B, T, ...], whose last axes hold the features together, as a view."""
        unit, rest, axis, kept = self.along, self.start, 2, []
        for size in tensor.shape[2:]:
            unit //= size
            first, rest = divmod(rest, unit)
            counted = {self.stride: self.heads, self.step: self.head_size}.get(unit, 0)
            if counted and unit not in kept and first + counted <= size:
                tensor, axis = tensor.narrow(axis, first, counted), axis + 1
                kept.append(unit)
            else:
                tensor = tensor.select(axis, min(first, size - 1))
        found = tensor if kept == [self.stride, self.step] else tensor.mT
        if sorted(kept) != sorted([self.stride, self.step]) or found.shape[2:] != (self.heads, self.head_size):
            raise LayoutError(
                f"{self.name}: what {type(self.module).__name__} returns has no axis of {self.heads} {self.projection} "
                f"heads and one of {self.head_size} features; have it return (batch, tokens, heads, features)."
            )
        return found

    def bias_view(self, tensor: Tensor) -> Tensor:
        """Return the heads of a bias, [rows] or of the axes of the weight without its inputs, as a view [M, e]."""
        flat = tensor.view(-1)
        (unit,) = flat.stride()
        apart = self.axes.features != self.axis
        stride = self.bias_stride or (self.head_size if apart else self.stride)
        size, strides = (self.heads, self.head_size), (stride * unit, self.step * unit)
        return flat.as_strided(size, strides, flat.storage_offset() + self.bias_start * unit)

    @property
    def bias_parameter(self) -> Tensor | None:
        """The parameter, or the buffer, that holds the bias; None where there is none."""
        owner = self.owner if self.bias_owner is None else self.bias_owner
        return None if self.bias is None else {**owner._buffers, **owner._parameters}.get(self.bias)

    @property
    def added_bias(self) -> Tensor | None:
        """The bias [M, e] that the attention itself adds to what `module` returns; None where it adds none."""
        held = self.bias_parameter
        return None if held is None or self.bias_owner in (None, self.owner) else self.bias_view(held)

    def require_trainable(self) -> None:
        """Raise `LayoutError` unless heads can be read and are trained: in the parameter, or in A and B of LoRA."""
        reason = find_flattening(self.owner, self.parameter)
        if self.lora is not None and reason is None:
            reason = find_lora_obstacle(self.lora) or find_untrained(self.lora, self.parameter)
        if reason is not None:
            raise LayoutError(f"{self.name} {reason}.")
        if self.lora is None and not self.parameter.requires_grad:
            raise LayoutError(
                f"{self.name} does not require a gradient; unfreeze it (under LoRA: name it in target_modules) or "
                "select other heads."
            )

    def require_finite(self) -> None:
        """Raise `HeadwiseError` where heads are not finite, `LayoutError` on the meta device."""
        if self.parameter.is_meta:
            raise LayoutError(f"{self.name} is on the meta device and has no values; load the weights first.")
        with torch.no_grad():
            sound = self.compute(gather_full).isfinite().flatten(1).all(1)
        if not sound.all():
            raise HeadwiseError(
                f"{self.name} holds NaN or infinity in {self.projection} heads "
                f"{(~sound).nonzero().flatten().tolist()} of {self.heads}; repulsion needs finite heads. "
                "Load finite weights, or look for the step that produced them."
            )


@dataclass(frozen=True, eq=False)
class OutputProjection:
    """Where the module that plays W_O is; its input is the concatenated heads [B, Q, H * e]."""

    owner: nn.Module = field(repr=False)
    attribute: str

    @property
    def module(self) -> nn.Module:
        """The module in that place now."""
        return getattr(self.owner, self.attribute)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, of FSDP2 (`fully_shard`) or tensor parallel.

    >>> is_sharded(torch.zeros(2))
    False
    """
    return hasattr(tensor, "device_mesh")


def gather_full(tensor: Tensor) -> Tensor:
    """Return all of a tensor on this process: the tensor itself unless it is sharded.

    >>> gather_full(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    sharded: Any = tensor
    return sharded.full_tensor() if is_sharded(tensor) else tensor


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


@dataclass(frozen=True, eq=False)
class HeadRuns(HeadSlice):
    """Heads in runs that are evenly spaced inside, as the queries of Falcon's groups and all heads of CodeGen.

    Attributes:
        runs: The slice of each run, in the order of the heads; all of one parameter and one head size.
    """

    runs: tuple[HeadSlice, ...] = ()

    @staticmethod
    def build(whole: HeadSlice, run: int, jump: int) -> HeadSlice:
        """Return the heads of a slice as runs of `run` heads that start `jump` rows apart; itself where it is one."""
        if run == whole.heads:
            return whole
        if run == 1:
            return replace(whole, stride=jump)
        starts = [whole.start + index * jump for index in range(whole.heads // run)]
        runs = [
            replace(whole, heads=run, start=start, bias_start=start, run=index) for index, start in enumerate(starts)
        ]
        fields = {name: getattr(whole, name) for name in HeadSlice.__dataclass_fields__}
        return HeadRuns(**fields, runs=tuple(runs))

    @property
    def parts(self) -> tuple[HeadSlice, ...]:
        """The slice of each run."""
        return self.runs

    @property
    def rows(self) -> list[int]:
        """The rows of its heads, head by head."""
        return [row for run in self.runs for row in run.rows]

    def view(self, tensor: Tensor) -> Tensor:
        """Refused: heads with other rows between them have no view.

        Raises:
            LayoutError: Always.
        """
        raise LayoutError(
            f"{self.name}: its {self.projection} heads lie in {len(self.runs)} runs, so a tensor of shape "
            f"{tuple(tensor.shape)} has no view of them; use gather(), or view() of each of parts."
        )

    def with_parts(self, parts: Sequence[HeadSlice]) -> HeadRuns:
        """Return the runs of another parameter of the same shape."""
        first = parts[0]
        fields = {name: getattr(first, name) for name in ("owner", "attribute", "module", "lora")}
        return replace(self, **fields, runs=tuple(parts))

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the heads of tensors shaped like the parameter, one for each run, in a copy."""
        return torch.cat([part.view(tensor) for part, tensor in zip(self.runs, tensors, strict=True)])

    def features(self, tensor: Tensor) -> Tensor:
        """Return the heads [..., M, e] among the features of a call of the module, in a copy."""
        return torch.cat([run.features(tensor) for run in self.runs], -2)


@dataclass(frozen=True, eq=False)
class HeadStack(HeadSlice):
    """The heads of one projection of one site where each head is a parameter of its own, as in a list of heads.

    Attributes:
        members: The slice of each head, in the order of the heads; all of one shape.
    """

    members: tuple[HeadSlice, ...] = ()

    @staticmethod
    def build(projection: str, name: str, owner: nn.Module, members: Sequence[HeadSlice]) -> HeadStack:
        """Return the stack of some slices, which `name` stands for; `owner` is the module that holds them all."""
        first = members[0]
        return HeadStack(
            projection,
            name,
            owner,
            first.attribute,
            len(members),
            first.head_size,
            axis=first.axis,
            feature_axis=first.feature_axis,
            input_axis=first.input_axis,
            start_axis=first.start_axis,
            along=len(members) * first.head_size,
            across=first.across,
            obstacle=next((member.obstacle for member in members if member.obstacle is not None), None),
            called=False,
            members=tuple(members),
        )

    @property
    def parts(self) -> tuple[HeadSlice, ...]:
        """The slice of each head."""
        return self.members

    @property
    def parameter(self) -> nn.Parameter:
        """Refused: there are several.

        Raises:
            LayoutError: Always.
        """
        raise LayoutError(
            f"{self.name} are {len(self.parts)} parameters, one for each head; read them with read(), or one by one "
            "in parts."
        )

    def with_parts(self, parts: Sequence[HeadSlice]) -> HeadStack:
        """Return the stack of other slices of the same shapes."""
        return replace(self, members=tuple(parts))

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the heads of tensors shaped like the parameters of `parts`, in a copy."""
        return torch.cat([part.view(tensor) for part, tensor in zip(self.parts, tensors, strict=True)])


def check_head_slice(head_slice: HeadSlice) -> None:
    """Raise `LayoutError` unless the head slice is inside a floating-point parameter and its heads do not overlap."""
    if head_slice.parts != (head_slice,):
        for part in head_slice.parts:
            check_head_slice(part)
        return
    if head_slice.obstacle is None:
        tensor = head_slice.owner._parameters.get(head_slice.attribute)
        axes = len(set(head_slice.axes))
        if tensor is None or not torch.is_floating_point(tensor) or tensor.dim() != axes:
            found = "nothing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            expected = "matrix" if axes == 2 else f"tensor of {axes} axes"
            raise LayoutError(
                f"{head_slice.name} of {type(head_slice.owner).__name__} is not a plain floating-point {expected} "
                f"(found {found}); a layout row that reads it must say so in the head slice's obstacle."
            )
        if axes > 2:
            _require_inside(head_slice, tuple(tensor.shape))
            return
    rows = head_slice.rows
    if not rows or len(set(rows)) < len(rows) or max(rows) >= head_slice.along:
        every = f"every {head_slice.stride}" + ("" if head_slice.step == 1 else f" in steps of {head_slice.step}")
        raise LayoutError(
            f"{head_slice.name}: {head_slice.heads} heads of {head_slice.head_size} "
            f"{'rows' if head_slice.axis == 0 else 'columns'} from {head_slice.start} {every} do "
            f"not fit the {head_slice.along} of the weight."
        )


def _require_inside(head_slice: HeadSlice, shape: tuple[int, ...]) -> None:
    """Raise `LayoutError` unless the heads of a parameter of several axes are inside its shape."""
    last, axes = [0] * len(shape), head_slice.axes
    moves = (head_slice.stride * (head_slice.heads - 1), head_slice.step * (head_slice.head_size - 1), 0)
    for axis, move in zip(axes, (*moves, head_slice.start), strict=True):
        last[axis] += move
    if head_slice.heads < 1 or head_slice.head_size < 1 or any(a >= b for a, b in zip(last, shape, strict=True)):
        raise LayoutError(
            f"{head_slice.name}: {head_slice.heads} heads along axis {axes.heads}, of {head_slice.head_size} features "
            f"along axis {axes.features}, from {head_slice.start} along axis {axes.start}, do not fit its shape "
            f"{shape}."
        )


def check_head_slices(slices: Sequence[HeadSlice], place: str = "...") -> None:
    """Raise `LayoutError` unless each is sound, and no row of a parameter is in two of them; `place` has them."""
    owned: dict[tuple[int, str], dict[int, HeadSlice]] = defaultdict(dict)
    for part in (part for head_slice in slices for part in head_slice.parts):
        check_head_slice(part)
        own = owned[id(part.owner), part.attribute]
        row = next((row for row in part.rows if row in own), None)
        if row is not None:
            if own[row].projection != part.projection and {*own[row].rows} == {*part.rows}:
                raise LayoutError(
                    f"{part.name}: one weight makes its {own[row].projection} heads and its {part.projection} heads, "
                    "so that whatever changes the ones changes the others; give both a projection of their own, such "
                    f"as a copy.deepcopy of this one, or leave it out: find_heads(model, exclude=({place!r},))."
                )
            raise LayoutError(
                f"{part.name}: row {row} is read as part of its {own[row].projection} heads and of its "
                f"{part.projection} heads; the layout row does not describe this module."
            )
        own.update(dict.fromkeys(part.rows, part))
