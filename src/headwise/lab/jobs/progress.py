"""Progress of jobs on the console: bars on a terminal, plain lines elsewhere, read from the folders of runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from headwise.lab.experiment.job import Failure, Job, Watch
from headwise.lab.experiment.run_folder import LOG, read_progress

# Minimum share of the work done before a remaining time is estimated.
LEAST_SHARE = 0.02


def choose_watch(console: Console, jobs: Sequence[Job], finished: int) -> Bars | Lines:
    """Return bars on a terminal and plain lines elsewhere.

    Args:
        console: The console.
        jobs: The unfinished runs.
        finished: Number of runs finished before.
    """
    return (Bars if console.is_terminal else Lines)(console, jobs, finished)


class Lines(Watch):
    """One line when a run starts and one when it ends."""

    def __init__(self, console: Console, jobs: Sequence[Job], finished: int) -> None:
        self.console, self.finished, self.total = console, finished, finished + len(jobs)
        self._clock = Clock(jobs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def started(self, job: Job) -> None:
        """Print that a run starts."""
        resumed = read_progress(job.folder)
        where = f" at step {resumed.step:,}" if resumed is not None and resumed.step else ""
        self._say(f"{job.name} starts{where}")

    def ended(self, job: Job, failure: Failure | None) -> None:
        """Print how a run ended and the remaining time."""
        self._clock.end(job)
        if failure is not None:
            self._say(str(failure))
            return
        self.finished += 1
        cell = read_progress(job.folder)
        note = f" ({cell.note})" if cell is not None and cell.note else ""
        self._say(f"{job.name} is done{note}; {self.finished} of {self.total} runs{self._clock.remaining_text()}")

    def silent(self, job: Job, minutes: int) -> None:
        """Print that a run has written nothing for so long."""
        self._say(_describe_silence(job, minutes))

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


class Bars(Watch):
    """Live bars, one for each active run and one for all with the remaining time."""

    def __init__(self, console: Console, jobs: Sequence[Job], finished: int) -> None:
        self.finished, self.total = finished, finished + len(jobs)
        self._clock = Clock(jobs)
        self._bars: dict[Job, TaskID] = {}
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[note]}", markup=False),
        )
        self._progress = Progress(*columns, console=console, transient=True, refresh_per_second=4, expand=True)
        self._all = self._progress.add_task(self._title(), total=1.0, note="")
        self.tick()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def started(self, job: Job) -> None:
        """Add a bar."""
        self._bars[job] = self._progress.add_task(job.name, total=1.0, note="")

    def ended(self, job: Job, failure: Failure | None) -> None:
        """Remove the bar; a failure stays on the screen."""
        self._clock.end(job)
        self._progress.remove_task(self._bars.pop(job))
        if failure is None:
            self.finished += 1
        else:
            self._progress.console.print(str(failure), highlight=False, markup=False, soft_wrap=True)
        self.tick()

    def silent(self, job: Job, minutes: int) -> None:
        """Print above the bars that a run has written nothing for so long."""
        self._progress.console.print(_describe_silence(job, minutes), highlight=False, markup=False, soft_wrap=True)

    def tick(self) -> None:
        """Update the bars."""
        for job, bar in self._bars.items():
            cell = read_progress(job.folder)
            if cell is not None and cell.steps:
                self._progress.update(bar, completed=cell.step / cell.steps, note=cell.note)
        before = self.total - len(self._clock.jobs)
        share = (before + len(self._clock.jobs) * self._clock.share()) / self.total
        note = self._clock.remaining_text().removeprefix(", ")
        self._progress.update(self._all, description=self._title(), completed=share, note=note)

    def _title(self) -> str:
        return f"{self.finished} of {self.total} runs"


class Clock:
    """Share of the work done, and the remaining time at the pace since the start."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = tuple(jobs)
        self._ended: set[Job] = set()
        self._work = sum(job.weight for job in self.jobs)
        self._began, self._at_first = time.monotonic(), self.share()

    def end(self, job: Job) -> None:
        """Count a job as done."""
        self._ended.add(job)

    def share(self) -> float:
        """Return the share of the work that is done, parts of runs included."""
        return sum(job.weight * (1.0 if job in self._ended else _read_share(job)) for job in self.jobs) / self._work

    def remaining_text(self) -> str:
        """Return ", about 4 min left", or nothing while there is no estimate."""
        share, seconds = self.share(), time.monotonic() - self._began
        fresh = share - self._at_first
        if fresh < LEAST_SHARE or share >= 1.0:
            return ""
        return f", about {_format_duration(seconds * (1.0 - share) / fresh)} left"


def _describe_silence(job: Job, minutes: int) -> str:
    return (
        f"{job.name} has written nothing for {minutes} minutes: it may be scoring a split, or hang (log: "
        f"{job.folder / LOG}); Ctrl-C stops it, and the same command resumes."
    )


def _read_share(job: Job) -> float:
    cell = read_progress(job.folder)
    return 0.0 if cell is None or not cell.steps else cell.step / cell.steps


def _format_duration(seconds: float) -> str:
    """Return a rounded duration: "40 s", "4 min", "2 h 10 min"."""
    if seconds < 90:
        return f"{max(10, 10 * round(seconds / 10))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
