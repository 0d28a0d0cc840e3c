"""The valid tokens of a batch, the dtype in which they are summed, and the checks of both."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from headwise.errors import MaskError, ShapeError


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which sums over a tensor are computed: float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def autocast_off(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast on the device of a tensor."""
    # Autocast would run a float32 product in half precision.
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def require_floating(name: str, tensor: Tensor, axes: int, shape: str) -> None:
    """Raise `ShapeError` unless a tensor is floating point and has at least this many axes, none of them empty."""
    if not isinstance(tensor, Tensor):
        raise ShapeError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor {shape}.")
    if tensor.dim() < axes or 0 in tensor.shape[-axes:]:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}, none of these axes empty.")
    if not tensor.is_floating_point():
        raise ShapeError(f"{name} is {tensor.dtype}; expected a floating dtype.")


def require_keep(keep: Tensor, shape: tuple[int, ...]) -> None:
    """Raise `MaskError` unless `keep` is a boolean mask of that shape."""
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        given = keep.dtype if isinstance(keep, Tensor) else type(keep).__name__
        raise MaskError(f"keep is {given}; expected a bool tensor, True = valid.")
    if tuple(keep.shape) != tuple(shape):
        raise MaskError(f"keep has shape {tuple(keep.shape)}; expected {tuple(shape)}, one entry per token.")


def select_tokens(vectors: Tensor, keep: Tensor | None) -> Tensor:
    """Return the vectors of the valid tokens, [T, H, e], in the dtype of accumulation."""
    require_floating("vectors", vectors, 2, "[..., H, e]")
    if keep is not None:
        require_keep(keep, vectors.shape[:-2])
        vectors = vectors[keep]
    elif vectors.dim() != 3:
        vectors = vectors.reshape(-1, *vectors.shape[-2:])
    return vectors.to(accumulation_dtype(vectors))
