"""Whether head slices lie inside their parameters, and apart from one another."""

from collections import defaultdict
from collections.abc import Sequence

import torch

from headwise.errors import LayoutError
from headwise.heads.head_slice import HeadSlice


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


def check_head_slices(slices: Sequence[HeadSlice]) -> None:
    """Raise `LayoutError` unless each is sound, and no row of a parameter is in two of them."""
    owned: dict[tuple[int, str], dict[int, HeadSlice]] = defaultdict(dict)
    for part in (part for head_slice in slices for part in head_slice.parts):
        check_head_slice(part)
        own = owned[id(part.owner), part.attribute]
        row = next((row for row in part.rows if row in own), None)
        if row is not None:
            raise LayoutError(
                f"{part.name}: row {row} is read as part of its {own[row].projection} heads and of its "
                f"{part.projection} heads; the layout row does not describe this module."
            )
        own.update(dict.fromkeys(part.rows, part))
