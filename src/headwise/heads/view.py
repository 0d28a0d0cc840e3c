"""The heads in one parameter, and the module that plays W_O.

The heads of a projection are one strided view of a parameter, several of them with other rows between, or one of a
parameter for each head. Engines that flatten parameters leave no matrix to read heads in: FSDP1 and DeepSpeed's ZeRO-3.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from headwise.errors import HeadwiseError, LayoutError, warn_renamed
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
    """Return why a parameter is no longer a matrix, a clause that follows its name; None where it is one."""
    if parameter is not None and (hasattr(parameter, "ds_id") or hasattr(parameter, "ds_tensor")):
        return ZERO3
    # FSDP2 marks modules too, but leaves a matrix
    if getattr(owner, "_is_fsdp_managed_module", False) and (parameter is None or parameter.dim() < 2):
        return FSDP1
    return None


class HeadAxes(NamedTuple):
    """The axes of a parameter along which heads, the features of a head, inputs and the start are counted."""

    heads: int = 0
    features: int = 0
    inputs: int = 1
    start: int = 0


ROWS, COLUMNS = HeadAxes(), HeadAxes(1, 1, 0, 1)


@dataclass(frozen=True, eq=False)
class HeadView:
    """The part of the parameters of a model that belongs to the heads of one projection of one site.

    Feature j of head i is row `start + i * stride + j * step` of a matrix, or column where `axes` is `COLUMNS`. A
    parameter of more axes has its heads, the features of a head and the inputs along axes of their own: those of
    [H, d, e] are `HeadAxes(0, 2, 1, 0)`, and the keys of [3, d, H, e] are `HeadAxes(2, 3, 1, 0)` with `start=1`. Heads
    without such a spacing are made of `pieces` that have one: runs of one parameter, or a parameter for each head.

    Attributes:
        projection: "query", "key", "value", or "output" for W_O.
        name: Dotted name of the parameter in the model, for example "layers.0.self_attn.in_proj_weight".
        owner, attribute: The module that holds the parameter, and its attribute there.
        heads, head_size: Number of heads M (key/value heads under grouped queries), and rows (columns) e of one.
        start: First row (or column) of head 0; its index along `axes.start`.
        stride: Rows (columns) from one head to the next; when 0, `head_size`, or 1 where features have an own axis.
        step: Rows (columns) from one feature of a head to the next: 1, or H where heads alternate, "(e h)".
        axes: The axes of the parameter; heads are rows of a matrix when not given.
        bias, bias_owner: Attribute of the bias, or None, and the module that holds it: `owner` when None. A bias of
            another module is added to what `module` returns.
        bias_start: First entry of head 0 in the bias, flattened; the weight's `start` when negative.
        bias_stride: Entries from one head to the next; when 0, `stride`, or `head_size` where features have an own
            axis.
        module: The module whose call computes the projection: `owner` when not given, or what wraps it (LoRA); None
            in `nn.MultiheadAttention`, and where `called` is False.
        called: Whether a module call computes the projection, and not the attention's own forward.
        along, across: Sizes of the weight along `axes.heads` and `axes.inputs`; taken from the parameter when 0.
        obstacle: Why the parameter cannot be read and written as heads (parametrized, quantized, under an adapter that
            is not plain LoRA); None when it can. Features can be read all the same.
        run: Which run of heads this is, where they lie in several; noise of each is its own.
        lora: The LoRA layer whose adapters add to the weight, or None.
        returned: The axes of what `module` returns, in the order (batch, tokens, features ...), where its features are
            not along the last one: (0, 2, 1, 3) for [B, H, T, e]; empty otherwise.
        pieces: What the heads are made of, in their order; empty where one spacing describes all of them.
    """

    projection: str
    name: str
    owner: nn.Module = field(repr=False)
    attribute: str
    heads: int
    head_size: int
    start: int = 0
    stride: int = 0
    step: int = 1
    axes: HeadAxes = ROWS
    bias: str | None = None
    bias_start: int = -1
    bias_stride: int = 0
    bias_owner: nn.Module | None = field(default=None, repr=False)
    module: nn.Module | None = field(default=None, repr=False)
    called: bool = True
    along: int = 0
    across: int = 0
    obstacle: str | None = None
    run: int = 0
    lora: nn.Module | None = field(default=None, repr=False)
    returned: tuple[int, ...] = ()
    pieces: tuple[HeadView, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        def settle(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        if self.stride == 0:
            settle("stride", 1 if self.apart else self.head_size)
        if self.bias_start < 0:
            settle("bias_start", self.start)
        if self.module is None and self.called and not isinstance(self.owner, nn.MultiheadAttention):
            settle("module", self.owner)
        weight = self.owner._parameters.get(self.attribute)
        if self.along == 0 and weight is not None and weight.dim() == len(set(self.axes)):
            settle("along", weight.shape[self.axes.heads])
            settle("across", weight.shape[self.axes.inputs])

    @property
    def apart(self) -> bool:
        """Whether the features of a head have an axis of their own."""
        return self.axes.features != self.axes.heads

    @cached_property
    def transposed(self) -> bool:
        """Whether its views are [M, d, e] rather than [M, e, d]: features of heads come after the inputs."""
        return self.axes.features > self.axes.inputs

    @property
    def parts(self) -> tuple[HeadView, ...]:
        """The views of evenly spaced heads that it is made of: itself, or its `pieces`."""
        return self.pieces or (self,)

    @property
    def stacked(self) -> bool:
        """Whether each head is a parameter of its own, as in a list of heads."""
        return any(piece.owner is not self.owner for piece in self.pieces)

    def divide_runs(self, run: int, jump: int) -> HeadView:
        """Return the same heads as runs of `run` heads that start `jump` rows apart."""
        if run == self.heads:
            return self
        if run == 1:
            return replace(self, stride=jump)
        starts = [self.start + index * jump for index in range(self.heads // run)]
        pieces = [
            replace(self, heads=run, start=start, bias_start=start, run=index) for index, start in enumerate(starts)
        ]
        return replace(self, pieces=tuple(pieces))

    @staticmethod
    def stack(name: str, owner: nn.Module, pieces: Sequence[HeadView]) -> HeadView:
        """Return one view of heads that are parameters of their own, in modules that `owner` holds."""
        first = pieces[0]
        return replace(
            first,
            name=name,
            owner=owner,
            heads=len(pieces),
            bias=None,
            module=None,
            called=False,
            along=len(pieces) * first.head_size,
            obstacle=next((piece.obstacle for piece in pieces if piece.obstacle is not None), None),
            lora=None,
            pieces=tuple(pieces),
        )

    def map(self, change: Callable[[HeadView], HeadView]) -> HeadView:
        """Return the view of the same heads elsewhere, given how each of its parts changes."""
        if not self.pieces:
            return change(self)
        pieces = tuple(change(piece) for piece in self.pieces)
        names = () if self.stacked else ("owner", "attribute", "module", "lora")
        return replace(self, **{name: getattr(pieces[0], name) for name in names}, pieces=pieces)

    @property
    def rows(self) -> list[int]:
        """The rows (columns) of its heads, head by head; of a parameter of more axes, all but the inputs flattened."""
        if self.pieces:
            return [row for piece in self.pieces for row in piece.rows]
        weight, inputs = self.owner._parameters.get(self.attribute), self.axes.inputs
        shape = () if weight is None else weight.shape

        def count(axis: int) -> int:
            return prod(size for place, size in enumerate(shape) if axis < place != inputs)

        first, head = self.start * count(self.axes.start), self.stride * count(self.axes.heads)
        feature = self.step * count(self.axes.features)
        return [first + i * head + j * feature for i in range(self.heads) for j in range(self.head_size)]

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter itself, looked up at each use so that a moved or reloaded model stays right.

        Raises:
            LayoutError: It cannot be read and written as heads, or there are several; the message says which.
        """
        if self.stacked:
            raise LayoutError(
                f"{self.name} are {len(self.pieces)} parameters, one for each head; read them with read(), or one by "
                "one in parts."
            )
        if self.obstacle is not None:
            raise LayoutError(f"{self.name} {self.obstacle}.")
        held = self.owner._parameters.get(self.attribute)
        if held is None:
            raise LayoutError(self.vanished)
        if held.dim() == len(set(self.axes)) and held.shape[self.axes.heads] != self.along:
            raise LayoutError(
                f"{self.name} has {held.shape[self.axes.heads]} {self._counted}, and had {self.along} when its heads "
                "were found: heads were removed or merged since; call find_heads again."
            )
        return held

    @property
    def _counted(self) -> str:
        return "rows" if self.axes.heads == 0 else "columns"

    @property
    def vanished(self) -> str:
        """The refusal of a parameter that was there when its heads were found."""
        replaced = (
            f"is no longer a parameter of {type(self.owner).__name__}: it was replaced after its heads were found (a "
            "parametrization, pruning, sharding). Undo that, or call find_heads again, which tells what can still be "
            "done"
        )
        return f"{self.name} {find_flattening(self.owner, None) or replaced}."

    def of(self, *tensors: Tensor) -> Tensor:
        """Return the heads in tensors shaped like the parameters of `parts`: in one tensor, or in one for each part.

        Returns:
            A view [M, e, d], with the inputs d first where they come first in the parameter: [M, d, e] when heads are
            columns. Writing to it writes to the tensor. Of several tensors it is a copy: see `write`.

        Raises:
            LayoutError: A tensor does not have the parameter's shape, or there is one for several parts.
        """
        if len(tensors) != len(self.parts):
            raise LayoutError(
                f"{self.name}: its {self.projection} heads lie in {len(self.parts)} runs, so {len(tensors)} tensors "
                f"such as one of shape {tuple(tensors[0].shape)} have no view of them; give one tensor for each of "
                "parts, or call of() of each part."
            )
        if self.pieces:
            return torch.cat([piece.of(tensor) for piece, tensor in zip(self.pieces, tensors, strict=True)])
        (tensor,) = tensors
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
        return self._spread(tensor, self.axes)

    def view(self, tensor: Tensor) -> Tensor:
        """Return what `of` returns, as in version 0.2."""
        warn_renamed("HeadSlice.view", "HeadView.of")
        return self.of(tensor)

    def write(self, heads: Tensor, *tensors: Tensor) -> None:
        """Copy heads, [M, ...] as `of` returns them, into tensors shaped like the parameters of `parts`."""
        counts = [part.heads for part in self.parts]
        for part, tensor, own in zip(self.parts, tensors, heads.split(counts), strict=True):
            part.of(tensor).copy_(own)

    def _spread(self, tensor: Tensor, axes: HeadAxes) -> Tensor:
        """Return heads as one strided view of a tensor with these axes, whatever its number of inputs."""
        strides = tensor.stride()
        size = (self.heads, self.head_size, tensor.shape[axes.inputs])
        steps = (self.stride * strides[axes.heads], self.step * strides[axes.features], strides[axes.inputs])
        view = tensor.as_strided(size, steps, tensor.storage_offset() + self.start * strides[axes.start])
        return view.mT if axes.features > axes.inputs else view

    def read(self) -> Tensor:
        """Return the heads as they are now, without gradients: [M, e, d], or [M, d, e] where they are `transposed`.

        They are those of the weight that the model computes with: under LoRA, in a copy, of W + sum_a s_a B_a A_a.
        """
        return self.compute(torch.Tensor.detach)

    def compute(self, get: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the heads as `read` does, from what `get` makes of each parameter, with its gradients."""
        if self.pieces:
            return torch.cat([piece.compute(get) for piece in self.pieces])
        heads = self.of(get(self.parameter))
        for adapter in self.adapters:
            second, first = self.divide(get(adapter.first), get(adapter.second))
            heads = heads + adapter.scaling * self.orient(second @ first)
        return heads

    def turn(self, view: Tensor) -> Tensor:
        """Swap the last axes of a view if needed: [M, d, e] on the way in, the parameter's order on the way out."""
        return view if self.transposed else view.mT

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
        if self.projection == "output":
            return second, self._spread(first, COLUMNS)
        return self._spread(second, ROWS), first

    def orient(self, product: Tensor) -> Tensor:
        """Return heads of B A as the views of the weight have them, and back: Conv1D stores [d_in, d_out]."""
        return product.mT if self.transposed is (self.projection != "output") else product

    def features(self, tensor: Tensor) -> Tensor:
        """Return the heads among the features of a call of the module that holds this view, without a copy.

        Args:
            tensor: Output of the module, which may hold query, key and value, or for "output" its input, the
                concatenated heads: [..., F], any strides; F is `along`. Or an output with the axes of `returned`.

        Returns:
            A view [..., M, e]. Writing to it writes to `tensor`; gradients flow through it. A copy of heads in runs.

        Raises:
            LayoutError: The last axis does not have F features.

        Example:
            >>> owner = nn.Linear(4, 18)  # [query; key; value] of 2 heads of 3
            >>> value = HeadView("value", "qkv.weight", owner, "weight", heads=2, head_size=3, start=12)
            >>> value.features(owner(torch.randn(5, 7, 4))).shape
            torch.Size([5, 7, 2, 3])
        """
        if self.pieces and not self.stacked:
            return torch.cat([run.features(tensor) for run in self.pieces], -2)
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
        stride = self.bias_stride or (self.head_size if self.apart else self.stride)
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
        if reason is None and self.lora is None and not self.parameter.requires_grad:
            reason = (
                "does not require a gradient; unfreeze it (under LoRA: name it in target_modules) or select other heads"
            )
        if reason is not None:
            raise LayoutError(f"{self.name} {reason}.")

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
    """Whether a tensor is a DTensor, of FSDP2 (`fully_shard`) or tensor parallel."""
    return hasattr(tensor, "device_mesh")


def gather_full(tensor: Tensor) -> Tensor:
    """Return all of a tensor on this process: the tensor itself unless it is sharded."""
    sharded: Any = tensor
    return sharded.full_tensor() if is_sharded(tensor) else tensor


# Names under which wrappers keep their layer: adapters of peft, clipped and flexible Linears.
WRAPPED = ("base_layer", "linear", "base")


@dataclass(frozen=True, eq=False)
class Projection:
    """A module read as a projection [..., d_in] -> [..., d_out].

    Attributes:
        module, owner: The module that is called, and the one that holds the weight: the same, or what it wraps.
        path: Dotted path from `module` to `owner`, ending in a dot; empty when they are the same.
        rows, columns: Output features d_out and input features d_in.
        axis: 0 when output features are the weight's rows (`nn.Linear`), 1 when its columns (Conv1D of GPT-2).
        bias, obstacle, lora: As in `HeadView`.
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


def check_head_views(views: Sequence[HeadView], place: str = "...") -> None:
    """Raise `LayoutError` unless each is sound, and no row of a parameter is in two of them; `place` has them."""
    owned: dict[tuple[int, str], dict[int, HeadView]] = defaultdict(dict)
    for part in (part for view in views for part in view.parts):
        _require_inside(part)
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


def _require_inside(part: HeadView) -> None:
    """Raise `LayoutError` unless the heads are inside a floating-point parameter and do not overlap."""
    axes, count = part.axes, len(set(part.axes))
    sizes = {axes.heads: part.along}
    if part.obstacle is None:
        tensor = part.owner._parameters.get(part.attribute)
        if tensor is None or not torch.is_floating_point(tensor) or tensor.dim() != count:
            found = "nothing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            expected = "matrix" if count == 2 else f"tensor of {count} axes"
            raise LayoutError(
                f"{part.name} of {type(part.owner).__name__} is not a plain floating-point {expected} "
                f"(found {found}); a layout row that reads it must say so in the view's obstacle."
            )
        sizes |= dict(enumerate(tensor.shape)) if count > 2 else {}
    moves = (part.stride * (part.heads - 1), part.step * (part.head_size - 1), 0, part.start)
    last = Counter[int]()
    for axis, move in zip(axes, moves, strict=True):
        last[axis] += move
    rows = part.rows
    if not rows or len({*rows}) < len(rows) or any(last[axis] >= size for axis, size in sizes.items()):
        every = f"every {part.stride}" + (f" in steps of {part.step}" if part.step > 1 else "")
        where = f"the {part.along} of the weight" if count == 2 else f"axes {tuple(axes)} of {tuple(sizes.values())}"
        raise LayoutError(
            f"{part.name}: {part.heads} heads of {part.head_size} {part._counted} from {part.start} {every} do not fit "
            f"{where}."
        )
