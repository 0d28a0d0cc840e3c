"""The data of language modeling: rows of packed text with the positions of their documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from headwise.lab.data.arrays import digest
from headwise.lab.packed_text.prepare import Packing
from headwise.lab.packed_text.shards import PackedText, RowShards
from headwise.lab.tasks.lm.rows import Packer, make_labels, number_positions
from headwise.lab.tasks.lm.tokens import TextTokens, learn_tokens, read_tokens
from headwise.lab.training.start import Start

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

    @staticmethod
    def batch(rows: Sequence[TextRow]) -> dict[str, Tensor]:
        """Return rows collated into the model's arguments."""
        names = ("input_ids", "position_ids", "labels")
        return {name: torch.from_numpy(np.stack([getattr(row, name) for row in rows])) for name in names}


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

    @cached_property
    def train(self) -> Rows:
        """The training split."""
        return Rows(self.read_split("train"), self.words)

    @cached_property
    def dev(self) -> Rows:
        """The dev split."""
        return Rows(self.read_split("dev"), self.words)

    @cached_property
    def test(self) -> Rows:
        """The test split."""
        return Rows(self.read_split("test"), self.words)
