"""The readers of the sentence task: Yelp, SNLI, SICK and PAN's author profiles, and a user's own file or folder.

The reader of PAN's author profiles (2013 to 2016): the tweets of each author, and the author's age.

There is one XML file per author with a document per tweet, and `truth.txt` with lines `author:::gender:::age`.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from xml.etree import ElementTree as ET

from headwise.errors import DataError
from headwise.input_files import is_file, open_input, parse_json, read_numbered_lines
from headwise.texts.labeled_texts import (
    LABEL_NAMES,
    LabeledText,
    Layout,
    find_layout,
    find_names,
    has_splits,
    join_labels,
    read_labeled,
)
from headwise.texts.tables import USUAL, Columns, Table, read_table

TRUTH = "truth.txt"
BETWEEN = ":::"
# Age of authors whose age is unknown.
UNKNOWN = "xx-xx"
# tags, but not text between "<" and ">" signs
TAG = re.compile(r"</?[A-Za-z][^<>]*>")
LONG_REFERENCE = re.compile(r"&#[0-9]{100,};?")


@dataclass(frozen=True)
class Profile:
    """One tweet with its author and the author's age; `number` counts an author's tweets."""

    author: str
    age: str
    text: str
    number: int
    path: Path


@dataclass(frozen=True)
class Profiles:
    """The tweets of all authors with a known age, and the number of those without, who are left out."""

    tweets: tuple[Profile, ...]
    ageless: int


def find_truth(folder: Path) -> Path | None:
    """Return the file of the authors' ages, or None if a folder holds no profiles."""
    found = folder / TRUTH
    return found if is_file(found) and any(folder.glob("*.xml")) else None


def read_profiles(folder: Path) -> Profiles:
    """Return the tweets of all authors without markup; empty tweets and authors of age XX-XX are left out.

    Raises:
        DataError: A line of the truth is malformed, an author has no file or no age, or a file is not XML; the message
            names it.
    """
    ages = _read_ages(folder / TRUTH)
    found: list[Profile] = []
    for path in sorted(folder.glob("*.xml")):
        # later corpora append the author's language and more to the name
        author = next((name for name in (path.stem, path.stem.partition("_")[0]) if name in ages), None)
        if author is None:
            raise DataError(f"{path}: {folder / TRUTH} has no line for author {path.stem!r}; add it or take the file.")
        found += _read_tweets(path, author, ages[author])
    present = {profile.author for profile in found}
    absent = next((author for author in ages if author not in present), None)
    if absent is not None:
        raise DataError(f"{folder / TRUTH} names author {absent!r:.60}, of whom {folder} holds no tweet; add the file.")
    tweets = tuple(profile for profile in found if profile.age != UNKNOWN)
    if not tweets:
        raise DataError(f"{folder / TRUTH} knows the age of no author; expected author{BETWEEN}gender{BETWEEN}age.")
    return Profiles(tweets, sum(age == UNKNOWN for age in ages.values()))


def _read_ages(path: Path) -> dict[str, str]:
    ages: dict[str, str] = {}
    for number, line in read_numbered_lines(path):
        if not line.strip():
            continue
        fields = [field.strip() for field in line.split(BETWEEN)]
        if len(fields) < 3 or not fields[0] or not fields[2]:
            raise DataError(f"{path}, line {number}: {line[:60]!r}; expected author{BETWEEN}gender{BETWEEN}age.")
        if fields[0] in ages:
            raise DataError(f"{path}, line {number}: author {fields[0]!r:.60} occurs a second time; keep one line.")
        ages[fields[0]] = fields[2].lower()
    return ages


def _read_tweets(path: Path, author: str, age: str) -> list[Profile]:
    texts = []
    try:
        with open_input(path) as stream:
            for _, element in ET.iterparse(stream):
                if element.tag == "document":
                    texts.append(_clean("".join(element.itertext())))
                    element.clear()
    except (ET.ParseError, LookupError, ValueError, OSError) as error:
        # an encoding that is not known, or of several bytes, is named in the first line
        line = error.position[0] if isinstance(error, ET.ParseError) else 1
        raise DataError(
            f"{path}, line {line}: no XML that can be read ({error}); expected UTF-8 with a document a tweet: convert "
            "the file, or fetch it again."
        ) from None
    return [Profile(author, age, text, number, path) for number, text in enumerate(texts, start=1) if text]


