"""The grids of a comparison: verdicts, scores by bin, costs, diversity and what removing a head costs."""

from collections.abc import Sequence
from statistics import fmean

from rich.console import Group
from rich.text import Text

from headwise.lab.results.cells import (
    NONE,
    Grid,
    format_number,
    format_p_range,
    format_percent,
    format_points,
    format_signed,
)
from headwise.lab.results.head_drops import LOSS, Drop, summarize_drops
from headwise.lab.results.runs import MEASURES
from headwise.lab.results.table import PLAIN, Table

# More bins do not fit a terminal with their intervals.
BINS_WITH_INTERVAL = 5
KINDS = {"self": "encoder", "decoder": "decoder", "cross": "cross"}
NOTE = "± is half a 95 % interval over seeds and test items; differences are in points, p-values are Holm-adjusted."


def verdict_grid(table: Table) -> Grid:
    """Return the score of each arm and the verdict against its control."""
    rows = tuple(
        (
            row.arm,
            str(len(row.seeds)),
            format_percent(row.score),
            "baseline" if row.baseline else row.control or NONE,
            format_points(row.to_control),
            row.verdict or NONE,
        )
        for row in table.rows
    )
    header = ("arm", "seeds", table.axis.replace(" ", "\n"), "judged\nagainst", "difference,\npoints", "verdict")
    return Grid(f"{table.task} at scale {table.scale}: {table.primary}", header, rows, "lrrlrl")


def plain_grid(table: Table) -> Grid:
    """Return the differences to plain of baselines and of arms whose control is another arm."""
    rows = tuple(
        (row.arm, format_points(row.to_plain), row.to_plain.verdict or NONE)
        for row in table.rows
        if row.to_plain is not None and row.control != PLAIN
    )
    return Grid("the others against plain", ("arm", "difference,\npoints", "verdict"), rows, "lrl")


def bins_grid(table: Table, *, intervals: bool = True) -> Grid:
    """Return the score in each bin, one row per arm.

    Args:
        table: The comparison.
        intervals: Whether to show half the 95 % interval of each score.
    """
    rows = tuple((row.arm, *(format_percent(found, interval=intervals) for found in row.bins)) for row in table.rows)
    header = ("arm", *map(str, table.bins))
    title = f"{table.metric.name} by {table.difficulty}, {table.metric.unit}".removesuffix(", ")
    return Grid(title, header, rows, "l" + "r" * len(table.bins))


def cost_grid(table: Table) -> Grid:
    """Return further measures of each arm, its parameters and its step time, one row per arm."""
    measures = [one for one in table.shown if any(row.answered[one.key] is not None for row in table.rows)]
    rows = tuple(
        (
            row.arm,
            *(
                NONE if (value := row.answered[measure.key]) is None else f"{value:.{measure.digits}f}"
                for measure in measures
            ),
            NONE if row.parameters is None else f"{row.parameters:,}",
            NONE if row.step_ratio is None else f"{row.step_ratio:.2f}",
        )
        for row in (table.rows if measures else table.arms)
    )
    header = ("arm", *(measure.title for measure in measures), "params", "step\ntime")
    title = f"{'further scores and ' if measures else ''}the cost: means over seeds (step time: over plain)"
    return Grid(title, header, rows, "l" + "r" * (len(header) - 1))


