"""The disagreement terms as plain float64 loops over every pair of heads.

No closed form, no batching, and no code shared with `headwise.similarity`. Built of differentiable scalars, so that
autograd gives the gradients too. Arguments are those of the fast forms with one batch axis, and `keep` must keep at
least one token.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def subspace_similarity(values: Tensor, keep: Tensor) -> Tensor:
    """Mean over valid t of (1/H²) Σ_i Σ_j V_i·V_j / (|V_i| |V_j|), minus Eq. 5 of Li et al. 2021.

    >>> subspace_similarity(torch.eye(2).reshape(1, 1, 2, 2), torch.tensor([[True]]))
    tensor(0.5000, dtype=torch.float64)
    """
    return _mean_over_tokens(values.double(), keep, _cosine)


def output_similarity(outputs: Tensor, keep: Tensor) -> Tensor:
    """Mean over valid t of (1/H²) Σ_i Σ_j O_i·O_j / (|O_i| |O_j|), minus Eq. 7 of Li et al. 2021.

    >>> output_similarity(torch.eye(4).reshape(1, 1, 4, 4), torch.tensor([[True]]))
    tensor(0.2500, dtype=torch.float64)
    """
    return _mean_over_tokens(outputs.double(), keep, _cosine)


def position_similarity(weights: Tensor, keep: Tensor) -> Tensor:
    """Mean over valid q of (1/H²) Σ_i Σ_j Σ_k A_iqk A_jqk, minus Eq. 6 of Li et al. 2021.

    >>> position_similarity(torch.full((1, 8, 1, 64), 1 / 64), torch.tensor([[True]]))
    tensor(0.0156, dtype=torch.float64)
    """
    return _mean_over_tokens(weights.double().transpose(1, 2), keep, _overlap)


def position_squared_difference(weights: Tensor, keep: Tensor) -> Tensor:
    """Minus the mean over valid q of (1/H²) Σ_i Σ_j Σ_k (A_iqk - A_jqk)², footnote 3 of Li et al. 2021.

    >>> position_squared_difference(torch.eye(2).reshape(1, 2, 1, 2), torch.tensor([[True]]))
    tensor(-1., dtype=torch.float64)
    """
    return -_mean_over_tokens(weights.double().transpose(1, 2), keep, _squared_difference)


def normalized_position_similarity(weights: Tensor, keep: Tensor) -> Tensor:
    """Mean over valid q of (1/H²) Σ_i Σ_j cos(A_iq, A_jq).

    >>> normalized_position_similarity(torch.eye(2).reshape(1, 2, 1, 2), torch.tensor([[True]]))
    tensor(0.5000, dtype=torch.float64)
    """
    return _mean_over_tokens(weights.double().transpose(1, 2), keep, _cosine)


def frobenius_penalty(weights: Tensor, keep: Tensor) -> Tensor:
    """Mean over valid b of Σ_i Σ_j (Σ_t A_it A_jt - [i = j])², for weights [B, H, T] and keep [B].

    >>> frobenius_penalty(torch.eye(2).reshape(1, 2, 2), torch.tensor([True]))
    tensor(0., dtype=torch.float64)
    """
    weights = weights.double()
    heads = range(weights.shape[1])
    examples = []
    for (b,) in keep.nonzero().tolist():
        squares = [(_overlap(weights[b, i], weights[b, j]) - float(i == j)) ** 2 for i in heads for j in heads]
        examples.append(torch.stack(squares).sum())
    return torch.stack(examples).mean()


def _mean_over_tokens(vectors: Tensor, keep: Tensor, pair: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    heads = range(vectors.shape[2])
    tokens = []
    for b, t in keep.nonzero().tolist():
        pairs = [pair(vectors[b, t, i], vectors[b, t, j]) for i in heads for j in heads]
        tokens.append(torch.stack(pairs).sum() / len(heads) ** 2)
    return torch.stack(tokens).mean()


def _overlap(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum()


def _squared_difference(x: Tensor, y: Tensor) -> Tensor:
    return ((x - y) ** 2).sum()


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    if not x.any() or not y.any():
        return torch.zeros((), dtype=torch.float64)
    return (x * y).sum() / ((x * x).sum().sqrt() * (y * y).sum().sqrt())
