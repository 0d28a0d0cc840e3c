"""Pairwise comparisons of the heads of one attention: matrices [H, H], summed over tokens so that batches add up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import MaskError, ShapeError
from headwise.functional.tokens import autocast_off, require_floating, select_tokens

# Number of tokens compared at once, so that intermediate results stay in a core's cache.
CHUNK = 256


@dataclass(frozen=True, eq=False)
class PairSums:
    """A matrix over pairs of heads, summed over tokens; `a + b` is the sum over both sets of tokens.

    Attributes:
        total: [H, H] float64.
        count: Number of tokens.
    """

    total: Tensor
    count: int

    def __add__(self, other: PairSums) -> PairSums:
        return PairSums(self.total + other.total, self.count + other.count)

    @property
    def mean(self) -> Tensor:
        """The mean over tokens, [H, H]."""
        if not self.count:
            raise MaskError("there is no valid token; expected at least one.")
        return self.total / self.count


@torch.no_grad()
def distance_pairs(vectors: Tensor, keep: Tensor | None = None) -> PairSums:
    """Return sums over tokens of |x_i - x_j|, whose mean over tokens and pairs is `metrics.head_distance`.

    Vectors are [..., H, e]; `keep` [...] is True for valid tokens, and None keeps all.

    Example:
        >>> distance_pairs(torch.tensor([[[0.0, 0.0], [3.0, 4.0]]])).mean[0, 1]
        tensor(5., dtype=torch.float64)
    """
    items = select_tokens(vectors, keep)
    distances = torch.cdist(items, items, compute_mode="donot_use_mm_for_euclid_dist")
    return PairSums(distances.double().sum(0), len(items))


@torch.no_grad()
def cosine_pairs(vectors: Tensor, keep: Tensor | None = None) -> PairSums:
    """Return sums over tokens of cos(x_i, x_j), whose mean over tokens and pairs is `metrics.output_cosine`.

    Vectors are [..., H, e], and the cosine of a zero vector is 0; `keep` [...] is True for valid tokens, None for all.

    Example:
        >>> cosine_pairs(torch.tensor([[[1.0, 0.0], [3.0, 4.0]]])).mean[0, 1]
        tensor(0.6000, dtype=torch.float64)
    """
    units = torch.nn.functional.normalize(select_tokens(vectors, keep), dim=-1)
    total = torch.zeros(units.shape[1], units.shape[1], dtype=torch.float64, device=units.device)
    with autocast_off(units):
        for part in units.split(CHUNK):
            rows = part.transpose(0, 1).flatten(1)
            total += rows @ rows.mT
    return PairSums(total, len(units))


@torch.no_grad()
def attention_pairs(weights: Tensor, keep: Tensor | None = None) -> tuple[PairSums, Tensor]:
    """Return sums over queries of the Jensen-Shannon divergence between heads, and of the entropy of each head [H].

    Their means over queries are `metrics.attention_jensen_shannon` (also over pairs) and `metrics.attention_entropy`.
    Rows of weights [..., H, Q, K] sum to one; `keep` [..., Q] is True for valid queries, and None keeps all.

    Example:
        >>> pairs, entropy = attention_pairs(torch.eye(2).reshape(1, 2, 1, 2))
        >>> pairs.mean[0, 1], entropy
        (tensor(0.6931, dtype=torch.float64), tensor([0., 0.], dtype=torch.float64))
    """
    require_floating("weights", weights, 3, "[..., H, Q, K]")
    # heads first and rows contiguous, so that each pair is one pass over memory
    rows = select_tokens(weights.movedim(-3, -2), keep).transpose(0, 1).contiguous()
    heads = len(rows)
    total = torch.zeros(heads, heads, dtype=torch.float64, device=rows.device)
    entropies = torch.zeros(heads, dtype=torch.float64, device=rows.device)
    for part in rows.split(CHUNK, dim=1):
        logarithms, middles = torch.empty_like(part), torch.empty_like(part[1:])
        entropy = _entropy(part, logarithms)
        entropies += entropy.sum(-1, dtype=torch.float64)
        for first in range(heads - 1):
            middle = torch.add(part[first], part[first + 1 :], out=middles[first:]).mul_(0.5)
            divergence = _entropy(middle, logarithms[first + 1 :])
            divergence -= (entropy[first] + entropy[first + 1 :]) / 2
            total[first, first + 1 :] += divergence.clamp_min_(0).sum(-1, dtype=torch.float64)
    return PairSums(total + total.mT, rows.shape[1]), entropies


@torch.no_grad()
def parameter_pairs(particles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosine and the distance of the parameters of each pair of heads [M, D], both [M, M] float64.

    Example:
        >>> cosine, distance = parameter_pairs(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        >>> float(cosine[0, 1]), round(float(distance[0, 1]), 4)
        (0.0, 2.2361)
    """
    require_floating("particles", particles, 2, "[M, D]")
    values = particles.double()
    units = torch.nn.functional.normalize(values, dim=-1)
    return units @ units.mT, torch.cdist(values, values, compute_mode="donot_use_mm_for_euclid_dist")


