"""Reading and checking the finished runs of a comparison.

The cost of removing each head of a trained model: reading the records and summarizing them.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.atomic import require_unchanged
from headwise.errors import DataError, ShapeError
from headwise.input_files import describe_place, is_file, parse_json, read_numbered_lines
from headwise_lab.data.arrays import read_arrays
from headwise_lab.experiment.evaluation import METRICS, Measure, Metric
from headwise_lab.experiment.run_folder import (
    EPOCHS,
    PREDICTIONS,
    RESULT,
    SETTINGS,
    TEXT,
    VOCABULARY,
    analysis_file,
    read_json,
    require_intact,
)
from headwise_lab.results.statistics import Pair, PairedTests, read_paired_tests

REDUNDANCY = "redundancy"
LOSS = "loss"
# A head is redundant if removing it lowers the score, or raises the loss, by less than this share.
HARDLY = 0.01


@dataclass(frozen=True)
class Drop:
    """The cost of removing one head: fall of a score or rise of a loss, negative if it helps.

    Attributes:
        site: Dotted name of the attention module.
        kind: "self", "decoder" or "cross".
        layer: Its layer, from 0, as `head`.
        value: The cost; `low` and `high` are the ends of its 95 % interval over test items, paired by item.
    """

    site: str
    kind: str
    layer: int
    head: int
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class HeadDrops:
    """The costs of all heads of one trained model on one score.

    Attributes:
        score: Name of the score: the task's metric, or "loss".
        whole: The score with all heads.
        items: Number of test items.
    """

    score: str
    whole: float
    items: int
    drops: tuple[Drop, ...]


def summarize_drops(models: Sequence[HeadDrops]) -> dict[str, float]:
    """Return a summary of the heads of several models on one score, pooling all heads.

    Returns:
        "redundant_share" (heads whose removal costs less than a hundredth of the score), "raising_share" (heads whose
        removal helps), "unshown_share" (heads whose interval contains zero, without adjustment for their number) and
        "mean_cost".

    Example:
        >>> dear = Drop("encoder", "self", layer=0, head=0, value=0.2, low=0.1, high=0.3)
        >>> harmful = Drop("encoder", "self", layer=0, head=1, value=-0.1, low=-0.3, high=0.1)
        >>> summarize_drops([HeadDrops("accuracy", 0.9, items=100, drops=(dear, harmful))])
        {'redundant_share': 0.5, 'raising_share': 0.5, 'unshown_share': 0.5, 'mean_cost': 0.05}
    """
    known = [(drop, model.whole) for model in models for drop in model.drops]
    return {
        "redundant_share": sum(drop.value < HARDLY * whole for drop, whole in known) / len(known),
        "raising_share": sum(drop.value < 0.0 for drop, _ in known) / len(known),
        "unshown_share": sum(drop.low <= 0.0 <= drop.high for drop, _ in known) / len(known),
        "mean_cost": statistics.fmean(drop.value for drop, _ in known),
    }


def summarize_run(found: Sequence[HeadDrops]) -> dict[str, float]:
    """Return `summarize_drops` of one model for each score; names of the loss are prefixed with "loss_".

    Scores that are zero with all heads are skipped: no head could lower them.
    """
    return {
        f"{LOSS}_{name}" if model.score == LOSS else name: value
        for model in found
        if model.whole > 0.0
        for name, value in summarize_drops([model]).items()
    }


def read_head_drops(folder: Path) -> tuple[HeadDrops, ...]:
    """Return the costs of the heads of the run in `folder`, one entry per score; empty if not measured.

    Raises:
        DataError: The record is damaged.
    """
    path = analysis_file(folder, REDUNDANCY)
    return parse_head_drops(path, read_json(path)) if path.exists() else ()


def parse_head_drops(path: Path, record: Any) -> tuple[HeadDrops, ...]:
    """Return the costs of heads in what a file holds.

    Raises:
        DataError: The record is damaged.
    """
    try:
        return tuple(
            HeadDrops(
                str(score),
                float(whole),
                int(record["items"]),
                tuple(_read_drop(head, head["drops"][score]) for head in record["heads"]),
            )
            for score, whole in record["scores"].items()
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise DataError(f"{path} is not the record of an analysis; delete it and run the same command again.") from None


def _read_drop(head: Mapping[str, Any], cost: Mapping[str, Any]) -> Drop:
    numbers = [float(cost[name]) for name in ("value", "low", "high")]
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"a cost is {numbers}")
    return Drop(str(head["site"]), str(head["kind"]), int(head["layer"]), int(head["head"]), *numbers)


# What is measured of a model with half of its heads, in words.
HALVE = "halve"
STAGES: Mapping[str, str] = {"whole": "whole", "half": "half of its heads", "recovered": "half, recovered"}
WHOLE, *SHRUNK = STAGES
COMPARISON = "comparison.json"
TEST = "test.npz"
REFERENCES = "references.txt"
PAIRED = "paired-tests.json"
# The analysis that times steps in turn with those of plain, and its result.
STEP_TIME, STEP_RATIO = "step-time", "step_ratio"
# Records of version 0.1 lack the first three.
NEW_MEASURES = ("effective_heads", "effective_heads_weighted", "debiased_cka")
MEASURES = (
    *NEW_MEASURES,
    "distance",
    "output_cosine",
    "output_cka",
    "position_js",
    "parameter_cosine",
    "particle_norm",
    "force_ratio",
)
AGAIN = "delete the folder {} and run the same command again, which redoes only this run."


@dataclass(frozen=True)
class Halved:
    """What was measured of a model with half of its heads.

    Attributes:
        statistics: Statistics of each test item for the metric, [N] or [N, K], by stage; see `STAGES`.
        heads: Number of heads by stage.
        parameters: Number of parameters by stage.
        steps: Steps of the recovery.
    """

    statistics: Mapping[str, NDArray[np.float64]]
    heads: Mapping[str, int]
    parameters: Mapping[str, int]
    steps: int


def read_halved(folder: Path, items: int) -> Halved | None:
    """Return what was measured of the run in `folder` with half of its heads; None if nothing was.

    Raises:
        DataError: The record is damaged, or of another number of test items.
    """
    path = analysis_file(folder, HALVE)
    if not path.exists():
        return None
    record = read_json(path)
    try:
        statistics = {stage: np.array(record["statistics"][stage], dtype=np.float64) for stage in STAGES}
        if any(len(found) != items or not np.isfinite(found).all() for found in statistics.values()):
            raise ValueError(f"expected finite numbers of {items} items")
        heads, parameters = ({stage: int(record[name][stage]) for stage in STAGES} for name in ("heads", "parameters"))
        return Halved(statistics, heads, parameters, int(record["steps"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise DataError(f"{path} is not the record of an analysis; delete it and run the same command again.") from None


@dataclass(frozen=True)
class Run:
    """One finished run.

    Attributes:
        arm: Name of the arm, or of the baseline.
        start: Seed of its arm's earlier run that it started from, if the method acted in that run; else None.
        control: Name of its control; None for plain and for baselines.
        baseline: Whether it is a baseline rather than an arm.
        statistics: Statistics of each test item for the metric, [N] or [N, K].
        predicted: Its answers, or numbers that identify them, int [N].
        measures: `MEASURES` by name; None where one does not apply.
        answered: Further measures of its answers, by `metrics.Measure.key`.
        signatures: Signature of each score by name, if known.
        parameters: Number of parameters, or None for a baseline.
        step_seconds: Median time of a training step, or None.
        step_ratio: Time of a step over plain's if steps of both were timed in turn, else None.
        settings: Its settings, as JSON data.
        dev: Its score on dev after each epoch; empty for a baseline.
        head_drops: Cost of removing each head, one entry per score; empty if not measured.
        versions: Package to version.
        folder: Its folder.
        halved: What was measured with half of its heads; None if nothing was.
    """

    arm: str
    seed: int
    start: int | None
    control: str | None
    baseline: bool
    statistics: NDArray
    predicted: NDArray[np.int64]
    measures: Mapping[str, float | None]
    answered: Mapping[str, float | None]
    signatures: Mapping[str, str]
    parameters: int | None
    step_seconds: float | None
    step_ratio: float | None
    settings: Mapping[str, Any]
    dev: tuple[float, ...]
    head_drops: tuple[HeadDrops, ...]
    versions: Mapping[str, str]
    folder: Path
    halved: Halved | None = None


@dataclass(frozen=True)
class Results:
    """A comparison as stored on disk.

    Attributes:
        primary: The metric that verdicts are about, named before the first run.
        metric: That metric.
        shown: Further measures to show.
        difficulty: The quantity that bins of test items are made of, such as "number of operators".
        data: Fingerprint of the data.
        arms: Names of the requested arms, in order.
        seeds: The requested seeds.
        bins: Difficulty of each test item, int [N].
        runs: The finished runs.
        paired: sacreBLEU's paired tests of each arm against its control, if done.
        paired_signatures: Their signatures.
        described: Description of the data, or "".
        named: Name of the data's folder or file; "" for data that was generated, and where it is not known.
        unasked: Seeds of these arms that have finished runs, which were not asked for.
    """

    task: str
    scale: str
    primary: str
    metric: Metric
    shown: tuple[Measure, ...]
    difficulty: str
    data: str
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    bins: NDArray[np.int64]
    runs: tuple[Run, ...]
    paired: tuple[PairedTests, ...] = ()
    paired_signatures: Mapping[str, str] = field(default_factory=dict)
    described: str = ""
    named: str = ""
    unasked: tuple[int, ...] = ()

    def only(self, seeds: Sequence[int], arms: Sequence[str] | None = None) -> Results:
        """Return the comparison with some of its seeds, and with some of its arms unless None."""
        known = [run for run in self.runs if run.baseline or arms is None or run.arm in arms]
        return replace(
            self,
            arms=self.arms if arms is None else tuple(arms),
            seeds=tuple(seeds),
            runs=tuple(run for run in known if run.baseline or run.seed in seeds),
            unasked=tuple(sorted({run.seed for run in known if not run.baseline} - {*seeds})),
        )

    @property
    def missing(self) -> tuple[str, ...]:
        """The requested runs that are not finished."""
        finished = {(run.arm, run.seed) for run in self.runs}
        return tuple(f"{arm} seed {seed}" for arm in self.arms for seed in self.seeds if (arm, seed) not in finished)


def read_results(out: Path) -> Results:
    """Return what the comparison in folder `out` has finished.

    Raises:
        DataError: `out` holds no comparison or no finished run, or one of its files is damaged or belongs to
            something else.
    """
    path = out / COMPARISON
    if not path.exists():
        raise DataError(f"{out} holds no {COMPARISON}; expected the --out folder of a comparison.")
    record = read_json(path)
    try:
        names: dict[str, Any] = {name: str(record[name]) for name in ("task", "scale", "primary", "difficulty", "data")}
        metric = METRICS[str(record["metric"])]
        arms, seeds = tuple(map(str, record["arms"])), tuple(map(int, record["seeds"]))
        shown = tuple(
            Measure(**{name: value for name, value in measure.items() if name != "kind"})
            for measure in record.get("shown", [])
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise DataError(f"{path} is not the record of a comparison; choose another --out.") from None
    require_unchanged(path, record, remedy="give the command of the comparison again, which writes it anew.")
    bins = _read_arrays(out / TEST, ("bins",), f"delete {out / TEST} and run the same command again.")["bins"]
    places = sorted(out.glob(f"*/seed-*/{RESULT}"), key=lambda place: (place.parent.parent.name, _parse_seed(place)))
    runs = tuple(_read_run(place, metric, len(bins)) for place in places)
    if not runs:
        raise DataError(f"{out} holds no finished run; run the command of the comparison again to resume it.")
    (arm, seed), count = Counter((run.arm, run.seed) for run in runs).most_common(1)[0]
    if count > 1:
        raise DataError(f"{out} holds two runs of {arm} with seed {seed}; remove the copy.")
    paired, signatures = read_paired_tests(pair_with_controls(runs), out / REFERENCES, out / PAIRED)
    return Results(
        **names,
        metric=metric,
        shown=shown,
        arms=arms,
        seeds=seeds,
        bins=bins,
        runs=runs,
        paired=paired,
        paired_signatures=signatures,
        described=str(record.get("described", "")),
        named=str(record.get("named", "")),
    )


def pair_with_controls(runs: Sequence[Run]) -> tuple[Pair, ...]:
    """Return pairs of each run and the run of its control with the same seed, as files of translations.

    Runs taken over from a record have no texts, and are in no pair.
    """
    by_name = {(run.arm, run.seed): run for run in runs}
    return tuple(
        Pair(run.arm, run.control, run.seed, run.folder / TEXT, control.folder / TEXT)
        for run in runs
        if run.control is not None and (control := by_name.get((run.control, run.seed))) is not None
        if (run.folder / TEXT).exists() and (control.folder / TEXT).exists()
    )


def read_starts(runs: Iterable[Run]) -> tuple[int, ...] | None:
    """Return the seed of the earlier run that each run started from; None if they started from scratch.

    Raises:
        DataError: Only some started from an earlier run, perhaps as different versions made them.
    """
    given = list(runs)
    known = tuple(run.start for run in given if run.start is not None)
    if known and len(known) != len(given):
        silent = next(run for run in given if run.start is None)
        raise DataError(f"{silent.folder} does not record the run it started from; {AGAIN.format(silent.folder)}")
    return known or None


def has_met_target(settings: Mapping[str, Any], force_ratios: Iterable[float | None]) -> bool:
    """Return whether an arm's strength was a target that its heads met from the start, so that nothing pushed them.

    >>> has_met_target({"arm": {"methods": [{"kind": "Penalize", "weight": {"kind": "Target"}}]}}, [0.0, 0.0])
    True
    """
    methods = (settings.get("arm") or {}).get("methods", [])
    strengths = [one for method in methods for one in (method.get("weight"), (method.get("rule") or {}).get("alpha"))]
    aimed = any(isinstance(strength, Mapping) and strength.get("kind") == "Target" for strength in strengths)
    return aimed and all(ratio == 0.0 for ratio in force_ratios)


def _read_run(path: Path, metric: Metric, items: int) -> Run:
    again = AGAIN.format(path.parent)
    try:
        record = read_json(path)
    except DataError as error:
        raise DataError(f"{str(error).partition(';')[0]}; {again}") from None
    require_intact(path.parent, SETTINGS, EPOCHS, PREDICTIONS, TEXT, VOCABULARY)
    answers = _read_arrays(path.with_name(PREDICTIONS), ("statistics", "predicted"), again)
    if not all(np.isfinite(array).all() for array in answers.values()):
        raise DataError(f"{path.with_name(PREDICTIONS)} holds numbers that are not finite; {again}")
    predicted, statistics = answers["predicted"].astype(np.int64), answers["statistics"]
    if len(predicted) != items:
        raise DataError(
            f"{path.with_name(PREDICTIONS)} answers {len(predicted)} items, not the {items} of "
            f"{path.parents[2] / TEST}; {again}"
        )
    try:
        settings = dict(record["settings"])
        run = Run(
            arm=str(record["arm"]),
            seed=int(record["seed"]),
            start=None if record.get("start") is None else int(record["start"]),
            control=None if record["control"] is None else str(record["control"]),
            baseline="baseline" in settings,
            statistics=statistics,
            predicted=predicted,
            measures={name: _to_float(record.get(name) if name in NEW_MEASURES else record[name]) for name in MEASURES},
            answered={
                str(name): _to_float(value)
                for name, value in dict(record.get("answers", {})).items()
                if isinstance(value, int | float)
            },
            signatures={str(name): str(text) for name, text in dict(record.get("signatures", {})).items()},
            parameters=None if record["parameters"] is None else int(record["parameters"]),
            step_seconds=_to_float(record["step_seconds"]),
            step_ratio=_read_step_ratio(analysis_file(path.parent, STEP_TIME), again),
            settings=settings,
            versions={str(name): str(version) for name, version in dict(record["versions"]).items()},
            dev=_read_dev(path.with_name(EPOCHS), again),
            head_drops=read_head_drops(path.parent),
            folder=path.parent,
            halved=read_halved(path.parent, items),
        )
        score = float(record["score"]["pooled"])
        found = float(metric.values(statistics).mean())
    except KeyError as error:
        raise DataError(f"{path} has no {error}; {again}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError, IndexError, ShapeError):
        raise DataError(f"{path} is not the result of a run; {again}") from None
    if abs(score - found) > 1e-6:
        raise DataError(f"{path} has {metric.name} {score:.6f}, its predictions give {found:.6f}; {again}")
    return run


def _read_dev(path: Path, remedy: str) -> tuple[float, ...]:
    if not is_file(path):
        return ()
    found = []
    for number, line in read_numbered_lines(path):
        try:
            found.append(float(parse_json(line)["dev"]["pooled"]))
        except (ValueError, KeyError, TypeError, OverflowError):
            raise DataError(f"{path}, line {number} is not the record of an epoch; {remedy}") from None
    return tuple(found)


def _read_step_ratio(path: Path, remedy: str) -> float | None:
    if not path.exists():
        return None
    try:
        return float(read_json(path)["numbers"][STEP_RATIO])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise DataError(f"{path} is not the record of step times; {remedy}") from None


def _read_arrays(path: Path, names: tuple[str, ...], remedy: str) -> dict[str, NDArray]:
    if not is_file(path):
        raise DataError(f"{path} {describe_place(path)}; {remedy}")
    try:
        found = read_arrays(path)
        arrays = {name: found[name] for name in names}
    except (DataError, KeyError):
        raise DataError(f"{path} is damaged; {remedy}") from None
    if any(array.dtype.kind not in "biuf" for array in arrays.values()):
        raise DataError(f"{path} holds arrays that are no numbers; {remedy}")
    if len({array.shape[:1] for array in arrays.values()}) != 1 or next(iter(arrays.values())).ndim < 1:
        raise DataError(f"{path} holds arrays of different lengths; {remedy}")
    return arrays


def _to_float(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _parse_seed(place: Path) -> int:
    number = place.parent.name.removeprefix("seed-")
    return int(number) if number.isdecimal() else -1
