"""The table of a comparison: one row an arm, with intervals, paired differences, verdicts and how alike its heads are.

Owns what is compared with what and the family of tests that Holm's adjustment covers. The arithmetic is
`statistics`', the files are `results`', how it looks is `grids`'.
"""

from __future__ import annotations

import statistics as averages
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import NotFired
from headwise.lab.experiment.metrics import Measure, Metric
from headwise.lab.experiment.seeding import key
from headwise.lab.results.head_drops import HeadDrops
from headwise.lab.results.paired_tests import PairedTests
from headwise.lab.results.runs import MEASURES, Results, Run, read_results, starts_of
from headwise.lab.results.statistics import RESAMPLES, Estimate, difference, holm, score, verdict

PLAIN = "plain"
# Two runs whose measures differ by less, and whose answers are the same, have done the same thing.
SAME = 1e-6
# Intervals of single bins are shown and never tested, so fewer resamples do.
BIN_RESAMPLES = 500
OWN_TEST = "no verdict (each its own test)"


@dataclass(frozen=True)
class Difference:
    """Score of an arm minus that of another, paired by seed and test item.

    Attributes:
        against: Name of the other arm.
        estimate: The difference with its interval.
        adjusted: Its p-value after Holm's adjustment; None for what is shown but not tested.
        verdict: What it amounts to, in words; "" for what is not tested.
    """

    against: str
    estimate: Estimate
    adjusted: float | None = None
    verdict: str = ""


@dataclass(frozen=True)
class Point:
    """One run as a dot or a line in a figure.

    Attributes:
        seed: Its seed.
        score: The metric pooled over all test bins.
        output_cosine: See `results.MEASURES`.
        force_ratio: Likewise.
        answered: Further numbers about its answers, by key.
        dev: Its score on dev after each epoch.
    """

    seed: int
    score: float
    output_cosine: float | None
    force_ratio: float | None
    answered: Mapping[str, float | None]
    dev: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """One arm, or one baseline, over its seeds.

    Attributes:
        arm: Its name.
        control: Name of the arm it is judged against; None for plain and for baselines.
        baseline: Whether it is a row to compare with rather than an arm.
        seeds: The finished seeds.
        score: The metric pooled over all test bins.
        bins: The metric in each bin, in the order of `Table.bins`.
        to_plain: Difference to plain; None for plain itself and where plain is not there.
        to_control: Difference to the control, the one that `verdict` is about; None where it is not there. The same
            object as `to_plain` when the control is plain.
        bins_to_plain: Difference to plain in each bin; empty where there is none.
        verdict: The verdict in words; "" for plain and for baselines.
        measures: Means over seeds of `results.MEASURES`; None where one does not apply.
        answered: Means over seeds of what `Table.shown` names, by key; None where one does not apply.
        parameters: Number of parameters, or None.
        step_ratio: Time of a training step over plain's: of steps timed in turn where that was done, else that of the
            runs' own, median over seeds; or None.
        points: One point a seed.
        head_drops: What the heads of its models are worth, by score: one entry a seed for which that was measured.
        settings: What determined the arm's first run, as JSON data.
    """

    arm: str
    control: str | None
    baseline: bool
    seeds: tuple[int, ...]
    score: Estimate
    bins: tuple[Estimate, ...]
    to_plain: Difference | None
    to_control: Difference | None
    bins_to_plain: tuple[Estimate, ...]
    verdict: str
    measures: Mapping[str, float | None]
    answered: Mapping[str, float | None]
    parameters: int | None
    step_ratio: float | None
    points: tuple[Point, ...]
    head_drops: Mapping[str, tuple[HeadDrops, ...]]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """A comparison as a table: baselines first, then plain, then the arms in the order they were asked for.

    Attributes:
        task: Name of the task.
        scale: Name of the scale.
        primary: The metric that verdicts are about, in words.
        metric: That metric.
        shown: What is shown beside it.
        signatures: How each score was computed, as (name, signature); one entry a name unless runs differ.
        difficulty: What the bins are by, as in "number of operators".
        data: Fingerprint of the data.
        seeds: The seeds asked for.
        bins: Difficulty of each bin.
        items: Number of test items in each bin.
        rows: The rows.
        paired: sacreBLEU's paired tests, one entry an arm and metric, where answers are translations.
        missing: Runs that were asked for and are not finished, as text.
        versions: Package to version, over all runs.
    """

    task: str
    scale: str
    primary: str
    metric: Metric
    shown: tuple[Measure, ...]
    signatures: tuple[tuple[str, str], ...]
    difficulty: str
    data: str
    seeds: tuple[int, ...]
    bins: tuple[int, ...]
    items: tuple[int, ...]
    rows: tuple[Row, ...]
    paired: tuple[PairedTests, ...]
    missing: tuple[str, ...]
    versions: Mapping[str, str]

    def row(self, arm: str) -> Row | None:
        """Return the row of an arm, or None."""
        return next((row for row in self.rows if row.arm == arm), None)

    @property
    def axis(self) -> str:
        """The metric with its unit, as beside an axis."""
        return f"{self.metric.name}, {self.metric.unit}".removesuffix(", ")

    @property
    def arms(self) -> tuple[Row, ...]:
        """The rows that are not baselines."""
        return tuple(row for row in self.rows if not row.baseline)


