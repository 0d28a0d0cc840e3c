"""Reading labeled texts: tab- or comma-separated files with a label and a text per line."""

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headwise.errors import DataError
from headwise.input_files import LONGEST_LINE, is_file, read_numbered_lines

DELIMITERS = {".tsv": "\t", ".txt": "\t", ".csv": ","}
LABEL_NAMES = {"label", "labels", "class", "category", "target", "sentiment", "y"}
TEXT_NAMES = {"text", "texts", "sentence", "review", "comment", "document", "content", "question"}
# A column with a larger share of different values holds texts, not labels.
MOST_LABELS = 0.5
QUOTE = '"'


@dataclass(frozen=True)
class LabeledText:
    """One line of a file: its label, its text and its number."""

    label: str
    text: str
    line: int


@dataclass(frozen=True)
class Layout:
    """Which files of a folder hold which split, by their names without suffix.

    Attributes:
        train: The training file, or the only one.
        dev: The dev file; None where dev is cut from the training file.
        test: The test file; None where test is cut from the training file.
    """

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
    raise DataError(f"{place} holds no set of texts; expected files {wanted}, as .tsv or .csv, plain or .gz.{advice}")


def read_labeled(layout: Layout, paths: Mapping[str, Path]) -> dict[str, list[LabeledText]]:
    """Return the lines of each file of a layout.

    A first line that names both columns ("label" and "text", or a similar word) is a header; there may then be other
    columns. Without a header there are two columns, and labels are in the one with fewer different values in the
    training file. Fields of a .csv file are quoted as usual; in a .tsv file a field is unquoted if it begins and ends
    with a quote and doubles each one inside. Empty texts are kept as "": the published sets have some.

    Raises:
        DataError: A line has another number of fields or an empty label, there are fewer than two labels, or no column
            holds labels. The message names the file, the line and the fault.
    """
    files = {name: _File(path, list(read_rows(path))) for name, path in paths.items()}
    train = files[layout.train]
    columns = train.header or _find_columns(train.path, [fields for _, fields in train.body])
    if train.header is None:
        _require_no_header(train, columns[0])
    if len({fields[columns[0]].strip() for _, fields in train.body}) < 2:
        raise DataError(f"{train.path} has one label in {len(train.body)} lines; expected at least two different ones.")
    return {name: file.read_labeled(file.header or columns) for name, file in files.items()}


def read_texts(path: Path) -> list[str]:
    """Return the texts of a file, ignoring its labels if it has any.

    Without a header, texts are in the column with more different values. Empty texts are left out.

    Raises:
        DataError: A line has another number of fields, the columns are ambiguous, or there is no text.
    """
    file = _File(path, list(read_rows(path)), fewest=1)
    counts = [len(set(column)) for column in zip(*(fields for _, fields in file.body), strict=True)]
    column = counts.index(max(counts)) if file.header is None else file.header[1]
    texts = [" ".join(fields[column].split()) for _, fields in file.body if fields[column].strip()]
    if not texts:
        raise DataError(f"{path} holds no text; expected one a line, perhaps with a label.")
    return texts


class _File:
    """The rows of a file, all with the same number of fields."""

    def __init__(self, path: Path, rows: list[tuple[int, list[str]]], *, fewest: int = 2) -> None:
        if not rows:
            raise DataError(f"{path} has no lines; expected a label and a text in each.")
        self.path = path
        self.header = find_header(rows[0][1])
        self.body = rows if self.header is None else rows[1:]
        width = len(rows[0][1])
        if self.header is None and not fewest <= width <= 2:
            raise DataError(
                f"{path}, line {rows[0][0]}: {_count_fields(width)}; expected 2, a label and a text, or "
                "a header that names them."
            )
        for number, fields in self.body:
            if len(fields) != width:
                raise DataError(
                    f"{path}, line {number}: {_count_fields(len(fields))}; expected {width} as in the first line."
                )
        if not self.body:
            raise DataError(f"{path} has a header and no lines; expected a label and a text in each.")

    def read_labeled(self, columns: tuple[int, int]) -> list[LabeledText]:
        """Return the labels and texts of the rows."""
        label, text = columns
        empty = next((number for number, fields in self.body if not fields[label].strip()), None)
        if empty is not None:
            raise DataError(f"{self.path}, line {empty}: the label is empty; fill it in or drop the line.")
        return [LabeledText(fields[label].strip(), " ".join(fields[text].split()), n) for n, fields in self.body]


