"""Documents to pre-train on, read in pieces from text files of any size that are never loaded whole."""

import codecs
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headwise.errors import DataError
from headwise.input_files import is_file, open_input, parse_json, read_numbered_lines, require_text, split_lines
from headwise.texts.tables import flatten

FORMS = (
    "a file or a folder of files: .txt with a blank line between documents, or .jsonl with an object a line whose "
    '"text" is a document, each plain or .gz'
)
TEXT, LINES = (".txt", ".txt.gz"), (".jsonl", ".jsonl.gz")
# Characters of a piece of a document and bytes of a piece of a line, so that memory does not grow with either.
LONGEST, LONGEST_LINE = 100_000, 1 << 20
# Bytes of a line of .jsonl, which is read whole: any book fits.
LONGEST_OBJECT = 1 << 26
BOM = "\ufeff"
# The usual key of a document.
KEY = "text"


class Piece(NamedTuple):
    """A piece of a document, or of a line without its end; and whether it is the first and the last piece."""

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
    if is_file(place) and place.name.lower().endswith((*TEXT, *LINES)):
        return (place,)
    if place.is_dir():
        named = [path for path in sorted(place.rglob("*")) if path.name.lower().endswith((*TEXT, *LINES))]
        shown = [path for path in named if not any(part.startswith(".") for part in path.relative_to(place).parts)]
        found = [path for path in shown if is_file(path)]
        if found:
            return tuple(found)
    state = "holds no text" if place.is_dir() else "is of another form" if place.exists() else "does not exist"
    raise DataError(f"{place} {state}; expected {FORMS}.")


def read_pieces(path: Path, column: str = KEY) -> Iterator[Piece]:
    """Yield the documents of a file in pieces of at most 100,000 characters, cut at blanks; a blank one is "".

    `column` is the key of the documents in a .jsonl file; "data.body" is a key of an object inside another.

    Raises:
        DataError: The file cannot be read, or a line of a .jsonl file is no object with a text.
    """
    has_keys = path.name.lower().endswith(LINES)
    if column != KEY and not has_keys:
        raise DataError(f"{path} has documents without keys; expected JSON Lines, .jsonl, or omit --text-column.")
    for document in _read_objects(path, column) if has_keys else _read_paragraphs(path):
        yield from _cut(document)


def _read_objects(path: Path, column: str) -> Iterator[Iterator[str]]:
    for number, line in read_numbered_lines(path, LONGEST_OBJECT):
        if not line.strip():
            continue
        fault = f'expected a JSON object with a document under "{column}"'
        try:
            value = parse_json(line.removeprefix(BOM))
            keys = flatten(value) if isinstance(value, dict) else {}
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {fault} ({error}); correct or drop the line.") from None
        if column not in keys:
            known = f"its keys are {', '.join(keys)}"[:300] if keys else f"{str(value)[:60]} has no keys"
            raise DataError(
                f"{path}, line {number}: {fault} ({known}); name the key, --text-column, or correct or drop the line."
            )
        text = keys[column]
        if not isinstance(text, str | None):
            raise DataError(f"{path}, line {number}: {fault} ({str(text)[:60]} is no text); correct or drop the line.")
        yield iter((text or "",))


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
    else:
        yield Piece("", begins=True, ends=True)


def read_lines(path: Path, longest: int = LONGEST_LINE) -> Iterator[Piece]:
    """Yield the lines of a UTF-8 text file in pieces of at most so many bytes, unpacked when it ends in `.gz`.

    Raises:
        DataError: The file cannot be read, unpacked or decoded; the message names the line reached.
    """
    number, begins, decoder = 1, True, codecs.getincrementaldecoder("utf-8-sig")()
    try:
        with open_input(path) as stream:
            for raw in split_lines(stream, longest):
                ends = raw.endswith(b"\n")
                require_text(path, number, raw, begins=begins)
                text = decoder.decode(raw)
                yield Piece(text.rstrip("\r\n") if ends else text, begins, ends)
                begins, number = ends, number + ends
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: not UTF-8 ({error.reason}); convert the file.") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}, after line {number - 1}: cannot be read ({error}); fetch the file again.") from error
