"""An et al. 2020, section 5.3: ELECTRA pre-trained with repulsive heads, and fine-tuned on GLUE.

ELECTRA of the paper is plain, ELECTRA + RMA is svgd on the discriminator's first layer, in pre-training alone.
"""

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from headwise_lab.papers.claims import Claim, Contrast
from headwise_lab.results.cells import NONE, Cell, Grid, Number
from headwise_lab.results.evidence import Evidence
from headwise_lab.results.statistics import Estimate, estimate
from headwise_lab.results.table import Table

# A set fine-tuned from the model that was fine-tuned on another set, and the column it takes the place of.
AFTER = {"RTE after MNLI": "RTE"}
# Appendix B.3; the layer is the task's own choice.
SVGD = "svgd:alpha=0.1,step_size=0.01"
SMOOTH = "smooth:step_size=0.01"
# Sets whose score rises in the paper's table.
RISING = ("CoLA", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE after MNLI")


def build_glue_grid(evidence: Mapping[str, Evidence], tables: Mapping[str, Table]) -> Grid:
    """Return arms by sets: mean with its 95 % interval, and the median over fine-tunings; last the averages."""
    sets = list(evidence)
    arms = list(dict.fromkeys(row.arm for table in tables.values() for row in table.rows))
    ways = average_sets(sets)
    rows = []
    for arm in arms:
        known = [tables[name].row(arm) for name in sets]
        cells = [NONE if row is None else _show(row.score, row.score.by_seed) for row in known]
        for chosen in ways.values():
            found = _read_means(evidence, chosen, arm)
            cells.append(_show(estimate(np.array(found)[:, None], least=-1.0, most=1.0), found) if found else NONE)
        rows.append((arm, *cells))
    title = "Fine-tuning, times 100: mean (95 % interval), median over seeds"
    return Grid(title, ("arm", *sets, *ways), tuple(rows), "l" + "r" * (len(sets) + len(ways)))


def average_sets(sets: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the columns of averages, name to the sets each is over, as far as the sets are there.

    >>> average_sets(["CoLA", "RTE", "RTE after MNLI"])
    {'Avg. of 2': ('CoLA', 'RTE'), 'Avg. of 2, RTE after MNLI': ('CoLA', 'RTE after MNLI')}
    >>> average_sets(["CoLA"])
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


def _read_means(evidence: Mapping[str, Evidence], chosen: Sequence[str], arm: str) -> list[float]:
    """Return an arm's mean score over some sets, under each seed that all of them have."""
    scores = []
    for results in (evidence[name].results for name in chosen):
        runs = [run for run in results.runs if run.arm == arm]
        scores.append({run.seed: float(results.metric.values(run.statistics).mean()) for run in runs})
    seeds = sorted(set.intersection(*map(set, scores)))
    return [statistics.fmean(found[seed] for found in scores) for seed in seeds]


def _show(found: Estimate, values: Sequence[float]) -> Cell:
    if found.seeds < 2:
        return Number(found.value, digits=1, factor=100)
    return Number(found.value, found.low, found.high, digits=1, factor=100, median=statistics.median(values))


def make_claims(sets: tuple[str, ...]) -> tuple[Claim, ...]:
    """Return the paper's claims as far as some of its sets can speak of them."""
    ways = average_sets(sets)
    # the paper counts RTE by its second column; fine-tuned alone it falls
    rising = tuple(name for name in sets if name in RISING)
    here = "" if rising == RISING else f" ({len(rising)} of these seven are here: {', '.join(rising)})"
    return (
        Claim(
            f"Repulsive attention improves the average over the sets ({' and '.join(ways) or 'fewer than two here'}).",
            tuple(Contrast(SVGD, "plain", over=way) for way in ways.values()),
        ),
        Claim(
            f"Repulsive attention improves seven of eight sets, RTE after MNLI among them: all but SST-2{here}.",
            tuple(Contrast(SVGD, "plain", part=name) for name in rising),
        ),
        Claim(
            "The gains are larger on MNLI, the largest set, and on CoLA (shown, with RTE and SST-2, which fall in the "
            "paper's table).",
            tuple(Contrast(SVGD, "plain", part=name) for name in ("MNLI", "CoLA", "SST-2", "RTE") if name in sets),
            tested=False,
        ),
        Claim(
            "What repulsive pre-training adds is the repulsion, not the smoothing (our control; the paper has none).",
            tuple(Contrast(SVGD, SMOOTH, over=way) for way in ways.values()),
        ),
    )
