"""The grids of a comparison: verdicts, scores by bin, costs, diversity and what removing a head costs."""

from collections.abc import Iterable, Sequence
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
    show_percent,
    show_signed,
)
from headwise_lab.results.runs import LOSS, SHRUNK, STAGES, has_met_target, summarize_drops
from headwise_lab.results.statistics import Judgement, omit_p
from headwise_lab.results.table import FEW, PLAIN, Row, Table

# The measures of a row of `diversity_grid`; papers' own measures are under their papers' names.
DIVERSITY = {
    "effective_heads": "effective\nheads",
    "effective_heads_weighted": "by\nvariance",
    "debiased_cka": "CKA",
    "position_js": "attn.\nJS",
    "distance": "Dist",
    "output_cosine": "output\ncosine",
    "particle_norm": "norm",
    "force_ratio": "force\nratio",
}
# The measures of runs of version 0.1, which measured no effective number of heads.
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
# What the columns of a terminal are; the page explains them in full.
ALIKE = (
    "Effective heads: different things that heads contribute, from 1 for copies to their number; by variance: small "
    "contributions count less. CKA: alignment of contributions, 0 for independent heads. Attn. JS: divergence of "
    "attention, 0 for the same. Dist and output cosine: distance and cosine of outputs. Norm: of a head's parameters. "
    "Force ratio: repulsion over driving term."
)
COSTS = "Step time: median CPU time of a training step over plain's. A dash: does not apply, or not tested."
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
    rows = table.rows
    columns: dict[str, list[Cell]] = {
        "arm": [row.arm for row in rows],
        "verdict": [show_verdict(row) for row in rows],
        "p": [show_p(row.to_control and row.to_control.adjusted) for row in rows],
        "difference,\npoints": [show_lead(row.to_control) for row in rows],
        "to": [row.control or NONE for row in rows],
        table.axis.replace(" ", "\n"): [show_percent(row.score) for row in rows],
        "detectable": [_show_detectable(row.to_control) for row in rows],
        "seeds": [str(len(row.seeds)) for row in rows],
    }
    tested = _is_tested(table)
    if not tested:
        del columns["p"], columns["detectable"]
    title = f"{table.results.task} at scale {table.results.scale}: {table.results.primary}"
    return Grid.of(title, columns, "llrrlrrr" if tested else "llrlrr")


def list_notes(table: Table) -> tuple[str, ...]:
    """Return what explains the grids: only what is in them."""
    strong = any((row.measures["force_ratio"] or 0.0) > OVERWHELMING for row in table.arms)
    hidden = table.hidden_bins
    met = [row.arm for row in table.arms if has_met_target(row.settings, [row.measures["force_ratio"]])]
    return (
        NOTE if _is_tested(table) else INTERVALS,
        *([describe_doubt(table.doubt)] if table.doubt else []),
        *([FORCE_NOTE] if strong else []),
        *([f"{', '.join(met)}: the target was met from the start, and nothing pushed the heads."] if met else []),
        *([_describe_unasked(table)] if table.results.unasked else []),
        *([f"Not shown by {table.bin_words}, with fewer than {FEW} test items: {hidden}."] if hidden else []),
    )


def _describe_unasked(table: Table) -> str:
    there, last = table.results.unasked, 1 + max((*table.results.unasked, *table.results.seeds))
    named = f"seed{'s' * (len(there) > 1)} {', '.join(map(str, there))}"
    return f"Also in this folder, and left out here: {named}; --seeds {last} has them too."


def describe_doubt(doubt: str) -> str:
    """Return what a doubt about a task means for its table, as a sentence."""
    return f"Differences in score get no verdict: {doubt}, so this task may not need attention."


