"""Tuning arms by random search: the same number of draws for every arm, scored on dev; the test split is not used."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from headwise.errors import DataError, HeadwiseError, SettingError, require_integer
from headwise_lab.compare import CACHE, TUNING, require_fits
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.arm import Arm, named_arms
from headwise_lab.experiment.arm_text import list_settings, parse_arm
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.run_folder import Failure, Job
from headwise_lab.experiment.scale import Scale
from headwise_lab.experiment.seeding import derive_key
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.jobs.pool import do_jobs
from headwise_lab.training.cross_validation import list_scales

TUNED = "tuned.json"


@dataclass(frozen=True)
class Uniform:
    """Numbers uniform between `low` and `high`, or whose logarithm is uniform."""

    low: float
    high: float
    logarithmic: bool = False

    def draw(self, source: random.Random) -> str:
        """Return a number, to three digits."""
        if self.logarithmic:
            return f"{math.exp(source.uniform(math.log(self.low), math.log(self.high))):.3g}"
        return f"{source.uniform(self.low, self.high):.3g}"


@dataclass(frozen=True)
class Choice:
    """One of a few values, each as likely."""

    values: tuple[str, ...]

    def draw(self, source: random.Random) -> str:
        """Return one of the values."""
        return source.choice(self.values)


# The settings that are tuned where an arm has them. Step sizes are not: under Adam they hardly matter.
RANGES: dict[str, Uniform | Choice] = {
    "alpha": Uniform(1e-3, 1e2, logarithmic=True),
    # on SICK the strongest of the study of doses, 3, was the best
    "ratio": Uniform(1e-2, 3.0, logarithmic=True),
    "weight": Uniform(1e-2, 1e1, logarithmic=True),
    "rate": Uniform(0.02, 0.3),
    "iterations": Choice(("1", "2", "3", "4", "5")),
}
# Every arm, plain included, is tuned over the learning rate, this much below and above that of the scale, and over the
# dropout of the model where it has any.
RATE_FACTOR = Uniform(1 / 3, 3.0, logarithmic=True)
DROPOUT = Uniform(0.0, 0.5)


@dataclass(frozen=True)
class Tuning:
    """What is tuned, on what, and where the draws go.

    Attributes:
        task: Name of the task.
        arm: The arm as text; settings given in it are kept and not drawn.
        draws: Number of draws, at least 1. The arm as it is given is the first; every arm tuned into one folder
            has the same number.
        seed: Seed of the draws, and of the first run of each.
        scale: Sizes of data, model and training.
        out: Folder of the tuning.
        data: Folder of the data; None generates it.
        workers: Number of parallel runs, each on one thread.
        seeds: Number of runs of each draw, under seeds from `seed` on; a draw's score is their mean.
    """

    task: str
    arm: str
    draws: int
    seed: int
    scale: Scale
    out: Path
    data: Path | None = None
    workers: int = 1
    seeds: int = 1

    def __post_init__(self) -> None:
        named_task(self.task)
        require_integer("draws", self.draws, low=1)
        require_integer("seeds", self.seeds, low=1)
        require_integer("seed", self.seed, low=0, high=2**32 - 1)
        require_integer("workers", self.workers, low=1)
        parse_arm(self.arm)


@dataclass(frozen=True)
class Tuned:
    """The best draw of an arm.

    Attributes:
        arm: Its arm.
        dev_score: Its score on dev, which is biased upward as the best of several.
        expected: The score on dev that the best of 1, 2, ... of these draws has in expectation.
        failures: The runs that failed; their draws are left out.
    """

    arm: Arm
    dev_score: float
    expected: tuple[float, ...]
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class BestDraw:
    """The settings that an arm was tuned to, and what they were chosen from.

    Attributes:
        arm: The text of the arm with its best draw.
        tried: Each draw, the text of an arm, with its score on dev; empty in records of earlier versions.
        seeds: Number of runs that a draw's score is the mean of; None where the draws are not known.
    """

    arm: str
    tried: tuple[tuple[str, float], ...] = ()
    seeds: int | None = None

    @classmethod
    def from_record(cls, record: Mapping[str, Any] | str) -> BestDraw:
        """Return what `to_record` wrote, or what headwise tune did; text alone is an arm whose draws are not known.

        >>> BestDraw.from_record("cka:ratio=0.3").tried
        ()
        """
        if isinstance(record, str):
            return cls(record)
        tried = tuple((str(one["arm"]), float(one["dev_score"])) for one in record["tried"])
        if not tried or not all(math.isfinite(score) for _, score in tried):
            raise ValueError("no draw, or a score that is not finite")
        require_integer("seeds", record["seeds"], low=1)
        return cls(str(record["arm"]), tried, record["seeds"])

    def to_record(self) -> dict[str, Any] | str:
        """Return it as JSON data."""
        if not self.tried:
            return self.arm
        tried = [{"arm": arm, "dev_score": score} for arm, score in self.tried]
        return {"arm": self.arm, "tried": tried, "seeds": self.seeds}


def tune(tuning: Tuning, console: Console) -> Tuned:
    """Do the draws that are not finished and return the best; `tuned.json` in the arm's folder keeps all of them.

    Raises:
        SettingError: The folder cannot be written or was tuned differently, or a draw does not fit the model.
        DataError: The data cannot be read.
        HeadwiseError: Every draw failed.
        KeyboardInterrupt: Ctrl-C; every run has saved where it is.
    """
    run_folder.prepare_folder(tuning.out)
    task = named_task(tuning.task)
    data = task.load(tuning.data, tuning.scale, tuning.out / CACHE, progress=console.is_terminal)
    record: dict[str, Any] = {
        "task": tuning.task,
        "scale": tuning.scale.name,
        "sizes": run_folder.as_record(tuning.scale),
        "data": data.fingerprint,
        "draws": tuning.draws,
        "seed": tuning.seed,
        "seeds": tuning.seeds,
    }
    run_folder.require_same(tuning.out / TUNING, record)
    first = _make_job(tuning, data.fingerprint, tuning.out, parse_arm(tuning.arm), 0, 0)
    if len(list_scales(task, first.settings)) > 1:
        # what is dev for one fold is test for another
        raise SettingError("an arm is tuned on one cut of the data; leave the folds out (--folds 1).")
    arms = [draw_arm(tuning, index) for index in range(tuning.draws)]
    if any(task.remaining_arm(arm, data) != arm for arm in arms):
        raise SettingError(
            f"{tuning.arm} begins with what its own earlier training left, whose settings cannot be drawn here; begin "
            "with one model, as that of --pretrained RUNS/plain/seed-0."
        )
    for arm in arms:
        require_fits(arm, task, data, tuning.scale)
    run_folder.write_json(tuning.out / TUNING, record)
    home = tuning.out / parse_arm(tuning.arm).folder
    jobs = [
        _make_job(tuning, data.fingerprint, home, arm, index, turn)
        for turn in range(tuning.seeds)
        for index, arm in enumerate(arms)
    ]
    for job in jobs:
        run_folder.require_same(job.folder / run_folder.SETTINGS, job.settings.record())
    left = run_folder.list_left(jobs)
    failures = do_jobs(left, len(jobs) - len(left), tuning.workers, console)
    scored = []
    for index, arm in enumerate(arms):
        runs = jobs[index :: len(arms)]
        if all(run_folder.is_finished(job.folder) for job in runs):
            results = [run_folder.read_json(job.folder / run_folder.RESULT) for job in runs]
            scored.append((fmean(float(result["dev_score"]) for result in results), arm))
    if not scored:
        raise HeadwiseError(f"every draw of {tuning.arm} failed; the first: {failures[0]}")
    # of equals the first, which is nearest to the arm as given
    score, best = max(scored, key=lambda item: item[0])
    draws = [{"arm": arm.name, "dev_score": score} for score, arm in scored]
    expected = expect_best([score for score, _ in scored])
    kept = {"arm": best.name, "dev_score": score, **record, "expected": expected, "tried": draws}
    run_folder.write_json(home / TUNED, kept)
    return Tuned(best, score, tuple(expected), tuple(failures))


def expect_best(scores: Sequence[float]) -> list[float]:
    """Return the expected best of t scores for t = 1, 2, ..., drawn without replacement from those there are.

    Dodge et al. 2019, with replacement there: a curve still rising at its end says that more draws would gain.

    >>> expect_best([0.5, 0.7, 0.6])
    [0.6, 0.6666666666666666, 0.7]
    """
    ranked = sorted(scores)
    every = len(ranked)
    return [
        math.fsum(math.comb(rank, tried - 1) * score for rank, score in enumerate(ranked)) / math.comb(every, tried)
        for tried in range(1, every + 1)
    ]


def read_tuned(
    folder: Path, arms: Sequence[Arm], task: str, scale: Scale
) -> tuple[tuple[Arm, ...], dict[str, BestDraw]]:
    """Return arms with the settings of their best draws, under the names and controls they had, and each best draw.

    Raises:
        DataError: The folder is not that of a tuning, or an arm was not tuned there.
        SettingError: It was tuned on another task or at other sizes.
    """
    if not (folder / TUNING).exists():
        raise DataError(f"{folder} has no {TUNING}; give the --out of headwise tune.")
    record = _read_object(folder / TUNING)
    wanted = {"task": task, "sizes": run_folder.as_record(scale)}
    if differing := [name for name, value in wanted.items() if record.get(name) != value]:
        found = ", ".join(f"{name} {str(record.get(name))[:200]}" for name in differing)
        raise SettingError(f"{folder} was tuned for {found}; expected the task and the sizes of this comparison.")
    missing = [arm.name for arm in arms if not (folder / arm.folder / TUNED).exists()]
    if missing:
        draws, seed, seeds = (str(record.get(name, 1))[:20] for name in ("draws", "seed", "seeds"))
        raise DataError(
            f"{folder} has no best draw of {', '.join(missing)}; every arm and every control needs the same draws: "
            f"headwise tune {task} {','.join(missing)} --draws {draws} --seed {seed} --seeds {seeds} --out {folder}. "
            "Add the options of this comparison that say what is trained, such as --scale, --set and --data."
        )
    draws = {arm.name: _read_best(folder / arm.folder / TUNED) for arm in arms}
    best = (replace(parse_arm(draws[arm.name].arm), name=arm.name, control=arm.control) for arm in arms)
    return tuple(best), draws


def draw_arm(tuning: Tuning, index: int) -> Arm:
    """Return one draw of an arm; draw 0 is the arm as it is given.

    A draw depends on the seed, its number and the setting alone, so that all arms see the same learning rates and
    dropouts, and more draws add to the earlier ones. Dropout is drawn where the scale sets it.
    """
    if index == 0:
        return parse_arm(tuning.arm)

    def draw(where: Uniform | Choice, *name: str) -> str:
        return where.draw(random.Random(derive_key(tuning.seed, "tune", index, " ".join(name))))

    parts = []
    rate = tuning.scale.recipe.learning_rate * float(draw(RATE_FACTOR, "learning_rate"))
    given = parse_arm(tuning.arm)
    for number, part in enumerate(given.name.split("+")):
        name, _, rest = part.partition(":")
        settings = dict(piece.split("=") for piece in rest.split(",") if piece)
        for setting in list_settings(named_arms()[name]):
            if setting in RANGES and setting not in settings:
                settings[setting] = draw(RANGES[setting], name, setting)
        if number == 0 and given.learning_rate is None:
            settings["learning_rate"] = f"{rate:.3g}"
        if number == 0 and given.dropout is None and tuning.scale.sets_dropout:
            settings["dropout"] = draw(DROPOUT, "dropout")
        parts.append(name + (":" if settings else "") + ",".join(f"{s}={value}" for s, value in settings.items()))
    return parse_arm("+".join(parts))


def _read_object(path: Path) -> dict[str, Any]:
    record = run_folder.read_json(path)
    if not isinstance(record, dict):
        raise DataError(f"{path} is not what headwise tune wrote; delete it and tune again.")
    return record


def _read_best(path: Path) -> BestDraw:
    """Return the best draw of an arm, whose text names one."""
    try:
        found = BestDraw.from_record(_read_object(path))
        parse_arm(found.arm)
        return found
    except (SettingError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} does not hold the draws of an arm ({str(error)[:300]}); tune again.") from None


def _make_job(tuning: Tuning, fingerprint: str, home: Path, arm: Arm, index: int, turn: int) -> Job:
    settings = RunSettings(
        tuning.task,
        tuning.scale,
        arm,
        tuning.seed + turn,
        data=tuning.data,
        cache=tuning.out / CACHE,
        fingerprint=fingerprint,
        test=False,
    )
    folder = home / (f"draw-{index}-seed-{turn}" if turn else f"draw-{index}")
    return Job(f"draw {index} {arm.name}" + (f" seed {turn}" if turn else ""), folder, settings)
