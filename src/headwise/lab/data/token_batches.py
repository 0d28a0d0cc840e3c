"""Batches of as many tokens rather than as many examples: for sequences of very unequal length.

Owns how examples are cut into such batches, in training and in evaluation. Must not know what an example holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler

from headwise.errors import DataError, SettingError, require_integer

# The shorter sides in a batch differ by less than this where there is a choice: less pads them less, more mixes more.
BUCKET = 4


class TokenBatches(Sampler[list[int]]):
    """A batch sampler by tokens: shuffled, yet with little padding, and the same for the same (seed, epoch).

    A batch of B examples whose longest side has L tokens is cut so that B x L is at most `tokens`. Examples are sorted
    by length, in an order drawn anew each epoch among those of like length, cut from short to long, and the batches
    are shuffled. Where to cut follows from the sorted lengths alone, so that the number of batches is the same each
    epoch although their contents are not. Every example occurs once an epoch. The order is a function of (seed,
    epoch) alone, so a run resumed in the middle of an epoch sees the batches it would have seen.

    Batches differ in their number of examples, so there is no `batch_size`: with several processes accelerate has to be
    told `even_batches=False`.

    Args:
        lengths: Length of each example in tokens, [N], or of each of its sides, [N, S].
        tokens: Most tokens of a batch, padding included, on the side where they are most.
        seed: Key of the order, together with the epoch.
        examples: Most examples of a batch; None for any number.

    Raises:
        SettingError: A size is below 1, the seed negative, or one example alone exceeds `tokens`.
        DataError: There are no examples.

    Example:
        >>> batches = TokenBatches([3, 9, 3, 4], tokens=9, seed=5)
        >>> sorted(sorted(batch) for batch in batches)
        [[0, 2], [1], [3]]
    """

    drop_last = False  # accelerate asks every batch sampler

    def __init__(self, lengths: ArrayLike, *, tokens: int, seed: int, examples: int | None = None) -> None:
        require_integer("seed", seed)
        self._sort_key, self._cuts = _plan(lengths, tokens, examples)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration yields; accelerate's and the Trainer's loaders call this."""
        require_integer("epoch", epoch)
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._cuts) - 1

    def __iter__(self) -> Iterator[list[int]]:
        generator = np.random.default_rng([self.seed, self.epoch])
        shuffled = generator.permutation(len(self._sort_key))
        ordered = shuffled[np.argsort(self._sort_key[shuffled], kind="stable")]
        for position in generator.permutation(len(self)):
            yield ordered[self._cuts[position] : self._cuts[position + 1]].tolist()


def token_sorted(lengths: ArrayLike, *, tokens: int, examples: int | None = None) -> list[list[int]]:
    """Return all examples in batches by tokens, shortest first: for evaluation, where order does not matter.

    >>> token_sorted([5, 1, 4], tokens=8)
    [[1, 2], [0]]
    """
    sort_key, cuts = _plan(lengths, tokens, examples)
    ordered = np.argsort(sort_key, kind="stable")
    return [ordered[start:end].tolist() for start, end in pairwise(cuts)]


def _plan(lengths: ArrayLike, tokens: int, examples: int | None) -> tuple[NDArray[np.integer], list[int]]:
    """Return what to sort examples by, [N], and where to cut the sorted ones, from 0 to N."""
    require_integer("tokens", tokens, low=1)
    sides = np.asarray(lengths, dtype=np.int64)
    if sides.size == 0:
        raise DataError("lengths has no examples; expected at least one.")
    sides = sides.reshape(len(sides), -1)
    longer = sides.max(axis=1)
    if int(longer.max()) > tokens:
        index = int(longer.argmax())
        raise SettingError(
            f"tokens is {tokens} but example {index} has {longer[index]}; expected at least as many, or leave out "
            "long examples."
        )
    if examples is not None:
        require_integer("examples", examples, low=1)
    # of two sides one is the longer: their difference says how long the other is, and which it is
    difference = sides[:, 0] - sides[:, -1]
    bucket = (difference - difference.min()) // BUCKET
    sort_key = longer * (int(bucket.max()) + 1) + bucket
    # a narrow type sorts several times as fast
    narrow = np.min_scalar_type(int(sort_key.max()))
    return sort_key.astype(narrow), _cuts(np.sort(longer), tokens, examples or len(longer))


def _cuts(sizes: NDArray[np.int64], tokens: int, examples: int) -> list[int]:
    """Return where to cut rising sizes [N] so that each piece, its length times its last size, fits into `tokens`."""
    cuts = [0]
    while cuts[-1] < len(sizes):
        start = cuts[-1]
        low, high = start + 1, min(len(sizes), start + examples, start + tokens // int(sizes[start]))
        while low < high:
            middle = (low + high + 1) // 2
            fits = (middle - start) * int(sizes[middle - 1]) <= tokens
            low, high = (middle, high) if fits else (low, middle - 1)
        cuts.append(low)
    return cuts
