"""The data of pre-training: documents packed into rows of one length, masked anew in each pass over them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from headwise.errors import SettingError
from headwise_lab.data.arrays import stable_key
from headwise_lab.packed_text.prepare import Packing
from headwise_lab.packed_text.shards import PackedText, RowShards
from headwise_lab.tasks.pretraining.wordpieces import WordPieces, learn_word_pieces, read_word_pieces

# Share of rows that are one segment (Clark et al. 2020, released code).
ONE_SEGMENT = 0.1
DRAWS = 1 << 64


class Packer:
    """Packs ids into rows [CLS] a ... [SEP], without padding; tokens left over wait for more.

    Documents follow one another with [SEP] between them. A row inside one document is cut into two segments by a [SEP]
    in the middle, except for one in ten, chosen by a hash of its number: fine-tuning sees both.

    Args:
        length: Tokens of a row, specials included.
        start: Id of [CLS].
        end: Id of [SEP].

    Example:
        >>> packer = Packer(6, start=1, end=2)
        >>> packer.add([7, 7, 7, 7, 8, 8], ends=True).tolist()
        [[1, 7, 2, 7, 7, 2]]
        >>> packer.held
        [7, 8, 8, 2]
    """

    def __init__(self, length: int, start: int, end: int) -> None:
        if length < 5:
            raise SettingError(f"length is {length}; expected at least 5, room for two tokens and the special ones.")
        self.length, self.start, self.end = length, start, end
        self.held: list[int] = []
        self.rows = 0

    def add(self, ids: list[int], *, ends: bool) -> NDArray[np.int64]:
        """Add tokens and return the rows that are full now, [R, length]."""
        self.held.extend(ids)
        if ends:
            self.held.append(self.end)
        room, at, made = self.length - 2, 0, []
        while len(self.held) - at >= room + 1:
            if self.held[at] == self.end:
                at += 1
                continue
            body = self.held[at : at + room]
            at += room
            if self.end not in body and self._in_two():
                half = (room - 1) // 2
                body = [*body[:half], self.end, *body[half:-1]]
                at -= 1
            made.append([self.start, *body, self.end])
            self.rows += 1
        del self.held[:at]
        return np.array(made, dtype=np.int64).reshape(len(made), self.length)

    def _in_two(self) -> bool:
        return stable_key("segments", str(self.rows)) / DRAWS >= ONE_SEGMENT


def number_segments(rows: NDArray[np.int64], end: int) -> NDArray[np.int64]:
    """Return the segment of each token: 0 up to the first [SEP] of its row, 1 after it, [B, T].

    >>> number_segments(np.array([[1, 7, 2, 8, 2]]), end=2).tolist()
    [[0, 0, 0, 1, 1]]
    """
    ended = np.cumsum(rows == end, axis=1)
    return np.minimum(ended - (rows == end), 1)


def draw_masked(
    row: NDArray[np.int64], special: tuple[int, ...], count: int, *, draw: int, number: int
) -> NDArray[np.int64]:
    """Return `count` positions of a row to mask, sorted; special tokens are masked only where no others are left.

    >>> draw_masked(np.array([1, 7, 8, 9, 2]), (1, 2), 2, draw=5, number=0).tolist()
    [2, 3]
    """
    order = np.random.default_rng([draw, number]).random(len(row))
    order[np.isin(row, special)] += 1.0
    return np.sort(np.argsort(order, kind="stable")[:count])


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

    def make_rows(self, shards: RowShards) -> Rows:
        """Return the rows with masks."""
        return Rows(shards, self.words, self.masked)
