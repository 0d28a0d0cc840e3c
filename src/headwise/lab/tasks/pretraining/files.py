"""Text to pre-train on, of any size: documents in pieces, one after another, from files that are never loaded whole.

Owns the forms of files and what a document is in each. Must not know tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headwise.errors import DataError
from headwise.lab.data.arrays import numbered_lines
from headwise.lab.data.text_files import TextPart, bounded_lines

FORMS = (
    "a file or a folder of files: .txt with a blank line between documents, or .jsonl with an object a line whose "
    '"text" is a document, each plain or .gz'
)
TEXT, LINES = (".txt", ".txt.gz"), (".jsonl", ".jsonl.gz")
# Characters of a piece, so that memory does not grow with a document.
LONGEST = 100_000
BOM = "\ufeff"
# JSON may name halves of a surrogate pair, which are no text.
HALF = re.compile("[\ud800-\udfff]")


class Piece(NamedTuple):
    """A part of a document.

    Attributes:
        text: Its text.
        begins: Whether a document begins with it.
        ends: Whether the document ends with it.
    """

    text: str
    begins: bool
    ends: bool


def text_files(place: Path) -> tuple[Path, ...]:
    """Return the files of a place in the order they are read.

    Raises:
        DataError: There is none.
    """
    if place.is_file() and place.name.endswith((*TEXT, *LINES)):
        return (place,)
    if place.is_dir():
        found = [path for path in sorted(place.rglob("*")) if path.is_file() and path.name.endswith((*TEXT, *LINES))]
        found = [path for path in found if not any(part.startswith(".") for part in path.relative_to(place).parts)]
        if found:
            return tuple(found)
    state = "does not exist" if not place.exists() else "holds no text" if place.is_dir() else "is of another form"
    raise DataError(f"{place} {state}; expected {FORMS}.")


def pieces(path: Path) -> Iterator[Piece]:
    """Yield the documents of a file in pieces of at most 100,000 characters, cut at blanks; empty ones are left out.

    Raises:
        DataError: The file cannot be read, or a line of a .jsonl file is no object with a text.
    """
    found = _objects(path) if path.name.endswith(LINES) else _paragraphs(path)
    for document in found:
        yield from _cut(document)


def _objects(path: Path) -> Iterator[Iterator[str]]:
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            text = json.loads(line.removeprefix(BOM))["text"]
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise DataError(f'{path}, line {number}: expected a JSON object with a document under "text".')
        broken = HALF.search(text)
        if broken is not None:
            raise DataError(
                f"{path}, line {number}: character {broken.start() + 1} of the document is half of a surrogate pair; "
                "take it out, as where a text was cut inside an emoji."
            )
        yield iter((text,))


def _paragraphs(path: Path) -> Iterator[Iterator[str]]:
    """Yield the text of each document in parts, lazily: a document is over when the next one is asked for."""
    parts = bounded_lines(path)
    first = next((part for part in parts if not part.is_blank), None)

    def document(begin: TextPart) -> Iterator[str]:
        yield begin.text
        for part in parts:
            if part.begins:
                if part.is_blank:
                    return
                yield "\n"
            yield part.text

    while first is not None:
        rest = document(first)
        yield rest
        for _ in rest:
            pass  # whoever read the document did not read it to its end
        first = next((part for part in parts if not part.is_blank), None)


def _cut(parts: Iterator[str]) -> Iterator[Piece]:
    held, begins = "", True
    for part in parts:
        held, start = held + part, 0
        while len(held) - start > LONGEST:
            blank = max(held.rfind(mark, start + 1, start + LONGEST) for mark in " \n\t")
            end = blank if blank > 0 else start + LONGEST
            if held[start:end].strip():
                yield Piece(held[start:end], begins, ends=False)
                begins = False
            start = end
        held = held[start:]
    if held.strip() or not begins:
        yield Piece(held, begins, ends=True)
