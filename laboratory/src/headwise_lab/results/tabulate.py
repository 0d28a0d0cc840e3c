"""Making the table of a comparison from its runs: paired differences, adjusted tests and verdicts."""

import statistics as averages
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headwise.errors import NotFired
from headwise_lab.experiment.evaluation import Metric
from headwise_lab.results.paired_tests import PairedTests
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
)
from headwise_lab.results.statistics import MINIMUM_SEEDS, Judgement, difference, judge_family, score
from headwise_lab.results.table import PLAIN, Difference, Halving, Point, Row, Table

# Two runs with equal answers whose measures differ by less than this are the same.
SAME = 1e-6
OWN_TEST = "no verdict (each its own test)"


def read_table(out: Path) -> Table:
    """Return the table of the comparison in folder `out`, from its finished runs.

    Raises:
        DataError: A file is missing or damaged; see `read_results`.
        NotFired: An arm did the same as plain; see `make_table`.
    """
    return make_table(read_results(out))


def make_table(results: Results, judged: Mapping[tuple[str, str], Judgement] | None = None) -> Table:
    """Return the table of a comparison.

    Each arm is judged by its difference to its control; Holm's adjustment covers these differences, one per arm that
    was asked for. Other differences have an interval and no verdict.

    Args:
        results: The runs.
        judged: What was said of differences elsewhere, by arm and other arm: no others are tested. None for the
            above.

    Raises:
        NotFired: An arm has as many parameters as plain, its answers on all test items under every seed, and its
            measures to 1e-6: its method did not act. A target that was met from the start is none.
    """
    arms: dict[str, list[Run]] = {}
    for run in results.runs:
        arms.setdefault(run.arm, []).append(run)
    for runs in arms.values():
        runs.sort(key=lambda run: run.seed)
    plain = arms.get(PLAIN)
    if plain is not None:
        for runs in arms.values():
            _require_distinct(runs, plain)
    rows = [_make_row(arms[name], arms, results) for name in _order_arms(arms, results.arms)]
    doubt = find_doubt(results)
    if judged is None and not results.metric.own_test:
        judged = _judge_arms(rows, results.arms, doubt)
    bins, items = np.unique(results.bins, return_counts=True)
    return Table(
        task=results.task,
        scale=results.scale,
        primary=results.primary,
        metric=results.metric,
        shown=results.shown,
        signatures=(
            *dict.fromkeys(item for run in results.runs for item in run.signatures.items()),
            *results.paired_signatures.items(),
        ),
        difficulty=results.difficulty,
        data=results.data,
        named=results.named,
        seeds=results.seeds,
        bins=tuple(bins.tolist()),
        items=tuple(items.tolist()),
        rows=tuple(_judge(row, judged or {}, results.metric) for row in rows),
        paired=_select_paired(results.paired, {row.arm: row.seeds for row in rows}),
        missing=results.missing,
        doubt=doubt,
        versions={name: version for run in results.runs for name, version in sorted(run.versions.items())},
        halved=_compare_halves({row.arm: arms[row.arm] for row in rows}, results.metric, doubt),
    )


def find_doubt(results: Results) -> str:
    """Return why differences in score decide nothing here; "" where they do.

    Where attention itself is not shown to beat a baseline without it, the task may not need attention, and arms that
    score alike do not show that diversity is worthless. Plain beats a baseline if the 95 % interval of its lead is
    above 0. With too few seeds of plain nothing is said.
    """
    plain = sorted((run for run in results.runs if run.arm == PLAIN), key=lambda run: run.seed)
    for run in results.runs if plain and not results.metric.own_test else ():
        lead = _compare([run], plain, results.metric) if run.baseline else None
        if lead is None or lead.estimate.seeds < MINIMUM_SEEDS:
            continue
        # where all seeds have one mean, as of models that learned nothing, there is no interval
        most = lead.estimate.value if lead.estimate.has_equal_seeds else lead.estimate.interval()[1]
        if most >= 0.0:
            return f"{PLAIN} is not shown to beat {run.arm}"
    return ""


def _order_arms(arms: Mapping[str, Sequence[Run]], requested: Sequence[str]) -> list[str]:
    wanted = [name for name in requested if name in arms]
    wanted += [name for name in arms if name not in wanted]
    return sorted(wanted, key=lambda name: 0 if arms[name][0].baseline else 1 if name == PLAIN else 2)


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
    first, metric = runs[0], results.metric
    plain = arms.get(PLAIN, [])
    other = [] if first.arm == PLAIN else plain
    control = [] if first.control is None else arms.get(first.control, [])
    masks = [results.bins == number for number in np.unique(results.bins)]
    return Row(
        arm=first.arm,
        control=first.control,
        baseline=first.baseline,
        seeds=tuple(run.seed for run in runs),
        score=score(_stack_values(runs, metric), least=metric.least),
        bins=tuple(score(_stack_values(runs, metric, mask), least=metric.least) for mask in masks),
        to_plain=_compare(runs, other, metric),
        to_control=_compare(runs, control, metric),
        bins_to_plain=tuple(
            found.estimate for mask in masks if (found := _compare(runs, other, metric, mask)) is not None
        ),
        verdict="",
        measures={name: _average(run.measures[name] for run in runs) for name in MEASURES},
        answered={measure.key: _average(run.answered.get(measure.key) for run in runs) for measure in results.shown},
        parameters=first.parameters,
        step_ratio=_compute_step_ratio(runs, plain),
        points=tuple(
            Point(
                run.seed,
                float(metric.values(run.statistics).mean()),
                run.measures["effective_heads"],
                run.measures["effective_heads_weighted"],
                run.measures["output_cosine"],
                run.measures["force_ratio"],
                run.answered,
                run.dev,
            )
            for run in runs
        ),
        head_drops=_group_by_score(runs),
        settings=first.settings,
    )


