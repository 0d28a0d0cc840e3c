"""Readers of parallel text: two files of which line n of one translates line n of the other.

Three formats, each possibly gzipped: plain lines; the tagged lines of the IWSLT training files (`train.tags.*`); and
the segments `<seg id="1"> text </seg>` of the official dev and test sets (`.sgm`, `.xml`).
"""

import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from headwise.errors import DataError
from headwise.input_files import read_numbered_lines

# Neither can match from two places over the same text: time grows with the line, whatever is in it.
SEGMENT_TAG = re.compile(r"<(/?)seg\b([^<>]*)>", re.IGNORECASE)
SEGMENT_ID = re.compile(r"\bid=\"([^\"]*)\"", re.IGNORECASE)
# lines of an IWSLT training file that are not part of a talk; title and description are text in both languages
NOT_SPOKEN = re.compile(r"</?(?:url|talkid|keywords|speaker|reviewer|translator|doc)\b", re.IGNORECASE)
TITLE = re.compile(r"</?(?:title|description)>", re.IGNORECASE)
ENTITY = re.compile(r"&(?:amp|lt|gt|quot|apos|#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6});")
NAMED = {"&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'"}

SEGMENTED = (".sgm", ".sgml", ".xml")
# How BPE, SentencePiece, WordPiece and OpenNMT's joiner mark pieces of words, and how these are joined again.
MARKS = {
    "@@": (re.compile(r"\S@@(?:\s|$)"), r"sed -E 's/@@( |$)//g'"),
    "▁": (re.compile("▁"), "sed 's/ //g; s/▁/ /g'"),
    "##": (re.compile(r"\s##\w"), "sed 's/ ##//g'"),
    "￭": (re.compile("￭"), "sed -E 's/ ?￭ ?//g'"),
}


class Line(NamedTuple):
    """A line of one side: its number in the file, its text, and the segment's id where the file has them."""

    number: int
    text: str
    segment: str = ""


class TextPair(NamedTuple):
    """A line and its translation."""

    source: Line
    target: Line


def read_pairs(source: Path, target: Path) -> Iterator[TextPair]:
    """Yield the pairs of two files, in order.

    Raises:
        DataError: The files have different numbers of lines or other segments, a line is malformed or not UTF-8, or a
            file cannot be read. The message names file and line.
    """
    sides = read_side(source), read_side(target)
    for pairs, (first, second) in enumerate(zip_longest(*sides)):
        if first is None or second is None:
            left, right = (
                pairs + (line is not None) + sum(1 for _ in rest)
                for line, rest in zip((first, second), sides, strict=True)
            )
            repeated = max(left, right) % max(1, min(left, right)) == 0 and _has_segments(source, target)
            advice = " Where a file holds several references, or sources too, keep one of them." if repeated else ""
            raise DataError(
                f"{source} has {left:,} lines of text and {target} has {right:,}; expected as many: line n of one "
                f"translates line n of the other.{advice}"
            )
        if first.segment != second.segment and first.segment and second.segment:
            raise DataError(
                f"{source}, line {first.number} is segment {first.segment!r:.60} but {target}, line {second.number} is "
                f"segment {second.segment!r:.60}; expected the same segments in the same order."
            )
        yield TextPair(first, second)


def read_side(path: Path) -> Iterator[Line]:
    """Yield the lines of text of one file, without the blanks around them.

    Raises:
        DataError: A line is malformed or not UTF-8, or the file cannot be read.
    """
    if _has_segments(path):
        return _segments(path)
    if path.name.startswith("train.tags."):
        return _talks(path)
    return _plain(path)


def find_mark(text: str) -> str:
    """Return the mark by which a line is seen to be cut into subwords; "" for none.

    >>> find_mark("ein klei@@ ner hund"), find_mark("▁ein ▁hund"), find_mark("me@@home or C# ##")
    ('@@', '▁', '')
    """
    return next((mark for mark, (shape, _) in MARKS.items() if mark in text and shape.search(text)), "")


def _has_segments(*paths: Path) -> bool:
    return all(path.name.removesuffix(".gz").endswith(SEGMENTED) for path in paths)


def _plain(path: Path) -> Iterator[Line]:
    for number, line in read_numbered_lines(path):
        yield Line(number, line.strip())


def _talks(path: Path) -> Iterator[Line]:
    for number, line in read_numbered_lines(path):
        text = line.strip()
        if NOT_SPOKEN.match(text) is None:
            yield Line(number, TITLE.sub("", text).strip())


def _segments(path: Path) -> Iterator[Line]:
    for number, line in read_numbered_lines(path):
        # not an XML parser: official files hold bare ampersands and documents without a root
        tags = list(SEGMENT_TAG.finditer(line))
        identifiers = [SEGMENT_ID.search(tag[2]) for tag in tags[::2]]
        paired = [tag[1] for tag in tags] == ["", "/"] * (len(tags) // 2)
        if not paired or None in identifiers or line.lower().count("<seg") > len(identifiers):
            raise DataError(
                f'{path}, line {number}: expected <seg id="..."> text </seg> on one line; join or correct the line.'
            )
        for begin, end, identifier in zip(tags[::2], tags[1::2], identifiers, strict=True):
            text = ENTITY.sub(_character, line[begin.end() : end.start()]).strip()
            yield Line(number, text, identifier[1] if identifier else "")


def _character(entity: re.Match[str]) -> str:
    name = entity[0]
    if name in NAMED:
        return NAMED[name]
    code = int(name[3:-1], 16) if name[2] in "xX" else int(name[2:-1])
    # what is no character stays as it is written
    return chr(code) if code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF else name
