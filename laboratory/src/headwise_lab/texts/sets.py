"""Sets of texts as they are read: labeled texts and pairs, Yelp, SNLI, SICK and PAN's author profiles (2013 to 2016).

An author profile is one XML file per author with a document per tweet, and `truth.txt` has lines
`author:::gender:::age`.
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

# The split of a set that is not split.
ALL = "all"
TRUTH, BETWEEN = "truth.txt", ":::"
# Age of authors whose age is unknown.
UNKNOWN_AGE = "xx-xx"
# tags, but not text between "<" and ">" signs
TAG = re.compile(r"</?[A-Za-z][^<>]*>")
LONG_REFERENCE = re.compile(r"&#[0-9]{100,};?")
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
    """One example: its label, its text or the two of a pair, and its place, for messages; a blank text is ""."""

    label: str
    texts: tuple[str, ...]
    line: int
    path: Path
    author: str = ""

    @property
    def group(self) -> str:
        """What may not be in two splits: the author, else the text or the premise of a pair."""
        return self.author or self.texts[0].lower()


@dataclass(frozen=True)
class TextSet:
    """A set as it was read.

    `splits` are "train", "test" and perhaps "dev", or "all"; `paths` are all files that were read, and `blank` is the
    number of blank texts that the reader left out.
    """

    description: str
    splits: Mapping[str, Sequence[Example]]
    paths: tuple[Path, ...]
    blank: int = 0

    @classmethod
    def of_lines(
        cls, layout: Layout, read: Mapping[str, Sequence[LabeledText]], paths: Mapping[str, Path], blank: int = 0
    ) -> TextSet:
        """Return labeled texts as a set, given which file or partition is which split."""
        names = _name_splits(layout)
        splits = {
            names[name]: [Example(one.label, (one.text,), one.line, paths[name]) for one in lines]
            for name, lines in read.items()
        }
        return cls("texts", splits, tuple(dict.fromkeys(paths.values())), blank)


def list_labels(found: TextSet) -> tuple[str, ...]:
    """Return the labels of the training examples, which must be all there are; examples without a text have no label.

    Raises:
        DataError: There are fewer than two, or an example of dev or test has another.
    """
    splits = {name: [one for one in examples if all(one.texts)] for name, examples in found.splits.items()}
    train = splits[ALL] if ALL in splits else splits["train"]
    labels = tuple(sorted({one.label for one in train}))
    if len(labels) < 2:
        files = ", ".join(path.name for path in found.paths[:4])
        raise DataError(f"{files}: {len(labels)} labels in {len(train)} training examples; expected at least two.")
    for examples in splits.values():
        strange = next((one for one in examples if one.label not in labels), None)
        if strange is not None:
            raise DataError(
                f"{strange.path}, line {strange.line}: label {strange.label!r:.60} does not occur in "
                f"{train[0].path.name}; expected one of {', '.join(labels[:8]):.200}."
            )
    return labels


def read_set(place: Path, columns: Columns = USUAL) -> TextSet:
    """Return the set that a file or folder holds.

    Recognized in this order: Yelp's reviews (`review.json`, or files `part*.tsv` of stars and review); PAN's author
    profiles (`truth.txt` and one XML file per author); SICK, in the folder or in its subfolder `sick`, if there are no
    files `train` and `test`; and labeled texts as in `labeled_texts`, or pairs: a label, a premise and a hypothesis in
    each row. A single file holds texts or pairs. Blank texts are kept as "".

    Raises:
        DataError: The place does not exist or holds no such set, or a line is malformed; the message names it.
    """
    if is_file(place):
        return _read_tables(Layout(ALL), {ALL: place}, columns, pairs="pairs of texts")
    if not place.is_dir():
        raise DataError(f"{place} does not exist; expected a set's folder, or a file of labels and texts.")
    reviews = next((path for name in YELP for path in (place / name, place / f"{name}.gz") if is_file(path)), None)
    if reviews is not None:
        return TextSet("Yelp reviews by stars", {ALL: _read_reviews(reviews)}, (reviews,))
    parts = tuple(sorted([*place.glob("part*.tsv"), *place.glob("part*.tsv.gz")]))
    if parts:
        found = [one for path in parts for one in _read_tables(Layout(ALL), {ALL: path}, columns).splits[ALL]]
        return TextSet("reviews by stars", join_labels({ALL: found}), parts)
    if is_file(place / TRUTH) and any(place.glob("*.xml")):
        return read_profiles(place)
    sick = None if has_splits(place) else _read_sick(place)
    return sick or _read_tables(*find_layout(place), columns)


def _read_sick(place: Path) -> TextSet | None:
    for folder, name in ((place, "SICK"), (place / "sick", "SICK, since SNLI's training file is absent")):
        paths = {split: folder / file for split, file in SICK.items()}
        if all(is_file(path) for path in paths.values()):
            splits = {split: _read_pairs(_open(path, USUAL), USUAL) for split, path in paths.items()}
            return TextSet(name, splits, tuple(paths.values()))
    return None


def _read_tables(layout: Layout, paths: Mapping[str, Path], columns: Columns, pairs: str = "pairs") -> TextSet:
    """Return the texts or the pairs of tables; `pairs` is what pairs are called."""
    tables = {name: _open(path, columns) for name, path in paths.items()}
    if _find_pair(tables[layout.train], columns) is None:
        return TextSet.of_lines(layout, read_labeled(layout, paths, columns), paths)
    names = _name_splits(layout)
    read = {names[name]: _read_pairs(table, columns) for name, table in tables.items()}
    return TextSet(pairs, join_labels(read), tuple(paths.values()))


def _name_splits(layout: Layout) -> dict[str | None, str]:
    return {layout.train: "train" if layout.test else ALL, layout.dev: "dev", layout.test: "test"}


def _open(path: Path, columns: Columns) -> Table:
    return read_table(path, lambda names: bool(_find_named(names) or find_names(names)), columns=columns)


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
            found.append(Example(label.lower(), (one, other), number, table.path))
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
    """Return the names of the label and of both texts in a header; None if the fields are not a header of pairs."""
    names = [field.strip().lower() for field in fields]
    label = columns.label or next((name for name in PAIR_LABELS if name in names), None)
    usual = next((pair for pair in PAIR_TEXTS if set(pair) <= set(names)), None)
    texts = columns.texts or usual
    return None if label is None or texts is None else (label, texts[0], texts[1])


def _read_reviews(path: Path) -> list[Example]:
    found = []
    for number, line in islice(read_numbered_lines(path), YELP_LINES):
        try:
            review = parse_json(line)
            stars, text = float(review["stars"]), " ".join(review["text"].split())
            if isinstance(review["stars"], bool) or not stars.is_integer():
                raise ValueError(f"{str(review['stars'])[:60]} stars")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise DataError(
                f"{path}, line {number}: expected a JSON object with stars and text ({error}); correct or drop the "
                "line."
            ) from None
        found.append(Example(str(int(stars)), (text,), number, path))
    return found


def read_profiles(folder: Path) -> TextSet:
    """Return the tweets of all authors without markup; empty tweets and authors of age XX-XX are left out.

    Raises:
        DataError: A line of the truth is malformed, an author has no file or no age, or a file is not XML; the message
            names it.
    """
    truth = folder / TRUTH
    ages: dict[str, str] = {}
    for number, line in read_numbered_lines(truth):
        if not line.strip():
            continue
        fields = [field.strip() for field in line.split(BETWEEN)]
        if len(fields) < 3 or not fields[0] or not fields[2]:
            raise DataError(f"{truth}, line {number}: {line[:60]!r}; expected author{BETWEEN}gender{BETWEEN}age.")
        if fields[0] in ages:
            raise DataError(f"{truth}, line {number}: author {fields[0]!r:.60} occurs a second time; keep one line.")
        ages[fields[0]] = fields[2].lower()
    tweets: list[Example] = []
    for path in sorted(folder.glob("*.xml")):
        # later corpora append the author's language and more to the name
        author = next((name for name in (path.stem, path.stem.partition("_")[0]) if name in ages), None)
        if author is None:
            raise DataError(f"{path}: {truth} has no line for author {path.stem!r}; add it or take the file.")
        texts = enumerate(_read_tweets(path), start=1)
        tweets += [Example(ages[author], (text,), number, path, author) for number, text in texts if text]
    present = {one.author for one in tweets}
    absent = next((author for author in ages if author not in present), None)
    if absent is not None:
        raise DataError(f"{truth} names author {absent!r:.60}, of whom {folder} holds no tweet; add the file.")
    known = [one for one in tweets if one.label != UNKNOWN_AGE]
    if not known:
        raise DataError(f"{truth} knows the age of no author; expected author{BETWEEN}gender{BETWEEN}age.")
    ageless = sum(age == UNKNOWN_AGE for age in ages.values())
    left_out = f" ({ageless} authors of unknown age left out)" if ageless else ""
    return TextSet(
        f"tweets by their author's age{left_out}", {ALL: known}, tuple(dict.fromkeys(one.path for one in known))
    )


def _read_tweets(path: Path) -> list[str]:
    texts = []
    try:
        with open_input(path) as stream:
            for _, element in ET.iterparse(stream):
                if element.tag == "document":
                    # Python reads no number of so many digits
                    text = LONG_REFERENCE.sub("\N{REPLACEMENT CHARACTER}", TAG.sub(" ", "".join(element.itertext())))
                    texts.append(" ".join(html.unescape(text).split()))
                    element.clear()
    except (ET.ParseError, LookupError, ValueError, OSError) as error:
        # an encoding that is not known, or of several bytes, is named in the first line
        line = error.position[0] if isinstance(error, ET.ParseError) else 1
        raise DataError(
            f"{path}, line {line}: no XML that can be read ({error}); expected UTF-8 with a document a tweet: convert "
            "the file, or fetch it again."
        ) from None
    return texts
