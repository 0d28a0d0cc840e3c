"""A paper's table whose rows are groups of data sets: its numbers and ours, and the mean of each group."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np

from headwise.errors import DataError
from headwise.lab.experiment.run_folder import VOCABULARY, read_json
from headwise.lab.papers.reproduction import Published
from headwise.lab.results.cells import NONE, Cell, Grid, Number, show_number, show_percent, show_printed
from headwise.lab.results.evidence import Evidence, index_by_seed
from headwise.lab.results.statistics import estimate, holm
from headwise.lab.results.table import Table

MAJORITY = "majority"
LEVEL = 0.05
MARKED = (
    "; in parentheses what is not told to be better than the majority baseline, or than guessing a label where that "
    "is more (one-sided at 0.05 over seeds and sentences, Holm-adjusted over all scores of the grid)"
)


def build_grouped_grid(
    title: str,
    published: Published,
    groups: Mapping[str, Sequence[str]],
    tables: Mapping[str, Table],
    evidence: Mapping[str, Evidence],
    canonical: Callable[[str, str], str],
) -> Grid:
    """Return parts by arms, the paper's number before ours, and below a group the means over its parts that were run.

    A score in parentheses is not told to be better than the larger of the majority baseline and 1 / labels, in a
    one-sided test adjusted over all scores of the grid. The paper's means are over the same parts as ours.

    Raises:
        DataError: The labels of a run are not known.
    """
    doubtful = _find_at_chance(tables, evidence)
    arms = list(dict.fromkeys(row.arm for table in tables.values() for row in table.arms))
    cells = {(row.part, canonical(row.part, row.arm)): row.cells[0] for row in published.rows if row.part in tables}
    known = [arm for arm in arms if any((part, arm) in cells for part in tables)]
    rows: list[tuple[Cell, ...]] = []
    for group, members in groups.items():
        there = [part for part in members if part in tables]
        rows += [(part, *_build_row(part, arms, known, cells, tables.get(part), doubtful)) for part in members]
        if there:
            means: list[Cell] = []
            for arm in arms:
                if arm in known:
                    means.append(Number(fmean(float(cells[part, arm]) for part in there), digits=2))
                ours = [row.score.value for part in there if (row := tables[part].row(arm)) is not None]
                means.append(show_number(fmean(ours) if len(ours) == len(there) else None, 2, factor=100))
            which = "" if len(there) == len(members) else f" ({', '.join(there)})"
            rows.append((f"{group}: mean{which}", NONE, *means))
    header = ["task", MAJORITY]
    for arm in arms:
        header += [f"{arm}, paper", f"{arm}, here"] if arm in known else [f"{arm}, here"]
    return Grid(title + MARKED, tuple(header), tuple(rows), "l" + "r" * (len(header) - 1))


def _build_row(
    part: str,
    arms: Sequence[str],
    known: Sequence[str],
    cells: Mapping[tuple[str, str], str],
    table: Table | None,
    doubtful: set[tuple[str, str]],
) -> list[Cell]:
    majority = None if table is None else table.row(MAJORITY)
    found: list[Cell] = [NONE if majority is None else show_percent(majority.score, interval=False)]
    for arm in arms:
        if arm in known:
            found.append(show_printed(cells.get((part, arm), "")))
        row = None if table is None else table.row(arm)
        shown = NONE if row is None else show_percent(row.score)
        found.append(replace(shown, form="({})") if isinstance(shown, Number) and (part, arm) in doubtful else shown)
    return found


def _find_at_chance(tables: Mapping[str, Table], evidence: Mapping[str, Evidence]) -> set[tuple[str, str]]:
    """Return part and arm of each score that is not significantly above chance."""
    p_values: dict[tuple[str, str], float] = {}
    for part, table in tables.items():
        majority = table.row(MAJORITY)
        if majority is None:
            continue
        results = evidence[part].results
        for row in table.arms:
            runs = list(index_by_seed(results.runs, row.arm).values())
            # of many labels the most frequent one may not occur in test at all
            chance = max(majority.score.value, 1.0 / _count_labels(runs[0].folder))
            scores = np.stack([results.metric.values(run.statistics) for run in runs])
            p_values[part, row.arm] = estimate(scores).p_above(chance)
    adjusted = holm(list(p_values.values()))
    return {cell for cell, p in zip(p_values, adjusted, strict=True) if p > LEVEL}


def _count_labels(folder: Path) -> int:
    kept = read_json(folder / VOCABULARY)
    try:
        return len(kept["labels"])
    except (KeyError, TypeError) as error:
        raise DataError(f"{folder / VOCABULARY} does not hold the run's labels ({error}); train it again.") from None
