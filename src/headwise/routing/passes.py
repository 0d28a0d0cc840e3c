"""Arithmetic that routing algorithms share, written so that a compiler makes few passes over the votes."""

import torch
from torch import Tensor


def sum_axis(tensor: Tensor, axis: int) -> Tensor:
    """Return the sum over an axis; an axis of length 1 is not summed, which would copy the whole tensor."""
    return tensor.squeeze(axis) if tensor.shape[axis] == 1 else tensor.sum(axis)


def materialize(tensor: Tensor) -> Tensor:
    """Return `tensor`, and make a compiler write it out here instead of recomputing it for every head."""
    if not torch.compiler.is_compiling() or torch.is_grad_enabled():
        return tensor
    tensor = tensor.contiguous()
    return tensor.as_strided(tensor.shape, tensor.stride())


def softmax(logits: Tensor, axis: int) -> Tensor:
    """Return the softmax over an axis; a compiler divides once for each sum, not for each weight."""
    weights = (logits - logits.amax(axis, keepdim=True)).exp()
    return weights * materialize(1.0 / weights.sum(axis, keepdim=True))
