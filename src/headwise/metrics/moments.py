"""Moments of the outputs of heads, added up over batches, and the kernels between heads that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.errors import ShapeError
from headwise.functional.alignment import FEWEST_TOKENS, Products, effective_number
from headwise.functional.tokens import autocast_off
from headwise.metrics.pairs import average_pairs, select_outputs

# A variance below this share of the second moment is rounding error of a constant.
CONSTANT = 1e-24


class EffectiveHeads(NamedTuple):
    """The effective number of heads of one attention.

    Attributes:
        number: In [1, H], whatever the size of each head: a head that says next to nothing counts.
        weighted: In [1, H], each head weighted by the variance it contributes: one that says nothing does not count.
        tokens: Number of tokens N it was computed from.
    """

    number: float
    weighted: float
    tokens: int


@dataclass(frozen=True, eq=False)
class OutputMoments:
    """Moments of the outputs of H heads, in float64; `a + b` are the moments of both sets of tokens.

    Attributes:
        count: Number of tokens.
        mean: [H, e], mean output of each head.
        scatter: [H, e, H, e], sum_t c_t c_t^T over the concatenated heads, c = output less mean.
        thirds: [H, H, e], sum_t |c_ti|^2 c_tj.
        lengths: [H, H], sum_t |c_ti|^2 |c_tj|^2.

    >>> a, b = torch.randn(7, 2, 3), torch.randn(5, 2, 3)
    >>> together = output_moments(torch.cat([a, b])).debiased_cka_matrix()
    >>> torch.allclose((output_moments(a) + output_moments(b)).debiased_cka_matrix(), together)
    True
    """

    count: int
    mean: Tensor
    scatter: Tensor
    thirds: Tensor
    lengths: Tensor

    def __add__(self, other: OutputMoments) -> OutputMoments:
        if self.mean.shape != other.mean.shape:
            raise ShapeError(
                f"moments of heads {tuple(self.mean.shape)} and {tuple(other.mean.shape)} were added; expected "
                "the same number and width of heads."
            )
        count = self.count + other.count
        mean = self.mean + (other.mean - self.mean) * (other.count / count)
        one, two = self._about(mean), other._about(mean)
        return OutputMoments(count, mean, *(a + b for a, b in zip(one, two, strict=True)))

    def _about(self, mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scatter, thirds and lengths about another mean: c' = c + shift, where the c sum to zero."""
        shift = self.mean - mean
        squares = shift.square().sum(-1)
        traces = torch.einsum("iaia->i", self.scatter)
        # towards[i, j] = sum_t (c_ti . shift_i) c_tj
        towards = torch.einsum("ia,iajb->ijb", shift, self.scatter)
        scatter = self.scatter + self.count * shift[:, :, None, None] * shift
        thirds = self.thirds + 2 * towards + (traces + self.count * squares)[:, None, None] * shift
        along = torch.einsum("ijb,jb->ij", self.thirds, shift)
        lengths = self.lengths + 2 * (along + along.mT) + 4 * torch.einsum("ijb,jb->ij", towards, shift)
        both = traces[:, None] * squares
        return scatter, thirds, lengths + both + both.mT + self.count * squares[:, None] * squares

    def linear_cka(self) -> Tensor:
        """Return the mean of `linear_cka_matrix` over pairs i < j, a float64 scalar."""
        return average_pairs(self.linear_cka_matrix())

    def linear_cka_matrix(self) -> Tensor:
        """Return the linear CKA of each pair of heads, [H, H] in [0, 1]; ones on the diagonal, 0 for a constant head.

        Raises:
            ShapeError: There are fewer than two tokens.
        """
        if self.count < 2:
            raise ShapeError(f"the moments are of {self.count} token; linear CKA needs at least 2, better 10 e.")
        norms = self.scatter.square().sum((1, 3))
        scale = norms.diagonal().masked_fill(self._constant, math.inf).rsqrt()
        return norms * scale[:, None] * scale

    def debiased_cka(self) -> Tensor:
        """Return the mean of `debiased_cka_matrix` over pairs i < j, a float64 scalar."""
        return average_pairs(self.debiased_cka_matrix())

    def debiased_cka_matrix(self) -> Tensor:
        """Return the debiased linear CKA of each pair of heads, [H, H] in [-1, 1]; 0 for a constant head.

        HSIC_1(i, j) / sqrt(HSIC_1(i, i) HSIC_1(j, j)) with the unbiased estimator of Song et al. 2012: independent
        heads score 0 at any number of tokens, where `linear_cka` scores about e / N.

        Raises:
            ShapeError: There are fewer than four tokens.
        """
        if self.count < FEWEST_TOKENS:
            raise ShapeError(
                f"the moments are of {self.count} tokens; debiased CKA needs at least {FEWEST_TOKENS}, better 10 e."
            )
        sizes = (self._traces / self.count).masked_fill(self._constant, math.inf)
        products = Products(
            self.scatter.square().sum((1, 3)) / (sizes[:, None] * sizes),
            self.lengths / (sizes[:, None] * sizes),
            self._traces / sizes,
            torch.tensor(float(self.count), dtype=torch.float64, device=sizes.device),
            sizes,
        )
        return products.debiased_cka()

    def effective_heads(self) -> EffectiveHeads:
        """Return the effective number of heads, as it is and weighted by variance; see `metrics.effective_heads`.

        Raises:
            ShapeError: There are fewer than four tokens.
        """
        kernel = self.debiased_cka_matrix()
        energies = self._traces.masked_fill(self._constant, 0.0)
        return EffectiveHeads(
            float(effective_number(kernel)), float(effective_number(kernel, energies)), tokens=self.count
        )

    @property
    def _traces(self) -> Tensor:
        return torch.einsum("iaia->i", self.scatter)

    @property
    def _constant(self) -> Tensor:
        raw = self._traces + self.count * self.mean.square().sum(-1)
        return self._traces <= CONSTANT * raw