def plain_grid(table: Table) -> Grid:
    """Return the differences to plain of baselines and of arms whose control is another arm."""
    known = [(row.arm, row.to_plain) for row in table.rows if row.to_plain is not None and row.control != PLAIN]
    rows = tuple((arm, show_lead(lead), lead.words or NONE) for arm, lead in known)
    return Grid("the others against plain", ("arm", "difference,\npoints", "verdict"), rows, "lrl")


def bins_grid(table: Table, *, intervals: bool = True) -> Grid:
    """Return the score in each bin, one row per arm, with its 95 % interval unless told."""
    arms = {"arm": [row.arm for row in table.rows]}
    title = f"{table.results.metric.name} by {table.bin_words}, {table.results.metric.unit}".removesuffix(", ")
    scores = {
        str(table.bins[place]): [show_percent(row.bins[place], interval=intervals) for row in table.rows]
        for place in table.readable_bins
    }
    return Grid.of(title, {**arms, **scores})


def cost_grid(table: Table) -> Grid:
    """Return further measures of each arm, its parameters and its step time, one row per arm."""
    measures = [one for one in table.results.shown if any(row.answered[one.key] is not None for row in table.rows)]
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
    measured = [(score, row.arm, models) for row in table.arms for score, models in row.head_drops.items()]
    kinds = list(dict.fromkeys(drop.kind for _, _, models in measured for model in models for drop in model.drops))
    kinds = kinds if len(kinds) > 1 else []
    header = ("arm", "seeds", "heads", "redundant", "raise", "no cost\nshown", "mean\ncost")
    header += tuple(KINDS.get(kind, kind) for kind in kinds)
    grids = []
    for score in dict.fromkeys(score for score, _, _ in measured):
        rows: list[tuple[Cell, ...]] = []
        for arm, models in ((arm, models) for known, arm, models in measured if known == score):
            drops, summary = [drop for model in models for drop in model.drops], summarize_drops(models)
            shares = (summary[name] for name in ("redundant_share", "raising_share", "unshown_share"))
            percents = (Number(value, digits=0, factor=100, form="{} %") for value in shares)
            means = [_show_mean_cost(score, [drop.value for drop in drops])]
            means += [_show_mean_cost(score, [drop.value for drop in drops if drop.kind == kind]) for kind in kinds]
            rows.append((arm, str(len(models)), str(len(drops)), *percents, *means))
        cost = "rise in loss, nats" if score == LOSS else f"fall in {score}, points"
        grids.append(Grid(f"without one head: {cost}", header, tuple(rows), "l" + "r" * (len(header) - 1)))
    return tuple(grids)


def halving_grid(table: Table) -> Grid:
    """Return the score of each arm, a column, whole, with half of the heads and after the recovery, a row each."""
    halved = table.halved
    sizes = next(iter(halved.values()))
    columns: dict[str, list[Cell]] = {
        "model": [*STAGES.values()],
        "heads": [show_number(sizes.heads[stage], 0) for stage in STAGES],
        "params": [show_number(sizes.parameters[stage], 0) for stage in STAGES],
        **{
            arm: [Number(one.scores[stage].value, digits=1, factor=100) for stage in STAGES]
            for arm, one in halved.items()
        },
    }
    return Grid.of(f"with half of the heads: {table.axis}", columns)


def describe_halving(table: Table) -> str:
    """Return in a sentence what half of the heads costs plain, and the arm whose heads differ most, by variance."""
    halved, effective = table.halved, {row.arm: row.measures["effective_heads_weighted"] for row in table.arms}
    most = max(halved, key=lambda arm: effective.get(arm) or 0.0)
    words = [
        f"{arm}{', the arm with the most effective heads,' * (arm == most != PLAIN)} changes by "
        f"{_change(one.changes[SHRUNK[0]])}, and after {one.steps} step{'s' * (one.steps != 1)} of recovery, which the "
        f"whole model did not have, by {_change(one.changes[SHRUNK[1]])}"
        for arm in dict.fromkeys((PLAIN, most))
        if (one := halved.get(arm)) is not None
    ]
    if (beside := halved[most].beside) is not None:
        words.append(
            f"without recovery the change of {most} is above that of {halved[most].control} by {_change(beside)}"
        )
    return f"With half of its heads {'; '.join(words)}."


