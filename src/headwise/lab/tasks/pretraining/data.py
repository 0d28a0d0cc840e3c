"""The data of pre-training: rows in memory-mapped shards, their order, and masked batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from headwise.errors import DataError, require_integer
from headwise.lab.data.batching import ResumableBatches
from headwise.lab.experiment.run_folder import read_json
from headwise.lab.experiment.seeding import derive_key
from headwise.lab.tasks.pretraining.files import find_files
from headwise.lab.tasks.pretraining.prepare import (
    RECORD,
    TOKENIZER,
    TextPreparation,
    compute_fingerprint,
    name_shard,
    prepare_text,
)
from headwise.lab.tasks.pretraining.rows import draw_masked, number_segments
from headwise.lab.tasks.pretraining.wordpieces import WordPieces, read_word_pieces

# Shards whose rows are shuffled together; memory grows with their number of rows.
TOGETHER = 8


@dataclass(frozen=True, eq=False)
class MaskedRow:
    """A row with its masked positions.

    Attributes:
        input_ids: [MASK] at the masked positions, int64 [T].
        token_type_ids: Segment of each token, int64 [T].
        positions: The masked positions, int64 [K].
        labels: The original token at each of them, int64 [K].
    """

    input_ids: NDArray[np.int64]
    token_type_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    labels: NDArray[np.int64]

    @staticmethod
    def batch(rows: Sequence[MaskedRow]) -> dict[str, Tensor]:
        """Return rows collated into the model's arguments."""
        names = ("input_ids", "token_type_ids", "positions", "labels")
        return {name: torch.from_numpy(np.stack([getattr(row, name) for row in rows])) for name in names}


class Rows(Dataset[MaskedRow]):
    """The rows of one split; `rows[n]` is masked by draw n // len(rows), a new one in each pass over the text.

    Args:
        shards: Files of rows, opened on first use.
        sizes: Number of rows of each.
        words: The word pieces.
        masked: Share of the tokens between the outer special ones that are masked, in (0, 1).
        length: Tokens per row.
        most: Maximum number of rows to use; None for all.
    """

    def __init__(
        self,
        shards: Sequence[Path],
        sizes: Sequence[int],
        words: WordPieces,
        masked: float,
        length: int,
        most: int | None = None,
    ) -> None:
        self.shards, self.words = tuple(shards), words
        self.ends = np.minimum(np.cumsum(sizes), most or np.iinfo(np.int64).max)
        self.special = (words.start, words.end, words.padding)
        self.mask, self.length = words.mask, length
        self.count = max(1, round(masked * (length - 2)))
        self._opened: dict[int, NDArray] = {}

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> MaskedRow:
        draw, number = divmod(index, len(self))
        ids = self.ids(number)
        positions = draw_masked(ids, self.special, self.count, draw=draw, number=number)
        labels = ids[positions]
        types = number_segments(ids[None], self.words.end)[0]
        ids[positions] = self.mask
        return MaskedRow(ids, types, positions, labels)

    def ids(self, number: int) -> NDArray[np.int64]:
        """Return a row without masks, a copy."""
        shard = int(np.searchsorted(self.ends, number, side="right"))
        first = 0 if shard == 0 else int(self.ends[shard - 1])
        return self._rows(shard)[number - first].astype(np.int64)

    def _rows(self, shard: int) -> NDArray:
        if shard not in self._opened:
            try:
                rows = np.load(self.shards[shard], mmap_mode="r")
                if rows.ndim != 2 or rows.shape[1] != self.length:
                    raise ValueError(f"rows of shape {rows.shape}")
            except (OSError, ValueError, EOFError) as error:
                raise DataError(f"{self.shards[shard]} cannot be read ({error}); prepare the text again.") from None
            # the number that a pass shuffles together, so that each is opened once
            if len(self._opened) == TOGETHER:
                self._opened.pop(next(iter(self._opened)))
            self._opened[shard] = rows
        return self._opened[shard]

    def __getstate__(self) -> dict[str, Any]:
        # a worker process opens the files itself
        return {**self.__dict__, "_opened": {}}


