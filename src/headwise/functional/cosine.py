"""Squared and mean cosine of the outputs of heads at each token, without a matrix of pairs for each token."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from headwise.functional.tokens import accumulation_dtype, autocast_off, require_floating, require_keep

# A head's vector shorter than this share of the head's root mean square is divided by that instead of by its length.
SHORTEST = 1e-6


def squared_cosine_sum(vectors: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the squared cosine of two heads, averaged over pairs and summed over valid tokens, and their number.

    s = sum_t mean_{i<j} (u_ti . u_tj)^2 with u = x / |x| of vectors [..., H, e]. Plain cosine is least (-1/(H-1)) for
    one function in pairs of opposite sign; its square is not. At each token s is 1 when all heads are parallel, 0 when
    they are orthogonal, 1/e on average for random directions, and at least (H/e - 1)/(H - 1) (Welch 1974). It does not
    change with the scale and sign of each head and token, nor with one rotation of all heads; it does change with a
    rotation inside one head, which hides copies. The gradient in x_ti has no part along x_ti, and is 0 at exact copies,
    where the similarity is largest, and at padding, which may hold anything.

    >>> total, tokens = squared_cosine_sum(torch.tensor([[[1.0, 0.0], [-3.0, -4.0]]]))
    >>> round(float(total), 4), int(tokens)
    (0.36, 1)
    """
    require_floating("vectors", vectors, 2, "[..., H, e]")
    if keep is not None:
        require_keep(keep, vectors.shape[:-2])
    total: Tensor = _SquaredCosine.apply(vectors, keep)
    count = torch.full((), total.numel(), device=total.device) if keep is None else keep.sum()
    return total.sum(), count


class _SquaredCosine(torch.autograd.Function):
    """mean_{i<j} (u_i . u_j)^2 at each token, one offset between heads after another: [..., H, e] -> [...]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(vectors: Tensor, keep: Tensor | None) -> Tensor:
        units, _ = _to_units(vectors, keep)
        heads = units.shape[-2]
        total = units.new_zeros(units.shape[:-2])
        for offset in range(1, heads):
            total += _multiply(units, offset).square().sum(-1)
        return total / max(heads * (heads - 1) / 2, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:  # noqa: ARG004  torch's
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        vectors, keep = ctx.saved_tensors
        units, lengths = _to_units(vectors, keep)
        heads = units.shape[-2]
        towards = torch.zeros_like(units)
        for offset in range(1, heads):
            cosines = _multiply(units, offset).unsqueeze(-1)
            towards = towards + torch.nn.functional.pad(cosines * units[..., offset:, :], (0, 0, 0, offset))
            towards = towards + torch.nn.functional.pad(cosines * units[..., :-offset, :], (0, 0, offset, 0))
        # d(u_i . u_j) / dx_i = (u_j - (u_i . u_j) u_i) / |x_i|
        tangent = towards - (towards * units).sum(-1, keepdim=True) * units
        weight = grads[0] * (2 / max(heads * (heads - 1) / 2, 1))
        gradient = weight[..., None, None] * tangent / lengths
        if keep is not None:
            gradient = gradient.masked_fill(~keep[..., None, None], 0.0)
        return gradient.to(vectors.dtype), None


def _multiply(units: Tensor, offset: int) -> Tensor:
    """Return u_i . u_{i + offset}, [..., H - offset]."""
    return (units[..., :-offset, :] * units[..., offset:, :]).sum(-1)


def _to_units(vectors: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x / |x| (0 for padding and for zero vectors) [..., H, e], and what it was divided by [..., H, 1]."""
    wide = vectors.to(accumulation_dtype(vectors))
    if keep is not None:
        wide = wide.masked_fill(~keep[..., None, None], 0.0)
    lengths = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    axes = tuple(range(lengths.dim() - 2))
    least = lengths.detach().square().mean(axes, keepdim=True).sqrt() * SHORTEST
    lengths = torch.maximum(lengths, least.clamp_min(torch.finfo(wide.dtype).tiny))
    return wide / lengths, lengths


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
