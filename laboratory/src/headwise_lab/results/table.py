"""The table of a comparison, made from its runs: a row per arm with intervals, differences and verdicts; its record."""

import math
import statistics as averages
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import NotFired
from headwise_lab.experiment.evaluation import Metric
from headwise_lab.results.runs import (
    MEASURES,
    SHRUNK,
    STAGES,
    WHOLE,
    HeadDrops,
    Results,
    Run,
    has_met_target,
    read_results,
    read_starts,
    summarize_drops,
)
from headwise_lab.results.statistics import (
    MINIMUM_SEEDS,
    Estimate,
    Judgement,
    PairedTests,
    difference,
    judge_family,
    score,
)

PLAIN = "plain"
# Of a bin of fewer test items an interval is wider than any difference between arms.
FEW = 20
# Two runs with equal answers whose measures differ by less than this are the same.
SAME = 1e-6
OWN_TEST = "no verdict (each its own test)"
# The measures that a record has of each run.
OF_RUNS = ("effective_heads", "effective_heads_weighted", "output_cosine", "force_ratio")


@dataclass(frozen=True)
class Row:
    """One arm or baseline over its seeds.

    Attributes:
        arm: Its name.
        control: Name of its control; None for plain and for baselines.
        baseline: Whether it is a baseline without attention rather than an arm.
        runs: Its finished runs, by seed.
        score: The metric pooled over all test bins.
        bins: The metric in each bin, in the order of `Table.bins`.
        to_plain: Difference to plain, paired by seed and item; None for plain itself and if plain was not run.
        to_control: Difference to the control, which `verdict` is about; None if it was not run. Equal to
            `to_plain` if the control is plain.
        bins_to_plain: Difference to plain in each bin, or empty.
        verdict: The verdict in words; "" for plain and for baselines.
        measures: Means over seeds of `runs.MEASURES`; None where one does not apply.
        answered: Means over seeds of the measures in `Results.shown`, by key; None where one does not apply.
        parameters: Number of parameters, or None.
        step_ratio: Time of a training step over plain's, median over seeds: of steps timed in turn if available, else
            of the runs' own; or None.
        head_drops: Costs of removing heads, by score: one entry per seed for which they were measured.
        settings: Settings of the arm's first run, as JSON data.
    """

    arm: str
    control: str | None
    baseline: bool
    runs: tuple[Run, ...]
    score: Estimate
    bins: tuple[Estimate, ...]
    to_plain: Judgement | None
    to_control: Judgement | None
    bins_to_plain: tuple[Estimate, ...]
    verdict: str
    measures: Mapping[str, float | None]
    answered: Mapping[str, float | None]
    parameters: int | None
    step_ratio: float | None
    head_drops: Mapping[str, tuple[HeadDrops, ...]]
    settings: Mapping[str, Any]

    @property
    def seeds(self) -> tuple[int, ...]:
        """The finished seeds."""
        return tuple(run.seed for run in self.runs)


@dataclass(frozen=True)
class Halving:
    """The models of an arm with half of their heads.

    Attributes:
        heads: Number of heads of a model, by stage.
        parameters: Number of its parameters.
        scores: The metric pooled over all test items.
        changes: Differences to the whole models, of the other stages.
        beside: What half of the heads cost the arm less than its control; None without a control.
        control: Name of the control.
        steps: Steps of the recovery.
    """

    heads: Mapping[str, int]
    parameters: Mapping[str, int]
    scores: Mapping[str, Estimate]
    changes: Mapping[str, Judgement]
    beside: Judgement | None
    control: str | None
    steps: int


