"""The data of language modeling: rows of packed text with the positions of their documents.

Documents packed into rows of one length, and the positions by which attention stays inside each document.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from headwise.errors import SettingError
from headwise_lab.data.arrays import digest
from headwise_lab.packed_text.prepare import Packing
from headwise_lab.packed_text.shards import PackedText, RowShards
from headwise_lab.tasks.lm.tokens import TextTokens, learn_tokens, read_tokens
from headwise_lab.training.processes import IGNORED
from headwise_lab.training.start import Start


class Packer:
    """Packs ids into rows without padding; each row begins with the last token of the row before it.

    A document is [start] x_1 ... x_n, and [end] after it where that is another token; else the next document's start
    is its end. As rows overlap by one token, every token but the first is predicted exactly once.

    Args:
        length: Tokens of a row.
        start: Id of the token that documents begin with.
        end: Id of the token that they end with.

    Example:
        >>> packer = Packer(4, start=1, end=2)
        >>> packer.add([7, 8, 9], ends=True).tolist(), packer.held
        ([[1, 7, 8, 9]], [9, 2, 1])
    """

    def __init__(self, length: int, start: int, end: int) -> None:
        if length < 2:
            raise SettingError(f"length is {length}; expected at least 2, a token and the next.")
        self.length, self.start, self.end = length, start, end
        self.held, self.rows = [start], 0

    def add(self, ids: list[int], *, ends: bool) -> NDArray[np.int64]:
        """Add tokens and return the rows that are full now, [R, length]."""
        self.held.extend(ids)
        if ends:
            self.held.extend((self.start,) if self.end == self.start else (self.end, self.start))
        step = self.length - 1
        count = max(0, (len(self.held) - 1) // step)
        made = [self.held[number * step : number * step + self.length] for number in range(count)]
        del self.held[: count * step]
        self.rows += count
        return np.array(made, dtype=np.int64).reshape(count, self.length)


def number_positions(ids: NDArray[np.int64], start: int) -> NDArray[np.int64]:
    """Return the position of each token in its document, [*, T], from 0 at the row's beginning where it began before.

    Models of transformers attend inside each run of rising positions only.

    >>> number_positions(np.array([7, 2, 1, 8, 9]), start=1).tolist()
    [0, 1, 0, 1, 2]
    """
    places = np.arange(ids.shape[-1])
    begins = np.where(ids == start, places, 0)
    return places - np.maximum.accumulate(begins, axis=-1)


def make_labels(ids: NDArray[np.int64], start: int, end: int) -> NDArray[np.int64]:
    """Return the labels of a row: its tokens, but the start of a document after the end of another, [*, T].

    Where one token is both, a start is the end of the document before it, and is predicted.

    >>> make_labels(np.array([7, 2, 1, 8]), start=1, end=2).tolist()
    [7, 2, -100, 8]
    """
    return ids.copy() if start == end else np.where(ids == start, IGNORED, ids)


PACKING = Packing("lm", "lm-1", learn_tokens, read_tokens, lambda length, words: Packer(length, words.start, words.end))


@dataclass(frozen=True, eq=False)
class TextRow:
    """A row of packed text.

    Attributes:
        input_ids: Its tokens, int64 [T].
        position_ids: Position of each in its document, int64 [T].
        labels: The tokens that are predicted, -100 where none is, int64 [T]; models shift them.
    """

    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    labels: NDArray[np.int64]


class Rows(Dataset[TextRow]):
    """The rows of one split; `rows[n]` is row n modulo their number: a stream counts on from pass to pass."""

    def __init__(self, shards: RowShards, words: TextTokens) -> None:
        self.shards, self.start, self.end, self.length = shards, words.start, words.end, shards.length

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, index: int) -> TextRow:
        ids = self.ids(index % len(self))
        return TextRow(ids, number_positions(ids, self.start), make_labels(ids, self.start, self.end))

    def ids(self, number: int) -> NDArray[np.int64]:
        """Return the tokens of a row, a copy."""
        return self.shards.ids(number)


@dataclass(frozen=True, eq=False)
class LmData(PackedText):
    """A prepared folder.

    Attributes:
        start_model: The model that runs begin with; None for new ones.
    """

    words: TextTokens
    start_model: Start | None = None

    @property
    def fingerprint(self) -> str:
        """Digest of everything the data and the model that runs begin with depend on."""
        text = super().fingerprint
        return text if self.start_model is None else digest(f"{text} {self.start_model.fingerprint}")

    def make_rows(self, shards: RowShards) -> Rows:
        """Return the rows with positions and labels."""
        return Rows(shards, self.words)
