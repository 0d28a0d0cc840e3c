"""The readers of the sentence task: Yelp, SNLI, SICK and PAN's author profiles, and a user's own file or folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from headwise.errors import DataError
from headwise.input_files import is_file, read_numbered_lines
from headwise.lab.data.labeled_texts import (
    LABEL_NAMES,
    LabeledText,
    Layout,
    find_header,
    find_layout,
    read_labeled,
    read_rows,
)
from headwise.lab.tasks.sentence.author_profiles import find_truth, read_profiles
from headwise.strict_json import parse_json

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


def read_set(place: Path) -> SentenceSet:
    """Return the set that a file or folder holds.

    Recognized in this order: Yelp's reviews (`review.json`, or files `part*.tsv` of stars and review); PAN's author
    profiles (`truth.txt` and one XML file per author); pairs (`train`, `dev` and `test` with a label, a premise and a
    hypothesis in each line); SICK, in the folder or in its subfolder `sick` if SNLI's training file is absent; and
    labeled texts as in `labeled_texts`. A single file holds texts or pairs.

    Raises:
        DataError: The place does not exist or holds no such set, or a line is malformed; the message names it.
    """
    if is_file(place):
        return _read_file(place)
    if not place.is_dir():
        raise DataError(f"{place} does not exist; expected a set's folder, or a file of labels and texts.")
    reviews = next((found for name in YELP for found in _find_forms(place, name)), None)
    if reviews is not None:
        return SentenceSet("Yelp reviews by stars", {"all": _read_reviews(reviews)}, (reviews,))
    parts = tuple(sorted([*place.glob("part*.tsv"), *place.glob("part*.tsv.gz")]))
    if parts:
        return SentenceSet("reviews by stars", {"all": [one for path in parts for one in _read_texts(path)]}, parts)
    if find_truth(place) is not None:
        profiles = read_profiles(place)
        examples = [Example(one.age, (one.text,), one.author, one.number) for one in profiles.tweets]
        left_out = f" ({profiles.ageless} authors of unknown age left out)" if profiles.ageless else ""
        return SentenceSet(
            f"tweets by their author's age{left_out}",
            {"all": examples},
            tuple(dict.fromkeys(one.path for one in profiles.tweets)),
        )
    return _read_pair_folder(place) or _read_sick(place) or _read_folder(place)


def _read_file(path: Path) -> SentenceSet:
    first = next(read_rows(path), None)
    if first is not None and _find_columns(first[1]) is not None:
        return SentenceSet("pairs of texts", {"all": _read_pairs(path)}, (path,))
    return SentenceSet("texts", {"all": _read_texts(path, keep_empty=False)}, (path,))


def _read_folder(place: Path) -> SentenceSet:
    layout, paths = find_layout(place)
    read = read_labeled(layout, paths)
    names = {layout.train: "train", layout.dev: "dev", layout.test: "test"}
    if layout.test is None:
        names[layout.train] = "all"
    splits = {names[name]: _make_examples(lines) for name, lines in read.items()}
    return SentenceSet("texts", splits, tuple(paths.values()))


def _read_pair_folder(place: Path) -> SentenceSet | None:
    paths = {name: found[0] for name in ("train", "dev", "test") if (found := _find_forms(place, f"{name}.tsv"))}
    if "train" not in paths or "test" not in paths:
        return None
    first = next(read_rows(paths["train"]), None)
    if first is None or _find_columns(first[1]) is None:
        return None
    return SentenceSet("pairs", {name: _read_pairs(path) for name, path in paths.items()}, tuple(paths.values()))


def _read_sick(place: Path) -> SentenceSet | None:
    for folder, name in ((place, "SICK"), (place / "sick", "SICK, since SNLI's training file is absent")):
        paths = {split: folder / file for split, file in SICK.items()}
        if all(is_file(path) for path in paths.values()):
            return SentenceSet(name, {split: _read_pairs(path) for split, path in paths.items()}, tuple(paths.values()))
    return None


def _read_texts(path: Path, *, keep_empty: bool = True) -> list[Example]:
    layout = Layout("all")
    lines = read_labeled(layout, {"all": path})["all"]
    empty = next((one.line for one in lines if not one.text), None)
    if empty is not None and not keep_empty:
        raise DataError(f"{path}, line {empty}: the text is empty; fill it in or drop the line.")
    return _make_examples(lines)


def _make_examples(lines: Sequence[LabeledText]) -> list[Example]:
    return [Example(one.label, (one.text,), one.text.lower(), one.line) for one in lines]


def _read_pairs(path: Path) -> list[Example]:
    rows = read_rows(path)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{path} has no lines; expected a label and two texts in each.")
    columns = _find_columns(first[1])
    if columns is None:
        raise DataError(
            f"{path}, line {first[0]}: expected a label and two texts, or a header that names them (label, premise, "
            "hypothesis)."
        )
    width, found = len(first[1]), []
    for number, fields in [*([] if _find_named(first[1]) else [first]), *rows]:
        if len(fields) != width:
            raise DataError(f"{path}, line {number}: {len(fields)} fields; expected {width} as in the first line.")
        label, one, other = (" ".join(fields[column].split()) for column in columns)
        if not label or not one or not other:
            raise DataError(f"{path}, line {number}: a label or a text is empty; fill it in or drop the line.")
        if label != UNDECIDED:
            found.append(Example(label.lower(), (one, other), one.lower(), number))
    return found


def _find_columns(fields: Sequence[str]) -> tuple[int, int, int] | None:
    """Return the columns of the label and of both texts, from a first line; None where it is none of pairs."""
    if named := _find_named(fields):
        return named
    # without names a pair has the label first, as in the published files
    names = {field.strip().lower() for field in fields}
    headed = find_header(fields) is not None or not names.isdisjoint(("label", "gold_label"))
    return (0, 1, 2) if len(fields) == 3 and not headed else None


def _find_named(fields: Sequence[str]) -> tuple[int, int, int] | None:
    """Return the columns of the label and of both texts that a header names; None where the fields are no header."""
    names = [field.strip().lower() for field in fields]
    label = next((names.index(name) for name in PAIR_LABELS if name in names), None)
    for one, other in PAIR_TEXTS:
        if label is not None and one in names and other in names:
            return label, names.index(one), names.index(other)
    return None


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
