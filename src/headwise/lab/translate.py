"""Lines in, translations out: a stream of text through a translator, in memory that does not grow with it.

Owns the reading of lines, the window inside which lines change places, and the order and the count of what is written:
one line out for each line in. Must not know where the streams come from.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import IO, NamedTuple, Protocol

from headwise.checks import DataError, require_integer

__all__ = ["TextLine", "read_lines", "translate_lines"]

# Bytes of a line that are looked at: far more than any sentence. A stream without ends of lines still fits in memory.
LONGEST_LINE = 1 << 16


class TextLine(NamedTuple):
    """A line of a stream: its number from 1, its text without blanks around it, and whether its end was left out."""

    number: int
    text: str
    cut: bool = False


class Translating(Protocol):
    """What translates encoded lines; `translator.Translator` does."""

    @property
    def longest(self) -> int:
        """Subwords of a line that are translated."""
        ...

    def encode(self, lines: list[str]) -> list[list[int]]:
        """Return the subwords of each line."""
        ...

    def translate(self, sources: list[list[int]]) -> list[str]:
        """Return the translation of each encoded line."""
        ...


def read_lines(stream: IO[bytes], name: str) -> Iterator[TextLine]:
    r"""Yield the lines of a stream as they come, whether they end in LF or CRLF; the last may lack its end.

    Args:
        stream: UTF-8 text, with or without a byte order mark.
        name: What messages call it.

    Raises:
        DataError: A line is not UTF-8; the message names it.

    Example:
        >>> import io
        >>> [line.text for line in read_lines(io.BytesIO(b"a b\r\n\n c"), "standard input")]
        ['a b', '', 'c']
    """
    for number, (raw, cut) in enumerate(_raw_lines(stream), start=1):
        try:
            # a line that was cut may end inside a character
            text, _ = codecs.utf_8_decode(raw, "strict", not cut)
        except UnicodeDecodeError as error:
            raise DataError(f"{name}, line {number}: not UTF-8 ({error.reason}); convert the text.") from error
        yield TextLine(number, (text.removeprefix("\ufeff") if number == 1 else text).strip(), cut)


def translate_lines(
    translator: Translating,
    lines: Iterable[TextLine],
    output: IO[bytes],
    *,
    window: int,
    warn: Callable[[str], None] = lambda _sentence: None,
    done: Callable[[int], None] = lambda _lines: None,
) -> None:
    """Write one line for each line, in their order: its translation, or nothing where it holds nothing.

    Lines are translated window by window; inside a window those of like length go together. What is written is
    flushed after each window. Lines before one that cannot be read are still translated.

    Args:
        translator: What translates.
        lines: The lines.
        output: Where to.
        window: Lines read before the first of them is written.
        warn: Told, in a sentence, of each line too long to be translated whole.
        done: Told after each window how many lines are written.

    Raises:
        SettingError: `window` is below 1.
        DataError: A line cannot be read.
    """
    require_integer("window", window, low=1)
    coming = iter(lines)
    written, fault = 0, None
    while fault is None:
        held: list[TextLine] = []
        try:
            # grows line by line, so that what came before a fault is not lost
            held.extend(islice(coming, window))
        except DataError as error:
            fault = error
        if not held:
            break
        sources = translator.encode([line.text for line in held])
        for line, source in zip(held, sources, strict=True):
            if line.cut or len(source) > translator.longest:
                warn(_too_long(line, len(source), translator.longest))
        cut = [source[: translator.longest] for source in sources]
        output.write("".join(f"{text}\n" for text in translator.translate(cut)).encode())
        output.flush()
        written += len(held)
        done(written)
    if fault is not None:
        raise fault


def _too_long(line: TextLine, subwords: int, longest: int) -> str:
    size = f"over {LONGEST_LINE:,} bytes" if line.cut else f"{subwords:,} subwords"
    kept = min(subwords, longest)
    return f"line {line.number} has {size}; its first {kept:,} subwords are translated: give one sentence a line."


def _raw_lines(stream: IO[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield each line without its end, and whether more of it was left out."""
    while raw := stream.readline(LONGEST_LINE):
        piece, left_out = raw, 0
        while len(piece) == LONGEST_LINE and not piece.endswith(b"\n"):
            piece = stream.readline(LONGEST_LINE)
            left_out += len(piece.rstrip(b"\r\n"))
        yield raw.removesuffix(b"\n").removesuffix(b"\r"), left_out > 0