def _change(found: Judgement) -> str:
    words = found.words.replace("no difference shown", "no difference that could be detected")
    return f"{show_percent(found.estimate, signed=True)} points: {words}"


def signature_grid(table: Table) -> Grid:
    """Return the signature of each score as given by its library."""
    return Grid("how the scores were computed", ("score", "signature"), table.signatures, "ll")


def paired_grids(table: Table) -> tuple[Grid, ...]:
    """Return sacreBLEU's paired tests of each arm against its control, one grid per metric.

    The grid of the table's own metric also has the verdict, which is over seeds and test items.
    """
    grids = []
    for metric in dict.fromkeys(tests.metric for tests in table.paired):
        known = [tests for tests in table.paired if tests.metric == metric]
        columns: dict[str, list[Cell]] = {
            "arm": [tests.arm for tests in known],
            "seeds": [str(len(tests.seeds)) for tests in known],
            f"{metric}\ndifference": [show_signed(tests.difference) for tests in known],
            "ahead,\nbehind": [f"{tests.ahead}, {tests.behind}" for tests in known],
            "p,\nbootstrap": [_show_range(test.bootstrap for test in tests.tests) for tests in known],
            "p,\nrandomisation": [_show_range(test.randomisation for test in tests.tests) for tests in known],
        }
        judged = metric == table.results.metric.name
        if judged:
            rows = (table.row(tests.arm) for tests in known)
            columns["verdict"] = [NONE if row is None else row.verdict for row in rows]
        title = f"sacreBLEU's paired tests on {metric}, each run against its control's; p-values not adjusted"
        grids.append(Grid.of(title, columns, "lrrrrr" + "l" * judged))
    return tuple(grids)


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
        signature_grid(table),
    )
    return tuple(grid for grid in every if grid.rows)


def render_terminal(table: Table) -> Group:
    """Return what `headwise compare` prints; it fits 80 columns with up to 12 bins and arm names of usual length."""
    shown = list_grids(table, intervals=len(table.readable_bins) <= BINS_WITH_INTERVAL)
    notes = [*list_notes(table), COSTS, ALIKE, *(f"not finished: {run}" for run in table.results.missing)]
    # last, as it was asked for
    halves = [halving_grid(table), Text(describe_halving(table))] if table.halved else []
    return Group(*shown, *(Text(note, "dim") for note in notes), *halves)


def show_verdict(row: Row) -> str:
    """Return the verdict on an arm without its p-value, or a dash."""
    return "baseline" if row.baseline else omit_p(row.verdict) or NONE


def show_lead(found: Judgement | None) -> Cell:
    """Return a difference in points with its interval, or a dash."""
    return NONE if found is None else show_percent(found.estimate, signed=True)


def _is_tested(table: Table) -> bool:
    return any(row.to_control is not None and row.to_control.adjusted is not None for row in table.rows)


def _show_measure(name: str, value: float | None) -> Cell:
    strong = name == "force_ratio" and value is not None and value > OVERWHELMING
    return Number(value, form="{} !") if strong else show_number(value)


def _show_detectable(found: Judgement | None) -> Cell:
    if found is None or found.detectable is None or not found.family:
        return NONE
    digits = choose_digits(1, found.detectable, factor=100)
    return Number(None, found.detectable, found.detectable_in_family, digits=digits, factor=100)


def _show_range(values: Iterable[float]) -> Number:
    """Return the range of the p-values of several runs."""
    known = list(values)
    return Number(None, min(known), max(known))


def _show_mean_cost(score: str, costs: Sequence[float]) -> Cell:
    return show_number(fmean(costs) if costs else None, factor=1.0 if score == LOSS else 100.0)
