"""The remaining time of a comparison: known kinds of runs only, weighted by their pace, and it never rises."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from headwise.cli import output
from headwise_lab.experiment.run_folder import PROGRESS, Failure, Job, write_json
from headwise_lab.jobs.progress import Bars, Clock, Lines, choose_watch


def make_job(folder: Path, kind: str, seed: int) -> Job:
    place = folder / kind / f"seed-{seed}"
    place.mkdir(parents=True)
    return Job(f"{kind} seed {seed}", place, None, kind=kind)


def progress(job: Job, step: int, steps: int, note: str = "") -> None:
    write_json(job.folder / PROGRESS, {"step": step, "steps": steps, "note": note})


@pytest.fixture
def jobs(tmp_path: Path) -> list[Job]:
    return [make_job(tmp_path, kind, seed) for seed in range(2) for kind in ("plain", "em")]


def test_kinds_have_their_own_pace_and_the_remaining_time_never_rises(jobs: list[Job]):
    now = [0.0]
    plain, em, plain_1, em_1 = jobs
    clock = Clock(jobs, lambda: now[0])
    clock.start(plain)
    now[0] = 100.0
    clock.end(plain)
    assert clock.remaining_text() == ""
    clock.start(em)
    progress(em, 1, 100)
    now[0] = 110.0
    assert clock.remaining_text() == "", "a run of every kind must have progressed"
    progress(em, 10, 100)
    # em is at a tenth after 10 s: 90 s of it, 100 s of the other em and 100 s of plain are left
    assert clock.remaining_text() == ", about 5 min left"

    now[0] = 0.0
    clock = Clock(jobs, lambda: now[0])
    clock.start(plain_1)
    clock.start(em_1)
    now[0] = 120.0
    clock.end(plain_1)
    now[0] = 1200.0
    progress(em, 0, 100)
    clock.end(em_1)
    # 1320 s of work on two workers, of which one run takes 1200 s
    assert clock.remaining_text() == ", about 20 min left"
    clock.start(em)
    clock.start(plain)
    progress(em, 50, 100)
    now[0] = 1800.0
    assert clock.remaining_text() == ", about 10 min left"
    progress(em, 60, 100)
    now[0] = 9000.0
    assert clock.remaining_text() == ", about 10 min left", "it never rises"


def test_a_terminal_gets_a_bar_a_run_and_one_for_all_and_other_output_lines(tmp_path: Path):
    one, two = (Job(name, tmp_path / name, None) for name in ("a 0", "b 1"))
    one.folder.mkdir()
    on = Console(file=io.StringIO(), force_terminal=True, width=200)
    with choose_watch(on, [one, two], finished=2) as watch:
        assert isinstance(watch, Bars)
        watch.started(one)
        progress(one, 5, 10, "dev 50.0 %")
        watch.tick()
        (overall, running) = watch._progress.tasks
        assert overall.completed == pytest.approx(2.5 / 4)
        assert (running.description, running.completed, running.fields["note"]) == ("a 0", 0.5, "dev 50.0 %")
        assert "about" in overall.fields["note"]
        watch.ended(one, None)
        assert "3 of 4 runs" in watch._progress.tasks[0].description
    (one.folder / PROGRESS).unlink()
    text = io.StringIO()
    with choose_watch(Console(file=text, width=200), [one, two], finished=3) as watch:
        assert isinstance(watch, Lines)
        watch.started(one)
        progress(one, 10, 10, "dev 87.1 %")
        watch.ended(one, None)
        watch.ended(two, Failure(two, "no.", refused=True))
    lines = text.getvalue().splitlines()
    assert lines[0] == "a 0 starts"
    assert lines[1].startswith("a 0 is done (dev 87.1 %); 4 of 5 runs, about 10 s left")
    assert lines[2] == f"b 1 failed: no. (log: {two.folder}/log.txt)"


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