@torch.no_grad()
def output_moments(
    outputs: Tensor, keep: Tensor | None = None, *, output_weights: Tensor | None = None
) -> OutputMoments:
    """Return the moments of the outputs of one batch, to be added over batches.

    Args and raises as for `debiased_cka`.

    Returns:
        `EffectiveHeads(number, weighted, tokens)`.

    >>> output_moments(torch.ones(4, 2, 3)).count
    4
    """
    tokens = select_outputs("outputs", outputs, keep)
    if output_weights is not None:
        tokens = _contribute(tokens, output_weights)
    mean = tokens.mean(0, dtype=torch.float64)
    # the rounding of the mean to float32 is subtracted from the products; heads are scaled so that none underflows
    shift = mean.to(tokens.dtype)
    centered = tokens - shift
    size = centered.abs().amax((0, 2)).double().clamp_min(torch.finfo(tokens.dtype).tiny)
    rest = ((mean - shift.double()) / size[:, None]).flatten()
    scaled = (centered / size[:, None].to(tokens.dtype)).flatten(1)
    squares = (scaled.view_as(centered).double() - rest.view_as(mean)).square().sum(-1)
    with autocast_off(tokens):
        scatter = (scaled.mT @ scaled).double() - len(tokens) * rest[:, None] * rest
        thirds = squares.mT @ (scaled.double() - rest)
        lengths = squares.mT @ squares
    scales = size[:, None].expand_as(mean)
    scatter = scatter.reshape(*mean.shape, *mean.shape) * scales[:, :, None, None] * scales
    thirds = thirds.view(len(mean), *mean.shape) * size.square()[:, None, None] * size[:, None]
    return OutputMoments(len(tokens), mean, scatter, thirds, lengths * size.square()[:, None] * size.square())


