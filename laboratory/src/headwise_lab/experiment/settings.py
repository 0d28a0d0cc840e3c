"""What determines a run, as a value that travels to the process that does it, and the versions it was done with."""

import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headwise import __version__
from headwise.errors import DataError
from headwise_lab.experiment.arm import Arm
from headwise_lab.experiment.arm_text import record_arm
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.run_folder import as_record
from headwise_lab.experiment.scale import Scale

# Time between two checkpoints inside an epoch; one is written after each epoch anyway.
SAVE_SECONDS = 60.0


@dataclass(frozen=True)
class Whole:
    """The run that a training is a part of: its scale, and how many parts it has."""

    scale: Scale
    parts: int


@dataclass(frozen=True)
class RunSettings:
    """Everything one run is made from.

    Attributes:
        task: Name of the task.
        scale: Sizes of data, model and training.
        arm: What is done to the heads.
        seed: Seed of the separate random streams of parameters, data order, dropout and noise.
        data: Folder of the data, or None for generated data.
        cache: Folder where prepared data is kept.
        fingerprint: Digest of the data, so that a run is never continued on other data.
        test: Whether the test split is scored at the end; tuning never does.
        save_seconds: Time between two checkpoints inside an epoch.
        whole: The run this is a part of; None where it is a run.
        report_to: Where the Trainer reports each epoch beside TensorBoard's files, as "wandb"; it changes no number.
    """

    task: str
    scale: Scale
    arm: Arm
    seed: int
    data: Path | None = None
    cache: Path | None = None
    fingerprint: str = ""
    test: bool = True
    save_seconds: float = SAVE_SECONDS
    whole: Whole | None = None
    report_to: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """Return what determines the run's numbers, as JSON data, without the paths of data."""
        return {
            "task": self.task,
            "data": self.fingerprint,
            "seed": self.seed,
            "test": self.test,
            "arm": record_arm(self.arm),
            "scale": as_record(self.scale),
            "recipe": as_record(self.scale.recipe),
        }


def load_data(settings: Any) -> Any:
    """Return the data of a run, a baseline or a part of either, as the task reads it."""
    data = named_task(settings.task).load(settings.data, settings.scale, settings.cache)
    if settings.fingerprint not in ("", data.fingerprint):
        raise DataError(
            f"{settings.data} changed while the command ran: it had digest {settings.fingerprint} and has "
            f"{data.fingerprint}; nothing was trained on the new data: restore the old, or choose another --out."
        )
    return data


def read_versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python, headwise and some packages.

    >>> sorted(read_versions("torch"))
    ['headwise', 'python', 'torch']
    """
    return {"python": platform.python_version(), "headwise": __version__, **{name: version(name) for name in packages}}
