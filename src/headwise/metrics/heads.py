"""Measures of how different the heads of one attention are, on tensors already read from a model.

They are not losses, and no gradient flows through them (to lower a similarity, use `headwise.disagreement`). Pairs are
unordered pairs of different heads, i < j. A mean over tokens is over valid tokens only (`keep`, True = valid) and needs
at least one; to pool batches, weight each by its number of valid tokens, and add `OutputMoments` for CKA. None of them
measures the quality of a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.disagreement.terms import autocast_off, require_floating
from headwise.errors import MaskError, ShapeError
from headwise.metrics.pairs import select_tokens

# A variance below this share of the second moment is rounding error of a constant.
CONSTANT = 1e-24


class ParameterCosine(NamedTuple):
    """Mean of the cosines between particles over pairs i < j, signed and absolute.

    Attributes:
        mean: [*], in [-1/(M-1), 1].
        mean_absolute: [*], in [0, 1]; 0 only when all particles are orthogonal.
    """

    mean: Tensor
    mean_absolute: Tensor


@torch.no_grad()
def head_distance(outputs: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean Euclidean distance between the outputs of two heads.

    Dist = mean_t mean_{i<j} |z_ti - z_tj|  (An et al. 2020, "Dist" in Table 1). Not normalized: it grows with the
    norm of the outputs, so report `output_cosine` or `linear_cka` as well.

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
    items = _select_outputs("outputs", outputs, keep)
    distances = torch.cdist(items, items, compute_mode="donot_use_mm_for_euclid_dist")
    return _average_pairs(distances).mean()


@torch.no_grad()
def output_cosine(outputs: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean cosine between the outputs of two heads at one token.

    mean_t mean_{i<j} cos(O_ti, O_tj). For nonzero vectors this is (H s - 1)/(H - 1), where s is the
    `output_similarity` of the loss, which includes pairs of a head with itself; here orthogonal heads give 0. The
    cosine of a zero vector is 0.

    Args:
        outputs: [..., H, e].
        keep: [...], bool, True = valid token; None keeps all.

    Returns:
        A scalar in [-1/(H-1), 1], invariant to the scale of each head.

    Raises:
        ShapeError: Wrong shape or dtype, fewer than two heads, or no token.
        MaskError: `keep` is not bool, of another shape, or keeps no token.

    >>> output_cosine(torch.tensor([[[1.0, 0.0], [3.0, 4.0]]]))
    tensor(0.6000)
    """
    units = torch.nn.functional.normalize(_select_outputs("outputs", outputs, keep), dim=-1)
    pairs = units.sum(-2).square().sum(-1) - units.square().sum((-2, -1))
    heads = units.shape[-2]
    return pairs.mean() / (heads * (heads - 1))


@torch.no_grad()
def parameter_cosine(particles: Tensor) -> ParameterCosine:
    """Mean cosine, and mean absolute cosine, between the parameters of two heads.

    mean_{i<j} cos(θ_i, θ_j) and mean_{i<j} |cos(θ_i, θ_j)|. Only the first can be near 0 when heads are parallel and
    antiparallel. The cosine of a zero particle is 0.

    Args:
        particles: [*, M, D], one flattened head per row.

    Returns:
        `ParameterCosine(mean [*], mean_absolute [*])`, float64.

    Raises:
        ShapeError: Wrong shape or dtype, or fewer than two particles.

    >>> parameter_cosine(torch.tensor([[1.0, 0.0], [-2.0, 0.0], [0.0, 1.0]]))
    ParameterCosine(mean=tensor(-0.3333, dtype=torch.float64), mean_absolute=tensor(0.3333, dtype=torch.float64))
    """
    _require_particles("particles", particles, "[*, M, D]")
    units = torch.nn.functional.normalize(particles.double(), dim=-1)
    cosines = units @ units.mT
    return ParameterCosine(_average_pairs(cosines), _average_pairs(cosines.abs()))


@torch.no_grad()
def particle_norms(particles: Tensor) -> Tensor:
    """Euclidean norm of the parameters of each head, |θ_i|: [*, M, D] -> [*, M], float64.

    Args:
        particles: [*, M, D], one flattened head per row.

    Returns:
        [*, M]. Growing norms raise every Euclidean distance without making heads more different.

    Raises:
        ShapeError: Wrong shape or dtype.

    >>> particle_norms(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    tensor([5., 1.], dtype=torch.float64)
    """
    require_floating("particles", particles, 2, "[*, M, D]")
    return torch.linalg.vector_norm(particles.double(), dim=-1)


