"""Batches of examples of similar length, by number of examples or of tokens, in an order that can be resumed."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.utils.data import Sampler

from headwise.errors import DataError, SettingError, require_integer

# The shorter sides in a batch differ by less than this where there is a choice: less pads them less, more mixes more.
BUCKET = 4


class ResumableBatches(Sampler[list[int]]):
    """A batch sampler whose order depends on a seed and the epoch alone.

    Raises:
        SettingError: The seed is negative.
    """

    drop_last = False  # accelerate reads this of every batch sampler

    def __init__(self, seed: int) -> None:
        require_integer("seed", seed)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order the next iteration yields; accelerate and the Trainer call this."""
        require_integer("epoch", epoch)
        self.epoch = epoch


class LengthBatches(ResumableBatches):
    """A batch sampler: shuffled, yet with little padding, and the same for the same (seed, epoch).

    All examples are shuffled and cut into windows of `window` batches; each window is sorted by length and cut into
    batches, and the batches are shuffled. Every example occurs once per epoch; only the last batch may be short. The
    order depends on (seed, epoch) alone, so a run resumed in the middle of an epoch sees the same batches. The number
    of batches is the same in each epoch.

    Args:
        lengths: Length of each example in tokens, [N].
        batch_size: Examples per batch.
        seed: Seed of the order, together with the epoch.
        window: Batches per window; 1 gives a plain shuffle.

    Raises:
        SettingError: A size is below 1 or the seed negative.
        DataError: There are no examples.

    Example:
        >>> batches = LengthBatches([3, 9, 3, 9], batch_size=2, seed=5)
        >>> sorted(sorted(batch) for batch in batches)
        [[0, 2], [1, 3]]
    """

    def __init__(self, lengths: ArrayLike, *, batch_size: int, seed: int, window: int = 50) -> None:
        require_integer("batch_size", batch_size, low=1)
        super().__init__(seed)
        require_integer("window", window, low=1)
        self.lengths: NDArray[np.int64] = np.asarray(lengths, dtype=np.int64)
        if self.lengths.size == 0:
            raise DataError("LengthBatches was given no examples; expected at least one.")
        self.batch_size = batch_size
        self.window = window

    def __len__(self) -> int:
        return math.ceil(self.lengths.size / self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        generator = np.random.default_rng([self.seed, self.epoch])
        shuffled = generator.permutation(self.lengths.size)
        size = self.batch_size * self.window
        windows = (shuffled[start : start + size] for start in range(0, shuffled.size, size))
        batches = [batch for members in windows for batch in _cut_by_length(members, self.lengths, self.batch_size)]
        # the short batch stays last: accelerate's shards take it for the end
        whole = self.lengths.size // self.batch_size
        for position in (*generator.permutation(whole), *range(whole, len(batches))):
            yield batches[position].tolist()


class TokenBatches(ResumableBatches):
    """A batch sampler by tokens: shuffled, yet with little padding, and the same for the same (seed, epoch).

    A batch of B examples whose longest side has L tokens is cut so that B x L is at most `tokens`. Examples are sorted
    by length, in an order drawn anew in each epoch among those of similar length, cut from short to long, and the
    batches are shuffled. The cuts depend on the sorted lengths alone, so the number of batches is the same in each
    epoch although their contents are not. Every example occurs once per epoch, and the order depends on (seed, epoch)
    alone, as for `LengthBatches`.

    Batches differ in their number of examples, so there is no `batch_size`: with several processes accelerate needs
    `even_batches=False`.

    Args:
        lengths: Length of each example in tokens, [N], or of each of its sides, [N, S].
        tokens: Maximum number of tokens per batch, padding included, on the longer side.
        seed: Seed of the order, together with the epoch.
        examples: Maximum number of examples per batch; None for any number.

    Raises:
        SettingError: A size is below 1, the seed negative, or one example alone exceeds `tokens`.
        DataError: There are no examples.

    Example:
        >>> batches = TokenBatches([3, 9, 3, 4], tokens=9, seed=5)
        >>> sorted(sorted(batch) for batch in batches)
        [[0, 2], [1], [3]]
    """

    def __init__(self, lengths: ArrayLike, *, tokens: int, seed: int, examples: int | None = None) -> None:
        super().__init__(seed)
        self._sort_key, self._cuts = _plan(lengths, tokens, examples)

    def __len__(self) -> int:
        return len(self._cuts) - 1

    def __iter__(self) -> Iterator[list[int]]:
        generator = np.random.default_rng([self.seed, self.epoch])
        shuffled = generator.permutation(len(self._sort_key))
        ordered = shuffled[np.argsort(self._sort_key[shuffled], kind="stable")]
        for position in generator.permutation(len(self)):
            yield ordered[self._cuts[position] : self._cuts[position + 1]].tolist()


def batch_by_length(lengths: ArrayLike, batch_size: int) -> list[list[int]]:
    """Return all examples in batches of similar length, shortest first, for evaluation.

    >>> batch_by_length([5, 1, 4], batch_size=2)
    [[1, 2], [0]]
    """
    require_integer("batch_size", batch_size, low=1)
    sizes = np.asarray(lengths, dtype=np.int64)
    return [batch.tolist() for batch in _cut_by_length(np.arange(sizes.size), sizes, batch_size)]


def batch_by_tokens(lengths: ArrayLike, *, tokens: int, examples: int | None = None) -> list[list[int]]:
    """Return all examples in batches by tokens, shortest first, for evaluation.

    >>> batch_by_tokens([5, 1, 4], tokens=8)
    [[1, 2], [0]]
    """
    sort_key, cuts = _plan(lengths, tokens, examples)
    ordered = np.argsort(sort_key, kind="stable")
    return [ordered[start:end].tolist() for start, end in pairwise(cuts)]


def pad(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """Return rows of ids as one int64 tensor [B, longest], with `value` after the shorter ones.

    >>> pad([[5, 6], [7]], 0).tolist()
    [[5, 6], [7, 0]]
    """
    padded = np.full((len(rows), max(map(len, rows))), value, dtype=np.int64)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids
    return torch.from_numpy(padded)


def to_device(batch: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return a batch on the device of a model."""
    device = next(model.parameters()).device
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _cut_by_length(
    members: NDArray[np.int64], lengths: NDArray[np.int64], batch_size: int
) -> Sequence[NDArray[np.int64]]:
    ordered = members[np.argsort(lengths[members], kind="stable")]
    return [ordered[start : start + batch_size] for start in range(0, ordered.size, batch_size)]


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
    # the difference of two sides tells which is longer and by how much
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
