"""The grids of a comparison: verdicts, scores by bin, costs, diversity and what removing a head costs."""

from collections.abc import Sequence
from statistics import fmean

from rich.console import Group
from rich.text import Text

from headwise_lab.results.cells import (
    NONE,
    Cell,
    Grid,
    Number,
    choose_digits,
    show_number,
    show_p,
    show_p_range,
    show_percent,
    show_points,
    show_signed,
)
from headwise_lab.results.runs import LOSS, SHRUNK, STAGES, Drop, has_met_target, summarize_drops
from headwise_lab.results.statistics import Judgement, omit_p
from headwise_lab.results.table import FEW, PLAIN, Difference, Table

# The measures of a row of `diversity_grid`; papers' own measures are under their papers' names.
DIVERSITY = {
    "effective_heads": "effective\nheads",
    "effective_heads_weighted": "by vari-\nance",
    "debiased_cka": "CKA",
    "position_js": "attn.\nJS",
    "distance": "Dist",
    "output_cosine": "output\ncosine",
    "particle_norm": "norm",
    "force_ratio": "force\nratio",
}
# Those of runs of version 0.1, which measured no effective number of heads.
EARLIER_DIVERSITY = {
    "distance": "Dist",
    "output_cosine": "output\ncosine",
    "output_cka": "output\nCKA",
    "position_js": "attn.\nJS",
    "parameter_cosine": "param.\ncosine",
    "particle_norm": "norm",
    "force_ratio": "force\nratio",
}
# More bins do not fit a terminal with their intervals.
BINS_WITH_INTERVAL = 3
KINDS = {"self": "encoder", "decoder": "decoder", "cross": "cross"}
INTERVALS = "In parentheses 95 % intervals over seeds and test items; differences are in points."
NOTE = (
    "In parentheses 95 % intervals over seeds and test items; differences are in points, p-values are Holm-adjusted. "
    "Detectable: the smallest difference that a test at 5 % would find with 80 % power, alone and among its family."
)
# A repulsion this many times as strong as what drives training has replaced it.
OVERWHELMING = 10.0
FORCE_NOTE = f"!: a force ratio above {OVERWHELMING:g}; the repulsion, not the loss, then drives the heads."


def verdict_grid(table: Table) -> Grid:
    """Return the verdict on each arm with its p-value, the difference to its control, and its score.

    The verdict stands right after the arm: on a narrow screen it is seen first.
    """
    tested = any(_find_adjusted(row.to_control) is not None for row in table.rows)
    columns: dict[str, tuple[str, list[Cell]]] = {
        "arm": ("l", [row.arm for row in table.rows]),
        "verdict": ("l", ["baseline" if row.baseline else omit_p(row.verdict) or NONE for row in table.rows]),
        "p": ("r", [show_p(_find_adjusted(row.to_control)) for row in table.rows]),
        "difference,\npoints": (
            "r",
            [show_points(row.to_control and row.to_control.estimate) for row in table.rows],
        ),
        "to": ("l", [row.control or NONE for row in table.rows]),
        table.axis.replace(" ", "\n"): ("r", [show_percent(row.score) for row in table.rows]),
        "detect-\nable": ("r", [_show_detectable(row.to_control) for row in table.rows]),
        "seeds": ("r", [str(len(row.seeds)) for row in table.rows]),
    }
    if not tested:
        del columns["p"], columns["detect-\nable"]
    align = "".join(letter for letter, _ in columns.values())
    rows = tuple(zip(*(cells for _, cells in columns.values()), strict=True))
    return Grid(f"{table.task} at scale {table.scale}: {table.primary}", tuple(columns), rows, align)