def read_table(out: Path) -> Table:
    """Return the table of the comparison in folder `out`, from its finished runs.

    Raises:
        DataError: A file is missing or damaged; see `read_results`.
        NotFired: An arm did the same as plain; see `make_table`.
    """
    return make_table(read_results(out))


def make_table(results: Results) -> Table:
    """Return the table of a comparison.

    Each arm is judged by its difference to its own control; Holm's adjustment covers those differences, one an arm.
    Where the control is not plain the difference to plain is tested too, in a family of its own.

    Raises:
        NotFired: An arm gave plain's answers on all test items under every seed, with plain's measures to 1e-6: its
            method did not act, and a table would present that as a finding.
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
    rows = [_row(arms[name], arms, results) for name in _order(arms, results.arms)]
    adjusted = _untested if results.metric.own_test else _adjusted
    judged = adjusted({row.arm: row.to_control for row in rows})
    others = adjusted({row.arm: row.to_plain for row in rows if row.control not in (None, PLAIN)})
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
        seeds=results.seeds,
        bins=tuple(bins.tolist()),
        items=tuple(items.tolist()),
        rows=tuple(_judged(row, judged.get(row.arm), others.get(row.arm)) for row in rows),
        paired=_paired(results.paired, {row.arm: row.seeds for row in rows}),
        missing=results.missing,
        versions={name: version for run in results.runs for name, version in sorted(run.versions.items())},
    )


def _order(arms: Mapping[str, Sequence[Run]], asked: Sequence[str]) -> list[str]:
    wanted = [name for name in asked if name in arms]
    wanted += [name for name in arms if name not in wanted]
    return sorted(wanted, key=lambda name: 0 if arms[name][0].baseline else 1 if name == PLAIN else 2)


def _paired(paired: Sequence[PairedTests], seeds: Mapping[str, Sequence[int]]) -> tuple[PairedTests, ...]:
    """Return the tests of the arms and seeds in the table, in its order, one metric after the other."""
    metrics = list(dict.fromkeys(tests.metric for tests in paired))
    known = [
        tests.among([seed for seed in seeds[tests.arm] if seed in seeds[tests.against]])
        for tests in paired
        if tests.arm in seeds and tests.against in seeds
    ]
    known.sort(key=lambda tests: (metrics.index(tests.metric), list(seeds).index(tests.arm)))
    return tuple(tests for tests in known if tests.seeds)


def _row(runs: Sequence[Run], arms: Mapping[str, Sequence[Run]], results: Results) -> Row:
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
        score=score(_values(runs, metric), seed=key("accuracy", first.arm), least=metric.least),
        bins=tuple(
            score(
                _values(runs, metric, mask),
                seed=key("accuracy", first.arm),
                resamples=BIN_RESAMPLES,
                least=metric.least,
            )
            for mask in masks
        ),
        to_plain=_compared(runs, other, metric),
        to_control=_compared(runs, control, metric),
        bins_to_plain=tuple(
            found.estimate
            for mask in masks
            if (found := _compared(runs, other, metric, mask, BIN_RESAMPLES)) is not None
        ),
        verdict="",
        measures={name: _mean(run.measures[name] for run in runs) for name in MEASURES},
        answered={measure.key: _mean(run.answered.get(measure.key) for run in runs) for measure in results.shown},
        parameters=first.parameters,
        step_ratio=_step_ratio(runs, plain),
        points=tuple(
            Point(
                run.seed,
                float(metric.values(run.statistics).mean()),
                run.measures["output_cosine"],
                run.measures["force_ratio"],
                run.answered,
                run.dev,
            )
            for run in runs
        ),
        head_drops=_by_score(runs),
        settings=first.settings,
    )


def _by_score(runs: Sequence[Run]) -> dict[str, tuple[HeadDrops, ...]]:
    scores = dict.fromkeys(drops.score for run in runs for drops in run.head_drops)
    return {score: tuple(drops for run in runs for drops in run.head_drops if drops.score == score) for score in scores}


def _compared(
    runs: Sequence[Run],
    others: Sequence[Run],
    metric: Metric,
    mask: NDArray[np.bool_] | slice = slice(None),
    resamples: int = RESAMPLES,
) -> Difference | None:
    pairs = _pairs(runs, others)
    if not pairs:
        return None
    one = _values([run for run, _ in pairs], metric, mask)
    other = _values([run for _, run in pairs], metric, mask)
    name = others[0].arm
    found = difference(
        one,
        other,
        seed=key("difference", runs[0].arm, name),
        resamples=resamples,
        least=metric.least,
        starts=starts_of(other for _, other in pairs),
    )
    return Difference(name, found)


def _values(runs: Sequence[Run], metric: Metric, mask: NDArray[np.bool_] | slice = slice(None)) -> NDArray[np.float64]:
    """Return the metric's values of the items of a bin, [S, N]."""
    return np.stack([metric.values(run.statistics[mask]) for run in runs])


