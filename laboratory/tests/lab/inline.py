"""Jobs of the laboratory done in the test's own process, in seconds."""

from __future__ import annotations

import pytest

from headwise_lab.analyses import step_time
from headwise_lab.experiment.run_folder import Failure
from headwise_lab.jobs import pool


def do_inline(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Do jobs in this process, and return the list that their names are added to when they are done."""
    done: list[str] = []

    def run(target, jobs, workers, watch) -> list[Failure]:
        assert workers >= 1
        for job in jobs:
            watch.started(job)
            target(job.settings, job.folder, lambda: False)
            watch.ended(job, None)
            done.append(job.name)
        return []

    monkeypatch.setattr(pool, "run_jobs", run)
    # a time that nobody reads would take longer to measure than a toy to train
    monkeypatch.setattr(step_time, "BATCHES", 1)
    monkeypatch.setattr(step_time, "ROUNDS", 1)
    return done
