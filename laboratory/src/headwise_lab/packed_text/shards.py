"""Rows of one length in memory-mapped shards, and the prepared folder that holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.atomic import FILES, require_files_unchanged
from headwise.errors import DataError
from headwise_lab.data.arrays import load_array
from headwise_lab.data.subwords import TextEncoder
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
        """Return a row, a copy, int64 [length].

        Raises:
            DataError: Its shard was changed or damaged.
        """
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


@dataclass(frozen=True, eq=False)
class PackedText:
    """A prepared folder.

    Attributes:
        folder: The folder.
        record: Its record.
        words: Its tokenizer.
        dev_rows: Maximum number of rows of dev; None for all.
        test_rows: Maximum number of rows of test; None for all.
    """

    folder: Path
    record: dict[str, Any]
    words: TextEncoder
    dev_rows: int | None
    test_rows: int | None

    @property
    def fingerprint(self) -> str:
        """Digest of everything the data depends on."""
        return str(self.record["fingerprint"])

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
