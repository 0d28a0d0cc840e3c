"""Answering a stream of text line by line in bounded memory."""

import codecs
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import IO, NamedTuple, TypeVar

from headwise.errors import DataError, require_integer

# Maximum number of bytes read of a line, far more than any sentence: a stream without newlines still fits in memory.
LONGEST_LINE = 1 << 16

Read = TypeVar("Read")


class TextLine(NamedTuple):
    """A line of a stream: its number from 1, its text without the newline, and whether it was truncated."""

    number: int
    text: str
    cut: bool = False


def read_lines(stream: IO[bytes], name: str) -> Iterator[TextLine]:
    r"""Yield the lines of a stream as they arrive, ending in LF or CRLF; the last may lack its newline.

    Example:
        >>> import io
        >>> [line.text for line in read_lines(io.BytesIO(b"a b\r\n\nc"), "standard input")]
        ['a b', '', 'c']
    """
    for number, (raw, cut) in enumerate(_read_raw(stream), start=1):
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
    """Write one output line per input line in order, flushed after each window.

    Lines before one that cannot be read are still answered.
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


def _read_raw(stream: IO[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield each line without its newline, and whether it was truncated."""
    while raw := stream.readline(LONGEST_LINE):
        piece, left_out = raw, 0
        while len(piece) == LONGEST_LINE and not piece.endswith(b"\n"):
            piece = stream.readline(LONGEST_LINE)
            left_out += len(piece.rstrip(b"\r\n"))
        yield raw.removesuffix(b"\n").removesuffix(b"\r"), left_out > 0
