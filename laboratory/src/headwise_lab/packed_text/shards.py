"""Rows of one length in memory-mapped shards, the prepared folder that holds them, and the stream of their batches."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from headwise.atomic import FILES, require_files_unchanged
from headwise.errors import DataError, require_integer
from headwise.texts.batching import ResumableBatches
from headwise_lab.data.arrays import load_array
from headwise_lab.data.subwords import TextEncoder
from headwise_lab.experiment.seeding import derive_key
from headwise_lab.packed_text.prepare import name_shard

# Shards whose rows are shuffled together; memory grows with their number of rows.
TOGETHER = 8


class RowShards:
    """The rows of one split, in files that are opened on first use.

    Args:
        shards: Files of rows.
        sizes: Number of rows of each.
        length: Tokens per row.
        most: Maximum number of rows to use; None for all.
        digests: Digests of the files by name, where they are known.
    """

    def __init__(
        self,
        shards: Sequence[Path],
        sizes: Sequence[int],
        length: int,
        most: int | None = None,
        digests: Mapping[str, Any] = {},
    ) -> None:
        self.shards, self.length = tuple(shards), length
        self.ends = np.minimum(np.cumsum(sizes), most or np.iinfo(np.int64).max)
        self._opened: dict[int, NDArray] = {}
        self.digests, self._compared = digests or {}, set[Path]()

    def __len__(self) -> int:
        return int(self.ends[-1])

    def ids(self, number: int) -> NDArray[np.int64]:
        """Return a row, a copy, int64 [length]."""
        shard = int(np.searchsorted(self.ends, number, side="right"))
        first = 0 if shard == 0 else int(self.ends[shard - 1])
        return self._rows(shard)[number - first].astype(np.int64)

    def _rows(self, shard: int) -> NDArray:
        if shard not in self._opened:
            self._require_unchanged(self.shards[shard])
            rows = load_array(self.shards[shard])
            count = int(np.diff(self.ends, prepend=0)[shard])
            if rows.dtype.kind != "u" or rows.shape[1:] != (self.length,) or len(rows) < count:
                raise DataError(
                    f"{self.shards[shard]} holds {rows.dtype} of shape {list(rows.shape)}; expected ids of shape "
                    f"[{count}, {self.length}]: prepare the text again."
                )
            # the number that a pass shuffles together, so that each is opened once
            if len(self._opened) == TOGETHER:
                self._opened.pop(next(iter(self._opened)))
            self._opened[shard] = rows
        return self._opened[shard]

    def _require_unchanged(self, shard: Path) -> None:
        # once in a process: each pass opens all shards again
        if shard not in self._compared and shard.name in self.digests:
            require_files_unchanged(shard, self.digests, [shard.name], remedy="prepare the text again.")
        self._compared.add(shard)

    def __getstate__(self) -> dict[str, Any]:
        # a worker process opens the files itself
        return {**self.__dict__, "_opened": {}}


def stack_rows(rows: Sequence[Any]) -> dict[str, Tensor]:
    """Return the arrays of rows, dataclasses whose fields are the model's arguments, as a batch of tensors."""
    names = [one.name for one in dataclasses.fields(rows[0])]
    return {name: torch.from_numpy(np.stack([getattr(row, name) for row in rows])) for name in names}


@dataclass(frozen=True, eq=False)
class PackedText(ABC):
    """A prepared folder."""

    folder: Path
    record: dict[str, Any]
    words: TextEncoder
    dev_rows: int | None
    test_rows: int | None

    @property
    def fingerprint(self) -> str:
        """Digest of everything the data depends on."""
        return str(self.record["fingerprint"])

    @abstractmethod
    def make_rows(self, shards: RowShards) -> Dataset:
        """Return what a model reads of the rows of a split."""

    @cached_property
    def train(self) -> Any:
        """The training split."""
        return self.make_rows(self.read_split("train"))

    @cached_property
    def dev(self) -> Any:
        """The dev split."""
        return self.make_rows(self.read_split("dev"))

    @cached_property
    def test(self) -> Any:
        """The test split."""
        return self.make_rows(self.read_split("test"))

    @property
    def shards(self) -> list[int]:
        """Number of rows of each shard of the training split."""
        return list(self.record["shards"])

    def read_split(self, split: str) -> RowShards:
        """Return the rows of "train", "dev" or "test"."""
        if split == "train":
            return self._rows([name_shard(number) for number in range(len(self.shards))], self.shards, None)
        most = self.dev_rows if split == "dev" else self.test_rows
        return self._rows([f"{split}.npy"], [self.record["rows"][split]], most)

    def summary(self) -> str:
        """Return the size of the text and of its splits."""
        rows, record = self.record["rows"], self.record
        dev, test = (len(self.read_split(split)) for split in ("dev", "test"))
        shards = f"{len(self.shards)} shard{'s' * (len(self.shards) != 1)}"
        documents = f"{record['documents']:,} document{'s' * (record['documents'] != 1)}"
        if record.get("blank"):
            documents += f", {record['blank']:,} blank ones left out"
        if record.get("by_rows"):
            documents += ", too few to split by: the last rows are test, those before them dev"
        return (
            f"{record['corpus']}: {documents}; {rows['train']:,} rows of {record['length']} "
            f"tokens to train on in {shards}, {dev:,} dev, {test:,} test; "
            f"a vocabulary of {record['vocabulary_size']:,}, {record['tokenizer']}"
        )

    def _rows(self, names: Sequence[str], sizes: Sequence[int], most: int | None) -> RowShards:
        places = [self.folder / name for name in names]
        return RowShards(places, sizes, int(self.record["length"]), most, self.record.get(FILES, {}))


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
