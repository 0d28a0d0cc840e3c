"""The mean cosine between heads at each token, from the sum of their directions, with a gradient of its own."""

import math
from typing import Any

import torch
from torch import Tensor

from headwise.similarity.tokens import accumulation_dtype, autocast_off

ZERO_NORM = 1e-12
# On a CPU tokens are taken in parts of this many numbers, which stay in a core's cache from one operator to the next.
CPU_PART = 2**19


def mean_cosine(vectors: Tensor, keep: Tensor | None) -> Tensor:
    """Return (1/H^2) sum_ij cos(x_i, x_j) of x [..., H, e] at each token, [...]; 0 and no gradient where not kept.

    >>> mean_cosine(torch.eye(4), None)
    tensor(0.2500)
    """
    # what torch.func transforms needs a signature, which torch reads at every call
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if traced:
        similarity: Tensor = _Transformed.apply(vectors, keep)[0]
        return similarity
    direct: Tensor = _Direct.apply(vectors, keep)
    return direct


class _Direct(torch.autograd.Function):
    """|m|^2/H^2, m = sum_h x_h/|x_h|; faster than autograd's own gradient, and no float32 copy is saved."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, keep: Tensor | None) -> Tensor:
        similarity, inverse_norm, resultant = _compare(vectors, keep)
        ctx.save_for_backward(vectors, keep, inverse_norm, resultant)
        return similarity

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _differentiate(ctx.saved_tensors, grads[0]), None


class _Transformed(torch.autograd.Function):
    """The same for torch.func and torch.compile."""

    generate_vmap_rule = True

    @staticmethod
    def forward(vectors: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return _compare(vectors, keep)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: tuple[Tensor, ...]) -> None:
        vectors, keep = inputs
        _, inverse_norm, resultant = output
        ctx.mark_non_differentiable(inverse_norm, resultant)
        ctx.save_for_backward(vectors, keep, inverse_norm, resultant)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _differentiate(ctx.saved_tensors, grads[0]), None


def _differentiate(saved: tuple[Tensor, Tensor | None, Tensor, Tensor], grad: Tensor) -> Tensor:
    vectors, keep, inverse_norm, resultant = saved
    if torch.is_grad_enabled():
        # a second derivative must see how these depend on the vectors
        inverse_norm, resultant = _resultant(vectors.to(accumulation_dtype(vectors)))
    # d|m|^2/dx_h = (2/|x_h|) (m - u_h (u_h . m)), u_h = x_h/|x_h|
    towards = grad.unsqueeze(-1) * inverse_norm * (2 / vectors.shape[-2] ** 2)
    inward = -inverse_norm.square()
    with autocast_off(vectors):
        return _combine_parts(vectors, resultant, inward, towards, keep)


def _combine_parts(vectors: Tensor, resultant: Tensor, inward: Tensor, towards: Tensor, keep: Tensor | None) -> Tensor:
    divided = vectors.device.type == "cpu" and vectors.dim() > 2 and vectors.numel() > CPU_PART
    if not divided or torch.is_grad_enabled():
        return _combine(vectors, resultant, inward, towards, keep=keep)
    gradient = torch.empty_like(vectors, memory_format=torch.contiguous_format)
    rows = vectors.flatten(0, -3)
    size = max(1, CPU_PART // (rows.shape[1] * rows.shape[2]))
    columns = (rows, resultant.flatten(0, -2), inward.flatten(0, -2), towards.flatten(0, -2))
    kept = [None] * math.ceil(len(rows) / size) if keep is None else keep.flatten().split(size)
    for out, mask, *part in zip(
        gradient.flatten(0, -3).split(size), kept, *(column.split(size) for column in columns), strict=True
    ):
        _combine(*part, keep=mask, out=out)
    return gradient


def _compare(vectors: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    inverse_norm, resultant = _resultant(vectors.to(accumulation_dtype(vectors)))
    similarity = torch.linalg.vector_norm(resultant, dim=-1).square() / vectors.shape[-2] ** 2
    if keep is not None:
        similarity = similarity.masked_fill(~keep, 0.0)
    return similarity, inverse_norm, resultant


def _combine(
    vectors: Tensor,
    resultant: Tensor,
    inward: Tensor,
    towards: Tensor,
    *,
    keep: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    wide = vectors.to(resultant.dtype)
    # a row made a column: a column of stride 1 takes the slow path of a CPU's batched product
    along = (wide @ resultant.unsqueeze(-2).mT).squeeze(-1)
    place = out if out is not None and out.dtype == wide.dtype else None
    gradient = torch.addcmul(resultant.unsqueeze(-2), wide, (along * inward).unsqueeze(-1), out=place)
    gradient = torch.mul(gradient, towards.unsqueeze(-1), out=place)
    if keep is not None:
        gradient = gradient.masked_fill_(~keep[..., None, None], 0.0)
    if out is None or gradient is out:
        return gradient.to(vectors.dtype)
    return out.copy_(gradient)


def _resultant(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """1/|x_h| (0 for a zero vector) [..., H] and sum_h x_h/|x_h| [..., e]."""
    norm = torch.linalg.vector_norm(vectors, dim=-1)
    inverse_norm = norm.masked_fill(norm <= ZERO_NORM, math.inf).reciprocal()
    with autocast_off(vectors):
        return inverse_norm, (inverse_norm.unsqueeze(-2) @ vectors).squeeze(-2)
