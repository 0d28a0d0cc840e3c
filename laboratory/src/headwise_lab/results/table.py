"""The table of a comparison as values and as JSON: one row per arm, with intervals, differences and verdicts."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headwise_lab.experiment.evaluation import Measure, Metric
from headwise_lab.results.paired_tests import PairedTests
from headwise_lab.results.runs import HeadDrops, summarize_drops
from headwise_lab.results.statistics import Estimate, Judgement

PLAIN = "plain"
# Of a bin of fewer test items an interval is wider than any difference between arms.
FEW = 20


@dataclass(frozen=True)
class Difference:
    """Score of an arm minus that of another arm, paired by seed and test item.

    Attributes:
        against: Name of the other arm.
        judgement: The difference and what is said of it.
        reason: Why it is not tested, in words; "" for no reason.
    """

    against: str
    judgement: Judgement
    reason: str = ""

    @property
    def estimate(self) -> Estimate:
        """The difference with its interval."""
        return self.judgement.estimate

    @property
    def verdict(self) -> str:
        """The verdict in words; "" if it is not tested."""
        return self.reason or self.judgement.words


@dataclass(frozen=True)
class Point:
    """One run as a marker or a line in a figure.

    Attributes:
        seed: Its seed.
        score: The metric pooled over all test bins.
        effective_heads: See `runs.MEASURES`.
        effective_heads_weighted: See `runs.MEASURES`.
        output_cosine: See `runs.MEASURES`.
        force_ratio: See `runs.MEASURES`.
        answered: Further numbers about its answers, by key.
        dev: Its score on dev after each epoch.
    """

    seed: int
    score: float
    effective_heads: float | None
    effective_heads_weighted: float | None
    output_cosine: float | None
    force_ratio: float | None
    answered: Mapping[str, float | None]
    dev: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """One arm or baseline over its seeds.

    Attributes:
        arm: Its name.
        control: Name of its control; None for plain and for baselines.
        baseline: Whether it is a baseline without attention rather than an arm.
        seeds: The finished seeds.
        score: The metric pooled over all test bins.
        bins: The metric in each bin, in the order of `Table.bins`.
        to_plain: Difference to plain; None for plain itself and if plain was not run.
        to_control: Difference to the control, which `verdict` is about; None if it was not run. The same object as
            `to_plain` if the control is plain.
        bins_to_plain: Difference to plain in each bin, or empty.
        verdict: The verdict in words; "" for plain and for baselines.
        measures: Means over seeds of `runs.MEASURES`; None where one does not apply.
        answered: Means over seeds of the measures in `Table.shown`, by key; None where one does not apply.
        parameters: Number of parameters, or None.
        step_ratio: Time of a training step over plain's, median over seeds: of steps timed in turn if available, else
            of the runs' own; or None.
        points: One point per seed.
        head_drops: Costs of removing heads, by score: one entry per seed for which they were measured.
        settings: Settings of the arm's first run, as JSON data.
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
        task: Name of the task.
        scale: Name of the scale.
        primary: The metric that verdicts are about, in words.
        metric: That metric.
        shown: Further measures to show.
        signatures: How each score was computed, as (name, signature); one entry per name unless runs differ.
        difficulty: The quantity that bins are made of, such as "number of operators".
        data: Fingerprint of the data.
        named: Name of the data's folder or file; "" for data that was generated, and where it is not known.
        seeds: The requested seeds.
        bins: Difficulty of each bin.
        items: Number of test items in each bin.
        rows: The rows.
        paired: sacreBLEU's paired tests, one entry per arm and metric, for translations.
        missing: Requested runs that are not finished, as text.
        doubt: Why differences in score decide nothing, as in "plain is not shown to beat counts"; "" where they do.
        versions: Package to version, over all runs.
        halved: The arms with half of their heads, where that was measured.
    """

    task: str
    scale: str
    primary: str
    metric: Metric
    shown: tuple[Measure, ...]
    signatures: tuple[tuple[str, str], ...]
    difficulty: str
    data: str
    named: str
    seeds: tuple[int, ...]
    bins: tuple[int, ...]
    items: tuple[int, ...]
    rows: tuple[Row, ...]
    paired: tuple[PairedTests, ...]
    missing: tuple[str, ...]
    doubt: str
    versions: Mapping[str, str]
    halved: Mapping[str, Halving] = field(default_factory=dict)

    def row(self, arm: str) -> Row | None:
        """Return the row of an arm, or None."""
        return next((row for row in self.rows if row.arm == arm), None)

    @property
    def bin_words(self) -> str:
        """The quantity that bins are made of inside a sentence, where no number follows it."""
        name, comma, _ = self.difficulty.partition(", up to")
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
        return f"{self.metric.name}, {self.metric.unit}".removesuffix(", ")

    @property
    def arms(self) -> tuple[Row, ...]:
        """The rows that are not baselines."""
        return tuple(row for row in self.rows if not row.baseline)


def make_record(table: Table) -> dict[str, Any]:
    """Return the table as JSON data with keys in a fixed order."""
    return {
        "task": table.task,
        "scale": table.scale,
        "primary": table.primary,
        "data": table.data,
        "seeds": list(table.seeds),
        "bins": dict(zip(map(str, table.bins), table.items, strict=True)),
        "rows": [_record_row(row, table) for row in table.rows],
        "paired_tests": [_record_paired(tests) for tests in table.paired],
        "missing": list(table.missing),
        "doubt": table.doubt,
        "signatures": [list(pair) for pair in table.signatures],
        "versions": dict(table.versions),
        **({"halved": {arm: _record_halving(one) for arm, one in table.halved.items()}} if table.halved else {}),
    }


def _record_halving(one: Halving) -> dict[str, Any]:
    return {
        "heads": dict(one.heads),
        "parameters": dict(one.parameters),
        "scores": {stage: record_estimate(found) for stage, found in one.scores.items()},
        "changes": {stage: {**record_judgement(found), "verdict": found.words} for stage, found in one.changes.items()},
        "beside": one.beside and {"against": one.control, **record_judgement(one.beside), "verdict": one.beside.words},
        "steps": one.steps,
    }


def _record_row(row: Row, table: Table) -> dict[str, Any]:
    return {
        "arm": row.arm,
        "control": row.control,
        "baseline": row.baseline,
        "seeds": list(row.seeds),
        "score": record_estimate(row.score),
        "bins": {str(name): _record_interval(found) for name, found in zip(table.bins, row.bins, strict=True)},
        "to_plain": _record_difference(row.to_plain),
        "to_control": _record_difference(row.to_control),
        "bins_to_plain": {
            str(name): _record_interval(found) for name, found in zip(table.bins, row.bins_to_plain, strict=False)
        },
        "verdict": row.verdict,
        "measures": dict(row.measures),
        "answered": dict(row.answered),
        "heads": {
            score: {"seeds": len(models), "heads": sum(len(model.drops) for model in models), **summarize_drops(models)}
            for score, models in row.head_drops.items()
        },
        "parameters": row.parameters,
        "step_ratio": row.step_ratio,
        "runs": [dataclasses.asdict(point) for point in row.points],
        "settings": dict(row.settings),
    }


def _record_paired(tests: PairedTests) -> dict[str, Any]:
    return {
        "arm": tests.arm,
        "against": tests.against,
        "metric": tests.metric,
        "difference": tests.difference,
        "ahead": tests.ahead,
        "behind": tests.behind,
        "seeds": {
            str(seed): {
                "score": test.score,
                "against": test.baseline,
                "p_bootstrap": test.bootstrap,
                "p_randomisation": test.randomisation,
            }
            for seed, test in zip(tests.seeds, tests.tests, strict=True)
        },
    }


def record_estimate(found: Estimate) -> dict[str, Any]:
    """Return an estimate as JSON data: all that its interval and p-value follow from, and these."""
    return {
        **_record_interval(found),
        "by_seed": list(found.by_seed),
        "items": found.items,
        "sets": found.sets,
        "between_items": found.between_items,
        "rest": found.rest,
        "least": found.least if math.isfinite(found.least) else None,
        "most": found.most if math.isfinite(found.most) else None,
        "drawn": found.drawn,
        "seeds": found.seeds,
    }


def _record_interval(found: Estimate) -> dict[str, float]:
    return {"value": found.value, "low": found.low, "high": found.high}


def record_judgement(found: Judgement) -> dict[str, Any]:
    """Return a difference and what is said of it as JSON data."""
    return {
        **record_estimate(found.estimate),
        "p": found.estimate.p,
        "p_holm": found.adjusted,
        "family": found.family,
        "detectable": found.detectable,
        "detectable_in_family": found.detectable_in_family,
        "published": found.published,
        "holds_published": found.holds_gain,
        "p_equivalence": found.equivalence,
        "note": found.note,
    }


def _record_difference(found: Difference | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"against": found.against, **record_judgement(found.judgement), "verdict": found.verdict}
