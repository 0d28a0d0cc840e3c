"""The grid of GLUE: each set's score over repeated fine-tuning, and the average over sets, both ways.

Owns the average and how a set of runs is summed up: mean, interval and median. Must not know the paper's numbers.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from headwise.lab.experiment.seeding import key
from headwise.lab.results.cells import NONE, Grid
from headwise.lab.results.evidence import Evidence
from headwise.lab.results.statistics import Estimate, estimate
from headwise.lab.results.table import Table

# A set fine-tuned from the model that was fine-tuned on another set, and the column it takes the place of.
AFTER = {"RTE after MNLI": "RTE"}


def glue_grid(evidence: Mapping[str, Evidence], tables: Mapping[str, Table]) -> Grid:
    """Return arms by sets: mean with its 95 % interval, and the median over fine-tunings; last the averages.

    Args:
        evidence: The runs of each set.
        tables: The table of each.
    """
    sets = list(evidence)
    arms = list(dict.fromkeys(row.arm for table in tables.values() for row in table.rows))
    ways = averages(sets)
    rows = []
    for arm in arms:
        cells = [_cell(tables[name], arm) for name in sets]
        for chosen in ways.values():
            found = _by_seed(evidence, chosen, arm)
            means = np.array([[statistics.fmean(values)] for values in zip(*found, strict=True)]) if found else None
            cells.append(
                NONE if means is None else _written(estimate(means, seed=key("glue", arm)), means[:, 0].tolist())
            )
        rows.append((arm, *cells))
    title = "Fine-tuning, times 100: mean [95 % interval], median over seeds"
    return Grid(title, ("arm", *sets, *ways), tuple(rows), "l" + "r" * (len(sets) + len(ways)))


def averages(sets: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the columns of averages, name to the sets each is over, as far as the sets are there.

    >>> averages(["CoLA", "RTE", "RTE after MNLI"])
    {'Avg. of 2': ('CoLA', 'RTE'), 'Avg. of 2, RTE after MNLI': ('CoLA', 'RTE after MNLI')}
    >>> averages(["CoLA"])
    {}
    """
    single = tuple(name for name in sets if name not in AFTER)
    if len(single) < 2:
        return {}
    found: dict[str, tuple[str, ...]] = {f"Avg. of {len(single)}": single}
    for name, replaced in AFTER.items():
        if name in sets and replaced in single:
            found[f"Avg. of {len(single)}, {name}"] = tuple(name if one == replaced else one for one in single)
    return found


def _cell(table: Table, arm: str) -> str:
    row = table.row(arm)
    if row is None:
        return NONE
    return _written(row.score, [point.score for point in row.points])


def _by_seed(evidence: Mapping[str, Evidence], chosen: Sequence[str], arm: str) -> list[list[float]]:
    """Return the scores of an arm on each of some sets, under the seeds that all of them have."""
    scores = []
    for name in chosen:
        results = evidence[name].results
        runs = [run for run in results.runs if run.arm == arm]
        scores.append({run.seed: float(results.metric.values(run.statistics).mean()) for run in runs})
    seeds = sorted(set.intersection(*(set(found) for found in scores)))
    return [[found[seed] for seed in seeds] for found in scores] if seeds else []


def _written(found: Estimate, values: Sequence[float]) -> str:
    low, high = max(-1.0, found.low), min(1.0, found.high)
    if found.seeds < 2:
        return f"{100 * found.value:.1f}"
    return f"{100 * found.value:.1f} [{100 * low:.1f}, {100 * high:.1f}], {100 * statistics.median(values):.1f}"
