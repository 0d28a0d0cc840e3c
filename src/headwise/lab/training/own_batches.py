"""The batches of one process when several train together: its part of each batch that one process would have had.

Owns the division, and how much a part's mean counts in the mean of the whole batch. Must not know tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from headwise.lab.training import processes

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


def counted(loss: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """Return a loss, the mean over this process's labels, such that its mean over processes is that of the whole batch.

    loss n c_r / sum_s c_s, where c_r is how many labels process r of n has; the loss itself in one process.

    >>> counted(torch.tensor(2.0), {"labels": torch.tensor([0, 1])})
    tensor(2.)
    """
    if processes.count() == 1:
        return loss
    own = (inputs["labels"] != IGNORED).sum().to(torch.float64)
    return loss * (processes.count() * own / processes.total(own).clamp_min(1)).to(loss.dtype)
