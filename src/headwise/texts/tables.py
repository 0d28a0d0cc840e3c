"""Tables as spreadsheets, pandas and databases export them: delimited files and JSON Lines, read as rows of texts."""

import csv
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headwise.errors import DataError, SettingError
from headwise.input_files import LONGEST_LINE, parse_json, read_numbered_lines

TAB, COMMA, QUOTE = "\t", ",", '"'
# In the order in which they are tried: the earlier, the rarer it is inside a text.
DELIMITERS = {TAB: "tab", ";": "semicolon", "|": "bar", COMMA: "comma"}
OBJECTS = (".jsonl", ".ndjson", ".json")
# Of the files of a folder; a single file may have any name.
SUFFIXES = (".tsv", ".txt", ".csv", ".jsonl", ".ndjson")
# What Excel reads, and some programs write, above the first row.
STATED = re.compile(r"sep=(.)")
STATE = "state what separates the columns by a first line such as sep=;"
QUOTED = re.compile(r'"[^"]*(?:""[^"]*)*"')
SHOWN = 20

Row = tuple[int, list[str]]
Lines = Callable[[], Iterator[tuple[int, str]]]


@dataclass(frozen=True)
class Columns:
    """The columns of a table that hold texts, two for pairs, and labels; where not named, columns with usual names."""

    texts: tuple[str, ...] = ()
    label: str | None = None

    @property
    def text(self) -> str | None:
        """The first column of texts that is named."""
        return self.texts[0] if self.texts else None

    @property
    def names(self) -> tuple[str, ...]:
        """All columns that are named."""
        return (*self.texts, *(() if self.label is None else (self.label,)))

    def require(self, texts: int, *, labels: bool = True) -> None:
        """Raise `SettingError` if there are more columns of texts than expected, or labels where texts have none."""
        if len(self.texts) > texts:
            expected = "one column" if texts == 1 else "one column, or two for pairs"
            raise SettingError(f"--text-column names {', '.join(self.texts)}; expected {expected}.")
        if self.label is not None and not labels:
            raise SettingError("these texts have no labels; omit --label-column.")

    def words(self) -> list[str]:
        """Return the options as typed.

        >>> Columns(("premise", "hypothesis")).words()
        ['--text-column', 'premise', '--text-column', 'hypothesis']
        """
        found = [word for text in self.texts for word in ("--text-column", text)]
        return found + ([] if self.label is None else ["--label-column", self.label])


# Those with usual names.
USUAL = Columns()


@dataclass(frozen=True)
class Table:
    """The rows of a file: line numbers and fields; no header where the first row is not known to name columns."""

    path: Path
    header: tuple[str, ...] | None
    rows: Sequence[Row]

    @property
    def width(self) -> int:
        """Number of columns."""
        return len(self.rows[0][1]) if self.header is None else len(self.header)

    @property
    def names(self) -> str:
        """The names of the first columns, for messages."""
        header = self.header or ()
        return f"{', '.join(header[:SHOWN]):.600}" + (", ..." if len(header) > SHOWN else "")

    def find(self, name: str) -> int:
        """Return the column of a name, in capitals or not.

        Raises:
            DataError: There is no such column, or several.
        """
        header = self.header or ()
        found = [place for place, own in enumerate(header) if own == name]
        found = found or [place for place, own in enumerate(header) if own.lower() == name.lower()]
        if len(found) == 1:
            return found[0]
        state = "several columns" if found else "no column"
        raise DataError(f"{self.path} has {state} {name!r:.60}; its columns are {self.names}.")

    def find_any(self, names: Collection[str]) -> int | None:
        """Return the first column with one of some names, given in small letters; None if there is none."""
        known = next((name for name in self.header or () if name.lower() in names), None)
        return None if known is None else self.find(known)


