"""Labeled texts: tables with a label and a text in each row."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

from headwise.errors import DataError
from headwise.input_files import LONGEST_LINE, is_file
from headwise.texts.tables import STATE, SUFFIXES, USUAL, Columns, Table, count_fields, read_table

LABEL_NAMES = {"label", "labels", "class", "category", "target", "sentiment", "y"}
TEXT_NAMES = {"text", "texts", "sentence", "review", "comment", "document", "content", "question"}
SURE_NAMES = {"text", "texts", "sentence"}
# A column with a larger share of different values holds texts, not labels.
MOST_LABELS = 0.5
NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?")

Labeled = TypeVar("Labeled", bound=Any)


@dataclass(frozen=True)
class LabeledText:
    """One line of a file: its label, its text and its number."""

    label: str
    text: str
    line: int


class Texts(list[str]):
    """The texts of a file, and the number of blank ones that were left out."""

    blank: int = 0


@dataclass(frozen=True)
class Layout:
    """Which files of a folder hold which split, by their names without suffix; the others are cut from training."""

    train: str
    dev: str | None = None
    test: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The required files."""
        return tuple(name for name in (self.train, self.dev, self.test) if name is not None)


# The first that fits is used: SST has both whole sentences and the phrases it is trained on.
LAYOUTS = (
    Layout("all"),
    Layout("train_phrases", "dev", "test"),
    Layout("train", "dev", "test"),
    Layout("train", test="test"),
)


def find_layout(place: Path) -> tuple[Layout, dict[str, Path]]:
    """Return the layout of a folder, or of one file, and the path of each of its names.

    Raises:
        DataError: There is no such place, its files fit no layout, or a file is present in two forms.
    """
    if is_file(place):
        return Layout("all"), {"all": place}
    if not place.is_dir():
        raise DataError(f"{place} does not exist; expected a file of labels and texts, or a folder of such files.")
    for layout in LAYOUTS:
        found = {name: _find_forms(place, name) for name in layout.names}
        if all(found.values()):
            double = next((paths for paths in found.values() if len(paths) > 1), None)
            if double is not None:
                names = " and ".join(path.name for path in double)
                raise DataError(f"{place} holds {names}; expected one of them: take the other away.")
            return layout, {name: paths[0] for name, paths in found.items()}
    wanted = "; or ".join(" and ".join(layout.names) for layout in LAYOUTS)
    below = sorted(child.name for child in place.iterdir() if child.is_dir() and _fits_some(child))
    advice = f" There are such files in {place / below[0]}: name that folder." if below else ""
    raise DataError(
        f"{place} holds no set of texts; expected files {wanted}, as .tsv, .csv or .jsonl, plain or .gz.{advice}"
    )


def read_labeled(
    layout: Layout,
    paths: Mapping[str, Path],
    columns: Columns = USUAL,
) -> dict[str, list[LabeledText]]:
    """Return the lines of each file of a layout, tables as `read_table` reads them.

    A first line that names both columns ("label" and "text", or a similar word, or those of `columns`) is a header;
    there may then be other columns. Without a header there are two columns, and labels are in the one with fewer
    different values in the training file. Blank texts are kept as "", whatever their label; the other labels are those
    of `join_labels`.

    Raises:
        DataError: A line has another number of fields or an empty label, there are fewer than two labels, or no column
            holds labels. The message names the file, the line and the fault.
    """
    files = {name: open_labeled(path, columns) for name, path in paths.items()}
    train = files[layout.train]
    guessed = find_columns(train, columns) or _guess_columns(train)
    if train.header is None:
        _require_no_header(train, guessed[0])
    read = join_labels(
        {name: _read_lines(file, find_columns(file, columns) or guessed) for name, file in files.items()}
    )
    if len({one.label for one in read[layout.train] if one.text}) < 2:
        raise DataError(f"{train.path} has one label in {len(train.rows)} lines; expected at least two different ones.")
    return read


def join_labels(read: Mapping[str, Sequence[Labeled]]) -> dict[str, list[Labeled]]:
    """Return examples with labels that are equal as numbers written alike, in the shortest way, if all are numbers.

    One file may have 1 where another has 1.0, as pandas writes a column in which a number is missing.

    Args:
        read: By name, dataclasses with a field `label`; an empty one is no label.

    >>> read = join_labels({"train": [LabeledText("1.0", "a", 1)], "test": [LabeledText("1", "b", 1)]})
    >>> [one.label for lines in read.values() for one in lines]
    ['1', '1']
    """
    labels = {one.label for lines in read.values() for one in lines} - {""}
    shortest: dict[Decimal, str] = {}
    if all(NUMBER.fullmatch(label) for label in labels):
        for label in sorted(labels, key=lambda label: (len(label), label)):
            shortest.setdefault(Decimal(label), label)
    if len(shortest) in (0, len(labels)):
        return {name: [*lines] for name, lines in read.items()}
    return {
        name: [replace(one, label=shortest[Decimal(one.label)]) if one.label else one for one in lines]
        for name, lines in read.items()
    }


