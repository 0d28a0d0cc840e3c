"""Lines in, translations out: a stream of text through a translator.

Owns what is said of lines too long. Reading and writing lines is `line_streams`'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import IO, Protocol

from headwise.lab.data.line_streams import LONGEST_LINE, TextLine, answer_lines


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

    Lines are translated window by window; inside a window those of like length go together.

    Args:
        translator: What translates.
        lines: The lines; blanks around them do not count.
        output: As `line_streams.answer_lines` takes it.
        window: Likewise.
        warn: Told, in a sentence, of each line too long to be translated whole.
        done: As `line_streams.answer_lines` takes it.

    Raises:
        SettingError: `window` is below 1.
        DataError: A line cannot be read.
    """

    def translations(held: list[TextLine]) -> list[str]:
        sources = translator.encode([line.text.strip() for line in held])
        for line, source in zip(held, sources, strict=True):
            if line.cut or len(source) > translator.longest:
                warn(_too_long(line, len(source), translator.longest))
        return translator.translate([source[: translator.longest] for source in sources])

    answer_lines(lines, translations, output, window=window, done=done)


def _too_long(line: TextLine, subwords: int, longest: int) -> str:
    size = f"over {LONGEST_LINE:,} bytes" if line.cut else f"{subwords:,} subwords"
    kept = min(subwords, longest)
    return f"line {line.number} has {size}; its first {kept:,} subwords are translated: give one sentence a line."