def read_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number from 1, its fields) of a tab- or comma-separated file; empty lines are skipped.

    Raises:
        DataError: The file cannot be read, or its suffix is not that of a table.
    """
    suffix = (path.with_suffix("") if path.suffix == ".gz" else path).suffix
    if suffix not in DELIMITERS:
        raise DataError(f"{path} is no {', '.join(DELIMITERS)}; rename it after what separates its columns.")
    if suffix == ".csv":
        yield from _read_csv(path)
        return
    for number, line in read_numbered_lines(path):
        fields = line.split("\t")
        if fields != [""]:
            yield number, [_unquote(field) for field in fields]


def _read_csv(path: Path) -> Iterator[tuple[int, list[str]]]:
    lines = (f"{line}\n" for _, line in read_numbered_lines(path))
    reader = csv.reader(lines, strict=True)
    first = 1
    try:
        while (fields := _read_fields(reader)) is not None:
            if fields:
                yield first, fields
            first = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path}, line {first}: not comma-separated as quoting wants it ({error}); close each quote, and double "
            "those inside a field."
        ) from None


def _read_fields(reader: Iterator[list[str]]) -> list[str] | None:
    """Return the next row; None at the end. Fields may be as long as lines, where Python allows 131,072 characters."""
    before = csv.field_size_limit(LONGEST_LINE)
    try:
        return next(reader, None)
    finally:
        csv.field_size_limit(before)


def _unquote(field: str) -> str:
    inside = field[1:-1]
    quoted = len(field) > 1 and field[0] == field[-1] == QUOTE
    if quoted and QUOTE * 2 in inside and QUOTE not in inside.replace(QUOTE * 2, ""):
        return inside.replace(QUOTE * 2, QUOTE)
    return field


def find_header(fields: Sequence[str]) -> tuple[int, int] | None:
    """Return the columns of labels and texts if the fields are a header."""
    names = [field.strip().lower() for field in fields]
    label = next((i for i, name in enumerate(names) if name in LABEL_NAMES), None)
    text = next((i for i, name in enumerate(names) if name in TEXT_NAMES), None)
    return None if label is None or text is None else (label, text)


def _require_no_header(file: _File, label: int) -> None:
    """Refuse a first line that looks like a header: its label is the only one that occurs once."""
    counts = Counter(fields[label].strip() for _, fields in file.body)
    number, first = file.body[0]
    lone = [name for name, count in counts.items() if count == 1]
    if lone == [first[label].strip()] and len(counts) > 2:
        raise DataError(
            f"{file.path}, line {number}: the label {lone[0]!r:.60} is that of no other line; if the line names the "
            "columns, call them label and text, else give that class more lines."
        )


def _find_columns(path: Path, rows: Sequence[Sequence[str]]) -> tuple[int, int]:
    counts = [len({row[column] for row in rows}) for column in (0, 1)]
    label = 0 if counts[0] <= counts[1] else 1
    if counts[0] == counts[1] or min(counts) > max(2, MOST_LABELS * len(rows)):
        raise DataError(
            f"{path} has {counts[0]} and {counts[1]} different values in its columns of {len(rows)} lines, so it "
            "cannot be told which holds labels; put a first line that names them: label and text."
        )
    return label, 1 - label


def _find_forms(folder: Path, name: str) -> list[Path]:
    forms = (f"{name}{suffix}{packed}" for suffix in DELIMITERS for packed in ("", ".gz"))
    return [folder / form for form in forms if is_file(folder / form)]


def _fits_some(folder: Path) -> bool:
    return any(all(_find_forms(folder, name) for name in layout.names) for layout in LAYOUTS)


def _count_fields(count: int) -> str:
    return f"{count} field{'s' * (count != 1)}"
