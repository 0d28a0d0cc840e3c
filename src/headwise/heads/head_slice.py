"""The heads in one parameter, and the module that plays W_O."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from headwise.errors import LayoutError
from headwise.parallel import find_flattening, is_sharded


@dataclass(frozen=True, eq=False)
class HeadSlice:
    """The part of one parameter that belongs to the heads of one projection of one site.

    Head i owns `head_size` consecutive rows (columns when `axis` is 1) starting at `start + i * stride`.

    Attributes:
        projection: "query", "key", "value", or "output" for W_O.
        name: Dotted name of the parameter in the model, for example "layers.0.self_attn.in_proj_weight".
        owner: The module that holds the parameter.
        attribute: Its attribute name on `owner`.
        heads: Number of heads M (key/value heads under grouped queries).
        head_size: Rows (or columns) of one head, e.
        start: First row (or column) of head 0.
        stride: Rows (or columns) from one head's start to the next one's.
        axis: 0 when heads are rows, 1 when they are columns.
        bias: Attribute name of the bias on `owner`; None when there is none.
        bias_start: First entry of head 0 in the bias; the weight's `start` when negative.
        module: The module whose call computes the projection: `owner` when not given, or what wraps it (LoRA); None
            where no module call does, in `nn.MultiheadAttention`.
        along: Size of the weight along `axis`; taken from the parameter when 0.
        across: Its size along the other axis; likewise.
        obstacle: Why the parameter cannot be read and written as heads (parametrized, quantized, the base of a LoRA
            layer); None when it can. Features can be read all the same.
    """

    projection: str
    name: str
    owner: nn.Module
    attribute: str
    heads: int
    head_size: int
    start: int = 0
    stride: int = 0
    axis: int = 0
    bias: str | None = None
    bias_start: int = -1
    module: nn.Module | None = None
    along: int = 0
    across: int = 0
    obstacle: str | None = None

    def __post_init__(self) -> None:
        if self.stride == 0:
            object.__setattr__(self, "stride", self.head_size)
        if self.bias_start < 0:
            object.__setattr__(self, "bias_start", self.start)
        if self.module is None and not isinstance(self.owner, nn.MultiheadAttention):
            object.__setattr__(self, "module", self.owner)
        weight = self.owner._parameters.get(self.attribute)
        if self.along == 0 and weight is not None and weight.dim() == 2:
            object.__setattr__(self, "along", weight.shape[self.axis])
            object.__setattr__(self, "across", weight.shape[1 - self.axis])

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
        return held

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
            tensor: Two-dimensional tensor with the shape of the parameter, any strides.

        Returns:
            A view [M, e, d_in] when heads are rows, [M, d_out, e] when they are columns. Writing to it writes
            to `tensor`.

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
        """Return the heads of some columns of the parameter (rows when `axis` is 1): as `view`, of what there is."""
        row, column = tensor.stride()
        if self.axis == 0:
            size = (self.heads, self.head_size, tensor.shape[1])
            strides, start = (self.stride * row, row, column), self.start * row
        else:
            size = (self.heads, tensor.shape[0], self.head_size)
            strides, start = (self.stride * column, row, column), self.start * column
        return tensor.as_strided(size, strides, tensor.storage_offset() + start)

    def features(self, tensor: Tensor) -> Tensor:
        """Return the heads among the features of a call of the module that holds this head slice, without a copy.

        For query, key and value these are features of the module's output: a fused projection returns all three in
        one tensor, and this is the part of one of them, so values can be read where they are projected in every
        layout. For "output" they are features of the module's input, the concatenated heads.

        Args:
            tensor: Output (input, for "output") of the module, [..., F], any strides; F is the number of rows of the
                weight, or of columns when `axis` is 1.

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
        if tensor.dim() < 1 or tensor.shape[-1] != self.along:
            raise LayoutError(
                f"{self.name}: a tensor of shape {tuple(tensor.shape)} was given to be read as the features of "
                f"{self.projection} heads; expected {self.along} features along its last axis."
            )
        own = tensor.narrow(-1, self.start, (self.heads - 1) * self.stride + self.head_size)
        if self.stride == self.head_size:
            return own.unflatten(-1, (self.heads, self.head_size))
        return own.unfold(-1, self.head_size, self.stride)

    def bias_view(self, tensor: Tensor) -> Tensor:
        """Return the heads of a bias [rows] as a view [M, e]; only for heads that are rows."""
        (step,) = tensor.stride()
        size, strides = (self.heads, self.head_size), (self.stride * step, step)
        return tensor.as_strided(size, strides, tensor.storage_offset() + self.bias_start * step)


@dataclass(frozen=True, eq=False)
class OutputProjection:
    """Where the module that plays W_O is; its input is the concatenated heads [B, Q, H * e]."""

    owner: nn.Module
    attribute: str

    @property
    def module(self) -> nn.Module:
        """The module in that place now."""
        return getattr(self.owner, self.attribute)


def check_head_slice(head_slice: HeadSlice) -> None:
    """Raise `LayoutError` unless the head slice is inside a floating-point matrix and its heads do not overlap."""
    if head_slice.obstacle is None:
        tensor = head_slice.owner._parameters.get(head_slice.attribute)
        if tensor is None or not torch.is_floating_point(tensor) or tensor.dim() != 2:
            found = "nothing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            raise LayoutError(
                f"{head_slice.name} of {type(head_slice.owner).__name__} is not a plain floating-point matrix "
                f"(found {found}); a layout row that reads it must say so in the head slice's obstacle."
            )
    starts = [head_slice.start + i * head_slice.stride for i in range(head_slice.heads)]
    overlap = any(b - a < head_slice.head_size for a, b in pairwise(starts))
    empty = head_slice.heads < 1 or head_slice.head_size < 1
    if empty or overlap or starts[-1] + head_slice.head_size > head_slice.along:
        raise LayoutError(
            f"{head_slice.name}: {head_slice.heads} heads of {head_slice.head_size} "
            f"{'rows' if head_slice.axis == 0 else 'columns'} from {head_slice.start} every {head_slice.stride} do "
            f"not fit the {head_slice.along} of the weight."
        )