def mean_over_pairs(matrix: Tensor) -> float:
    """Return the mean of a symmetric matrix [H, H] over pairs of different heads.

    >>> mean_over_pairs(torch.tensor([[1.0, 0.5], [0.5, 1.0]]))
    0.5

    Raises:
        ShapeError: There are fewer than two heads.
    """
    heads = matrix.shape[-1]
    if heads < 2:
        raise ShapeError(f"the matrix has {heads} head; expected at least two, since the mean is over pairs.")
    return float(matrix.double().triu(1).sum()) / (heads * (heads - 1) / 2)


def mean_over_others(matrix: Tensor) -> Tensor:
    """Return for each head the mean of a symmetric matrix over the other heads, [H, H] -> [H].

    >>> mean_over_others(torch.tensor([[1.0, 0.5, 0.1], [0.5, 1.0, 0.3], [0.1, 0.3, 1.0]]))
    tensor([0.3000, 0.4000, 0.2000], dtype=torch.float64)
    """
    heads = matrix.shape[-1]
    return (matrix.double().sum(-1) - matrix.double().diagonal()) / (heads - 1)


def _entropy(rows: Tensor, logarithms: Tensor) -> Tensor:
    """Return -sum_k p_k log p_k of each row, with 0 log 0 = 0; `logarithms` is a buffer of the same shape."""
    torch.clamp(rows, min=torch.finfo(rows.dtype).tiny, out=logarithms)
    return logarithms.log_().mul_(rows).sum(-1).neg_()


def average_pairs(matrices: Tensor) -> Tensor:
    """Return the mean above the diagonal, [*, H, H] -> [*]."""
    heads = matrices.shape[-1]
    return matrices.triu(1).sum((-2, -1)) / (heads * (heads - 1) / 2)


def select_outputs(name: str, outputs: Tensor, keep: Tensor | None) -> Tensor:
    """Return the outputs of the valid tokens, [T, H, e]."""
    require_particles(name, outputs, "[..., H, e]")
    return select_some(outputs, keep)


def select_some(vectors: Tensor, keep: Tensor | None) -> Tensor:
    """Return the vectors of the valid tokens, of which there must be one."""
    tokens = select_tokens(vectors, keep)
    if not len(tokens):
        raise (ShapeError if keep is None else MaskError)("there is no valid token; expected at least one.")
    return tokens


def require_particles(name: str, vectors: Tensor, shape: str) -> None:
    """Raise `ShapeError` unless these are floating vectors of at least two heads."""
    require_floating(name, vectors, 2, shape)
    require_two_heads(name, vectors.shape[-2])


def require_two_heads(name: str, heads: int) -> None:
    """Raise `ShapeError` for a single head."""
    if heads < 2:
        raise ShapeError(f"{name} has {heads} head; expected at least two, since the metric is over pairs.")
