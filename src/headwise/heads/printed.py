"""How what belongs to many heads is printed: aligned columns, without the middle of a long list."""

from collections.abc import Sequence
from typing import TypeVar

# What fits on a screen.
LINES = 40

T = TypeVar("T")


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, with its cells below those of the row before.

    Example:
        >>> align([("site", "heads"), ("layers.0", "12")])
        ['site      heads', 'layers.0  12']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def shorten(rows: Sequence[T], most: int) -> tuple[Sequence[T], int, Sequence[T]]:
    """Return the first rows, the number of rows left out, and the last rows, which with a line between are `most`.

    Example:
        >>> shorten(range(10), 6), shorten(range(6), 6)
        ((range(0, 3), 5, range(8, 10)), (range(0, 6), 0, range(0, 0)))
    """
    if len(rows) <= most:
        return rows, 0, rows[:0]
    last = (most - 1) // 2
    first = most - 1 - last
    return rows[:first], len(rows) - first - last, rows[len(rows) - last :]
