"""Runs that several processes train together: the first one has the command, the others follow it from run to run.

Owns that division: `torchrun --nproc-per-node 2 -m headwise compare ...` reads data, shows progress and writes the
page once, whatever the command, and every training is shared.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from headwise.errors import HeadwiseError
from headwise.lab.experiment.job import Failure, Job, Watch
from headwise.lab.experiment.run_folder import LOG
from headwise.lab.experiment.settings import RunSettings
from headwise.lab.jobs.job import do_job
from headwise.lab.training import processes

INTERRUPTED = 130


def run_together(jobs: Sequence[Job], watch: Watch) -> list[Failure]:
    """Do jobs one after the other, each training with all processes; return the failures.

    A refusal is the same in all processes, and the next run goes on. Any other error ends the command in all of them:
    the same command goes on from the checkpoints.
    """
    failures = []
    for job in jobs:
        watch.started(job)

        def heartbeat() -> bool:
            watch.tick()
            return False

        failure = None
        try:
            job.folder.mkdir(parents=True, exist_ok=True)
            if isinstance(job.settings, RunSettings):
                processes.agreed(job)
                do_job(job.settings, job.folder, heartbeat)
            else:
                with processes.alone():
                    do_job(job.settings, job.folder, heartbeat)
        except HeadwiseError as error:
            with (job.folder / LOG).open("a", encoding="utf-8") as log:
                traceback.print_exc(file=log)
            failure = Failure(job, str(error), refused=True)
            failures.append(failure)
        watch.ended(job, failure)
    return failures


def follow() -> None:
    """Train each run that the first process begins, until it has no more."""
    processes.meet()
    while (job := processes.agreed(None)) is not None:
        # the first process says what was refused
        with suppress(HeadwiseError):
            do_job(job.settings, job.folder, lambda: False)
    processes.end()


@contextmanager
def leading() -> Iterator[None]:
    """Let the others go at the end, also where the command ends with an exit code."""
    if not processes.launched():
        yield
        return
    processes.meet()
    try:
        yield
    except SystemExit as ended:
        # after Ctrl-C they are in the middle of a run, and the launcher ends them
        if ended.code != INTERRUPTED:
            _let_go()
        raise
    _let_go()


def _let_go() -> None:
    processes.agreed(None)
    processes.end()