def list_notes(table: Table) -> tuple[str, ...]:
    """Return what explains the grids: only what is in them."""
    tested = any(_find_adjusted(row.to_control) is not None for row in table.rows)
    strong = any((row.measures["force_ratio"] or 0.0) > OVERWHELMING for row in table.arms)
    hidden = table.hidden_bins
    met = [row.arm for row in table.arms if has_met_target(row.settings, [row.measures["force_ratio"]])]
    return (
        NOTE if tested else INTERVALS,
        *([describe_doubt(table.doubt)] if table.doubt else []),
        *([FORCE_NOTE] if strong else []),
        *([f"{', '.join(met)}: the target was met from the start, and nothing pushed the heads."] if met else []),
        *([f"Not shown by {table.bin_words}, with fewer than {FEW} test items: {hidden}."] if hidden else []),
    )


def describe_doubt(doubt: str) -> str:
    """Return what a doubt about a task means for its table, as a sentence."""
    return f"Differences in score get no verdict: {doubt}, so this task may not need attention."


def plain_grid(table: Table) -> Grid:
    """Return the differences to plain of baselines and of arms whose control is another arm."""
    rows = tuple(
        (row.arm, show_points(row.to_plain.estimate), row.to_plain.verdict or NONE)
        for row in table.rows
        if row.to_plain is not None and row.control != PLAIN
    )
    return Grid("the others against plain", ("arm", "difference,\npoints", "verdict"), rows, "lrl")


def bins_grid(table: Table, *, intervals: bool = True) -> Grid:
    """Return the score in each bin, one row per arm.

    Args:
        table: The comparison.
        intervals: Whether to show the 95 % interval of each score.
    """
    shown = table.readable_bins
    rows = tuple(
        (row.arm, *(show_percent(row.bins[place], interval=intervals) for place in shown)) for row in table.rows
    )
    header = ("arm", *(str(table.bins[place]) for place in shown))
    title = f"{table.metric.name} by {table.bin_words}, {table.metric.unit}".removesuffix(", ")
    return Grid(title, header, rows, "l" + "r" * len(shown))


