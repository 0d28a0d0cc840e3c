"""A term on many attentions of one shape at once, in a number of operators that does not grow with the layers.

Where a launch or a call costs more than copying what heads computed, the tensors of all attentions are copied into one
stack. Larger ones are measured one attention after another, without a copy.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from headwise.similarity.mean_cosine import mean_cosine
from headwise.similarity.tokens import accumulation_dtype

# Largest tensors of one attention that are stacked, in numbers: on a CPU copying soon costs more than calls do.
MOST_ON_CPU, MOST_ON_ACCELERATOR = 2**16, 2**22


@runtime_checkable
class Poolable(Protocol):
    """A similarity that is computed for several attentions at once."""

    def sum_and_count_each(self, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what `sum_and_count` does for each of S attentions, [S], given a stack of what it reads, [S, ...]."""
        ...


def measure_together(
    similarity: object, tensors: list[Tensor], keeps: list[Tensor | None]
) -> tuple[Tensor, Tensor] | None:
    """Return sums and numbers of several attentions, each [S], or None where they are measured one by one.

    Args:
        similarity: A similarity.
        tensors: What it reads of each attention.
        keeps: True where a token of each is real, or None.
    """
    first, keep = tensors[0], keeps[0]
    if len(tensors) < 2 or not isinstance(similarity, Poolable):
        return None
    most = MOST_ON_CPU if first.device.type == "cpu" else MOST_ON_ACCELERATOR
    alike = all(own.shape == first.shape and own.dtype == first.dtype and own.device == first.device for own in tensors)
    if first.numel() > most or not alike:
        return None
    if keep is None:
        return similarity.sum_and_count_each(torch.stack(tensors), None) if keeps.count(None) == len(keeps) else None
    given = [own for own in keeps if own is not None]
    if len(given) < len(keeps) or any(own.shape != keep.shape for own in given):
        return None
    return similarity.sum_and_count_each(torch.stack(tensors), torch.stack(given))


def add_up_each(per_token: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sums of a term that is 0 where not kept, [S, ...] -> [S], and the numbers of valid tokens.

    >>> add_up_each(torch.ones(2, 3), None)
    (tensor([3., 3.]), tensor([3, 3]))
    """
    per_token = per_token.flatten(1)
    if keep is None:
        counts = torch.full((len(per_token),), per_token.shape[1], dtype=torch.int64, device=per_token.device)
        return per_token.sum(1), counts
    return per_token.sum(1), keep.flatten(1).sum(1)


def vector_similarity_each(vectors: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """`output_similarity_sum` of S attentions at once, vectors [S, ..., H, e] and keep [S, ...]: sums and numbers, [S].

    >>> vector_similarity_each(torch.eye(4).expand(2, 3, 4, 4), None)
    (tensor([0.7500, 0.7500]), tensor([3, 3]))
    """
    return add_up_each(mean_cosine(vectors, keep), keep)


def position_similarity_each(mean: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """`position_similarity_of_mean_sum` of S attentions at once, [S, ..., Q, K]: sums and numbers, [S].

    >>> position_similarity_each(torch.full((2, 3, 4), 0.25), None)
    (tensor([0.7500, 0.7500]), tensor([3, 3]))
    """
    if keep is not None:
        mean = mean.masked_fill(~keep.unsqueeze(-1), 0.0)
    return add_up_each(mean.to(accumulation_dtype(mean)).square().sum(-1), keep)


def mean_over_heads(weights: Tensor) -> Tensor:
    """Return the mean of attention weights [..., H, Q, K] over heads, in single precision at least.

    >>> mean_over_heads(torch.eye(2)[:, None])
    tensor([[0.5000, 0.5000]])
    """
    return weights.mean(-3, dtype=accumulation_dtype(weights))