@dataclass(frozen=True)
class Table:
    """A comparison as a table: baselines first, then plain, then the other arms in the requested order.

    Attributes:
        results: The runs that it was made from.
        signatures: How each score was computed, as (name, signature); one entry per name unless runs differ.
        bins: Difficulty of each bin.
        items: Number of test items in each bin.
        rows: The rows.
        paired: sacreBLEU's paired tests, one entry per arm and metric, for translations.
        doubt: Why differences in score decide nothing, as in "plain is not shown to beat counts"; "" where they do.
        versions: Package to version, over all runs.
        halved: The arms with half of their heads, where that was measured.
    """

    results: Results
    signatures: tuple[tuple[str, str], ...]
    bins: tuple[int, ...]
    items: tuple[int, ...]
    rows: tuple[Row, ...]
    paired: tuple[PairedTests, ...]
    doubt: str
    versions: Mapping[str, str]
    halved: Mapping[str, Halving] = field(default_factory=dict)

    def row(self, arm: str) -> Row | None:
        """Return the row of an arm, or None."""
        return next((row for row in self.rows if row.arm == arm), None)

    @property
    def arms(self) -> tuple[Row, ...]:
        """The rows that are not baselines."""
        return tuple(row for row in self.rows if not row.baseline)

    @property
    def bin_words(self) -> str:
        """The quantity that bins are made of inside a sentence, where no number follows it."""
        name, comma, _ = self.results.difficulty.partition(", up to")
        return f"{name} (bins by their upper ends)" if comma else name

    @property
    def readable_bins(self) -> tuple[int, ...]:
        """Places of the bins with enough test items to read; all of them if none has enough."""
        enough = tuple(place for place, items in enumerate(self.items) if items >= FEW)
        return enough or tuple(range(len(self.bins)))

    @property
    def hidden_bins(self) -> str:
        """The bins that are not shown with their numbers of items, in words; "" for none."""
        hidden = [place for place in range(len(self.bins)) if place not in self.readable_bins]
        return ", ".join(f"{self.bins[place]} ({self.items[place]})" for place in hidden)

    @property
    def axis(self) -> str:
        """The metric with its unit, as an axis label."""
        return f"{self.results.metric.name}, {self.results.metric.unit}".removesuffix(", ")


def read_table(out: Path, seeds: Sequence[int] | None = None) -> Table:
    """Return the table of the comparison in folder `out`, from its finished runs, of some seeds unless None.

    Raises:
        DataError: A file is missing or damaged; see `read_results`.
        NotFired: An arm did the same as plain; see `make_table`.
    """
    results = read_results(out)
    return make_table(results if seeds is None else results.only(seeds))


def make_table(results: Results, judged: Mapping[tuple[str, str], Judgement] | None = None) -> Table:
    """Return the table of a comparison.

    Each arm is judged by its difference to its control; Holm's adjustment covers these differences, one per arm that
    was asked for. Other differences have an interval and no verdict.

    Args:
        results: The runs.
        judged: Judgements made elsewhere, by arm and other arm: no other difference is tested. None for the above.

    Raises:
        NotFired: An arm has as many parameters as plain, its answers on all test items under every seed, and its
            measures to 1e-6: its method did not act. A target that was met from the start is none.
    """
    arms: dict[str, list[Run]] = {}
    for run in sorted(results.runs, key=lambda run: run.seed):
        arms.setdefault(run.arm, []).append(run)
    for runs in arms.values():
        _require_distinct(runs, arms.get(PLAIN, []))
    # as asked for, then as they were read; baselines and plain first
    names = dict.fromkeys((*results.arms, *(run.arm for run in results.runs)))
    ordered = sorted((arms[name] for name in names if name in arms), key=_place)
    rows = [_make_row(runs, arms, results) for runs in ordered]
    doubt = find_doubt(results)
    if results.metric.own_test:
        judged = {}
    elif judged is None:
        judged = _judge_arms(rows, results.arms, doubt)
    bins, items = np.unique(results.bins, return_counts=True)
    signatures = (*(item for run in results.runs for item in run.signatures.items()),)
    return Table(
        results=results,
        signatures=(*dict.fromkeys(signatures), *results.paired_signatures.items()),
        bins=tuple(bins.tolist()),
        items=tuple(items.tolist()),
        rows=tuple(_judge(row, judged, results.metric) for row in rows),
        paired=_select_paired(results.paired, {row.arm: row.seeds for row in rows}),
        doubt=doubt,
        versions={name: version for run in results.runs for name, version in sorted(run.versions.items())},
        halved=_compare_halves({row.arm: row.runs for row in rows}, results.metric, doubt),
    )


def find_doubt(results: Results) -> str:
    """Return why differences in score decide nothing here; "" where they do.

    Where attention itself is not shown to beat a baseline without it, the task may not need attention, and arms that
    score alike do not show that diversity is worthless. Plain beats a baseline if the 95 % interval of its lead is
    above 0. With too few seeds of plain nothing is said.
    """
    plain = sorted((run for run in results.runs if run.arm == PLAIN), key=lambda run: run.seed)
    baselines = [run for run in results.runs if run.baseline and not results.metric.own_test]
    for run in baselines:
        lead = _compare([run], plain, results.metric)
        if lead is None or lead.seeds < MINIMUM_SEEDS:
            continue
        # where all seeds have one mean, as of models that learned nothing, there is no interval
        if (lead.value if lead.has_equal_seeds else lead.interval()[1]) >= 0.0:
            return f"{PLAIN} is not shown to beat {run.arm}"
    return ""