def read_table(
    path: Path,
    is_header: Callable[[Sequence[str]], bool],
    *,
    columns: Columns = USUAL,
    fewest: int = 2,
    even: bool = True,
    longest: int = LONGEST_LINE,
) -> Table:
    """Return the rows of a delimited file or of JSON Lines; lines without anything are left out.

    The delimiter is the one by which the first row is a header; else tab, if it gives all rows the same number of
    fields, or the only one of semicolon, bar and comma that does; a first line `sep=;` states it, or any other. Fields
    are quoted as usual. In a tab-separated file quotes are text unless each field with a quote is quoted as a whole, or
    quoted fields hold line ends. In JSON Lines a column is a key, and "data.body" the key of an object inside another.

    Args:
        path: The file, plain or gzipped.
        is_header: Whether the fields of a first row name the columns, where `columns` names none.
        columns: Columns that a header must name.
        fewest: Least number of columns; with 1, a file is one of lines unless a tab, a header or its suffix says
            otherwise.
        even: Whether each row must have as many fields as the first.
        longest: Most bytes of a line.

    Raises:
        DataError: The file cannot be read, has no rows, a quote is not closed, a row has another number of fields, or
            two delimiters fit; the message names the line.
    """
    if has_suffix(path, OBJECTS):
        header, rows = _read_objects(path, longest)
    else:
        wanted = {name.lower() for name in columns.names}

        def names_columns(fields: Sequence[str]) -> bool:
            return wanted.issubset(map(str.lower, fields)) if wanted else is_header(fields)

        rows, header = _read_delimited(path, names_columns, fewest, longest), None
        first = tuple(field.strip() for field in rows[0][1]) if rows else ()
        if rows and (wanted or is_header(first)):
            header, rows = first, rows[1:]
    if not rows:
        raise DataError(f"{path} has {'a header and ' * bool(header)}no lines, so it holds no text; expected some.")
    table = Table(path, header, rows)
    for number, fields in rows if even else ():
        if len(fields) != table.width:
            raise DataError(
                f"{path}, line {number}: {count_fields(len(fields))}; expected {table.width} as in the first line; "
                f"correct the line, or {STATE}."
            )
    return table


