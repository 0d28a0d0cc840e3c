"""Documents to pre-train on, read in pieces from text files of any size that are never loaded whole."""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headwise.errors import DataError
from headwise.lab.data.arrays import read_numbered_lines

FORMS = (
    "a file or a folder of files: .txt with a blank line between documents, or .jsonl with an object a line whose "
    '"text" is a document, each plain or .gz'
)
TEXT, LINES = (".txt", ".txt.gz"), (".jsonl", ".jsonl.gz")
# Characters of a piece of a document and bytes of a piece of a line, so that memory does not grow with either.
LONGEST, LONGEST_LINE = 100_000, 1 << 20
BOM = "\ufeff"
# JSON may name halves of a surrogate pair, which are no text.
HALF = re.compile("[\ud800-\udfff]")


class Piece(NamedTuple):
    """A piece of a document, or of a line.

    Attributes:
        text: Its text, without the end of the line.
        begins: Whether it is the first piece.
        ends: Whether it is the last piece.
    """

    text: str
    begins: bool
    ends: bool

    @property
    def is_blank(self) -> bool:
        """Whether it is a whole line of white space."""
        return self.begins and self.ends and not self.text.strip()


def find_files(place: Path) -> tuple[Path, ...]:
    """Return the text files of a path in the order they are read.

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


def read_pieces(path: Path) -> Iterator[Piece]:
    """Yield the documents of a file in pieces of at most 100,000 characters, cut at blanks; empty ones are left out.

    Raises:
        DataError: The file cannot be read, or a line of a .jsonl file is no object with a text.
    """
    found = _read_objects(path) if path.name.endswith(LINES) else _read_paragraphs(path)
    for document in found:
        yield from _cut(document)


def _read_objects(path: Path) -> Iterator[Iterator[str]]:
    for number, line in read_numbered_lines(path):
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


def _read_paragraphs(path: Path) -> Iterator[Iterator[str]]:
    """Yield the text of each document in parts, lazily: a document ends when the next one is requested."""
    parts = read_lines(path)
    first = next((part for part in parts if not part.is_blank), None)

    def document(begin: Piece) -> Iterator[str]:
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
            pass  # the caller may not have read the document to its end
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


def read_lines(path: Path, longest: int = LONGEST_LINE) -> Iterator[Piece]:
    """Yield the lines of a UTF-8 text file in pieces, unpacked when it ends in `.gz`; memory does not grow with a line.

    Args:
        path: The file.
        longest: Maximum number of bytes per piece.

    Raises:
        DataError: The file cannot be read, unpacked or decoded; the message names the line reached.
    """
    number, begins, decoder = 1, True, codecs.getincrementaldecoder("utf-8-sig")()
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            while raw := stream.readline(longest):
                ends = raw.endswith(b"\n")
                text = decoder.decode(raw)
                yield Piece(text.rstrip("\r\n") if ends else text, begins, ends)
                begins, number = ends, number + ends
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: not UTF-8 ({error.reason}); convert the file.") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}, after line {number - 1}: cannot be read ({error}); fetch the file again.") from error
