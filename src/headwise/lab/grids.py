"""A comparison's table as text: grids of cells, and their terminal, Markdown and JSON forms.

Owns how a number looks, once for every place it is shown. Must not compute anything: the numbers are `table`'s.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from headwise.lab.runs import write_json
from headwise.lab.statistics import Estimate
from headwise.lab.table import PLAIN, Difference, Row, Table

__all__ = [
    "Grid",
    "bins_grid",
    "diversity_grid",
    "grids",
    "markdown_of",
    "plain_grid",
    "record",
    "terminal",
    "verdict_grid",
    "write_record",
]

NONE = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
# More bins than this do not fit a terminal with their intervals.
BINS_WITH_INTERVAL = 5
# Columns of a grid that leaves one space between them, and letters of a name that is not broken.
CROWDED = 8
LONGEST_NAME = 16
NOTE = "± is half a 95 % interval over seeds and test items; differences are in points, p-values are Holm-adjusted."


@dataclass(frozen=True)
class Grid:
    """Cells of text with a title.

    Attributes:
        title: What the grid shows.
        header: One text a column.
        rows: Rows of one text a column.
        align: One letter a column, l or r.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str


def verdict_grid(table: Table) -> Grid:
    """Return the score of each arm and the verdict about it, against the arm that differs in one thing."""
    rows = tuple(
        (
            row.arm,
            str(len(row.seeds)),
            percent(row.score),
            "baseline" if row.baseline else row.control or NONE,
            points(row.to_control),
            row.verdict or NONE,
        )
        for row in table.rows
    )
    header = ("arm", "seeds", table.axis.replace(" ", "\n"), "judged\nagainst", "difference,\npoints", "verdict")
    return Grid(f"{table.task} at scale {table.scale}: {table.primary}", header, rows, "lrrlrl")


def plain_grid(table: Table) -> Grid:
    """Return the differences to plain of the baselines and of the arms whose control is another arm."""
    rows = tuple(
        (row.arm, points(row.to_plain), row.to_plain.verdict or NONE)
        for row in table.rows
        if row.to_plain is not None and row.control != PLAIN
    )
    return Grid("the others against plain", ("arm", "difference,\npoints", "verdict"), rows, "lrl")


def bins_grid(table: Table, *, intervals: bool = True) -> Grid:
    """Return the score in each bin, one row an arm.

    Args:
        table: The comparison.
        intervals: Whether each score carries half its 95 % interval.
    """
    rows = tuple((row.arm, *(percent(found, interval=intervals) for found in row.bins)) for row in table.rows)
    header = ("arm", *map(str, table.bins))
    title = f"{table.metric.name} by {table.difficulty}, {table.metric.unit}".removesuffix(", ")
    return Grid(title, header, rows, "l" + "r" * len(table.bins))


def diversity_grid(table: Table) -> Grid:
    """Return how alike the heads of each arm are, and what the arm costs, one row an arm."""
    names = ("distance", "output_cosine", "output_cka", "position_js", "parameter_cosine", "particle_norm")
    rows = tuple(
        (
            row.arm,
            *(number(row.measures[name]) for name in names),
            number(row.measures["force_ratio"]),
            NONE if row.parameters is None else f"{row.parameters:,}",
            NONE if row.step_ratio is None else f"{row.step_ratio:.2f}",
        )
        for row in table.arms
    )
    header = (
        *("arm", "Dist", "output\ncosine", "output\nCKA", "attn.\nJS", "param.\ncosine", "norm", "force\nratio"),
        *("params", "step\ntime"),
    )
    return Grid(
        "how alike the heads are, and the cost (step time: over plain)",
        header,
        rows,
        "l" + "r" * (len(header) - 1),
    )


def grids(table: Table, *, intervals: bool = True) -> tuple[Grid, ...]:
    """Return all grids that have rows, the verdicts first; `intervals` as for `bins_grid`."""
    every = (verdict_grid(table), plain_grid(table), bins_grid(table, intervals=intervals), diversity_grid(table))
    return tuple(grid for grid in every if grid.rows)


def terminal(table: Table) -> Group:
    """Return what `headwise compare` prints; it fits 80 columns with up to 12 bins and arm names of usual length."""
    shown = [_rich(grid) for grid in grids(table, intervals=len(table.bins) <= BINS_WITH_INTERVAL)]
    notes = [NOTE, *(f"not finished: {run}" for run in table.missing)]
    return Group(*shown, *(Text(note, "dim") for note in notes))


