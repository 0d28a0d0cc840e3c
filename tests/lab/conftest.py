"""What tests of the laboratory share."""

from __future__ import annotations

import pytest

from headwise.lab import pool
from headwise.lab.workers import Failure


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Do jobs in this process, and list those that were done."""
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
    return done