@dataclass(frozen=True, eq=False)
class OutputMoments:
    """Moments of the outputs of H heads for linear CKA, in float64; `a + b` are the moments of both sets of tokens.

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
                "the same number and width of heads."
            )
        count = self.count + other.count
        shift = other.mean - self.mean
        between = shift[:, :, None, None] * shift * (self.count * other.count / count)
        mean = self.mean + shift * (other.count / count)
        return OutputMoments(count, mean, self.scatter + other.scatter + between)

    def linear_cka(self) -> Tensor:
        """Return the mean of `linear_cka_matrix` over pairs i < j, a float64 scalar."""
        return _average_pairs(self.linear_cka_matrix())

    def linear_cka_matrix(self) -> Tensor:
        """Return the linear CKA of each pair of heads, [H, H] in [0, 1]; ones on the diagonal, 0 for a constant head.

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
    """Return the moments of the outputs of one batch, to be added over batches.

    Args:
        outputs: [..., H, e].
        keep: [...], bool, True = valid token; None keeps all.

    Returns:
        `OutputMoments`, whose memory is (H e)² for any number of tokens.

    Raises:
        ShapeError: Wrong shape or dtype, fewer than two heads, or no token.
        MaskError: `keep` is not bool, of another shape, or keeps no token.

    >>> output_moments(torch.ones(4, 2, 3)).count
    4
    """
    tokens = _select_outputs("outputs", outputs, keep)
    mean = tokens.mean(0, dtype=torch.float64)
    # the rounding of the mean to float32 is subtracted from the products; heads are scaled so that none underflows
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

    mean_{i<j} |X_iᵀ X_j|²_F / (|X_iᵀ X_i|_F |X_jᵀ X_j|_F), where X_i are the outputs of head i over all valid tokens,
    with each feature centered (Kornblith et al. 2019). Unlike a cosine it is invariant to the basis: it is 1 when one
    head is a rotation and scaling of another. It is biased upward with few tokens: independent heads score about e/T,
    so use many more tokens than the width of a head.

    Args:
        outputs: [..., H, e].
        keep: [...], bool, True = valid token; None keeps all.

    Returns:
        A float64 scalar in [0, 1]; a head that is constant over tokens scores 0 with every other head.

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

    mean_q mean_{i<j} [ S((A_iq + A_jq)/2) - (S(A_iq) + S(A_jq))/2 ], where S is the entropy (Lin 1991): 0 if heads
    attend alike, log 2 if they share no key.

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
    rows = _select_rows(weights, keep)
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
    """Jensen-Shannon divergence between the attention rows of all heads, in nats.

    mean_q [ S(mean_h A_hq) - mean_h S(A_hq) ], where S is the entropy (Lin 1991, with equal weights): the mutual
    information of the head and the attended key. It takes one pass over heads; `attention_jensen_shannon` takes pairs.

    Args:
        weights: [..., H, Q, K], attention weights, before dropout; each row sums to one.
        keep: [..., Q], bool, True = valid query; None keeps all.

    Returns:
        A scalar in [0, log H]: 0 if heads attend alike, log H if no two share a key.

    Raises:
        ShapeError: Wrong shape or dtype, fewer than two heads, or no query.
        MaskError: `keep` is not bool, of another shape, or keeps no query.

    >>> generalized_jensen_shannon(torch.eye(4).reshape(1, 4, 1, 4)).exp()
    tensor(4.)
    """
    rows = _select_rows(weights, keep)
    _require_two_heads("weights", rows.shape[-2])
    return (_entropy(rows.mean(1)) - _entropy(rows).mean(1)).clamp_min(0).mean()


@torch.no_grad()
def attention_entropy(weights: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean entropy of each head's attention rows, in nats.

    mean_q [ -Σ_k A_hqk log A_hqk ]: 0 for a head that attends to one key, log K for a uniform one.

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
    return _entropy(_select_rows(weights, keep)).mean(0)


def _entropy(rows: Tensor) -> Tensor:
    return torch.special.entr(rows).sum(-1)


def _average_pairs(matrices: Tensor) -> Tensor:
    """Return the mean above the diagonal, [*, H, H] -> [*]."""
    heads = matrices.shape[-1]
    return matrices.triu(1).sum((-2, -1)) / (heads * (heads - 1) / 2)


def _select_outputs(name: str, outputs: Tensor, keep: Tensor | None) -> Tensor:
    """Return the outputs of the valid tokens, [T, H, e]."""
    _require_particles(name, outputs, "[..., H, e]")
    return _select(outputs, keep)


def _select_rows(weights: Tensor, keep: Tensor | None) -> Tensor:
    """Return the attention rows of the valid queries, [T, H, K]."""
    require_floating("weights", weights, 3, "[..., H, Q, K]")
    return _select(weights.movedim(-3, -2), keep)


def _select(vectors: Tensor, keep: Tensor | None) -> Tensor:
    tokens = select_tokens(vectors, keep)
    if not len(tokens):
        raise (ShapeError if keep is None else MaskError)("there is no valid token; expected at least one.")
    return tokens


def _require_particles(name: str, vectors: Tensor, shape: str) -> None:
    require_floating(name, vectors, 2, shape)
    _require_two_heads(name, vectors.shape[-2])


def _require_two_heads(name: str, heads: int) -> None:
    if heads < 2:
        raise ShapeError(f"{name} has {heads} head; expected at least two, since the metric is over pairs.")
