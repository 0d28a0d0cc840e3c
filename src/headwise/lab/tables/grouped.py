"""A paper's table whose rows are sets of data in groups: its numbers beside ours, and the mean of each group.

Owns that grid and how a score at chance is marked. Must not know any table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from headwise.lab.cells import NONE, percent
from headwise.lab.grids import Grid
from headwise.lab.table import Row, Table
from headwise.lab.tables.reproduction import Published

__all__ = ["grouped_grid"]

MAJORITY = "majority"


def grouped_grid(
    title: str,
    published: Published,
    groups: Mapping[str, Sequence[str]],
    tables: Mapping[str, Table],
    canonical: Callable[[str, str], str],
) -> Grid:
    """Return parts by arms, the paper's number before ours, and below a group the means over its parts that were run.

    A score in parentheses is not told to be better than the majority baseline: its 95 % interval reaches down to it.
    The paper's means are over the same parts as ours.

    Args:
        title: Of the grid.
        published: The paper's numbers.
        groups: Names of groups, and of the parts in each.
        tables: The table of each part that was run.
        canonical: Returns an arm's name at the scale from a part and the arm as the reproduction writes it.
    """
    arms = list(dict.fromkeys(row.arm for table in tables.values() for row in table.arms))
    cells = {(row.part, canonical(row.part, row.arm)): row.cells[0] for row in published.rows if row.part in tables}
    known = [arm for arm in arms if any((part, arm) in cells for part in tables)]
    rows = []
    for group, members in groups.items():
        there = [part for part in members if part in tables]
        rows += [(part, *_row(part, arms, known, cells, tables.get(part))) for part in members]
        if there:
            means = []
            for arm in arms:
                if arm in known:
                    means.append(f"{fmean(float(cells[part, arm]) for part in there):.2f}")
                ours = [row.score.value for part in there if (row := tables[part].row(arm)) is not None]
                means.append(f"{100 * fmean(ours):.2f}" if len(ours) == len(there) else NONE)
            which = "" if len(there) == len(members) else f" ({', '.join(there)})"
            rows.append((f"{group}: mean{which}", NONE, *means))
    header = ["task", MAJORITY]
    for arm in arms:
        header += [f"{arm}, paper", f"{arm}, here"] if arm in known else [f"{arm}, here"]
    title += "; in parentheses what is not told to be better than the majority baseline"
    return Grid(title, tuple(header), tuple(rows), "l" + "r" * (len(header) - 1))


def _row(
    part: str, arms: Sequence[str], known: Sequence[str], cells: Mapping[tuple[str, str], str], table: Table | None
) -> list[str]:
    majority = None if table is None else table.row(MAJORITY)
    found = [NONE if majority is None else f"{100 * majority.score.value:.1f}"]
    for arm in arms:
        if arm in known:
            found.append(cells.get((part, arm), NONE))
        row = None if table is None else table.row(arm)
        found.append(NONE if row is None else _score(row, majority))
    return found


def _score(row: Row, majority: Row | None) -> str:
    text = percent(row.score)
    return f"({text})" if majority is not None and row.score.low <= majority.score.value else text