def read_texts(path: Path, columns: Columns = USUAL, longest: int = LONGEST_LINE) -> Texts:
    """Return the texts of a table, ignoring its labels if it has any, or of a file with one a line, but blank ones.

    Without a header, texts are in the column with more different values.

    Raises:
        DataError: A row has another number of fields, no column can hold texts, or there is no text.
    """

    def is_header(fields: Sequence[str]) -> bool:
        # there may be no labels, and other names of texts may be labels
        return find_names(fields) is not None or not SURE_NAMES.isdisjoint(field.lower() for field in fields)

    table = read_table(path, is_header, columns=columns, fewest=1, longest=longest)
    if table.header is None:
        counts = [len(set(column)) for column in zip(*(fields for _, fields in table.rows), strict=True)]
        column = counts.index(max(counts))
    else:
        column = _find_column(table, columns.text, TEXT_NAMES, "text")
    every = [fields[column].strip() for _, fields in table.rows]
    texts = Texts(text if table.width == 1 and "\n" not in text else " ".join(text.split()) for text in every if text)
    if not texts:
        raise DataError(f"{path} holds no text; expected one a line, perhaps with a label.")
    texts.blank = len(every) - len(texts)
    return texts


def describe_blank(texts: Sequence[object]) -> str:
    """Return how many texts of a file were blank, as a sentence; "" for none.

    >>> describe_blank(["a"])
    ''
    """
    blank = texts.blank if isinstance(texts, Texts) else 0
    return f"Texts without a word that were left out: {blank:,}." if blank else ""


def open_labeled(path: Path, columns: Columns = USUAL) -> Table:
    """Return the table of a file, whose columns may be named or, if there are two, guessed.

    Raises:
        DataError: See `read_table`; or there are more columns, without names.
    """
    table = read_table(path, lambda fields: find_names(fields) is not None, columns=columns)
    if table.header is None and table.width != 2:
        number, fields = table.rows[0]
        advice = f"; {STATE}" if table.width == 1 else ""
        raise DataError(
            f"{path}, line {number}: {count_fields(len(fields))}; expected 2, a label and a text, or a header that "
            f"names them: label and text, or what --label-column and --text-column say{advice}."
        )
    return table


def find_names(fields: Sequence[str]) -> tuple[int, int] | None:
    """Return the columns of labels and texts if the fields are a header."""
    names = [field.strip().lower() for field in fields]
    label = next((i for i, name in enumerate(names) if name in LABEL_NAMES), None)
    text = next((i for i, name in enumerate(names) if name in TEXT_NAMES), None)
    return None if label is None or text is None else (label, text)


def find_columns(table: Table, columns: Columns) -> tuple[int, int] | None:
    """Return the columns of labels and texts that a header names; None without a header.

    Raises:
        DataError: The header does not name them, or names two columns alike.
    """
    if table.header is None:
        return None
    for name in columns.names:
        table.find(name)
    return _find_column(table, columns.label, LABEL_NAMES, "label"), _find_column(
        table, columns.text, TEXT_NAMES, "text"
    )


def _find_column(table: Table, given: str | None, usual: Collection[str], kind: str) -> int:
    found = table.find_any(usual) if given is None else table.find(given)
    if found is None:
        raise DataError(
            f"{table.path}: none of its columns {table.names} is known to hold {kind}s; name it: --{kind}-column."
        )
    return found


def _read_lines(table: Table, columns: tuple[int, int]) -> list[LabeledText]:
    label, text = columns
    found = [LabeledText(row[label].strip(), " ".join(row[text].split()), number) for number, row in table.rows]
    empty = next((one.line for one in found if one.text and not one.label), None)
    if empty is not None:
        raise DataError(f"{table.path}, line {empty}: the label is empty; fill it in or drop the line.")
    return found


def _require_no_header(file: Table, label: int) -> None:
    """Refuse a first line that looks like a header: its label is the only one that occurs once."""
    counts = Counter(fields[label].strip() for _, fields in file.rows)
    number, first = file.rows[0]
    lone = [name for name, count in counts.items() if count == 1]
    if lone == [first[label].strip()] and len(counts) > 2:
        raise DataError(
            f"{file.path}, line {number}: the label {lone[0]!r:.60} is that of no other line; if the line names the "
            "columns, name them with --label-column and --text-column, else give that class more lines."
        )


def _guess_columns(table: Table) -> tuple[int, int]:
    counts = [len({fields[column] for _, fields in table.rows}) for column in (0, 1)]
    label = 0 if counts[0] <= counts[1] else 1
    if counts[0] == counts[1] or min(counts) > max(2, MOST_LABELS * len(table.rows)):
        raise DataError(
            f"{table.path} has {counts[0]} and {counts[1]} different values in its columns of {len(table.rows)} lines, "
            "so it cannot be told which holds labels; put a first line that names them: label and text."
        )
    return label, 1 - label


def has_splits(folder: Path) -> bool:
    """Return whether a folder has files of training and test."""
    return bool(_find_forms(folder, "train") and _find_forms(folder, "test"))


def _find_forms(folder: Path, name: str) -> list[Path]:
    forms = (f"{name}{suffix}{packed}" for suffix in SUFFIXES for packed in ("", ".gz"))
    return [folder / form for form in forms if is_file(folder / form)]


def _fits_some(folder: Path) -> bool:
    return any(all(_find_forms(folder, name) for name in layout.names) for layout in LAYOUTS)


TRAIN, DEV, TEST = "tr", "va", "te"