def cost_grid(table: Table) -> Grid:
    """Return further measures of each arm, its parameters and its step time, one row per arm."""
    measures = [one for one in table.shown if any(row.answered[one.key] is not None for row in table.rows)]
    rows = tuple(
        (
            row.arm,
            *(show_number(row.answered[measure.key], measure.digits) for measure in measures),
            show_number(row.parameters, 0),
            show_number(row.step_ratio, 2),
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
        rows: list[tuple[Cell, ...]] = []
        for row in table.arms:
            if models := row.head_drops.get(score):
                drops = [drop for model in models for drop in model.drops]
                summary = summarize_drops(models)
                shares = (summary[name] for name in ("redundant_share", "raising_share", "unshown_share"))
                means = [_show_mean_cost(score, drops)]
                means += [
                    _show_mean_cost(score, [drop for drop in drops if drop.kind == kind]) for kind in kinds if columns
                ]
                percents = (Number(value, digits=0, factor=100, form="{} %") for value in shares)
                rows.append((row.arm, str(len(models)), str(len(drops)), *percents, *means))
        cost = "rise in loss, nats" if score == LOSS else f"fall in {score}, points"
        found.append(Grid(f"without one head: {cost}", header, tuple(rows), "l" + "r" * (len(header) - 1)))
    return tuple(found)


def halving_grid(table: Table) -> Grid:
    """Return the score of each arm, a column, whole, with half of the heads and after the recovery, a row each."""
    halved, metric = table.halved, table.metric
    header = ("model", "heads", "params", *halved)
    sizes = next(iter(halved.values())) if halved else None
    rows = tuple(
        (
            STAGES[stage],
            show_number(sizes.heads[stage], 0),
            show_number(sizes.parameters[stage], 0),
            *(Number(one.scores[stage].value, digits=1, factor=100) for one in halved.values()),
        )
        for stage in STAGES
        if sizes is not None
    )
    title = f"with half of the heads: {metric.name}, {metric.unit}".removesuffix(", ")
    return Grid(title, header, rows, "l" + "r" * (len(header) - 1))


def describe_halving(table: Table) -> str:
    """Return in words what half of the heads costs plain, and the arm with the most effective heads, by variance."""
    halved, effective = table.halved, {row.arm: row.measures["effective_heads_weighted"] for row in table.arms}
    if not halved:
        return ""
    most = max(halved, key=lambda arm: effective.get(arm) or 0.0)
    said = [
        f"With half of its heads {arm} changes by {_change(one.changes[SHRUNK[0]])}; after a recovery of {one.steps} "
        f"steps, which the whole model did not have, by {_change(one.changes[SHRUNK[1]])}."
        for arm in dict.fromkeys((PLAIN, most))
        if (one := halved.get(arm)) is not None
    ]
    if (beside := halved[most].beside) is not None:
        said.append(
            f"Without a recovery the change of {most}, the arm with the most effective heads, is above that of "
            f"{halved[most].control} by {_change(beside)}."
        )
    return " ".join(said)


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
        rows: list[tuple[Cell, ...]] = []
        for tests in table.paired:
            if tests.metric != metric:
                continue
            row = table.row(tests.arm)
            cells = (
                tests.arm,
                str(len(tests.seeds)),
                show_signed(tests.difference),
                f"{tests.ahead}, {tests.behind}",
                show_p_range([test.bootstrap for test in tests.tests]),
                show_p_range([test.randomisation for test in tests.tests]),
            )
            rows.append((*cells, row.verdict if row is not None else NONE) if judged else cells)
        header = ("arm", "seeds", f"{metric}\ndifference", "ahead,\nbehind", "p,\nbootstrap", "p, random-\nisation")
        title = f"sacreBLEU's paired tests on {metric}, each run against its control's; p-values not adjusted"
        found.append(Grid(title, (*header, *(["verdict"] * judged)), tuple(rows), "lrrrrr" + "l" * judged))
    return tuple(found)


def diversity_grid(table: Table) -> Grid:
    """Return how similar the heads of each arm are, one row per arm."""
    measured = any(row.measures["effective_heads"] is not None for row in table.arms)
    columns = DIVERSITY if measured else EARLIER_DIVERSITY
    rows = tuple((row.arm, *(_show_measure(name, row.measures[name]) for name in columns)) for row in table.arms)
    return Grid("how alike the heads are: means over seeds", ("arm", *columns.values()), rows, "l" + "r" * len(columns))


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
        halving_grid(table),
        signature_grid(table),
    )
    return tuple(grid for grid in every if grid.rows)


def render_terminal(table: Table) -> Group:
    """Return what `headwise compare` prints; it fits 80 columns with up to 12 bins and arm names of usual length."""
    shown = list_grids(table, intervals=len(table.readable_bins) <= BINS_WITH_INTERVAL)
    notes = [
        *list_notes(table),
        *filter(None, [describe_halving(table)]),
        *(f"not finished: {run}" for run in table.missing),
    ]
    return Group(*shown, *(Text(note, "dim") for note in notes))


def _find_adjusted(found: Difference | None) -> float | None:
    return None if found is None else found.judgement.adjusted


def _show_measure(name: str, value: float | None) -> Cell:
    strong = name == "force_ratio" and value is not None and value > OVERWHELMING
    return Number(value, form="{} !") if strong else show_number(value)


def _show_detectable(found: Difference | None) -> Cell:
    if found is None or found.judgement.detectable is None or not found.judgement.family:
        return NONE
    low, high = found.judgement.detectable, found.judgement.detectable_in_family
    return Number(None, low, high, digits=choose_digits(1, low, factor=100), factor=100)


def _show_mean_cost(score: str, drops: Sequence[Drop]) -> Cell:
    if not drops:
        return NONE
    return show_number(fmean(drop.value for drop in drops), factor=1.0 if score == LOSS else 100.0)


def _change(found: Judgement) -> str:
    word = found.words.replace("no difference shown", "no difference that could be detected")
    return f"{show_points(found.estimate)} points: {word}"