def _place(runs: Sequence[Run]) -> int:
    return 0 if runs[0].baseline else 1 if runs[0].arm == PLAIN else 2


def _select_paired(paired: Sequence[PairedTests], seeds: Mapping[str, Sequence[int]]) -> tuple[PairedTests, ...]:
    """Return the tests of the arms and seeds in the table, in its order, one metric after the other."""
    metrics = list(dict.fromkeys(tests.metric for tests in paired))
    known = [
        tests.select([seed for seed in seeds[tests.arm] if seed in seeds[tests.against]])
        for tests in paired
        if tests.arm in seeds and tests.against in seeds
    ]
    known.sort(key=lambda tests: (metrics.index(tests.metric), list(seeds).index(tests.arm)))
    return tuple(tests for tests in known if tests.seeds)


def _make_row(runs: Sequence[Run], arms: Mapping[str, Sequence[Run]], results: Results) -> Row:
    first, metric, plain = runs[0], results.metric, arms.get(PLAIN, [])
    control = _compare(runs, arms.get(first.control or "", []), metric)
    places = (slice(None), *(results.bins == number for number in np.unique(results.bins)))
    whole, *bins = (score(_stack_values(runs, metric, place), least=metric.least) for place in places)
    leads = [_compare(runs, [] if first.arm == PLAIN else plain, metric, place) for place in places]
    scores = dict.fromkeys(drops.score for run in runs for drops in run.head_drops)
    return Row(
        arm=first.arm,
        control=first.control,
        baseline=first.baseline,
        runs=tuple(runs),
        score=whole,
        bins=tuple(bins),
        to_plain=leads[0] and Judgement(leads[0]),
        to_control=control and Judgement(control),
        bins_to_plain=tuple(lead for lead in leads[1:] if lead is not None),
        verdict="",
        measures={name: _average(run.measures[name] for run in runs) for name in MEASURES},
        answered={measure.key: _average(run.answered.get(measure.key) for run in runs) for measure in results.shown},
        parameters=first.parameters,
        step_ratio=_compute_step_ratio(runs, plain),
        head_drops={
            score: tuple(drops for run in runs for drops in run.head_drops if drops.score == score) for score in scores
        },
        settings=first.settings,
    )


def _compare_halves(arms: Mapping[str, Sequence[Run]], metric: Metric, doubt: str) -> dict[str, Halving]:
    """Return the halving of each arm of whose runs it was measured; their differences are one family of tests."""
    measured = {arm: {run.seed: run for run in runs if run.halved} for arm, runs in arms.items()}
    measured = {arm: runs for arm, runs in measured.items() if runs}
    halvings, tests = {}, {}
    for arm, runs in measured.items():
        values = {stage: _stack_stage(runs.values(), stage, metric) for stage in STAGES}
        first = next(iter(runs.values()))
        assert first.halved is not None
        starts = read_starts(runs.values())
        for stage in SHRUNK:
            tests[arm, stage] = difference(values[stage], values[WHOLE], least=metric.least, starts=starts)
        others = measured.get(first.control or "", {})
        if both := [seed for seed in runs if seed in others]:
            lost, other = (
                _stack_stage(pair, SHRUNK[0], metric) - _stack_stage(pair, WHOLE, metric)
                for pair in ([runs[seed] for seed in both], [others[seed] for seed in both])
            )
            tests[arm, first.control] = difference(
                lost, other, least=metric.least - 1.0, starts=read_starts(others[seed] for seed in both)
            )
        scores = {stage: score(value, least=metric.least) for stage, value in values.items()}
        sizes = first.halved
        halvings[arm] = Halving(sizes.heads, sizes.parameters, scores, {}, None, first.control, sizes.steps)
    judged = dict(zip(tests, judge_family(list(tests.values()), doubts=[doubt] * len(tests)), strict=True))
    return {
        arm: replace(
            one, changes={stage: judged[arm, stage] for stage in SHRUNK}, beside=judged.get((arm, one.control))
        )
        for arm, one in halvings.items()
    }


