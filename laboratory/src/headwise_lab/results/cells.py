"""Cells of text: how a number looks in a table, and grids of such cells in a terminal, in Markdown and in LaTeX."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table as RichTable
from rich.text import Text

from headwise_lab.results.statistics import Estimate

NONE = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
# A terminal table of more columns than this has one space between them instead of two.
CROWDED = 8
# Words up to this length are not broken, nor texts up to that one between their words.
LONGEST_WORD, LONGEST_TEXT = 16, 28
_WORD, _PIECE = re.compile(rf"\S{{{LONGEST_WORD + 1},}}"), re.compile(r"[^-:=_,+/.]*[-:=_,+/.]|[^-:=_,+/.]+")
MOST_DIGITS = 6
LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", MINUS: "$-$", NONE: "--"}
LATEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"} | {"<": r"\textless{}", ">": r"\textgreater{}"}


@dataclass(frozen=True)
class Number:
    """A number as a cell; `str` is how it is shown.

    Attributes:
        value: The number; None where only a range is shown.
        low: Lower end of its interval or range; None for none.
        high: Upper end.
        digits: Digits behind the point; None for three significant digits.
        factor: What it is multiplied by where it is shown, as 100 for percent.
        signed: Whether it has a sign also above zero.
        form: What stands around it, as in "{} %".
        median: A median shown behind it; None for none.

    Example:
        >>> str(Number(0.1234, low=-0.01, high=0.2568, digits=1, factor=100, signed=True))
        '+12.3 (−1.0 to +25.7)'
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    digits: int | None = None
    factor: float = 1.0
    signed: bool = False
    form: str = "{}"
    median: float | None = None

    def __str__(self) -> str:
        text = "" if self.value is None else self._format(self.value)
        if self.low is not None and self.high is not None:
            ends = " to ".join(dict.fromkeys((self._format(self.low), self._format(self.high))))
            text = f"{text} ({ends})" if text else ends
        return self.form.format(text if self.median is None else f"{text}, {self._format(self.median)}")

    def _format(self, value: float) -> str:
        value *= self.factor
        if self.digits is None:
            digits = ".2g" if 0 < abs(value) < 0.01 else ".3f" if abs(value) < 10 else ".1f"
        else:
            digits = f",.{self.digits}f"
        text = f"{value:{'+' * self.signed}{digits}}"
        # what rounds to zero has no sign
        return (text if float(text.replace(",", "")) else text.lstrip("+-")).replace("-", MINUS)


Cell = str | Number


class Link(str):
    """A text that leads somewhere; a Markdown table has it as a link.

    Example:
        >>> print(Grid("t", ("a",), ((Link("table 5", to="RESULTS.md#table-5"),),), "l").to_markdown().split()[-2])
        5](RESULTS.md#table-5)
    """

    __slots__ = ("to",)
    to: str

    def __new__(cls, text: str, *, to: str) -> Self:
        """Return the text with where it leads."""
        made = super().__new__(cls, text)
        made.to = to
        return made


@dataclass(frozen=True)
class Line:
    """Named values in a line; `str` is how it is shown.

    Example:
        >>> print(Line("parameters", {"plain": Number(1024, digits=0), "svgd": "not run"}))
        parameters: plain 1,024, svgd not run
    """

    label: str
    values: Mapping[str, Cell]
    note: str = ""

    def __str__(self) -> str:
        return f"{self.label}: {', '.join(f'{name} {cell}' for name, cell in self.values.items())}{self.note}"

    def to_record(self) -> dict[str, Any]:
        """Return it as JSON data, in which numbers are numbers."""
        return {**vars(self), "values": {name: _record_cell(cell) for name, cell in self.values.items()}}

    @classmethod
    def from_record(cls, found: Mapping[str, Any]) -> Line:
        """Return the line that `to_record` wrote."""
        return cls(**{**found, "values": {name: _read_cell(cell) for name, cell in found["values"].items()}})


