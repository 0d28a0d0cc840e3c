"""Lines of a text as batches a trained model takes, with what role masks need to know of their tokens.

Owns the reading of a text file, the batch, and which characters a token stands for. Must not know models or tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.errors import DataError
from headwise.lab.data.batching import length_sorted
from headwise.roles.word_table import WordTable

BATCH = 32
# The first character of a token and the one after its last; None for a token that is added to the text.
Span = tuple[int, int] | None


@dataclass(frozen=True)
class Pieces:
    """The tokens of a text as `headwise.align` reads them; made by `pieces`."""

    offsets: Sequence[tuple[int, int]]
    sequence_ids: Sequence[int | None]
    special_tokens_mask: Sequence[int]
    attention_mask: Sequence[int]


@dataclass(frozen=True)
class Row:
    """One line of a text.

    Attributes:
        ids: Its token ids.
        tokens: Its tokens as they are to be read.
        spans: The characters of the line each token stands for; None where they are not words of a language.
        table: The words of the line, with their parse if there is one; None where its tokens are no words.
        cut: Whether the line is longer than what was read of it.
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
        number: Its place among the batches.
        places: The place of each line in the text.
        inputs: The model's arguments.
        keep: True where a token is real, [B, n].
        tokens: The tokens of each line as they are to be read.
        encoding: What `headwise.align` takes, for role masks; None where tokens are no words of a language.
        tables: The words of each line, with their parse if there is one; None where tokens are no words.
        cut: How many of the lines are longer than what was read of them.
    """

    number: int
    places: tuple[int, ...]
    inputs: dict[str, Tensor]
    keep: Tensor
    tokens: tuple[tuple[str, ...], ...]
    encoding: Any = None
    tables: tuple[WordTable, ...] | None = None
    cut: int = 0


def pieces(spans: Sequence[Span]) -> Pieces:
    """Return tokens by the characters they stand for.

    >>> pieces([(0, 3), None]).special_tokens_mask
    [0, 1]
    """
    return Pieces(
        [(0, 0) if span is None else span for span in spans],
        [None if span is None else 0 for span in spans],
        [int(span is None) for span in spans],
        [1] * len(spans),
    )


def batched(rows: Sequence[Row], device: torch.device, *, padding: int = 0) -> Iterator[Encoded]:
    """Yield rows in batches of like length: "input_ids" [B, n], padded at the end, and "attention_mask" [B, n].

    >>> batch = next(batched([Row([5, 6], ("a", "b")), Row([7], ("c",))], torch.device("cpu")))
    >>> batch.places, batch.inputs["input_ids"].tolist()
    ((1, 0), [[7, 0], [5, 6]])
    """
    for number, chosen in enumerate(length_sorted([len(row.ids) for row in rows], BATCH)):
        found = [rows[place] for place in chosen]
        width = max(len(row.ids) for row in found)
        ids = torch.tensor([[*row.ids, *[padding] * (width - len(row.ids))] for row in found], device=device)
        lengths = torch.tensor([len(row.ids) for row in found], device=device)
        keep = torch.arange(width, device=device) < lengths[:, None]
        spans = [row.spans for row in found]
        encoding = None if None in spans else [pieces(span) for span in spans if span is not None]
        inputs = {"input_ids": ids, "attention_mask": keep}
        tables = tuple(row.table for row in found if row.table is not None)
        yield Encoded(
            number,
            tuple(map(int, chosen)),
            inputs,
            keep,
            tuple(row.tokens for row in found),
            encoding,
            tables if len(tables) == len(found) else None,
            sum(row.cut for row in found),
        )


def read_sentences(path: Path) -> list[str]:
    """Return the sentences of a file, one a line; empty lines are left out.

    Raises:
        DataError: The file is not UTF-8, or holds no text.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start}); expected text, a sentence a line.") from None
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise DataError(f"{path} holds no text; expected a sentence a line.")
    return found
