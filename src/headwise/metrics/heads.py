"""Measurements of how different the heads of one attention are.

Owns metrics of tensors already read from a model; nothing here is a loss and no gradient flows (to lower a
similarity, use `headwise.disagreement`). Pairs are unordered pairs of two different heads, i < j. A metric
over tokens runs over valid tokens only (`keep`, True = valid) and refuses to have none; to pool batches, weight
each by its number of valid tokens, and for CKA add `OutputMoments`. No metric here says that a model is good.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.disagreement.terms import accumulation_dtype, autocast_off, require_floating, require_keep
from headwise.errors import MaskError, ShapeError

# Variance below this share of the second moment is rounding of a constant.
CONSTANT = 1e-24


class ParameterCosine(NamedTuple):
    """Cosines between particles, averaged over pairs i < j: with their signs, and without.

    Attributes:
        mean: [*], in [-1/(M-1), 1].
        mean_absolute: [*], in [0, 1]; 0 only when all particles are orthogonal.
    """

    mean: Tensor
    mean_absolute: Tensor


@torch.no_grad()
def head_distance(outputs: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean Euclidean distance between the outputs of two heads.

    Dist = mean_t mean_{i<j} |z_ti - z_tj|  (An et al. 2020, the "Dist" of Table 1), not normalized: it grows
    with the norm of the outputs, so report `output_cosine` or `linear_cka` beside it.

    Args:
        outputs: [..., H, e]; one item is an example ([N, H, e], the paper's sentence model) or a token.
        keep: [...], bool, True = valid item; None keeps all.

    Returns:
        A scalar of at least 0, in the unit of the outputs.

    Raises:
        ShapeError: Wrong shape or dtype, fewer than two heads, or no item.
        MaskError: `keep` is not bool, of another shape, or keeps no item.

    >>> head_distance(torch.tensor([[[0.0, 0.0], [3.0, 4.0]]]))
    tensor(5.)
    """
    items = _valid("outputs", outputs, keep)
    distances = torch.cdist(items, items, compute_mode="donot_use_mm_for_euclid_dist")
    return _mean_over_pairs(distances).mean()