def record(table: Table) -> dict[str, Any]:
    """Return the table as JSON data whose keys keep their order."""
    return {
        "task": table.task,
        "scale": table.scale,
        "primary": table.primary,
        "data": table.data,
        "seeds": list(table.seeds),
        "bins": dict(zip(map(str, table.bins), table.items, strict=True)),
        "rows": [_row_record(row, table) for row in table.rows],
        "missing": list(table.missing),
        "versions": dict(table.versions),
    }


def write_record(table: Table, path: Path) -> None:
    """Write `record(table)` so that a reader sees the old file or the new one, never a part."""
    write_json(path, record(table))


def percent(found: Estimate, *, interval: bool = True) -> str:
    """Return a score times 100.

    >>> percent(Estimate(0.9812, 0.976, 0.9864, 0.001, seeds=5, items=100))
    '98.1 ±0.5'
    """
    value = f"{100 * found.value:.1f}"
    return f"{value} ±{100 * _half(found):.1f}" if interval else value


def points(found: Difference | None) -> str:
    """Return a difference in percentage points with its sign, or a dash.

    >>> points(Difference("plain", Estimate(-0.0123, -0.02, -0.0046, 0.01, seeds=5, items=100)))
    '−1.2 ±0.8'
    """
    if found is None:
        return NONE
    return f"{signed(100 * found.estimate.value)} ±{100 * _half(found.estimate):.1f}"


def signed(value: float) -> str:
    """Return a number with one decimal and a sign, the typographic minus; what rounds to zero has none.

    >>> signed(1.26), signed(-0.5), signed(-0.04)
    ('+1.3', '−0.5', '0.0')
    """
    text = f"{value:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", MINUS)


def number(value: float | None) -> str:
    """Return a measure with three digits that count, or a dash.

    >>> number(0.98765), number(12.345), number(0.000123), number(None)
    ('0.988', '12.3', '0.00012', '–')
    """
    if value is None:
        return NONE
    if value == 0 or abs(value) >= 0.01:
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return f"{value:.2g}".replace("-", MINUS)


def _half(found: Estimate) -> float:
    # an interval cut at 0 or 1 is one-sided there
    return max(found.high - found.value, found.value - found.low)


def _rich(grid: Grid) -> RichTable:
    many = len(grid.header) > CROWDED
    shown = RichTable(title=Text(grid.title, "bold"), box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    shown.padding, shown.collapse_padding = ((0, 0) if many else (0, 1)), True
    longest = min(LONGEST_NAME, max(len(row[0]) for row in grid.rows))
    for place, (name, letter) in enumerate(zip(grid.header, grid.align, strict=True)):
        justify = "left" if letter == "l" else "right"
        # numbers are never broken; long names and verdicts are, where the terminal is narrow
        shown.add_column(
            Text(name),
            justify=justify,
            vertical="top",
            no_wrap=letter == "r",
            overflow="fold",
            min_width=None if place else longest,
        )
    for row in grid.rows:
        # an arm's name is text, not markup
        shown.add_row(*(Text(cell) for cell in row))
    return shown


def markdown_of(grid: Grid) -> str:
    """Return a grid as a Markdown table under its title."""
    rule = ["---" if letter == "l" else "--:" for letter in grid.align]
    lines = [_line(map(_escaped, grid.header)), _line(rule)]
    return "\n".join([f"**{_escaped(grid.title)}**", "", *lines, *(_line(map(_escaped, row)) for row in grid.rows)])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|#~&])", r"\\\1", " ".join(text.split()))


def _row_record(row: Row, table: Table) -> dict[str, Any]:
    return {
        "arm": row.arm,
        "control": row.control,
        "baseline": row.baseline,
        "seeds": list(row.seeds),
        "score": _estimate_record(row.score),
        "bins": {str(name): _estimate_record(found) for name, found in zip(table.bins, row.bins, strict=True)},
        "to_plain": _difference_record(row.to_plain),
        "to_control": _difference_record(row.to_control),
        "bins_to_plain": {
            str(name): _estimate_record(found) for name, found in zip(table.bins, row.bins_to_plain, strict=False)
        },
        "verdict": row.verdict,
        "measures": dict(row.measures),
        "parameters": row.parameters,
        "step_ratio": row.step_ratio,
        "runs": [dataclasses.asdict(point) for point in row.points],
        "settings": dict(row.settings),
    }


def _estimate_record(found: Estimate) -> dict[str, float]:
    return {"value": found.value, "low": found.low, "high": found.high}


def _difference_record(found: Difference | None) -> dict[str, Any] | None:
    if found is None:
        return None
    estimate = found.estimate
    return {
        "against": found.against,
        **_estimate_record(estimate),
        "seeds": estimate.seeds,
        "p": estimate.p,
        "p_holm": found.adjusted,
        "verdict": found.verdict,
    }
