"""An endless stream of batches of rows, which resumes in the middle of a shard."""

from collections.abc import Iterator, Sequence

import numpy as np

from headwise.errors import require_integer
from headwise.texts.batching import ResumableBatches
from headwise_lab.experiment.seeding import derive_key
from headwise_lab.packed_text.shards import TOGETHER


class StreamBatches(ResumableBatches):
    """A batch sampler over an endless stream of passes over the rows, cut into rounds of `steps` batches (its epochs).

    In each pass shards come in a new order, a few together, with their rows shuffled; a batch may begin in one pass
    and end in the next. Batch b of round e does not depend on what came before: a run resumed in the middle of a shard
    reads on from there without reading what it skips.

    Args:
        sizes: Number of rows of each shard.
        batch_size: Rows per batch.
        steps: Batches per round.
        seed: Key of the order, and of what a task draws for each row.

    Example:
        >>> batches = StreamBatches([2, 1], batch_size=2, steps=3, seed=5)
        >>> [index % 3 for batch in batches for index in batch]  # two passes over three rows
        [0, 1, 2, 0, 2, 1]
    """

    def __init__(self, sizes: Sequence[int], *, batch_size: int, steps: int, seed: int) -> None:
        require_integer("batch_size", batch_size, low=1)
        require_integer("steps", steps, low=1)
        super().__init__(seed)
        self.sizes, self.batch_size, self.steps = np.asarray(sizes, np.int64), batch_size, steps
        self.starts: list[int] = [0, *np.cumsum(self.sizes).tolist()]
        self.first_draw = derive_key(seed, "masks")

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        total = self.starts[-1]
        passed, offset = divmod(self.epoch * self.steps * self.batch_size, total)
        batch, made = [], 0
        while made < self.steps:
            # the index encodes the draw by which a task masks the row
            place = (self.first_draw + passed) * total
            for number in self._pass(passed, offset):
                batch.append(place + number)
                if len(batch) == self.batch_size:
                    yield batch
                    batch, made = [], made + 1
                    if made == self.steps:
                        return
            passed, offset = passed + 1, 0

    def _pass(self, passed: int, offset: int) -> Iterator[int]:
        """Yield the rows of one pass from `offset` on, without shuffling the groups of shards before it."""
        shards = np.random.default_rng([self.seed, passed]).permutation(len(self.sizes))
        for group, first in enumerate(range(0, len(shards), TOGETHER)):
            chosen = shards[first : first + TOGETHER]
            count = int(self.sizes[chosen].sum())
            if offset >= count:
                offset -= count
                continue
            numbers = np.concatenate([np.arange(self.starts[one], self.starts[one + 1]) for one in chosen])
            np.random.default_rng([self.seed, passed, group]).shuffle(numbers)
            yield from numbers[offset:].tolist()
            offset = 0
