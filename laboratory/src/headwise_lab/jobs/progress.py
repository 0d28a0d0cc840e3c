"""Progress of jobs on the console: bars on a terminal, plain lines elsewhere, read from the folders of runs."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from typing_extensions import override

from headwise.cli.output import asked_output
from headwise_lab.experiment.run_folder import LOG, Failure, Job, Watch, read_progress

# Share of a run that must be done before its pace counts.
LEAST_SHARE = 0.02


def choose_watch(console: Console, jobs: Sequence[Job], finished: int) -> Bars | Lines:
    """Return bars on a terminal and plain lines elsewhere, for unfinished jobs and a number of finished ones."""
    return (Bars if console.is_terminal else Lines)(console, jobs, finished)


class _Counted(Watch):
    """Counts and times runs, and prints failures; subclasses show the progress."""

    def __init__(self, console: Console, jobs: Sequence[Job], finished: int) -> None:
        self.console, self.finished, self.total = console, finished, finished + len(jobs)
        self._clock = Clock(jobs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @override
    def started(self, job: Job) -> None:
        self._clock.start(job)

    @override
    def ended(self, job: Job, failure: Failure | None) -> None:
        self._clock.end(job)
        self.finished += failure is None
        if failure is not None:
            self._say(str(failure))

    @override
    def silent(self, job: Job, minutes: int) -> None:
        self._say(
            f"{job.name} has written nothing for {minutes} minutes: it may be scoring a split, or hang (log: "
            f"{job.folder / LOG}); Ctrl-C stops it, and the same command resumes."
        )

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


class Lines(_Counted):
    """One line when a run starts and one when it ends; with --verbose also one for each epoch."""

    def __init__(self, console: Console, jobs: Sequence[Job], finished: int) -> None:
        super().__init__(console, jobs, finished)
        self._noted: dict[Job, str] = {}

    @override
    def started(self, job: Job) -> None:
        super().started(job)
        resumed = read_progress(job.folder)
        where = f" at step {resumed.step:,}" if resumed is not None and resumed.step else ""
        self._noted[job] = "" if resumed is None else resumed.note
        self._say(f"{job.name} starts{where}")

    @override
    def tick(self) -> None:
        for job, before in self._noted.items() if asked_output().verbose else ():
            cell = read_progress(job.folder)
            if cell is not None and cell.note != before:
                self._noted[job] = cell.note
                self._say(f"{job.name}: {cell.note} at step {cell.step:,} of {cell.steps:,}")

    @override
    def ended(self, job: Job, failure: Failure | None) -> None:
        super().ended(job, failure)
        if failure is None:
            self._noted.pop(job, None)
            cell = read_progress(job.folder)
            note = f" ({cell.note})" if cell is not None and cell.note else ""
            self._say(f"{job.name} is done{note}; {self.finished} of {self.total} runs{self._clock.remaining_text()}")


class Bars(_Counted):
    """Live bars, one for each active run and one for all with the remaining time."""

    def __init__(self, console: Console, jobs: Sequence[Job], finished: int) -> None:
        super().__init__(console, jobs, finished)
        self._bars: dict[Job, TaskID] = {}
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[note]}", markup=False),
        )
        self._progress = Progress(*columns, console=console, transient=True, refresh_per_second=4, expand=True)
        self._all = self._progress.add_task("", total=1.0, note="")
        self.tick()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    @override
    def started(self, job: Job) -> None:
        super().started(job)
        self._bars[job] = self._progress.add_task(job.name, total=1.0, note="")

    @override
    def ended(self, job: Job, failure: Failure | None) -> None:
        self._progress.remove_task(self._bars.pop(job))
        super().ended(job, failure)
        self.tick()

    @override
    def tick(self) -> None:
        for job, bar in self._bars.items():
            cell = read_progress(job.folder)
            if cell is not None and cell.steps:
                self._progress.update(bar, completed=cell.step / cell.steps, note=cell.note)
        before = self.total - len(self._clock.jobs)
        share = (before + len(self._clock.jobs) * self._clock.share()) / self.total
        note = self._clock.remaining_text().removeprefix(", ")
        title = f"{self.finished} of {self.total} runs"
        self._progress.update(self._all, description=title, completed=share, note=note)


class Clock:
    """Share of the work done, and the remaining time where runs of every kind that is left have shown their pace.

    Runs are of one kind if they train the same arm, or are the same baseline or analysis: kinds differ in duration. The
    remaining time is the work left at the pace of each kind over the number of runs at once, and never rises.

    Args:
        jobs: The runs.
        now: The clock, in seconds.
    """

    def __init__(self, jobs: Sequence[Job], now: Callable[[], float] = time.monotonic) -> None:
        self.jobs, self._now = tuple(jobs), now
        self._work = sum(job.weight for job in self.jobs)
        # start of each active run, and its share at that time
        self._active: dict[Job, tuple[float, float]] = {}
        self._ended: set[Job] = set()
        # seconds and shares of ended runs, by kind
        self._seconds, self._done = defaultdict[str, float](float), defaultdict[str, float](float)
        self._at_once, self._shown = 1, math.inf

    def start(self, job: Job) -> None:
        """Count a job as active."""
        self._active[job] = self._now(), _read_share(job)
        self._at_once = max(self._at_once, len(self._active))

    def end(self, job: Job) -> None:
        """Count a job as done."""
        self._ended.add(job)
        if job in self._active:
            began, share = self._active.pop(job)
            self._seconds[job.kind] += self._now() - began
            self._done[job.kind] += 1.0 - share

    def share(self) -> float:
        """Return the share of the work that is done, parts of runs included."""
        return sum(job.weight * (1.0 if job in self._ended else _read_share(job)) for job in self.jobs) / self._work

    def remaining_text(self) -> str:
        """Return ", about 4 min left", or nothing while the pace of a kind of run is not known."""
        shares = {job: _read_share(job) for job in self.jobs if job not in self._ended}
        spent, done = self._seconds.copy(), self._done.copy()
        for job, (began, first) in self._active.items():
            progressed = _read_share(job) - first
            if progressed >= LEAST_SHARE:
                spent[job.kind] += self._now() - began
                done[job.kind] += progressed
        if not shares or any(done[job.kind] <= 0.0 for job in shares):
            return ""
        left = [(1.0 - share) * spent[job.kind] / done[job.kind] for job, share in shares.items()]
        self._shown = min(self._shown, max(sum(left) / self._at_once, *left))
        return f", about {_format_duration(self._shown)} left"


def _read_share(job: Job) -> float:
    cell = read_progress(job.folder)
    return 0.0 if cell is None or not cell.steps else cell.step / cell.steps


def _format_duration(seconds: float) -> str:
    """Return a rounded duration: "40 s", "4 min", "2 h 10 min"."""
    if seconds < 90:
        return f"{max(10, 10 * round(seconds / 10))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