@torch.no_grad()
def linear_cka(outputs: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean linear centered kernel alignment between the outputs of two heads.

    mean_{i<j} |X_i^T X_j|^2_F / (|X_i^T X_i|_F |X_j^T X_j|_F), where X_i are the outputs of head i over all valid
    tokens, with each feature centered (Kornblith et al. 2019). Unlike a cosine it is invariant to the basis: it is 1
    when one head is a rotation and scaling of another. It is biased upward with few tokens: independent heads score
    about e/T, so use many more tokens than the width of a head, or `debiased_cka`.

    Args and raises as for `debiased_cka`, from two tokens on.

    Returns:
        A float64 scalar in [0, 1]; a head that is constant over tokens scores 0 with every other head.

    >>> head = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 5.0]])
    >>> linear_cka(torch.stack([head, -3 * head.flip(1)], dim=1))
    tensor(1.0000, dtype=torch.float64)
    """
    return output_moments(outputs, keep).linear_cka()


def debiased_cka(outputs: Tensor, keep: Tensor | None = None, *, output_weights: Tensor | None = None) -> Tensor:
    """Mean debiased linear CKA between the outputs, or the contributions, of two heads.

    mean_{i<j} HSIC_1(i, j) / sqrt(HSIC_1(i, i) HSIC_1(j, j)), with the unbiased estimator of HSIC (Song et al. 2012;
    for CKA Nguyen et al. 2021). Independent heads score 0 at any number of tokens, small negatives included.

    Args:
        outputs: [..., H, e].
        keep: [...], bool, True = valid token; None keeps all.
        output_weights: W_O of each head as [H, d, e]. With it the contributions W_O,h o_h are compared, which a change
            of basis between W_V and W_O cannot hide.

    Returns:
        A float64 scalar in [-1, 1]; a head that is constant over tokens scores 0 with every other head.

    Raises:
        ShapeError: Wrong shape or dtype, fewer than two heads, or fewer than four tokens.
        MaskError: `keep` is not bool, of another shape, or keeps no token.

    >>> head = torch.randn(50, 1, 3)
    >>> debiased_cka(torch.cat([head, -3 * head.flip(2)], dim=1))
    tensor(1.0000, dtype=torch.float64)
    """
    return output_moments(outputs, keep, output_weights=output_weights).debiased_cka()


def effective_heads(
    outputs: Tensor, keep: Tensor | None = None, *, output_weights: Tensor | None = None
) -> EffectiveHeads:
    """Effective number of heads: how many different things the heads of one attention say.

    exp(-sum_k l_k log l_k) over the eigenvalues of K/H, with K the debiased linear CKA of each pair, clipped to [0, 1]
    (the spectral entropy of Roy and Vetterli 2007, the Vendi score of Friedman and Dieng 2023). It is 1 where all heads
    are copies and H where no two are alike; k equal groups of copies give k. Scale, sign, offset, rotations inside a
    head and permuted dimensions do not fool it, nor, of contributions, any change of basis between W_V and W_O.

    It does not see usefulness: heads of noise are different, and so is what remains of copies when their mean is
    subtracted. Hold the task's loss fixed beside it. A head that says next to nothing counts in `number`, and not in
    `weighted`. Tokens of one sequence are not independent: under uniform attention they all say the same.

    Args:
        outputs: [..., H, e].
        keep: [...], bool, True = valid token; None keeps all.
        output_weights: W_O of each head as [H, d, e], for contributions.

    Returns:
        `EffectiveHeads(number, weighted, tokens)`.

    Raises:
        ShapeError: Wrong shape or dtype, fewer than two heads, or fewer than four tokens.
        MaskError: `keep` is not bool, of another shape, or keeps no token.

    >>> heads = torch.randn(500, 3, 4)
    >>> round(effective_heads(heads).number, 1), round(effective_heads(heads[:, [0, 0, 1]]).number, 1)
    (3.0, 1.9)
    """
    return output_moments(outputs, keep, output_weights=output_weights).effective_heads()


def _contribute(tokens: Tensor, output_weights: Tensor) -> Tensor:
    """Return W_O,h o_h of each head in an orthonormal basis of its own, [T, H, min(d, e)]."""
    heads, width = tokens.shape[1:]
    if output_weights.dim() != 3 or output_weights.shape[0] != heads or output_weights.shape[2] != width:
        raise ShapeError(
            f"output_weights has shape {tuple(output_weights.shape)}; expected [{heads}, d, {width}], W_O of each head."
        )
    # W = Q R with orthonormal Q: |W o| = |R o|, and so are all products
    triangles = torch.linalg.qr(output_weights.double(), mode="r").R.to(tokens.dtype)
    with autocast_off(tokens):
        return torch.einsum("the,hfe->thf", tokens, triangles)
