"""The remaining time of a comparison: known kinds of runs only, weighted by their pace, and it never rises."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from headwise.cli import output
from headwise_lab.experiment.run_folder import PROGRESS, Job, write_json
from headwise_lab.jobs.progress import Clock, Lines


def make_job(folder: Path, kind: str, seed: int) -> Job:
    place = folder / kind / f"seed-{seed}"
    place.mkdir(parents=True)
    return Job(f"{kind} seed {seed}", place, None, kind=kind)


def progress(job: Job, step: int, steps: int, note: str = "") -> None:
    write_json(job.folder / PROGRESS, {"step": step, "steps": steps, "note": note})


@pytest.fixture
def jobs(tmp_path: Path) -> list[Job]:
    return [make_job(tmp_path, kind, seed) for seed in range(2) for kind in ("plain", "em")]


def test_there_is_no_remaining_time_until_a_run_of_every_kind_has_progressed(jobs: list[Job]):
    now = [0.0]
    clock = Clock(jobs, lambda: now[0])
    plain, em, *_ = jobs
    clock.start(plain)
    now[0] = 100.0
    clock.end(plain)
    assert clock.remaining_text() == ""
    clock.start(em)
    progress(em, 1, 100)
    now[0] = 110.0
    assert clock.remaining_text() == ""
    progress(em, 10, 100)
    # em is at a tenth after 10 s: 90 s of it, 100 s of the other em and 100 s of plain are left
    assert clock.remaining_text() == ", about 5 min left"


def test_kinds_have_their_own_pace_and_runs_at_once_share_the_work(jobs: list[Job]):
    now = [0.0]
    clock = Clock(jobs, lambda: now[0])
    plain, em, plain_1, em_1 = jobs
    clock.start(plain)
    clock.start(em)
    now[0] = 120.0
    clock.end(plain)
    now[0] = 1200.0
    clock.end(em)
    # 1320 s of work on two workers, of which one run takes 1200 s
    assert clock.remaining_text() == ", about 20 min left"
    clock.start(em_1)
    clock.start(plain_1)
    progress(em_1, 50, 100)
    now[0] = 1800.0
    assert clock.remaining_text() == ", about 10 min left"


def test_the_remaining_time_never_rises(jobs: list[Job]):
    now = [0.0]
    clock = Clock(jobs[::2], lambda: now[0])
    first, second = jobs[::2]
    clock.start(first)
    now[0] = 600.0
    clock.end(first)
    assert clock.remaining_text() == ", about 10 min left"
    clock.start(second)
    progress(second, 10, 100)
    now[0] = 1200.0
    assert clock.remaining_text() == ", about 10 min left"


@pytest.mark.parametrize("verbose", [False, True])
def test_a_verbose_command_prints_what_each_run_notes(jobs: list[Job], monkeypatch: pytest.MonkeyPatch, verbose: bool):
    monkeypatch.setattr("headwise_lab.jobs.progress.asked_output", lambda: output.Output(verbose=verbose))
    text = io.StringIO()
    lines = Lines(Console(file=text), jobs, 0)
    lines.started(jobs[0])
    progress(jobs[0], 10, 40, "dev 81.2")
    lines.tick()
    lines.tick()
    assert text.getvalue().count("plain seed 0: dev 81.2 at step 10 of 40") == verbose
