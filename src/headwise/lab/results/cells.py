"""Cells of text: how a number looks in a table, and grids of such cells in a terminal and in Markdown."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table as RichTable
from rich.text import Text

from headwise.lab.results.statistics import Estimate
from headwise.lab.results.table import Difference

NONE = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
# A terminal table of more columns than this has one space between them instead of two.
CROWDED = 8
# Words up to this length are not broken.
LONGEST_WORD = 16


@dataclass(frozen=True)
class Grid:
    """Cells of text with a title; printing one to a rich console shows it.

    Where the terminal is too narrow for all columns, they are shown in blocks below one another, each with the first
    column: rich alone would cut numbers. Numbers are never broken, texts between words where that is possible.

    Attributes:
        title: What the grid shows.
        header: One text per column.
        rows: Rows of one text per column.
        align: One letter per column: l for text, r for numbers.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text | RichTable]:
        # above a narrow table its own title would be as narrow
        yield Text(self.title, "bold")
        block = [0]
        for column in range(1, len(self.header)):
            if len(block) > 1 and self._least_width([*block, column]) > options.max_width:
                yield self._render(block, options.max_width)
                block = [0]
            block.append(column)
        yield self._render(block, options.max_width)

    def _lines(self, column: int, *, broken: bool = True) -> list[str]:
        header = self.header[column]
        if broken and self.align[column] == "r" and "\n" not in header:
            header = "\n".join(header.split())
        return [*header.split("\n"), *(row[column] for row in self.rows)]

    def _least_width(self, columns: Sequence[int]) -> int:
        return _edges(columns) + sum(self._least(column) for column in columns)

    def _least(self, column: int) -> int:
        lines = self._lines(column)
        if self.align[column] == "r":
            return max(map(cell_len, lines))
        # a short name is kept on one line; a long one is broken before a column moves to another block
        whole = lines if column == 0 else [word for line in lines for word in line.split()]
        return min(max(map(cell_len, whole), default=0), LONGEST_WORD)

    def _render(self, columns: Sequence[int], room: int) -> RichTable:
        whole_width = sum(max(map(cell_len, self._lines(column, broken=False))) for column in columns)
        broken = _edges(columns) + whole_width > room
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, _padding(columns)), collapse_padding=True)
        for column in columns:
            lines, right = self._lines(column, broken=broken), self.align[column] == "r"
            header = Text("\n".join(lines[: len(lines) - len(self.rows)]))
            whole = right or (column == 0 and max(map(cell_len, lines)) <= LONGEST_WORD)
            table.add_column(header, justify="right" if right else "left", overflow="fold", no_wrap=whole)
        for row in self.rows:
            # an arm's name is text, not markup
            table.add_row(*(Text(row[column]) for column in columns))
        return table

    def to_markdown(self) -> str:
        """Return the grid as a Markdown table under its title."""
        rule = ["---" if letter == "l" else "--:" for letter in self.align]
        lines = [_join(map(_escape, self.header)), _join(rule), *(_join(map(_escape, row)) for row in self.rows)]
        return "\n".join([f"**{_escape(self.title)}**", "", *lines])


def format_percent(found: Estimate, *, interval: bool = True) -> str:
    """Return a score times 100.

    >>> format_percent(Estimate(0.9812, 0.976, 0.9864, 0.001, seeds=5, items=100))
    '98.1 ±0.5'
    """
    value = f"{100 * found.value:.1f}"
    return f"{value} ±{100 * _half_width(found):.1f}" if interval else value


def format_points(found: Difference | None) -> str:
    """Return a difference in percentage points with its sign, or a dash.

    >>> format_points(Difference("plain", Estimate(-0.0123, -0.02, -0.0046, 0.01, seeds=5, items=100)))
    '−1.2 ±0.8'
    """
    if found is None:
        return NONE
    return f"{format_signed(100 * found.estimate.value)} ±{100 * _half_width(found.estimate):.1f}"


def format_signed(value: float) -> str:
    """Return a number with one decimal and a sign (typographic minus); what rounds to zero has no sign.

    >>> format_signed(1.26), format_signed(-0.5), format_signed(-0.04)
    ('+1.3', '−0.5', '0.0')
    """
    text = f"{value:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", MINUS)


def format_p_range(values: Sequence[float]) -> str:
    """Return the range of p-values of different runs.

    >>> format_p_range([0.2104, 0.00012, 0.034]), format_p_range([0.034])
    ('<0.001 to 0.210', '0.034')
    """
    ends = dict.fromkeys("<0.001" if value < 0.0005 else f"{value:.3f}" for value in (min(values), max(values)))
    return " to ".join(ends)


def format_number(value: float | None) -> str:
    """Return a measure with three significant digits, or a dash.

    >>> [format_number(value) for value in (0.98765, 12.345, 0.000123, -0.25, None)]
    ['0.988', '12.3', '0.00012', '−0.250', '–']
    """
    if value is None:
        return NONE
    digits = ".2g" if 0 < abs(value) < 0.01 else ".3f" if abs(value) < 10 else ".1f"
    return f"{value:{digits}}".replace("-", MINUS)


def _half_width(found: Estimate) -> float:
    # an interval cut at 0 or 1 is one-sided there
    return max(found.high - found.value, found.value - found.low)


def _edges(columns: Sequence[int]) -> int:
    return 2 + (len(columns) - 1) * (1 + _padding(columns))


def _padding(columns: Sequence[int]) -> int:
    return 0 if len(columns) > CROWDED else 1


def _join(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escape(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|#~&])", r"\\\1", " ".join(text.split()))
