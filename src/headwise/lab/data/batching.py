"""Which examples go into which batch: sequences of like length together, in an order that can be resumed.

Owns the two ways the laboratory cuts examples into batches. Must not know what an example holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler

from headwise.errors import DataError, require_integer


class LengthBatches(Sampler[list[int]]):
    """A batch sampler: shuffled, yet with little padding, and the same for the same (seed, epoch).

    All examples are shuffled and cut into windows of `window` batches; each window is sorted by length and cut
    into batches, and the batches are shuffled. Every example occurs once an epoch; only the last batch may be
    short. The order is a function of (seed, epoch) alone, so a run resumed in the middle of an epoch sees the
    batches it would have seen, whatever else drew random numbers. The number of batches is the same each epoch.

    Args:
        lengths: Length of each example in tokens, [N].
        batch_size: Examples a batch.
        seed: Key of the order, together with the epoch.
        window: Batches a window; 1 gives a plain shuffle.

    Raises:
        SettingError: A size is below 1 or the seed negative.
        DataError: There are no examples.

    Example:
        >>> batches = LengthBatches([3, 9, 3, 9], batch_size=2, seed=5)
        >>> sorted(sorted(batch) for batch in batches)
        [[0, 2], [1, 3]]
    """

    drop_last = False  # accelerate asks every batch sampler

    def __init__(self, lengths: ArrayLike, *, batch_size: int, seed: int, window: int = 50) -> None:
        require_integer("batch_size", batch_size, low=1)
        require_integer("seed", seed)
        require_integer("window", window, low=1)
        self.lengths: NDArray[np.int64] = np.asarray(lengths, dtype=np.int64)
        if self.lengths.size == 0:
            raise DataError("LengthBatches was given no examples; expected at least one.")
        self.batch_size = batch_size
        self.seed = seed
        self.window = window
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration yields; accelerate's and the Trainer's loaders call this."""
        require_integer("epoch", epoch)
        self.epoch = epoch

    def __len__(self) -> int:
        return math.ceil(self.lengths.size / self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        generator = np.random.default_rng([self.seed, self.epoch])
        shuffled = generator.permutation(self.lengths.size)
        size = self.batch_size * self.window
        windows = (shuffled[start : start + size] for start in range(0, shuffled.size, size))
        batches = [batch for members in windows for batch in _cut_by_length(members, self.lengths, self.batch_size)]
        # the short batch, always the last one cut, stays last: accelerate's shards take it for the end
        whole = self.lengths.size // self.batch_size
        for position in (*generator.permutation(whole), *range(whole, len(batches))):
            yield batches[position].tolist()


def length_sorted(lengths: ArrayLike, batch_size: int) -> list[list[int]]:
    """Return all examples in batches of like length, shortest first: for evaluation, where order does not matter.

    >>> length_sorted([5, 1, 4], batch_size=2)
    [[1, 2], [0]]
    """
    require_integer("batch_size", batch_size, low=1)
    sizes = np.asarray(lengths, dtype=np.int64)
    return [batch.tolist() for batch in _cut_by_length(np.arange(sizes.size), sizes, batch_size)]


def _cut_by_length(
    members: NDArray[np.int64], lengths: NDArray[np.int64], batch_size: int
) -> Sequence[NDArray[np.int64]]:
    ordered = members[np.argsort(lengths[members], kind="stable")]
    return [ordered[start : start + batch_size] for start in range(0, ordered.size, batch_size)]
