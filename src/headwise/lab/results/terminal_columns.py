"""Cells of text in a terminal of any width: columns side by side while they fit, the rest in blocks below.

Owns which columns stand together and how wide each is, so that nothing is cut. Must not know what the cells say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

# Columns of a table that leaves one space between them, and letters of a word that is not broken.
CROWDED = 8
LONGEST_WORD = 16


@dataclass(frozen=True)
class ColumnBlocks:
    """A table for the terminal; where it is too wide, several below one another, each with the first column.

    Numbers are never broken, texts between words, and words where they are longer than the room there is.

    Attributes:
        title: Above the first block.
        header: One text a column.
        rows: Rows of one text a column.
        align: One letter a column: l for text, r for numbers.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str

    def __rich_console__(
        self,
        console: Console,
        options: ConsoleOptions,
    ) -> Iterator[Text | Table]:
        # above a narrow table its own title would be as narrow
        yield Text(self.title, "bold")
        for columns in self._blocks(options.max_width):
            yield self._table(columns, options.max_width)

    def _blocks(self, room: int) -> list[list[int]]:
        blocks: list[list[int]] = []
        for column in range(1, len(self.header)):
            if blocks and self._least_width([*blocks[-1], column]) <= room:
                blocks[-1].append(column)
            else:
                blocks.append([0, column])
        return blocks or [[0]]

    def _least_width(self, columns: Sequence[int]) -> int:
        return sum(self._least(column) for column in columns) + _between(len(columns))

    def _least(self, column: int) -> int:
        """Return the least width of a column: of its numbers, or of its longest word (name in the first) up to 16."""
        if self.align[column] == "r":
            numbers = max((cell_len(row[column]) for row in self.rows), default=0)
            return max(numbers, *(cell_len(word) for word in self.header[column].split() or [""]))
        # a short name is kept in one line; a long one is broken before a column goes into a block of its own
        whole = [line for text in self._texts(column) for line in ([text] if not column else text.split())]
        return min(max(map(cell_len, whole), default=0), LONGEST_WORD)

    def _most(self, column: int) -> int:
        return max(cell_len(line) for text in self._texts(column) for line in text.split("\n"))

    def _texts(self, column: int) -> list[str]:
        return [self.header[column], *(row[column] for row in self.rows)]

    def _widths(self, columns: Sequence[int], room: int) -> list[int]:
        """Return widths that fill the room as far as texts need it, the narrowest column growing first."""
        widths = [self._least(column) for column in columns]
        most = [self._most(column) for column in columns]
        for _ in range(room - sum(widths) - _between(len(columns))):
            growing = [place for place, width in enumerate(widths) if width < most[place]]
            if not growing:
                break
            widths[min(growing, key=lambda place: widths[place])] += 1
        # two columns that do not fit are narrowed, the name first: what is folded can be read, what is cut cannot
        for place in range(len(columns)):
            over = sum(widths) + _between(len(columns)) - room
            widths[place] -= max(0, min(over, widths[place] - 1))
        return widths

    def _table(self, columns: Sequence[int], room: int) -> Table:
        shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        shown.padding, shown.collapse_padding = (0, _padding(len(columns))), True
        for column, width in zip(columns, self._widths(columns, room), strict=True):
            justify = "left" if self.align[column] == "l" else "right"
            shown.add_column(Text(self.header[column]), justify=justify, vertical="top", overflow="fold", width=width)
        for row in self.rows:
            # an arm's name is text, not markup
            shown.add_row(*(Text(row[column]) for column in columns))
        return shown


def _padding(columns: int) -> int:
    return 0 if columns > CROWDED else 1


def _between(columns: int) -> int:
    """Return the width of edges, rules and padding of so many columns."""
    return 2 + (columns - 1) * (1 + _padding(columns))
