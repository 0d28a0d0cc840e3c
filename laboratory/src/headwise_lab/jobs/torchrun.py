"""Commands under torchrun or `accelerate launch`: the first process runs the command, the others join each training.

Accelerate shares a training; it does not let one process lead a command of many trainings, as here.
"""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

from headwise.errors import HeadwiseError
from headwise_lab.experiment.run_folder import LOG, Failure, Job, Watch
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.jobs.workers import do_job
from headwise_lab.training import processes

INTERRUPTED = 130


def run_together(jobs: Sequence[Job], watch: Watch) -> list[Failure]:
    """Do jobs one after the other, each training with all processes; return the failures.

    A refusal is the same in all processes, and the next run follows. Any other error ends the command in all of them;
    the same command resumes from the checkpoints.
    """

    def heartbeat() -> bool:
        watch.tick()
        return False

    failures = []
    for job in jobs:
        watch.started(job)
        failure, shared = None, isinstance(job.settings, RunSettings)
        try:
            job.folder.mkdir(parents=True, exist_ok=True)
            if shared:
                processes.agree(job)
            with nullcontext() if shared else processes.alone():
                do_job(job.settings, job.folder, heartbeat)
        except KeyboardInterrupt as error:
            error.args = (f"stopped; {job.name} resumes from its last checkpoint: give the same command again.",)
            raise
        except HeadwiseError as error:
            with (job.folder / LOG).open("a", encoding="utf-8") as log:
                traceback.print_exc(file=log)
            failure = Failure(job, str(error), refused=True)
            failures.append(failure)
        watch.ended(job, failure)
    return failures


def follow() -> None:
    """Join each training that the first process starts, until there are no more."""
    processes.meet()
    while (job := processes.agree(None)) is not None:
        # the first process reports refusals
        with suppress(HeadwiseError):
            do_job(job.settings, job.folder, lambda: False)
    processes.end()


@contextmanager
def leading() -> Iterator[None]:
    """Release the other processes at the end, also if the command ends with an exit code."""
    if not processes.launched():
        yield
        return
    processes.meet()
    try:
        yield
    except SystemExit as ended:
        # after Ctrl-C they are in the middle of a run, and the launcher ends them
        if ended.code != INTERRUPTED:
            _release()
        raise
    _release()


def _release() -> None:
    processes.agree(None)
    processes.end()
