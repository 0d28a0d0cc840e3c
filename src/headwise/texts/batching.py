"""Batches of examples of similar length, in an order that can be resumed; and of encoded lines for a trained model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.utils.data import Sampler

from headwise.errors import DataError, SettingError, require_integer
from headwise.roles.word_table import WordTable
from headwise.texts.labeled_texts import Texts, read_texts
from headwise.texts.tables import USUAL, Columns

# The shorter sides in a batch differ by less than this where there is a choice: less pads them less, more mixes more.
BUCKET = 4


class ResumableBatches(Sampler[list[int]]):
    """A batch sampler whose order depends on a seed and the epoch alone."""

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
    batches, and the batches are shuffled. Every example occurs once per epoch; only the last batch may be short. A run
    resumed in the middle of an epoch sees the same batches, whose number is the same in each epoch.

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
    by length, in an order drawn anew in each epoch among examples of similar length, cut from short to long, and the
    batches are shuffled. The cuts depend on the sorted lengths alone, so the number of batches is the same in each
    epoch. Every example occurs once per epoch. There is no `batch_size`: with several processes accelerate needs
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
    sizes, most, cuts = np.sort(longer), examples or len(longer), [0]
    while cuts[-1] < len(sizes):
        start = cuts[-1]
        low, high = start + 1, min(len(sizes), start + most, start + tokens // int(sizes[start]))
        while low < high:
            middle = (low + high + 1) // 2
            fits = (middle - start) * int(sizes[middle - 1]) <= tokens
            low, high = (middle, high) if fits else (low, middle - 1)
        cuts.append(low)
    return sort_key.astype(narrow), cuts


BATCH = 32
# Bytes of a line; spaCy takes texts of a million characters.
LONGEST = 1_000_000
# Start and end of a token in characters; None for a special token.
Span = tuple[int, int] | None


@dataclass(frozen=True)
class Pieces:
    """The tokens of a text as `headwise.roles.align` reads them; made by `make_pieces`."""

    offsets: Sequence[tuple[int, int]]
    sequence_ids: Sequence[int | None]
    special_tokens_mask: Sequence[int]
    attention_mask: Sequence[int]


@dataclass(frozen=True)
class Row:
    """One line of a text: its tokens by id and as text, and whether it was cut.

    `spans` are the characters of each token in the line, and `table` its words, perhaps parsed; both are None if the
    tokens are not words of a language.
    """

    ids: Sequence[int]
    tokens: tuple[str, ...]
    spans: Sequence[Span] | None = None
    table: WordTable | None = None
    cut: bool = False


@dataclass(frozen=True, eq=False)
class Encoded:
    """A batch of lines.

    Attributes:
        number: Index of the batch.
        places: Index of each line in the text.
        inputs: The model's arguments.
        keep: True where a token is real, [B, n].
        tokens: The tokens of each line, as text.
        encoding: Argument of `headwise.roles.align`; None if tokens are not words of a language.
        tables: The words of each line, perhaps parsed; None if tokens are not words.
        cut: Number of truncated lines.
    """

    number: int
    places: tuple[int, ...]
    inputs: dict[str, Tensor]
    keep: Tensor
    tokens: tuple[tuple[str, ...], ...]
    encoding: Any = None
    tables: tuple[WordTable, ...] | None = None
    cut: int = 0


def make_pieces(spans: Sequence[Span]) -> Pieces:
    """Return tokens given by their characters.

    >>> make_pieces([(0, 3), None]).special_tokens_mask
    [0, 1]
    """
    return Pieces(
        [(0, 0) if span is None else span for span in spans],
        [None if span is None else 0 for span in spans],
        [int(span is None) for span in spans],
        [1] * len(spans),
    )


def collate_rows(rows: Sequence[Row], device: torch.device, *, padding: int = 0) -> Iterator[Encoded]:
    """Yield rows in batches of similar length: "input_ids" [B, n], padded at the end, and "attention_mask" [B, n].

    >>> batch = next(collate_rows([Row([5, 6], ("a", "b")), Row([7], ("c",))], torch.device("cpu")))
    >>> batch.places, batch.inputs["input_ids"].tolist()
    ((1, 0), [[7, 0], [5, 6]])
    """
    for number, chosen in enumerate(batch_by_length([len(row.ids) for row in rows], BATCH)):
        found = [rows[place] for place in chosen]
        ids = pad([row.ids for row in found], padding).to(device)
        lengths = torch.tensor([len(row.ids) for row in found], device=device)
        keep = torch.arange(ids.shape[1], device=device) < lengths[:, None]
        spans = [row.spans for row in found if row.spans is not None]
        tables = tuple(row.table for row in found if row.table is not None)
        yield Encoded(
            number,
            tuple(chosen),
            {"input_ids": ids, "attention_mask": keep},
            keep,
            tuple(row.tokens for row in found),
            [make_pieces(span) for span in spans] if len(spans) == len(found) else None,
            tables if len(tables) == len(found) else None,
            sum(row.cut for row in found),
        )


def read_sentences(path: Path, columns: Columns = USUAL) -> Texts:
    """Return the texts of a file with one a line, or of a table; see `read_texts`."""
    return read_texts(path, columns, LONGEST)