def _stack_stage(runs: Iterable[Run], stage: str, metric: Metric) -> NDArray[np.float64]:
    return np.stack([metric.values(run.halved.statistics[stage]) for run in runs if run.halved is not None])


def _compare(
    runs: Sequence[Run], others: Sequence[Run], metric: Metric, place: NDArray[np.bool_] | slice = slice(None)
) -> Estimate | None:
    pairs = _pair_runs(runs, others)
    if not pairs:
        return None
    one, other = (_stack_values(side, metric, place) for side in zip(*pairs, strict=True))
    return difference(one, other, least=metric.least, starts=read_starts(other for _, other in pairs))


def _stack_values(runs: Sequence[Run], metric: Metric, place: NDArray[np.bool_] | slice) -> NDArray[np.float64]:
    """Return the metric's values of some items, [S, N]; an item's value may depend on the others, as for BLEU."""
    return np.stack([metric.values(run.statistics[place]) for run in runs])


def _pair_runs(runs: Sequence[Run], others: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Return the runs of two arms paired by seed; the one run of a baseline is paired with every seed."""
    if runs[0].baseline:
        return [(runs[0], other) for other in others]
    by_seed = {run.seed: run for run in others}
    return [(run, by_seed[run.seed]) for run in runs if run.seed in by_seed]


def _judge_arms(rows: Sequence[Row], requested: Sequence[str], doubt: str) -> dict[tuple[str, str], Judgement]:
    """Return the judgement of each arm's difference to its control; with a doubt about the task, without verdicts."""
    known = {(row.arm, str(row.control)): row.to_control.estimate for row in rows if row.to_control is not None}
    # an arm without its control, or without a run so far, was to be tested too unless its control is not wanted
    controls = {row.arm: row.control for row in rows}
    planned = {arm for arm in requested if arm != PLAIN and controls.get(arm, PLAIN) in (PLAIN, *requested)}
    family = len(planned | {arm for arm, _ in known})
    judged = judge_family(list(known.values()), planned=family, doubts=[doubt] * len(known))
    return dict(zip(known, judged, strict=True))


def _judge(row: Row, judged: Mapping[tuple[str, str], Judgement], metric: Metric) -> Row:
    row = replace(row, to_plain=row.to_plain and judged.get((row.arm, PLAIN), row.to_plain))
    if row.control is None:
        return row
    if row.to_control is None:
        return replace(row, verdict=f"no verdict ({row.control} not run)")
    to_control = judged.get((row.arm, row.control), row.to_control)
    return replace(row, to_control=to_control, verdict=OWN_TEST if metric.own_test else to_control.words)


def _require_distinct(runs: Sequence[Run], plain: Sequence[Run]) -> None:
    # Adam divides the constant factor of "scaled" out again, up to its epsilon and to clipping
    if runs[0].baseline or runs[0].arm.partition(":")[0] in (PLAIN, "scaled"):
        return
    if has_met_target(runs[0].settings, [run.measures["force_ratio"] for run in runs]):
        return
    pairs = _pair_runs(runs, plain)
    if pairs and all(_have_same_results(run, other) for run, other in pairs):
        raise NotFired(
            f"{runs[0].folder.parent}: arm {runs[0].arm} gave the answers of plain on all {len(runs[0].predicted)} "
            f"test items under all {len(pairs)} seeds, with the same measures to {SAME:g}: its method did not act. "
            "A learning rate that begins at 0 moves nothing in its first step: train for more steps. Otherwise give "
            "the arm other settings or leave it out. Remove this folder first."
        )


def _have_same_results(run: Run, other: Run) -> bool:
    # models that learned nothing may agree on one label although a method acted: compare measures too;
    # added parameters may start as the identity and hardly move in few steps: whether they are trained is checked there
    if run.parameters != other.parameters or not np.array_equal(run.predicted, other.predicted):
        return False
    pairs = [(run.measures[name], other.measures[name]) for name in MEASURES if name != "force_ratio"]
    measured = [(one, two) for one, two in pairs if one is not None and two is not None]
    # a model without attention has no measure in common with plain
    return bool(measured) and all(abs(one - two) <= SAME * max(1.0, abs(two)) for one, two in measured)


def _compute_step_ratio(runs: Sequence[Run], plain: Sequence[Run]) -> float | None:
    timed = [run.step_ratio for run in runs if run.step_ratio is not None]
    ratios = timed or [
        run.step_seconds / other.step_seconds
        for run, other in _pair_runs(runs, plain)
        if run.step_seconds is not None and other.step_seconds
    ]
    return averages.median(ratios) if ratios else None


def _average(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return averages.fmean(known) if known else None


def make_record(table: Table) -> dict[str, Any]:
    """Return the table as JSON data with keys in a fixed order."""
    return {
        **_pick(table.results, "task", "scale", "primary", "data"),
        "seeds": list(table.results.seeds),
        "bins": dict(zip(map(str, table.bins), table.items, strict=True)),
        "rows": [_record_row(row, table) for row in table.rows],
        "paired_tests": [_record_paired(tests) for tests in table.paired],
        "missing": list(table.results.missing),
        "doubt": table.doubt,
        "signatures": [list(pair) for pair in table.signatures],
        "versions": dict(table.versions),
        **({"halved": {arm: _record_halving(one) for arm, one in table.halved.items()}} if table.halved else {}),
    }


def _record_halving(one: Halving) -> dict[str, Any]:
    return {
        **{name: dict(getattr(one, name)) for name in ("heads", "parameters")},
        "scores": {stage: record_estimate(found) for stage, found in one.scores.items()},
        "changes": {stage: {**record_judgement(found), "verdict": found.words} for stage, found in one.changes.items()},
        "beside": one.beside and {"against": one.control, **record_judgement(one.beside), "verdict": one.beside.words},
        "steps": one.steps,
    }


def _pick(found: object, *names: str) -> dict[str, Any]:
    return {name: getattr(found, name) for name in names}


def _record_row(row: Row, table: Table) -> dict[str, Any]:
    bins = [str(name) for name in table.bins]
    runs = zip(row.runs, row.score.by_seed, strict=True)
    return {
        **_pick(row, "arm", "control", "baseline"),
        "seeds": list(row.seeds),
        "score": record_estimate(row.score),
        "bins": dict(zip(bins, map(_record_interval, row.bins), strict=True)),
        "to_plain": _record_difference(row, PLAIN, row.to_plain),
        "to_control": _record_difference(row, row.control, row.to_control),
        "bins_to_plain": dict(zip(bins, map(_record_interval, row.bins_to_plain), strict=False)),
        **_pick(row, "verdict", "measures", "answered"),
        "heads": {
            score: {"seeds": len(models), "heads": sum(len(model.drops) for model in models), **summarize_drops(models)}
            for score, models in row.head_drops.items()
        },
        **_pick(row, "parameters", "step_ratio"),
        "runs": [
            {"seed": run.seed, "score": score, **{name: run.measures[name] for name in OF_RUNS}}
            | _pick(run, "answered", "dev")
            for run, score in runs
        ],
        "settings": dict(row.settings),
    }


def _record_paired(tests: PairedTests) -> dict[str, Any]:
    names = {"score": "score", "against": "baseline", "p_bootstrap": "bootstrap", "p_randomisation": "randomisation"}
    return {
        **_pick(tests, "arm", "against", "metric", "difference", "ahead", "behind"),
        "seeds": {
            str(seed): {name: getattr(test, own) for name, own in names.items()}
            for seed, test in zip(tests.seeds, tests.tests, strict=True)
        },
    }


def record_judgement(found: Judgement) -> dict[str, Any]:
    """Return a difference with its judgement as JSON data."""
    return {
        **record_estimate(found.estimate),
        "p": found.estimate.p,
        "p_holm": found.adjusted,
        **_pick(found, "family", "detectable", "detectable_in_family", "published"),
        "holds_published": found.holds_gain,
        "p_equivalence": found.equivalence,
        "note": found.note,
    }


def record_estimate(found: Estimate) -> dict[str, Any]:
    """Return an estimate as JSON data: all that its interval and p-value follow from, and these."""
    return {
        **_record_interval(found),
        "by_seed": list(found.by_seed),
        **_pick(found, "items", "sets", "between_items", "rest"),
        **{name: end if math.isfinite(end) else None for name, end in _pick(found, "least", "most").items()},
        **_pick(found, "drawn", "seeds"),
    }


def _record_interval(found: Estimate) -> dict[str, float]:
    return _pick(found, "value", "low", "high")


def _record_difference(row: Row, against: str | None, found: Judgement | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "against": against,
        **record_judgement(found),
        "verdict": row.verdict if against == row.control else found.words,
    }