def head_grids(table: Table) -> tuple[Grid, ...]:
    """Return the cost of removing one head, one grid per score, pooling the heads of all seeds."""
    scores = dict.fromkeys(score for row in table.arms for score in row.head_drops)
    kinds = dict.fromkeys(
        drop.kind
        for row in table.arms
        for models in row.head_drops.values()
        for model in models
        for drop in model.drops
    )
    columns = tuple(KINDS.get(kind, kind) for kind in kinds) if len(kinds) > 1 else ()
    header = ("arm", "seeds", "heads", "redundant", "raise", "no cost\nshown", "mean\ncost", *columns)
    found = []
    for score in scores:
        rows = []
        for row in table.arms:
            if models := row.head_drops.get(score):
                drops = [drop for model in models for drop in model.drops]
                summary = summarize_drops(models)
                shares = (summary[name] for name in ("redundant_share", "raising_share", "unshown_share"))
                means = [_format_mean_cost(score, drops)]
                means += [
                    _format_mean_cost(score, [drop for drop in drops if drop.kind == kind]) for kind in kinds if columns
                ]
                percents = (f"{100 * value:.0f} %" for value in shares)
                rows.append((row.arm, str(len(models)), str(len(drops)), *percents, *means))
        cost = "rise in loss, nats" if score == LOSS else f"fall in {score}, points"
        found.append(Grid(f"without one head: {cost}", header, tuple(rows), "l" + "r" * (len(header) - 1)))
    return tuple(found)


def signature_grid(table: Table) -> Grid:
    """Return the signature of each score as given by its library."""
    return Grid("how the scores were computed", ("score", "signature"), table.signatures, "ll")


def paired_grids(table: Table) -> tuple[Grid, ...]:
    """Return sacreBLEU's paired tests of each arm against its control, one grid per metric.

    The grid of the table's own metric also has the verdict, which is over seeds and test items.
    """
    found = []
    for metric in dict.fromkeys(tests.metric for tests in table.paired):
        judged = metric == table.metric.name
        rows = []
        for tests in table.paired:
            if tests.metric != metric:
                continue
            row = table.row(tests.arm)
            cells = (
                tests.arm,
                str(len(tests.seeds)),
                format_signed(tests.difference),
                f"{tests.ahead}, {tests.behind}",
                format_p_range([test.bootstrap for test in tests.tests]),
                format_p_range([test.randomisation for test in tests.tests]),
            )
            rows.append((*cells, row.verdict if row is not None else NONE) if judged else cells)
        header = ("arm", "seeds", f"{metric}\ndifference", "ahead,\nbehind", "p,\nbootstrap", "p, random-\nisation")
        title = f"sacreBLEU's paired tests on {metric}, each run against its control's; p-values not adjusted"
        found.append(Grid(title, (*header, *(["verdict"] * judged)), tuple(rows), "lrrrrr" + "l" * judged))
    return tuple(found)


def diversity_grid(table: Table) -> Grid:
    """Return how similar the heads of each arm are, one row per arm."""
    rows = tuple((row.arm, *(format_number(row.measures[name]) for name in MEASURES)) for row in table.arms)
    header = ("arm", "Dist", "output\ncosine", "output\nCKA", "attn.\nJS", "param.\ncosine", "norm", "force\nratio")
    return Grid("how alike the heads are: means over seeds", header, rows, "l" + "r" * (len(header) - 1))


def list_grids(table: Table, *, intervals: bool = True) -> tuple[Grid, ...]:
    """Return all grids that have rows, the verdicts first; `intervals` as for `bins_grid`."""
    every = (
        verdict_grid(table),
        plain_grid(table),
        *paired_grids(table),
        cost_grid(table),
        bins_grid(table, intervals=intervals),
        diversity_grid(table),
        *head_grids(table),
        signature_grid(table),
    )
    return tuple(grid for grid in every if grid.rows)


def render_terminal(table: Table) -> Group:
    """Return what `headwise compare` prints; it fits 80 columns with up to 12 bins and arm names of usual length."""
    shown = list_grids(table, intervals=len(table.bins) <= BINS_WITH_INTERVAL)
    notes = [NOTE, *(f"not finished: {run}" for run in table.missing)]
    return Group(*shown, *(Text(note, "dim") for note in notes))


def _format_mean_cost(score: str, drops: Sequence[Drop]) -> str:
    if not drops:
        return NONE
    mean = fmean(drop.value for drop in drops)
    return format_number(mean) if score == LOSS else format_number(100 * mean)
