"""Tuning an arm by random search: the same number of draws for every arm, scored on dev; the test split is not used."""

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from typing_extensions import override

from headwise.errors import HeadwiseError, SettingError, require_integer
from headwise.lab.compare import CACHE, require_fits
from headwise.lab.experiment import run_folder
from headwise.lab.experiment.arm import Arm, named_arms
from headwise.lab.experiment.arm_text import list_settings, parse_arm
from headwise.lab.experiment.job import Failure, Job
from headwise.lab.experiment.registry import named_task
from headwise.lab.experiment.scale import Scale
from headwise.lab.experiment.seeding import derive_key
from headwise.lab.experiment.settings import RunSettings
from headwise.lab.jobs.pool import do_jobs
from headwise.lab.training.cross_validation import list_scales

TUNING = "tuning.json"
TUNED = "tuned.json"


@dataclass(frozen=True)
class Uniform:
    """Numbers uniform between `low` and `high`."""

    low: float
    high: float

    def draw(self, source: random.Random) -> str:
        """Return a number, to three digits."""
        return f"{source.uniform(self.low, self.high):.3g}"


class LogUniform(Uniform):
    """Numbers whose logarithm is uniform between those of `low` and `high`."""

    @override
    def draw(self, source: random.Random) -> str:
        """Return a number, to three digits."""
        return f"{math.exp(source.uniform(math.log(self.low), math.log(self.high))):.3g}"


@dataclass(frozen=True)
class Choice:
    """One of a few values, each as likely."""

    values: tuple[str, ...]

    def draw(self, source: random.Random) -> str:
        """Return one of the values."""
        return source.choice(self.values)


# The settings that are tuned where an arm has them. Step sizes are not: under Adam they hardly matter.
RANGES: dict[str, Uniform | Choice] = {
    "alpha": LogUniform(1e-3, 1e2),
    "ratio": LogUniform(1e-2, 1.0),
    "weight": LogUniform(1e-2, 1e1),
    "rate": Uniform(0.02, 0.3),
    "iterations": Choice(("1", "2", "3", "4", "5")),
}
# Every arm, plain included, is tuned over the learning rate: this much below and above that of the scale.
RATE_FACTOR = LogUniform(1 / 3, 3.0)


@dataclass(frozen=True)
class Tuning:
    """What is tuned, on what, and where the draws go.

    Attributes:
        task: Name of the task.
        arm: The arm as text; settings given in it are kept and not drawn.
        draws: Number of draws, at least 1. The arm as it is given is the first; every arm tuned into one folder
            has the same number.
        seed: Seed of the draws and of every run.
        scale: Sizes of data, model and training.
        out: Folder of the tuning.
        data: Folder of the data; None generates it.
        workers: Number of parallel runs, each on one thread.
    """

    task: str
    arm: str
    draws: int
    seed: int
    scale: Scale
    out: Path
    data: Path | None = None
    workers: int = 1

    def __post_init__(self) -> None:
        named_task(self.task)
        require_integer("draws", self.draws, low=1)
        require_integer("seed", self.seed, low=0, high=2**32 - 1)
        require_integer("workers", self.workers, low=1)
        parse_arm(self.arm)


@dataclass(frozen=True)
class Tuned:
    """The best draw: its arm, its score on dev, and the draws that failed."""

    arm: Arm
    dev_score: float
    failures: tuple[Failure, ...] = ()


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
    }
    run_folder.require_same(tuning.out / TUNING, record)
    if len(list_scales(task, _make_job(tuning, data.fingerprint, tuning.out, parse_arm(tuning.arm), 0).settings)) > 1:
        # what is dev for one fold is test for another
        raise SettingError("an arm is tuned on one cut of the data; leave the folds out (--folds 1).")
    arms = [draw_arm(tuning, index) for index in range(tuning.draws)]
    for arm in arms:
        require_fits(arm, task, data, tuning.scale)
    run_folder.write_json(tuning.out / TUNING, record)
    home = tuning.out / parse_arm(tuning.arm).folder
    jobs = [_make_job(tuning, data.fingerprint, home, arm, index) for index, arm in enumerate(arms)]
    left = [job for job in jobs if not run_folder.is_finished(job.folder)]
    failures = do_jobs(left, len(jobs) - len(left), tuning.workers, console)
    scored = [
        (float(run_folder.read_json(job.folder / run_folder.RESULT)["dev_score"]), arm)
        for job, arm in zip(jobs, arms, strict=True)
        if run_folder.is_finished(job.folder)
    ]
    if not scored:
        raise HeadwiseError(f"every draw of {tuning.arm} failed; the first: {failures[0]}")
    # of equals the first, which is nearest to the arm as given
    score, best = max(scored, key=lambda item: item[0])
    draws = [{"arm": arm.name, "dev_score": score} for score, arm in scored]
    run_folder.write_json(home / TUNED, {"arm": best.name, "dev_score": score, **record, "tried": draws})
    return Tuned(best, score, tuple(failures))


def draw_arm(tuning: Tuning, index: int) -> Arm:
    """Return one draw of an arm; draw 0 is the arm as it is given.

    A draw depends on the seed, its number and the setting alone, so that all arms see the same learning rates and
    more draws add to the earlier ones.
    """
    if index == 0:
        return parse_arm(tuning.arm)
    parts = []
    rate = tuning.scale.recipe.learning_rate * float(_draw(RATE_FACTOR, tuning.seed, index, "learning_rate"))
    given = parse_arm(tuning.arm).learning_rate is not None
    for number, part in enumerate(parse_arm(tuning.arm).name.split("+")):
        name, _, rest = part.partition(":")
        settings = dict(piece.split("=") for piece in rest.split(",") if piece)
        for setting in list_settings(named_arms()[name]):
            if setting in RANGES and setting not in settings:
                settings[setting] = _draw(RANGES[setting], tuning.seed, index, f"{name} {setting}")
        if number == 0 and not given:
            settings["learning_rate"] = f"{rate:.3g}"
        parts.append(name + (":" if settings else "") + ",".join(f"{s}={value}" for s, value in settings.items()))
    return parse_arm("+".join(parts))


def _draw(where: Uniform | Choice, seed: int, index: int, name: str) -> str:
    return where.draw(random.Random(derive_key(seed, "tune", index, name)))


def _make_job(tuning: Tuning, fingerprint: str, home: Path, arm: Arm, index: int) -> Job:
    settings = RunSettings(
        tuning.task,
        tuning.scale,
        arm,
        tuning.seed,
        data=tuning.data,
        cache=tuning.out / CACHE,
        fingerprint=fingerprint,
        test=False,
    )
    return Job(f"draw {index} {arm.name}", home / f"draw-{index}", settings)