@dataclass(frozen=True)
class Grid:
    r"""Cells with a title; printing one to a rich console shows it.

    Where the terminal is too narrow for all columns, they are shown in blocks below one another, each with the first
    columns: rich alone would cut numbers. Numbers are never broken, texts between words, and long names after signs.

    Attributes:
        title: What the grid shows.
        header: One text per column.
        rows: Rows of one cell per column.
        align: One letter per column: l for text, r for numbers.
        keys: How many columns name a row; every block of a narrow terminal begins with them.

    Example:
        >>> print(Grid("t", ("arm", "score, %"), (("a_b", Number(81.5, digits=1)),), "lr").to_latex())
        \begin{tabular}{lr}
        \toprule
        arm & score, \% \\
        \midrule
        a\_b & 81.5 \\
        \bottomrule
        \end{tabular}
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    align: str
    keys: int = 1

    @classmethod
    def of(cls, title: str, columns: Mapping[str, Iterable[Cell]], align: str = "", keys: int = 1) -> Grid:
        """Return a grid from its columns by name; by default all but the first hold numbers."""
        rows = tuple(zip(*columns.values(), strict=True))
        return cls(title, tuple(columns), rows, align or "l" + "r" * (len(columns) - 1), keys)

    @property
    def text(self) -> tuple[tuple[str, ...], ...]:
        """The rows as they are shown."""
        return tuple(tuple(map(str, row)) for row in self.rows)

    @property
    def words(self) -> tuple[str, ...]:
        """The header with each name on one line."""
        return tuple(name.replace("\n", " ") for name in self.header)

    def select(self, *names: str) -> Grid:
        """Return the grid with some of its columns, in this order."""
        places = [self.header.index(name) for name in names]
        rows = tuple(tuple(row[place] for place in places) for row in self.rows)
        return replace(self, header=names, rows=rows, align="".join(self.align[place] for place in places))

    def first(self, count: int) -> Grid:
        """Return the grid with its first rows alone."""
        return replace(self, rows=self.rows[:count])

    def to_record(self) -> dict[str, Any]:
        """Return the grid as JSON data, in which numbers are numbers."""
        rows = [list(map(_record_cell, row)) for row in self.rows]
        return {"title": self.title, "header": list(self.header), "rows": rows, "align": self.align}

    @classmethod
    def from_record(cls, found: Mapping[str, Any]) -> Grid:
        """Return the grid that `to_record` wrote."""
        rows = tuple(tuple(map(_read_cell, row)) for row in found["rows"])
        return cls(found["title"], tuple(found["header"]), rows, found["align"])

    def to_markdown(self) -> str:
        """Return the grid as a Markdown table under its title."""
        rule = ["---" if letter == "l" else "--:" for letter in self.align]
        rows = [list(map(_escape, self.words)), rule, *(list(map(_to_markdown, row)) for row in self.rows)]
        return "\n".join([f"**{_escape(self.title)}**", "", *(f"| {' | '.join(row)} |" for row in rows)])

    def to_latex(self) -> str:
        """Return the grid as a LaTeX table with the rules of booktabs."""
        escaped = re.compile("|".join(map(re.escape, LATEX)))
        top, *rows = (
            " & ".join(escaped.sub(lambda sign: LATEX[sign[0]], " ".join(cell.split())) for cell in row) + r" \\"
            for row in (self.header, *self.text)
        )
        begin = rf"\begin{{tabular}}{{{self.align}}}"
        return "\n".join([begin, r"\toprule", top, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}"])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text | RichTable]:
        # above a narrow table its own title would be as narrow
        yield Text(self.title, "bold")
        keys = list(range(self.keys))
        block = keys
        for column in range(self.keys, len(self.header)):
            if len(block) > self.keys and self._measure([*block, column], self._least) > options.max_width:
                yield self._render(block, options.max_width)
                block = keys
            block = [*block, column]
        yield self._render(block, options.max_width)

    def _cells(self, column: int, *, broken: bool = True) -> list[str]:
        """Return the header and the cells of a column; those that are broken have lines."""
        header, *cells = self.header[column], *(row[column] for row in self.text)
        if broken and self.align[column] == "r" and "\n" not in header:
            header = textwrap.fill(header, max(map(cell_len, (*header.split(), *cells))), break_long_words=False)
        if broken and self.align[column] == "l":
            cells = [_WORD.sub(_break_word, cell) for cell in cells]
        return [header, *cells]

    def _lines(self, column: int, *, broken: bool = True) -> list[str]:
        return [line for cell in self._cells(column, broken=broken) for line in cell.split("\n")]

    def _measure(self, columns: Sequence[int], measure: Callable[[int], int]) -> int:
        return 2 + (len(columns) - 1) * (1 + _padding(columns)) + sum(map(measure, columns))

    def _least(self, column: int) -> int:
        lines = self._lines(column)
        widest = max(map(cell_len, lines))
        if self.align[column] == "r":
            return widest
        # a short name is kept on one line; a long one is broken before a column moves to another block
        if column < self.keys:
            return min(widest, LONGEST_WORD)
        words = max((cell_len(word) for line in lines for word in line.split()), default=0)
        texts = max((cell_len(line) for line in lines if cell_len(line) <= LONGEST_TEXT), default=0)
        return max(min(words, LONGEST_WORD), texts)

    def _render(self, columns: Sequence[int], room: int) -> RichTable:
        broken = self._measure(columns, lambda column: max(map(cell_len, self._lines(column, broken=False)))) > room
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, _padding(columns)), collapse_padding=True)
        cells = [self._cells(column, broken=broken) for column in columns]
        for column, (header, *_) in zip(columns, cells, strict=True):
            right = self.align[column] == "r"
            widest = max(map(cell_len, self._lines(column, broken=broken)))
            whole = right or (column < self.keys and widest <= LONGEST_WORD)
            table.add_column(Text(header), justify="right" if right else "left", overflow="fold", no_wrap=whole)
        for row in zip(*(rows for _, *rows in cells), strict=True):
            # an arm's name is text, not markup
            table.add_row(*map(Text, row))
        return table


def _break_word(word: re.Match[str]) -> str:
    """Return a word in lines that are not too long, broken after signs that join parts of a name."""
    lines = [""]
    for piece in _PIECE.findall(word[0]):
        if lines[-1] and cell_len(lines[-1] + piece) > LONGEST_WORD:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def choose_digits(least: int, *values: float | None, factor: float = 1.0) -> int:
    """Return the number of decimals needed to tell the values, times a factor, apart: at least the given number.

    A single value is told from zero.

    >>> choose_digits(1, 97.8, 98.5), choose_digits(1, 0.01385, 0.01448, factor=100), choose_digits(2, 0.0153)
    (1, 2, 3)
    """
    known = [factor * value for value in values if value is not None]
    known += [0.0] if len(known) == 1 else []
    width = max(known) - min(known) if known else 0.0
    digits = least
    while 0.0 < width < 2 * 10.0**-digits and digits < MOST_DIGITS:
        digits += 1
    return digits


def show_percent(found: Estimate, *, interval: bool = True, signed: bool = False) -> Number:
    """Return a score times 100, or a difference in points with its sign, and its interval.

    >>> print(show_percent(Estimate((0.978, 0.982, 0.983, 0.982), most=1.0)))
    98.1 (97.8 to 98.5)
    >>> print(show_percent(Estimate((-0.02, -0.01, -0.01, -0.02)), signed=True))
    −1.5 (−2.4 to −0.6)
    """
    if found.is_one_number:
        return Number(found.value, digits=1, factor=100, signed=signed)
    digits = choose_digits(1, found.low, found.high, factor=100)
    ends = (found.low, found.high) if interval else (None, None)
    return Number(found.value, *ends, digits=digits, factor=100, signed=signed)


def show_signed(value: float) -> Number:
    """Return a number with one decimal and a sign; what rounds to zero has no sign.

    >>> [str(show_signed(value)) for value in (1.26, -0.5, -0.04)]
    ['+1.3', '−0.5', '0.0']
    """
    return Number(value, digits=1, signed=True)


def show_p(value: float | None) -> Cell:
    """Return a p-value with three decimals, or a dash.

    >>> [str(show_p(value)) for value in (0.0421, 0.00012, None)]
    ['0.042', '<0.001', '–']
    """
    return NONE if value is None else "<0.001" if value < 0.001 else Number(value, digits=3)


def show_number(value: float | None, digits: int | None = None, *, factor: float = 1.0) -> Cell:
    """Return a number with three significant digits unless told, or a dash.

    >>> [str(show_number(value)) for value in (0.98765, 12.345, 0.000123, -0.25, None)]
    ['0.988', '12.3', '0.00012', '−0.250', '–']
    """
    return NONE if value is None else Number(value, digits=digits, factor=factor)


def show_printed(text: str) -> Cell:
    """Parse a printed value: numbers keep their decimals, other text is returned unchanged, empty text is a dash.

    >>> show_printed("28.20").digits, show_printed("88M"), show_printed("")
    (2, '88M', '–')
    """
    try:
        return Number(float(text), digits=len(text.partition(".")[2]))
    except ValueError:
        return text or NONE


def _record_cell(cell: Cell) -> str | dict[str, Any]:
    if isinstance(cell, str):
        return cell
    # only the value has no default
    return {one.name: value for one in fields(cell) if (value := getattr(cell, one.name)) != one.default}


def _read_cell(cell: str | Mapping[str, Any]) -> Cell:
    return cell if isinstance(cell, str) else Number(**cell)


def _padding(columns: Sequence[int]) -> int:
    return 0 if len(columns) > CROWDED else 1


def _to_markdown(cell: Cell) -> str:
    text = _escape(str(cell))
    return f"[{text}]({cell.to})" if isinstance(cell, Link) else text


def _escape(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|#~&])", r"\\\1", " ".join(text.split()))
