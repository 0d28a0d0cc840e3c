"""A run to do, its failure, and callbacks while runs are done."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.lab.experiment.run_folder import LOG

# Called regularly by a job; True means that it should save and return.
Heartbeat = Callable[[], bool]


@dataclass(frozen=True, eq=False)
class Job:
    """One run to do.

    Attributes:
        name: Its name.
        folder: Its folder.
        settings: Its settings.
        weight: Its relative duration, for the share of all work.
        kind: What runs of about the same duration share, for the remaining time.
    """

    name: str
    folder: Path
    settings: Any
    weight: float = 1.0
    kind: str = ""


@dataclass(frozen=True)
class Failure:
    """A run that failed: the error in one sentence, and whether it was a refusal (bad input) or a defect."""

    job: Job
    message: str
    refused: bool

    def __str__(self) -> str:
        return f"{self.job.name} failed: {self.message} (log: {self.job.folder / LOG})"


class Watch:
    """Callbacks while jobs run; subclasses show progress, this one shows nothing."""

    def started(self, job: Job) -> None:
        """A job was handed to a worker."""

    def ended(self, job: Job, failure: Failure | None) -> None:
        """A job ended, perhaps with a failure."""

    def silent(self, job: Job, minutes: int) -> None:
        """A job has written nothing for so long."""

    def tick(self) -> None:
        """Called a few times a second."""
