"""The data of pre-training: rows of packed text, masked anew in each pass over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from headwise_lab.packed_text.prepare import Packing
from headwise_lab.packed_text.shards import PackedText, RowShards
from headwise_lab.tasks.pretraining.rows import Packer, draw_masked, number_segments
from headwise_lab.tasks.pretraining.wordpieces import WordPieces, learn_word_pieces, read_word_pieces

PACKING = Packing(
    "pretraining",
    "pretraining-2",
    learn_word_pieces,
    read_word_pieces,
    lambda length, words: Packer(length, words.start, words.end),
)


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
        shards: The rows.
        words: The word pieces.
        masked: Share of the tokens between the outer special ones that are masked, in (0, 1).
    """

    def __init__(self, shards: RowShards, words: WordPieces, masked: float) -> None:
        self.shards, self.words, self.length = shards, words, shards.length
        self.special = (words.start, words.end, words.padding)
        self.mask = words.mask
        self.count = max(1, round(masked * (self.length - 2)))

    def __len__(self) -> int:
        return len(self.shards)

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
        return self.shards.ids(number)


@dataclass(frozen=True, eq=False)
class PretrainingData(PackedText):
    """A prepared folder, of which a share of the tokens is masked.

    Attributes:
        masked: Share of tokens that are masked.
    """

    words: WordPieces
    masked: float

    @cached_property
    def train(self) -> Rows:
        """The training split."""
        return self._read("train")

    @cached_property
    def dev(self) -> Rows:
        """The dev split."""
        return self._read("dev")

    @cached_property
    def test(self) -> Rows:
        """The test split."""
        return self._read("test")

    def _read(self, split: str) -> Rows:
        return Rows(self.read_split(split), self.words, self.masked)
