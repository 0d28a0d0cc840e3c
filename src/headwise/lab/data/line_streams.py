"""Lines in, lines out: a stream of text that is answered line by line, in memory that does not grow with it.

Owns the reading of lines, the window inside which they are answered together, and the order and the count of what is
written: one line out for each line in. Must not know what an answer is, nor where the streams come from.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import IO, NamedTuple, TypeVar

from headwise.errors import DataError, require_integer

# Bytes of a line that are looked at: far more than any sentence. A stream without ends of lines still fits in memory.
LONGEST_LINE = 1 << 16

Read = TypeVar("Read")


class TextLine(NamedTuple):
    """A line of a stream: its number from 1, its text without its end, and whether more of it was left out."""

    number: int
    text: str
    cut: bool = False


def read_lines(stream: IO[bytes], name: str) -> Iterator[TextLine]:
    r"""Yield the lines of a stream as they come, whether they end in LF or CRLF; the last may lack its end.

    Args:
        stream: UTF-8 text, with or without a byte order mark.
        name: What messages call it.

    Raises:
        DataError: A line is not UTF-8; the message names it.

    Example:
        >>> import io
        >>> [line.text for line in read_lines(io.BytesIO(b"a b\r\n\nc"), "standard input")]
        ['a b', '', 'c']
    """
    for number, (raw, cut) in enumerate(_raw_lines(stream), start=1):
        try:
            # a line that was cut may end inside a character
            text, _ = codecs.utf_8_decode(raw, "strict", not cut)
        except UnicodeDecodeError as error:
            raise DataError(f"{name}, line {number}: not UTF-8 ({error.reason}); convert the text.") from error
        yield TextLine(number, text.removeprefix("\ufeff") if number == 1 else text, cut)


def answer_lines(
    lines: Iterable[Read],
    answer: Callable[[list[Read]], list[str]],
    output: IO[bytes],
    *,
    window: int,
    done: Callable[[int], None] = lambda _lines: None,
) -> None:
    """Write one line for each line, in their order, flushed after each window.

    Lines before one that cannot be read are still answered.

    Args:
        lines: What was read of each line.
        answer: Given the lines of a window, returns a line for each.
        output: Where to.
        window: Lines read before the first of them is written.
        done: Told after each window how many lines are written.

    Raises:
        SettingError: `window` is below 1.
        DataError: A line cannot be read.
    """
    require_integer("window", window, low=1)
    coming = iter(lines)
    written, fault = 0, None
    while fault is None:
        held: list[Read] = []
        try:
            # grows line by line, so that what came before a fault is not lost
            held.extend(islice(coming, window))
        except DataError as error:
            fault = error
        if not held:
            break
        output.write("".join(f"{text}\n" for text in answer(held)).encode())
        output.flush()
        written += len(held)
        done(written)
    if fault is not None:
        raise fault


def _raw_lines(stream: IO[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield each line without its end, and whether more of it was left out."""
    while raw := stream.readline(LONGEST_LINE):
        piece, left_out = raw, 0
        while len(piece) == LONGEST_LINE and not piece.endswith(b"\n"):
            piece = stream.readline(LONGEST_LINE)
            left_out += len(piece.rstrip(b"\r\n"))
        yield raw.removesuffix(b"\n").removesuffix(b"\r"), left_out > 0