def _compare_halves(arms: Mapping[str, Sequence[Run]], metric: Metric, doubt: str) -> dict[str, Halving]:
    """Return the halving of each arm of whose runs it was measured; their differences are one family of tests."""
    measured = {arm: {run.seed: run for run in runs if run.halved} for arm, runs in arms.items()}
    measured = {arm: runs for arm, runs in measured.items() if runs}
    found, tests = {}, {}
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
        found[arm] = Halving(sizes.heads, sizes.parameters, scores, {}, None, first.control, sizes.steps)
    judged = dict(zip(tests, judge_family(list(tests.values()), doubts=[doubt] * len(tests)), strict=True))
    return {
        arm: replace(
            one, changes={stage: judged[arm, stage] for stage in SHRUNK}, beside=judged.get((arm, one.control))
        )
        for arm, one in found.items()
    }


def _stack_stage(runs: Iterable[Run], stage: str, metric: Metric) -> NDArray[np.float64]:
    return np.stack([metric.values(run.halved.statistics[stage]) for run in runs if run.halved is not None])


def _group_by_score(runs: Sequence[Run]) -> dict[str, tuple[HeadDrops, ...]]:
    scores = dict.fromkeys(drops.score for run in runs for drops in run.head_drops)
    return {score: tuple(drops for run in runs for drops in run.head_drops if drops.score == score) for score in scores}


def _compare(
    runs: Sequence[Run],
    others: Sequence[Run],
    metric: Metric,
    mask: NDArray[np.bool_] | slice = slice(None),
) -> Difference | None:
    pairs = _pair_runs(runs, others)
    if not pairs:
        return None
    one = _stack_values([run for run, _ in pairs], metric, mask)
    other = _stack_values([run for _, run in pairs], metric, mask)
    found = difference(one, other, least=metric.least, starts=read_starts(other for _, other in pairs))
    return Difference(others[0].arm, Judgement(found))


def _stack_values(
    runs: Sequence[Run], metric: Metric, mask: NDArray[np.bool_] | slice = slice(None)
) -> NDArray[np.float64]:
    """Return the metric's values of the items of a bin, [S, N]."""
    return np.stack([metric.values(run.statistics[mask]) for run in runs])


def _pair_runs(runs: Sequence[Run], others: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Return the runs of two arms paired by seed; the one run of a baseline is paired with every seed."""
    if runs[0].baseline:
        return [(runs[0], other) for other in others]
    by_seed = {run.seed: run for run in others}
    return [(run, by_seed[run.seed]) for run in runs if run.seed in by_seed]


def _judge_arms(rows: Sequence[Row], requested: Sequence[str], doubt: str) -> dict[tuple[str, str], Judgement]:
    """Return the judgement of each arm's difference to its control; with a doubt about the task, without verdicts."""
    known = {(row.arm, row.to_control.against): row.to_control.estimate for row in rows if row.to_control is not None}
    # an arm without its control, or without a run so far, was to be tested too unless its control is not wanted
    controls = {row.arm: row.control for row in rows}
    planned = {arm for arm in requested if arm != PLAIN and controls.get(arm, PLAIN) in (PLAIN, *requested)}
    estimates, family = list(known.values()), len(planned | {arm for arm, _ in known})
    judged = judge_family(estimates, planned=family, doubts=[doubt] * len(estimates))
    return dict(zip(known, judged, strict=True))


def _judge(row: Row, judged: Mapping[tuple[str, str], Judgement], metric: Metric) -> Row:
    def find(found: Difference | None) -> Difference | None:
        if found is None:
            return None
        if metric.own_test:
            return replace(found, reason=OWN_TEST) if found is row.to_control else found
        return replace(found, judgement=judged.get((row.arm, found.against), found.judgement))

    to_control = find(row.to_control)
    to_plain = to_control if row.control == PLAIN else find(row.to_plain)
    words = to_control.verdict if to_control is not None else ""
    if to_control is None and row.control is not None:
        words = f"no verdict ({row.control} not run)"
    return replace(row, to_control=to_control, to_plain=to_plain, verdict=words)


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
            "Give it other settings or leave it out, and remove this folder."
        )


def _have_same_results(run: Run, other: Run) -> bool:
    # models that learned nothing may agree on one label although a method acted: compare measures too
    measured = [
        (run.measures[name], other.measures[name])
        for name in MEASURES
        if name != "force_ratio" and run.measures[name] is not None and other.measures[name] is not None
    ]
    # added parameters may start as the identity and hardly move in few steps; whether they are trained is checked there
    # a model without attention has no measure in common with plain
    return (
        run.parameters == other.parameters
        and bool(measured)
        and np.array_equal(run.predicted, other.predicted)
        and all(
            abs(one - two) <= SAME * max(1.0, abs(two)) for one, two in measured if one is not None and two is not None
        )
    )


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