def _clean(text: str) -> str:
    # Python reads no number of so many digits
    whole = LONG_REFERENCE.sub("\N{REPLACEMENT CHARACTER}", TAG.sub(" ", text))
    return " ".join(html.unescape(whole).split())


# The released code takes the first lines of Yelp's own file.
YELP_LINES = 504_000
YELP = ("review.json", "yelp_academic_dataset_review.json")
SICK: Mapping[str, str] = {"train": "SICK_train.txt", "dev": "SICK_trial.txt", "test": "SICK_test_annotated.txt"}
# The first of these that names a column, where two others are named as texts.
PAIR_LABELS = ("gold_label", "entailment_judgment", "label", *sorted(LABEL_NAMES - {"label"}))
PAIR_TEXTS = (("premise", "hypothesis"), ("sentence1", "sentence2"), ("sentence_a", "sentence_b"))
# SNLI's label of pairs on which its annotators did not agree.
UNDECIDED = "-"


@dataclass(frozen=True)
class Example:
    """One example of a file.

    Attributes:
        label: Its label.
        texts: Its text, or the two of a pair.
        group: What may not be in two splits: the text, the premise of a pair, or the author.
        line: Its line number, for messages.
    """

    label: str
    texts: tuple[str, ...]
    group: str
    line: int


@dataclass(frozen=True)
class SentenceSet:
    """A set as it was read.

    Attributes:
        description: What it is, for people.
        splits: Its examples by split: "train", "test" and perhaps "dev", or "all".
        paths: All files that were read.
    """

    description: str
    splits: Mapping[str, Sequence[Example]]
    paths: tuple[Path, ...]


def read_set(place: Path, columns: Columns = USUAL) -> SentenceSet:
    """Return the set that a file or folder holds.

    Recognized in this order: Yelp's reviews (`review.json`, or files `part*.tsv` of stars and review); PAN's author
    profiles (`truth.txt` and one XML file per author); SICK, in the folder or in its subfolder `sick`, if there are no
    files `train` and `test`; and labeled texts as in `labeled_texts`, or pairs: a label, a premise and a hypothesis in
    each row. A single file holds texts or pairs. Blank texts are kept as "".

    Args:
        place: The file or folder.
        columns: The columns of its tables, if they have no usual names.

    Raises:
        DataError: The place does not exist or holds no such set, or a line is malformed; the message names it.
    """
    if is_file(place):
        description, examples = _read_table(place, columns)
        return SentenceSet(description, {"all": examples}, (place,))
    if not place.is_dir():
        raise DataError(f"{place} does not exist; expected a set's folder, or a file of labels and texts.")
    reviews = next((found for name in YELP for found in _find_forms(place, name)), None)
    if reviews is not None:
        return SentenceSet("Yelp reviews by stars", {"all": _read_reviews(reviews)}, (reviews,))
    parts = tuple(sorted([*place.glob("part*.tsv"), *place.glob("part*.tsv.gz")]))
    if parts:
        found = [one for path in parts for one in _read_table(path, columns)[1]]
        return SentenceSet("reviews by stars", join_labels({"all": found}), parts)
    if find_truth(place) is not None:
        profiles = read_profiles(place)
        examples = [Example(one.age, (one.text,), one.author, one.number) for one in profiles.tweets]
        left_out = f" ({profiles.ageless} authors of unknown age left out)" if profiles.ageless else ""
        return SentenceSet(
            f"tweets by their author's age{left_out}",
            {"all": examples},
            tuple(dict.fromkeys(one.path for one in profiles.tweets)),
        )
    return (None if has_splits(place) else _read_sick(place)) or _read_folder(place, columns)


def _read_folder(place: Path, columns: Columns) -> SentenceSet:
    layout, paths = find_layout(place)
    names = {layout.train: "train" if layout.test else "all", layout.dev: "dev", layout.test: "test"}
    tables = {name: _open(path, columns) for name, path in paths.items()}
    if _find_pair(tables[layout.train], columns) is not None:
        pairs = {names[name]: _read_pairs(table, columns) for name, table in tables.items()}
        return SentenceSet("pairs", join_labels(pairs), tuple(paths.values()))
    read = read_labeled(layout, paths, columns)
    return SentenceSet(
        "texts", {names[name]: _make_examples(lines) for name, lines in read.items()}, (*paths.values(),)
    )