def has_suffix(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Return whether a file has one of some suffixes, in capitals or not, plain or gzipped.

    >>> has_suffix(Path("Export.CSV.gz"), (".csv",))
    True
    """
    return path.name.lower().removesuffix(".gz").endswith(suffixes)


def count_fields(count: int) -> str:
    """Return a number of fields in words.

    >>> count_fields(1)
    '1 field'
    """
    return f"{count} field{'s' * (count != 1)}"


def flatten(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a JSON object and of those inside it, joined by dots, with their values.

    Raises:
        ValueError: Two keys are the same when joined.

    >>> flatten({"data": {"body": "a text", "words": 2}})
    {'data.body': 'a text', 'data.words': 2}
    """
    found: dict[str, Any] = {}
    left = [*value.items()][::-1]
    while left:
        name, inner = left.pop()
        if isinstance(inner, dict):
            left += [(f"{name}.{key}", one) for key, one in [*inner.items()][::-1]]
        elif name in found:
            raise ValueError(f"two keys are {name!r}, one of them inside an object")
        else:
            found[name] = inner
    return found


def _read_objects(path: Path, longest: int) -> tuple[tuple[str, ...], list[Row]]:
    fault = "expected a JSON object in each line, as pandas writes them with orient='records', lines=True"
    found: list[tuple[int, Mapping[str, str]]] = []
    for number, line in read_numbered_lines(path, longest):
        if not line.strip():
            continue
        try:
            value = parse_json(line)
            keys = flatten(value) if isinstance(value, dict) else None
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {fault} ({error}).") from None
        if keys is None:
            raise DataError(f"{path}, line {number}: {fault}.")
        flat = {name: _format(inner) for name, inner in keys.items() if not isinstance(inner, list)}
        found.append((number, flat))
    header = tuple(dict.fromkeys(name for _, flat in found for name in flat))
    return header, [(number, [flat.get(name, "") for name in header]) for number, flat in found]


def _format(value: str | float | bool | None) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _read_delimited(path: Path, is_header: Callable[[Sequence[str]], bool], fewest: int, longest: int) -> Sequence[Row]:
    lines = partial(_read_lines, path, longest)
    number, first = next(((number, line) for number, line in lines() if line.strip()), (0, ""))
    if stated := STATED.fullmatch(first):
        return _require_closed(path, *_try_split(partial(_read_lines, path, longest, after=number), stated[1]))
    own = COMMA if has_suffix(path, (".csv",)) else TAB
    present = [mark for mark in dict.fromkeys((TAB, own, *DELIMITERS)) if mark in first]
    for mark in present:
        names, _ = _split_quoted(lambda: iter([(1, first)]), mark)
        if names and is_header([field.strip() for field in names[0][1]]):
            return _require_closed(path, *_try_split(lines, mark))
    tried = present if own in present or own == TAB else [*present, own]
    if fewest == 1 and own == TAB:
        tried = [mark for mark in tried if mark == TAB]
    if rows := _split_evenly(path, lines, tried, fewest):
        return rows
    if fewest == 1 and (own == TAB or own not in present):
        return [(number, [line]) for number, line in lines() if line]
    mark = own if own in present or not present else max(present, key=first.count)
    return _require_closed(path, *_try_split(lines, mark))


def _split_evenly(path: Path, lines: Lines, marks: Sequence[str], fewest: int) -> Sequence[Row]:
    """Return the rows by the mark that gives all the same number of fields; () if none does."""
    fitting: dict[str, Sequence[Row]] = {}
    for mark in marks:
        rows, fault = _try_split(lines, mark)
        if rows and not fault and len(rows[0][1]) >= fewest and _are_even(rows):
            fitting[mark] = rows
            if mark == TAB or len(rows[0][1]) == 1:
                break
    several = [DELIMITERS[mark] for mark, rows in fitting.items() if len(rows[0][1]) > 1]
    if len(several) > 1 and TAB not in fitting:
        raise DataError(f"{path}: both {several[0]} and {several[1]} give all lines as many fields; {STATE}.")
    return next(iter(fitting.values()), ())


def _read_lines(path: Path, longest: int, after: int = 0) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file after a line, which end in LF, CRLF or CR, numbered from 1."""
    number = 0
    for _, line in read_numbered_lines(path, longest):
        for part in line.split("\r"):
            number += 1
            if number > after:
                yield number, part


def _require_closed(path: Path, rows: Sequence[Row], fault: str) -> Sequence[Row]:
    if fault:
        raise DataError(f"{path}, {fault}")
    return rows


def _try_split(lines: Lines, mark: str) -> tuple[Sequence[Row], str]:
    """Return the rows of lines up to the first fault of their quotes, and that fault, or ""."""
    if mark != TAB:
        return _split_quoted(lines, mark)
    rows = [(number, line.split(TAB)) for number, line in lines() if line]
    if not _are_even(rows) and any(QUOTE in field for _, fields in rows for field in fields):
        quoted, fault = _split_quoted(lines, TAB)
        if not fault and _are_even(quoted):
            return quoted, ""
    whole = all(QUOTED.fullmatch(field) for _, fields in rows for field in fields if QUOTE in field)
    return [(number, [_unquote(field, whole=whole) for field in fields]) for number, fields in rows], ""


def _split_quoted(lines: Lines, mark: str) -> tuple[Sequence[Row], str]:
    found: list[Row] = []
    first = 1
    # fields may be as long as lines, where Python allows 131,072 characters
    before = csv.field_size_limit(LONGEST_LINE)
    try:
        reader = csv.reader((f"{line}\n" for _, line in lines()), delimiter=mark, strict=True, skipinitialspace=True)
        for fields in reader:
            if fields:
                found.append((first, fields))
            first = reader.line_num + 1
    except csv.Error as error:
        return found, (
            f"line {first}: not {DELIMITERS.get(mark, mark)}-separated as quotes want it ({error}); close each quote, "
            "and double those inside a field."
        )
    finally:
        csv.field_size_limit(before)
    return found, ""


def _are_even(rows: Sequence[Row]) -> bool:
    return len({len(fields) for _, fields in rows}) <= 1


def _unquote(field: str, *, whole: bool) -> str:
    if QUOTED.fullmatch(field) and (whole or QUOTE * 2 in field[1:-1]):
        return field[1:-1].replace(QUOTE * 2, QUOTE)
    return field
