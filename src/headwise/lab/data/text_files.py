"""Lines of a file in parts of bounded size, for text that may have no ends of lines.

Owns the cutting of a line and of what is decoded at a cut. Must not know what the text is.
"""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headwise.errors import DataError

# Bytes of a part at most.
LONGEST = 1 << 20


class TextPart(NamedTuple):
    """A part of a line, without the line's end.

    Attributes:
        text: Its text.
        begins: Whether a line begins with it.
        ends: Whether the line ends with it.
    """

    text: str
    begins: bool
    ends: bool

    @property
    def is_blank(self) -> bool:
        """Whether it is a whole line without anything to see."""
        return self.begins and self.ends and not self.text.strip()


def bounded_lines(path: Path, longest: int = LONGEST) -> Iterator[TextPart]:
    """Yield the lines of a UTF-8 text file in parts, unpacked when it ends in `.gz`; memory does not grow with a line.

    Args:
        path: The file.
        longest: Bytes of a part at most.

    Raises:
        DataError: The file cannot be read, unpacked or decoded; the message names the line reached.
    """
    number, begins, decoder = 1, True, codecs.getincrementaldecoder("utf-8-sig")()
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            while raw := stream.readline(longest):
                ends = raw.endswith(b"\n")
                text = decoder.decode(raw)
                yield TextPart(text.rstrip("\r\n") if ends else text, begins, ends)
                begins, number = ends, number + ends
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: not UTF-8 ({error.reason}); convert the file.") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}, after line {number - 1}: cannot be read ({error}); fetch the file again.") from error
