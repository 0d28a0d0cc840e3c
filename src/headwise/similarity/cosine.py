"""Squared cosine of the outputs of two heads at one token, without a matrix of pairs for each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.similarity.tokens import accumulation_dtype, require_floating, require_keep

# A head's vector shorter than this share of the head's root mean square is divided by that instead of by its length.
SHORTEST = 1e-6


def squared_cosine_sum(vectors: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the squared cosine of two heads, averaged over pairs and summed over valid tokens, and their number.

    s = sum_t mean_{i<j} (u_ti . u_tj)^2 with u = x / |x|. Plain cosine is least (-1/(H-1)) for one function in pairs
    of opposite sign; its square is not. At each token s is 1 when all heads are parallel, 0 when they are orthogonal,
    1/e on average for random directions, and at least (H/e - 1)/(H - 1) (Welch 1974). It does not change with the
    scale and sign of each head and token, nor with one rotation of all heads; it does change with a rotation inside
    one head, which hides copies.

    The gradient in x_ti has no part along x_ti, and is 0 at exact copies, where the similarity is largest.

    Args:
        vectors: [..., H, e], H at least 2.
        keep: [...], bool, True = valid token; None keeps all. Padded tokens may hold anything and get gradient 0.

    Returns:
        The sum in [0, number of tokens], float32 or float64, and the number of valid tokens.

    Raises:
        ShapeError: `vectors` is not floating or has fewer than two axes.
        MaskError: `keep` is not bool or not of the leading shape of `vectors`.

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
