"""Jobs without a model for the tests of the pool; a module of its own because every worker process imports it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from headwise.errors import DataError
from headwise_lab.experiment.run_folder import Failure, Job
from headwise_lab.jobs.serving import attempt


def work(settings, folder, heartbeat):
    """A job: write how often it was tried, then do what its settings say."""
    tries = folder / "tries"
    tries.write_text(str(int(tries.read_text()) + 1 if tries.exists() else 1))
    sys.stdout.write("to the log\n")
    if settings == "fail":
        raise ValueError("the first line\nand another")
    if settings == "refuse":
        raise DataError("this file is missing; make it.")
    if settings == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if settings == "wait":
        (folder / "waiting").touch()
        while not heartbeat():
            time.sleep(0.02)
        (folder / "saved").touch()
    if settings == "slow":
        time.sleep(2.5)
    if settings == "deaf":
        (folder / "waiting").touch()
        time.sleep(60)
    (folder / "threads").write_text(os.environ["OMP_NUM_THREADS"])


def do_work(job: Job) -> Failure | None:
    """What an engine is given in the place of a real run."""
    return attempt(work, job, lambda: False)


def jobs(folder: Path, *kinds: str) -> list[Job]:
    return [Job(f"{kind} {i}", folder / str(i), kind) for i, kind in enumerate(kinds)]