def _read_table(path: Path, columns: Columns) -> tuple[str, list[Example]]:
    """Return what a file holds, and its examples."""
    table = _open(path, columns)
    if _find_pair(table, columns) is not None:
        return "pairs of texts", join_labels({"all": _read_pairs(table, columns)})["all"]
    return "texts", _make_examples(read_labeled(Layout("all"), {"all": path}, columns)["all"])


def _open(path: Path, columns: Columns) -> Table:
    return read_table(path, lambda names: bool(_find_named(names) or find_names(names)), columns=columns)


def _read_sick(place: Path) -> SentenceSet | None:
    for folder, name in ((place, "SICK"), (place / "sick", "SICK, since SNLI's training file is absent")):
        paths = {split: folder / file for split, file in SICK.items()}
        if all(is_file(path) for path in paths.values()):
            splits = {split: _read_pairs(_open(path, USUAL), USUAL) for split, path in paths.items()}
            return SentenceSet(name, splits, tuple(paths.values()))
    return None


def _make_examples(lines: Sequence[LabeledText]) -> list[Example]:
    return [Example(one.label, (one.text,), one.text.lower(), one.line) for one in lines]


def _read_pairs(table: Table, columns: Columns) -> list[Example]:
    chosen = _find_pair(table, columns)
    if chosen is None:
        raise DataError(
            f"{table.path}, line {table.rows[0][0]}: expected a label and two texts, or a header that names them "
            "(label, premise, hypothesis)."
        )
    found = []
    for number, fields in table.rows:
        label, one, other = (" ".join(fields[column].split()) for column in chosen)
        if one and other and not label:
            raise DataError(f"{table.path}, line {number}: the label is empty; fill it in or drop the line.")
        if label != UNDECIDED:
            found.append(Example(label.lower(), (one, other), one.lower(), number))
    return found


def _find_pair(table: Table, columns: Columns) -> tuple[int, int, int] | None:
    """Return the columns of the label and of both texts; None for a table of single texts."""
    if len(columns.texts) == 1:
        return None
    if table.header is None:
        # without names a pair has the label first, as in the published files
        names = {field.strip().lower() for field in table.rows[0][1]}
        return (0, 1, 2) if table.width == 3 and names.isdisjoint(("label", "gold_label")) else None
    for name in columns.names:
        table.find(name)
    named = _find_named(table.header, columns)
    if named is None and columns.texts:
        raise DataError(
            f"{table.path}: none of its columns {table.names} is known to hold labels; name it: --label-column."
        )
    return None if named is None else (table.find(named[0]), table.find(named[1]), table.find(named[2]))


def _find_named(fields: Sequence[str], columns: Columns = USUAL) -> tuple[str, str, str] | None:
    """Return the names of the label and of both texts in a header; None where the fields are no header of pairs."""
    names = [field.strip().lower() for field in fields]
    label = columns.label or next((name for name in PAIR_LABELS if name in names), None)
    pairs = (columns.texts,) if columns.texts else PAIR_TEXTS
    one, other = next((pair for pair in pairs if columns.texts or set(pair) <= set(names)), (None, None))
    return None if label is None or one is None or other is None else (label, one, other)


def _read_reviews(path: Path) -> list[Example]:
    found = []
    for number, line in islice(read_numbered_lines(path), YELP_LINES):
        try:
            review = parse_json(line)
            stars, text = _read_stars(review["stars"]), review["text"].split()
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise DataError(
                f"{path}, line {number}: expected a JSON object with stars and text ({error}); correct or drop the "
                "line."
            ) from None
        words = " ".join(text)
        found.append(Example(str(stars), (words,), words.lower(), number))
    return found


def _read_stars(value: str | float) -> int:
    stars = float(value)
    if isinstance(value, bool) or not stars.is_integer():
        raise ValueError(f"{str(value)[:60]} stars")
    return int(stars)


def _find_forms(folder: Path, name: str) -> list[Path]:
    return [path for path in (folder / name, folder / f"{name}.gz") if is_file(path)]