@torch.no_grad()
def output_cosine(outputs: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean cosine between the outputs of two heads at one token.

    mean_t mean_{i<j} cos(O_ti, O_tj). For vectors none of which is zero this is (H s - 1)/(H - 1), s the
    `output_similarity` of the loss, which also counts a head with itself: here orthogonal heads give 0. The
    cosine of a zero vector is 0.

    Args:
        outputs: [..., H, e].
        keep: [...], bool, True = valid token; None keeps all.

    Returns:
        A scalar in [-1/(H-1), 1]; scaling any head leaves it.

    Raises:
        ShapeError: Wrong shape or dtype, fewer than two heads, or no token.
        MaskError: `keep` is not bool, of another shape, or keeps no token.

    >>> output_cosine(torch.tensor([[[1.0, 0.0], [3.0, 4.0]]]))
    tensor(0.6000)
    """
    units = torch.nn.functional.normalize(_valid("outputs", outputs, keep), dim=-1)
    pairs = units.sum(-2).square().sum(-1) - units.square().sum((-2, -1))
    heads = units.shape[-2]
    return pairs.mean() / (heads * (heads - 1))


@torch.no_grad()
def parameter_cosine(particles: Tensor) -> ParameterCosine:
    """Mean cosine, and mean absolute cosine, between the parameters of two heads.

    mean_{i<j} cos(θ_i, θ_j) and mean_{i<j} |cos(θ_i, θ_j)|. The first can be near 0 while heads are pairwise
    parallel and opposite; the second cannot. The cosine of a zero particle is 0.

    Args:
        particles: [*, M, D], one flattened head a row.

    Returns:
        `ParameterCosine(mean [*], mean_absolute [*])`, float64.

    Raises:
        ShapeError: Wrong shape or dtype, or fewer than two particles.

    >>> parameter_cosine(torch.tensor([[1.0, 0.0], [-2.0, 0.0], [0.0, 1.0]]))
    ParameterCosine(mean=tensor(-0.3333, dtype=torch.float64), mean_absolute=tensor(0.3333, dtype=torch.float64))
    """
    _require_pairs("particles", particles, "[*, M, D]")
    units = torch.nn.functional.normalize(particles.double(), dim=-1)
    cosines = units @ units.mT
    return ParameterCosine(_mean_over_pairs(cosines), _mean_over_pairs(cosines.abs()))


@torch.no_grad()
def particle_norms(particles: Tensor) -> Tensor:
    """Euclidean norm of the parameters of each head, |θ_i|: [*, M, D] -> [*, M], float64.

    Args:
        particles: [*, M, D], one flattened head a row.

    Returns:
        [*, M]. Norms that grow raise every Euclidean distance without making heads more different.

    Raises:
        ShapeError: Wrong shape or dtype.

    >>> particle_norms(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    tensor([5., 1.], dtype=torch.float64)
    """
    require_floating("particles", particles, 2, "[*, M, D]")
    return torch.linalg.vector_norm(particles.double(), dim=-1)


@dataclass(frozen=True, eq=False)
class OutputMoments:
    """What linear CKA needs of the outputs of H heads, in float64; `a + b` is that of both sets of tokens.

    Attributes:
        count: Number of tokens.
        mean: [H, e], mean output of each head.
        scatter: [H, e, H, e], Σ_t (O_t - mean)(O_t - mean)ᵀ over the concatenated heads.

    >>> a, b = torch.randn(7, 2, 3), torch.randn(5, 2, 3)
    >>> together = output_moments(torch.cat([a, b])).linear_cka()
    >>> torch.allclose((output_moments(a) + output_moments(b)).linear_cka(), together)
    True
    """

    count: int
    mean: Tensor
    scatter: Tensor

    def __add__(self, other: OutputMoments) -> OutputMoments:
        if self.mean.shape != other.mean.shape:
            raise ShapeError(
                f"moments of heads {tuple(self.mean.shape)} and {tuple(other.mean.shape)} were added; expected "
                "equal numbers and widths of heads."
            )
        count = self.count + other.count
        shift = other.mean - self.mean
        between = shift[:, :, None, None] * shift * (self.count * other.count / count)
        mean = self.mean + shift * (other.count / count)
        return OutputMoments(count, mean, self.scatter + other.scatter + between)

    def linear_cka(self) -> Tensor:
        """Mean over pairs i < j of `linear_cka_matrix`, a float64 scalar."""
        return _mean_over_pairs(self.linear_cka_matrix())

    def linear_cka_matrix(self) -> Tensor:
        """Linear CKA of each two heads, [H, H] in [0, 1]: ones on the diagonal, 0 where a head is constant.

        Raises:
            ShapeError: There are fewer than two tokens.
        """
        if self.count < 2:
            raise ShapeError(f"the moments are of {self.count} token; linear CKA needs at least 2, better 10 e.")
        norms = self.scatter.square().sum((1, 3))
        within = torch.einsum("hehe->h", self.scatter)
        raw = within + self.count * self.mean.square().sum(-1)
        constant = within <= CONSTANT * raw
        scale = norms.diagonal().masked_fill(constant, math.inf).rsqrt()
        return norms * scale[:, None] * scale


@torch.no_grad()
def output_moments(outputs: Tensor, keep: Tensor | None = None) -> OutputMoments:
    """Moments of the outputs of one batch, to be added over batches.

    Args:
        outputs: [..., H, e].
        keep: [...], bool, True = valid token; None keeps all.

    Returns:
        `OutputMoments`; memory (H e)², whatever the number of tokens.

    Raises:
        ShapeError: Wrong shape or dtype, fewer than two heads, or no token.
        MaskError: `keep` is not bool, of another shape, or keeps no token.

    >>> output_moments(torch.ones(4, 2, 3)).count
    4
    """
    tokens = _valid("outputs", outputs, keep)
    mean = tokens.mean(0, dtype=torch.float64)
    # what is left of the mean where tokens are float32 is taken off the products, and tiny heads do not underflow
    shift = mean.to(tokens.dtype)
    centered = tokens - shift
    size = centered.abs().amax((0, 2)).double().clamp_min(torch.finfo(tokens.dtype).tiny)
    rest = ((mean - shift.double()) / size[:, None]).flatten()
    scaled = (centered / size[:, None].to(tokens.dtype)).flatten(1)
    with autocast_off(tokens):
        scatter = (scaled.mT @ scaled).double() - len(tokens) * rest[:, None] * rest
    scales = size[:, None].expand_as(mean)
    scatter = scatter.reshape(*mean.shape, *mean.shape) * scales[:, :, None, None] * scales
    return OutputMoments(len(tokens), mean, scatter)


def linear_cka(outputs: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean linear centered kernel alignment between the outputs of two heads.

    mean_{i<j} |X_iᵀ X_j|²_F / (|X_iᵀ X_i|_F |X_jᵀ X_j|_F), X_i the outputs of head i over all valid tokens, each
    feature centered (Kornblith et al. 2019). Unlike a cosine it sees heads that say the same in another basis:
    it is 1 when one head is a rotation and scaling of another. It is biased upwards with few tokens: independent
    heads score about e/T, so use many more tokens than the width of a head.

    Args:
        outputs: [..., H, e].
        keep: [...], bool, True = valid token; None keeps all.

    Returns:
        A float64 scalar in [0, 1]; a head that is constant over tokens scores 0 with every other.

    Raises:
        ShapeError: Wrong shape or dtype, fewer than two heads, or fewer than two tokens.
        MaskError: `keep` is not bool, of another shape, or keeps no token.

    >>> head = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 5.0]])
    >>> linear_cka(torch.stack([head, -3 * head.flip(1)], dim=1))
    tensor(1.0000, dtype=torch.float64)
    """
    return output_moments(outputs, keep).linear_cka()


@torch.no_grad()
def attention_jensen_shannon(weights: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean Jensen-Shannon divergence between the attention rows of two heads, in nats.

    mean_q mean_{i<j} [ S((A_iq + A_jq)/2) - (S(A_iq) + S(A_jq))/2 ], S the entropy (Lin 1991). 0 when heads attend
    alike, log 2 when they share no key.

    Args:
        weights: [..., H, Q, K], attention weights, before dropout; each row sums to one.
        keep: [..., Q], bool, True = valid query; None keeps all.

    Returns:
        A scalar in [0, log 2].

    Raises:
        ShapeError: Wrong shape or dtype, fewer than two heads, or no query.
        MaskError: `keep` is not bool, of another shape, or keeps no query.

    >>> attention_jensen_shannon(torch.eye(4).reshape(1, 4, 1, 4))
    tensor(0.6931)
    """
    rows = _valid_rows(weights, keep)
    _require_two_heads("weights", rows.shape[-2])
    heads = rows.shape[-2]
    entropy = _entropy(rows)
    total = rows.new_zeros(())
    for offset in range(1, heads):
        first, second = rows[:, :-offset], rows[:, offset:]
        separate = (entropy[:, :-offset] + entropy[:, offset:]) / 2
        total = total + (_entropy((first + second) / 2) - separate).clamp_min(0).sum()
    return total / (len(rows) * heads * (heads - 1) / 2)


@torch.no_grad()
def generalized_jensen_shannon(weights: Tensor, keep: Tensor | None = None) -> Tensor:
    """Jensen-Shannon divergence of the attention rows of all heads at once, in nats.

    mean_q [ S(mean_h A_hq) - mean_h S(A_hq) ], S the entropy (Lin 1991, with equal weights): how much a head's
    index tells of where it attends. One pass over the heads, where `attention_jensen_shannon` goes over pairs.

    Args:
        weights: [..., H, Q, K], attention weights, before dropout; each row sums to one.
        keep: [..., Q], bool, True = valid query; None keeps all.

    Returns:
        A scalar in [0, log H]: 0 when heads attend alike, log H when no two share a key.

    Raises:
        ShapeError: Wrong shape or dtype, fewer than two heads, or no query.
        MaskError: `keep` is not bool, of another shape, or keeps no query.

    >>> generalized_jensen_shannon(torch.eye(4).reshape(1, 4, 1, 4)).exp()
    tensor(4.)
    """
    rows = _valid_rows(weights, keep)
    _require_two_heads("weights", rows.shape[-2])
    return (_entropy(rows.mean(1)) - _entropy(rows).mean(1)).clamp_min(0).mean()


@torch.no_grad()
def attention_entropy(weights: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean entropy of each head's attention rows, in nats.

    mean_q [ -Σ_k A_hqk log A_hqk ]: 0 for a head that looks at one key, log K for a uniform one.

    Args:
        weights: [..., H, Q, K], attention weights, before dropout; each row sums to one.
        keep: [..., Q], bool, True = valid query; None keeps all.

    Returns:
        [H], in [0, log K].

    Raises:
        ShapeError: Wrong shape or dtype, or no query.
        MaskError: `keep` is not bool, of another shape, or keeps no query.

    >>> attention_entropy(torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]]]))
    tensor([0.0000, 0.6931])
    """
    return _entropy(_valid_rows(weights, keep)).mean(0)


def _entropy(rows: Tensor) -> Tensor:
    return torch.special.entr(rows).sum(-1)


def _mean_over_pairs(matrices: Tensor) -> Tensor:
    """Mean above the diagonal: [*, H, H] -> [*]."""
    heads = matrices.shape[-1]
    return matrices.triu(1).sum((-2, -1)) / (heads * (heads - 1) / 2)


def _valid(name: str, outputs: Tensor, keep: Tensor | None) -> Tensor:
    """Outputs of the valid tokens, [T, H, e]."""
    _require_pairs(name, outputs, "[..., H, e]")
    return _select(outputs, keep)


def _valid_rows(weights: Tensor, keep: Tensor | None) -> Tensor:
    """Attention rows of the valid queries, [T, H, K]."""
    require_floating("weights", weights, 3, "[..., H, Q, K]")
    return _select(weights.movedim(-3, -2), keep)


def _select(vectors: Tensor, keep: Tensor | None) -> Tensor:
    if keep is None:
        tokens = vectors.flatten(0, -3) if vectors.dim() > 2 else vectors.unsqueeze(0)
    else:
        require_keep(keep, vectors.shape[:-2])
        tokens = vectors[keep]
    if not len(tokens):
        raise (ShapeError if keep is None else MaskError)("no valid token is left; expected at least one.")
    return tokens.to(accumulation_dtype(vectors))


def _require_pairs(name: str, vectors: Tensor, shape: str) -> None:
    require_floating(name, vectors, 2, shape)
    _require_two_heads(name, vectors.shape[-2])


def _require_two_heads(name: str, heads: int) -> None:
    if heads < 2:
        raise ShapeError(f"{name} has {heads} head; expected at least two, since the metric is over pairs.")
