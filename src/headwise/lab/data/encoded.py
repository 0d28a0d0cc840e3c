"""Lines of a text encoded and batched for a trained model, with what role masks need to know of their tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.lab.data.batching import batch_by_length
from headwise.lab.data.labeled_texts import Texts, read_texts
from headwise.lab.data.tables import USUAL, Columns
from headwise.roles.word_table import WordTable

BATCH = 32
# Bytes of a line; spaCy takes texts of a million characters.
LONGEST = 1_000_000
# Start and end of a token in characters; None for a special token.
Span = tuple[int, int] | None


@dataclass(frozen=True)
class Pieces:
    """The tokens of a text as `headwise.align` reads them; made by `make_pieces`."""

    offsets: Sequence[tuple[int, int]]
    sequence_ids: Sequence[int | None]
    special_tokens_mask: Sequence[int]
    attention_mask: Sequence[int]


@dataclass(frozen=True)
class Row:
    """One line of a text.

    Attributes:
        ids: Its token ids.
        tokens: Its tokens, as text.
        spans: The characters of each token in the line; None if they are not words of a language.
        table: The words of the line, with their parse if there is one; None if its tokens are not words.
        cut: Whether the line was truncated.
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
        encoding: Argument of `headwise.align`, for role masks; None if tokens are not words of a language.
        tables: The words of each line, with their parse if there is one; None if tokens are not words.
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
        width = max(len(row.ids) for row in found)
        ids = torch.tensor([[*row.ids, *[padding] * (width - len(row.ids))] for row in found], device=device)
        lengths = torch.tensor([len(row.ids) for row in found], device=device)
        keep = torch.arange(width, device=device) < lengths[:, None]
        spans = [row.spans for row in found]
        encoding = None if None in spans else [make_pieces(span) for span in spans if span is not None]
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


def read_sentences(path: Path, columns: Columns = USUAL) -> Texts:
    """Return the texts of a file with one a line, or of a table; see `read_texts`.

    Raises:
        DataError: The file cannot be read, or holds no text.
    """
    return read_texts(path, columns, LONGEST)
