"""Readers of parallel text: two files of which line n of one translates line n of the other.

Three formats, each possibly gzipped: plain lines; the tagged lines of the IWSLT training files (`train.tags.*`); and
the segments `<seg id="1"> text </seg>` of the official dev and test sets (`.sgm`, `.xml`).

Custom corpora, and what `--data` may name: a known corpus, a custom folder, or two files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from headwise.errors import DataError, SettingError
from headwise.input_files import describe_place, is_file, read_numbered_lines
from headwise_lab.tasks.translation.corpora import CORPORA, Corpus, Layout, Part, find_files, find_present

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
    """Yield the pairs of two files, in order."""
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
    """Yield the lines of text of one file, without the blanks around them."""
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


DEV_NAMES = "dev", "valid", "val"
FORMS = (
    f"a folder with the files of {', '.join(CORPORA)}; FOLDER:en-de for your own train.en and train.de; "
    "or two files, my.en,my.de"
)


def find_corpus(place: Path) -> tuple[Corpus, Path]:
    """Return the corpus at a place, and the folder its files are looked for in.

    Args:
        place: A folder with the files of a known corpus; `FOLDER:en-de` for your own `train.en` and `train.de`, and
            likewise dev (or valid or val) and test; or two files aligned by line, `my.en,my.de`, source first. A split
            that is not there is cut from training; see `make_custom_corpus`.

    Example:
        >>> try:
        ...     find_corpus(Path("nowhere"))
        ... except DataError as error:
        ...     print(str(error).partition(";")[0])
        nowhere does not exist
    """
    if place.is_dir():
        return _known_corpus(place), place
    text = str(place)
    folder, _, direction = text.rpartition(":")
    if folder and Path(folder).is_dir():
        return make_folder_corpus(Path(folder), *_sides(Path(folder), direction)), Path(folder)
    if "," in text:
        return _two_files([Path(part.strip()) for part in text.split(",")])
    raise DataError(f"{folder or place} {describe_place(Path(folder or place))}; expected {FORMS}.")


def make_custom_corpus(train: Part, source_language: str, target_language: str, **splits: Part) -> Corpus:
    """Return a corpus of custom files; a dev or test split that is not given is cut from training.

    A cut split has at most 2,000 pairs and at most a twentieth of training. Pairs are drawn by a keyed hash of the
    source line, so that no source line of a cut split is in training.

    Example:
        >>> make_custom_corpus(Part("my.de", "my.en"), "de", "en", test=Part("t.de", "t.en")).layouts[0].test
        (Part(source='t.de', target='t.en'),)
    """
    given = {name: (part,) for name, part in splits.items()}
    dev, test = given.pop("dev", ()), given.pop("test", ())
    layout = Layout("own", (train,), dev, test, tuple(given.items()))
    return Corpus("own", source_language, target_language, (layout,))


def make_folder_corpus(folder: Path, source_language: str, target_language: str) -> Corpus:
    """Return a corpus of a custom folder: `train.de`, `train.en` and likewise dev (or valid or val) and test."""
    sides = source_language, target_language
    if source_language == target_language:
        raise SettingError(f"source and target language are both {source_language!r}; expected two.")

    def part(name: str) -> Part | None:
        there = {side: _find_side(folder, f"{name}.{side}") for side in sides}
        source, target = there.values()
        if source and target:
            return Part(source, target)
        for side, found in there.items():
            if found:
                raise DataError(f"{folder} has {found} but no {name}.{(set(sides) - {side}).pop()}.")
        return None

    train, test = part("train"), part("test")
    if train is None:
        raise DataError(f"{folder} lacks train.{sides[0]} and train.{sides[1]}, plain or with .gz.")
    devs = {name: kept for name in DEV_NAMES if (kept := part(name))}
    if len(devs) > 1:
        both = " and ".join(f"{name}.{sides[0]}" for name in devs)
        raise DataError(f"{folder} has both {both}; expected one of them.")
    found = {"dev": next(iter(devs.values()), None), "test": test}
    used = {name for kept in (train, *found.values()) if kept for name in (kept.source, kept.target)}
    absent = [name for name, kept in found.items() if kept is None]
    others = {path.name.removesuffix(".gz") for path in folder.iterdir()} - used
    idle = sorted(name for name in others if name.endswith(SEGMENTED))
    if absent and idle:
        raise DataError(
            f"{folder} has {idle[0]} and no {' and '.join(absent)} split, which would be cut from training; call the "
            f"segments {absent[0]}.{sides[0]}.sgm and {absent[0]}.{sides[1]}.sgm, or take them away."
        )
    return make_custom_corpus(train, *sides, **{name: kept for name, kept in found.items() if kept})


def _known_corpus(folder: Path) -> Corpus:
    faults = []
    for corpus in CORPORA.values():
        try:
            find_files(corpus, folder)
        except DataError as error:
            faults.append(str(error))
        else:
            return corpus
    sides = _languages(folder)
    if len(sides) > 1:
        one, other = sides[:2]
        raise DataError(
            f"{folder} has {' and '.join(f'train.{side}' for side in sides)}; say which is translated into "
            f"which: {folder}:{one}-{other} or {folder}:{other}-{one}."
        )
    raise DataError(f"{folder} holds no corpus that is known; expected {FORMS}. {faults[0]}")


def _two_files(files: list[Path]) -> tuple[Corpus, Path]:
    if len(files) != 2 or files[0] == files[1]:
        raise DataError(
            f"{','.join(map(str, files))} are {len(files)} files, {len(set(files))} of them different; expected two: "
            "source,target, such as my.en,my.de."
        )
    for path in files:
        if find_present(path.parent, str(path.absolute())) is None:
            raise DataError(
                f"{path} {describe_place(path)}; expected a text file, plain or with .gz, one sentence a line."
            )
    names = [path.name.removesuffix(".gz") for path in files]
    names = [next((name.removesuffix(end) for end in SEGMENTED if name.endswith(end)), name) for name in names]
    endings = [name.rpartition(".")[2] for name in names]
    # a.txt and b.txt differ in what comes before the ending
    languages = endings if endings[0] != endings[1] else names
    part = Part(*(str(path.absolute()) for path in files))
    return make_custom_corpus(part, *languages), files[0].parent


def _find_side(folder: Path, name: str) -> str | None:
    """Return the name of a side that is there, as lines or as segments."""
    forms = [form for form in (name, *(f"{name}{ending}" for ending in SEGMENTED)) if find_present(folder, form)]
    if len(forms) > 1:
        raise DataError(f"{folder} has both {' and '.join(forms)}; expected one of them.")
    return forms[0] if forms else None


def _sides(folder: Path, direction: str) -> tuple[str, str]:
    """Return source and target of `en-de`; a language may contain a hyphen, as in `pt-BR-en`."""
    parts = direction.split("-")
    cuts = [("-".join(parts[:cut]), "-".join(parts[cut:])) for cut in range(1, len(parts))]
    known = _languages(folder)
    fitting = [cut for cut in cuts if set(cut) <= set(known)]
    if not cuts or not all(direction.split("-")):
        raise DataError(f"{direction!r} is no direction; expected source-target, such as {folder}:en-de.")
    return (fitting or cuts)[0]


def _languages(folder: Path) -> list[str]:
    """Return the languages there are training files of, in order."""
    names = {path.name.removesuffix(".gz") for path in folder.glob("train.*") if is_file(path)}
    return sorted(name.removeprefix("train.") for name in names if name.count(".") == 1)