def _pairs(runs: Sequence[Run], others: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Return the runs of both arms that share a seed; a baseline, which has one run, stands beside every seed."""
    if runs[0].baseline:
        return [(runs[0], other) for other in others]
    by_seed = {run.seed: run for run in others}
    return [(run, by_seed[run.seed]) for run in runs if run.seed in by_seed]


def _adjusted(family: Mapping[str, Difference | None]) -> dict[str, Difference]:
    """Return the differences of one family of tests, by arm, with adjusted p-values and verdicts."""
    known = {arm: found for arm, found in family.items() if found is not None}
    p_values = holm([found.estimate.p for found in known.values()])
    return {
        arm: replace(found, adjusted=p, verdict=verdict(found.estimate, p))
        for (arm, found), p in zip(known.items(), p_values, strict=True)
    }


def _untested(family: Mapping[str, Difference | None]) -> dict[str, Difference]:
    """Return differences that no test is about: each model answered a test of its own making."""
    return {arm: replace(found, verdict=OWN_TEST) for arm, found in family.items() if found is not None}


def _judged(row: Row, to_control: Difference | None, to_plain: Difference | None) -> Row:
    if row.control == PLAIN:
        to_plain = to_control
    words = to_control.verdict if to_control is not None else ""
    if to_control is None and row.control is not None:
        words = f"no verdict ({row.control} not run)"
    return replace(row, to_control=to_control, to_plain=to_plain or row.to_plain, verdict=words)


def _require_distinct(runs: Sequence[Run], plain: Sequence[Run]) -> None:
    if runs[0].baseline or runs[0].arm == PLAIN:
        return
    pairs = _pairs(runs, plain)
    if pairs and all(_same(run, other) for run, other in pairs):
        raise NotFired(
            f"arm {runs[0].arm} gave the answers of plain on all {len(runs[0].predicted)} test items under all "
            f"{len(pairs)} seeds, with the same measures to {SAME:g}: its method did not act. Give it other settings "
            "or leave it out, and remove its folder."
        )


def _same(run: Run, other: Run) -> bool:
    # a model that learnt nothing answers one label, and two such models agree although a method acted
    measured = [
        (run.measures[name], other.measures[name])
        for name in MEASURES
        if name != "force_ratio" and run.measures[name] is not None and other.measures[name] is not None
    ]
    # a model without attention may well answer as plain does; it has no measure in common with it
    return (
        bool(measured)
        and np.array_equal(run.predicted, other.predicted)
        and all(
            abs(one - two) <= SAME * max(1.0, abs(two)) for one, two in measured if one is not None and two is not None
        )
    )


def _step_ratio(runs: Sequence[Run], plain: Sequence[Run]) -> float | None:
    timed = [run.step_ratio for run in runs if run.step_ratio is not None]
    ratios = timed or [
        run.step_seconds / other.step_seconds
        for run, other in _pairs(runs, plain)
        if run.step_seconds is not None and other.step_seconds
    ]
    return averages.median(ratios) if ratios else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return averages.fmean(known) if known else None