class StreamBatches(ResumableBatches):
    """A batch sampler over an endless stream of passes over the rows, cut into rounds of `steps` batches (its epochs).

    In each pass shards come in a new order, a few together, with their rows shuffled; a batch may begin in one pass
    and end in the next. Batch b of round e does not depend on what came before: a run resumed in the middle of a shard
    reads on from there without reading what it skips.

    Args:
        sizes: Number of rows of each shard.
        batch_size: Rows per batch.
        steps: Batches per round.
        seed: Key of the order and of the masks.

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
            # the index encodes the draw by which `Rows` masks the row
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


@dataclass(frozen=True, eq=False)
class PretrainingData:
    """A prepared folder.

    Attributes:
        folder: The folder.
        record: Its record.
        words: Its word pieces.
        masked: Share of tokens that are masked.
        dev_rows: Maximum number of rows of dev.
        test_rows: Maximum number of rows of test.
    """

    folder: Path
    record: dict[str, Any]
    words: WordPieces
    masked: float
    dev_rows: int | None
    test_rows: int | None

    @property
    def fingerprint(self) -> str:
        """Digest of everything the data depends on."""
        return str(self.record["fingerprint"])

    @property
    def shards(self) -> list[int]:
        """Number of rows of each shard."""
        return list(self.record["shards"])

    @cached_property
    def train(self) -> Rows:
        """The training split."""
        return self._rows([name_shard(number) for number in range(len(self.shards))], self.shards, None)

    @cached_property
    def dev(self) -> Rows:
        """The dev split."""
        return self._rows(["dev.npy"], [self.record["rows"]["dev"]], self.dev_rows)

    @cached_property
    def test(self) -> Rows:
        """The test split."""
        return self._rows(["test.npy"], [self.record["rows"]["test"]], self.test_rows)

    def summary(self) -> str:
        """Return the size of the text and of its splits."""
        rows, record = self.record["rows"], self.record
        return (
            f"{record['corpus']}: {record['documents']:,} documents; {rows['train']:,} rows of {record['length']} "
            f"tokens to train on in {len(self.shards)} shard{'s' * (len(self.shards) != 1)}, {len(self.dev):,} dev, "
            f"{len(self.test):,} test; {record['vocabulary_size']:,} word pieces, {record['tokenizer']}"
        )

    def _rows(self, names: Sequence[str], sizes: Sequence[int], most: int | None) -> Rows:
        places = [self.folder / name for name in names]
        return Rows(places, sizes, self.words, self.masked, int(self.record["length"]), most)


def open_text(folder: Path, masked: float, dev_rows: int | None, test_rows: int | None) -> PretrainingData:
    """Return a prepared folder.

    Raises:
        DataError: It lacks a file, or is no such folder.
    """
    record = read_json(folder / RECORD)
    try:
        names = [name_shard(number) for number in range(len(record["shards"]))] + ["dev.npy", "test.npy", TOKENIZER]
        for number in (record["length"], record["vocabulary_size"], record["rows"]["train"]):
            int(number)
        str(record["fingerprint"])
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{folder / RECORD} is not the record of prepared text; name another folder.") from None
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder} lacks {missing[0]}; prepare the text again.")
    return PretrainingData(folder, record, read_word_pieces(folder / TOKENIZER), masked, dev_rows, test_rows)


def load_text(
    place: Path,
    preparation: TextPreparation,
    cache: Path,
    masked: float,
    dev_rows: int | None,
    test_rows: int | None,
    *,
    progress: bool = False,
) -> PretrainingData:
    """Return the data of a text file or folder, prepared once in `cache`.

    Raises:
        DataError: There is no text, or it is bad; see `prepare_text`.
    """
    files = find_files(place)
    fingerprint = compute_fingerprint(files, preparation)
    folder = cache / f"pretraining-{fingerprint}"
    if not folder.exists():
        prepare_text(files, preparation, fingerprint, folder, progress=progress)
    return open_text(folder, masked, dev_rows, test_rows)
