"""The batches of one process when several train together: its part of each batch that one process would have had.

Owns the division, and how much a part's mean counts in the mean of the whole batch. Must not know tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from headwise.lab import processes

__all__ = ["OwnBatches", "share_of_batch"]

# What torch's losses leave out.
IGNORED = -100


class OwnBatches(Sampler[list[int]]):
    """Every batch of another sampler, divided: process r of n has examples r, r + n, r + 2 n, ... of it.

    A batch of fewer examples than processes is given to each of them whole.

    Args:
        batches: The batches of one process.
        rank: Which process this is, r.
        count: How many there are, n.

    Example:
        >>> [list(OwnBatches([[4, 5, 6], [7]], rank, 2)) for rank in (0, 1)]
        [[[4, 6], [7]], [[5], [7]]]
    """

    drop_last = False  # accelerate asks every batch sampler

    def __init__(self, batches: Any, rank: int, count: int) -> None:
        self.batches, self.rank, self.count = batches, rank, count

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            yield batch[self.rank :: self.count] if len(batch) >= self.count else batch


def share_of_batch(inputs: Mapping[str, Any]) -> Tensor | float:
    """Return n c_r / sum_s c_s, where c_r is how many labels of the batch process r of n has; 1.0 in one process.

    The mean over the processes of their losses, each a mean over its own labels, times this is the loss of the whole
    batch in one process.
    """
    if processes.count() == 1:
        return 1.0
    labels: Tensor = inputs["labels"]
    own = (labels != IGNORED).sum().to(torch.float64)
    return (processes.count() * own / processes.total(own).clamp_min(1)).to(torch.float32)
