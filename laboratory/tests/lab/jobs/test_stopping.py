"""Ctrl-C once and twice, a closed terminal, requests to end, and workers that hang: said, and nothing lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headwise_lab.experiment.run_folder import Job, Watch
from headwise_lab.jobs import workers
from headwise_lab.jobs.workers import SAVED, run_jobs
from lab.jobs.pool_target import jobs, work

pytestmark = pytest.mark.full

TESTS = Path(__file__).parents[2]
SCRIPT = """
import signal
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from headwise_lab.experiment.run_folder import Watch
from headwise_lab.jobs import workers
from headwise_lab.jobs.workers import run_jobs
from headwise.cli.stopping import Stopped, ignore_stops, stoppable
from lab.jobs.pool_target import jobs, work

if __name__ == "__main__":
    # what starts the tests in the background may have Ctrl-C ignored, and children inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.{hangup})
    workers.PATIENCE_SECONDS = {patience}
    try:
        with stoppable():
            failures = run_jobs(work, jobs(Path({folder!r}), *{kinds!r}), 2, Watch())
    except Stopped as stopped:
        ignore_stops()
        sys.stderr.write(str(stopped))
        sys.exit(stopped.code)
    sys.stderr.write(" ".join(map(str, failures)))
"""


class Running:
    """A pool of jobs in a process group of its own."""

    def __init__(self, folder: Path, *kinds: str, hangup: str = "SIG_DFL", patience: float = 1.0) -> None:
        self.folder, script = folder, folder / "script.py"
        given = {"folder": str(folder), "kinds": kinds, "hangup": hangup, "patience": patience}
        script.write_text(SCRIPT.format(tests=str(TESTS), **given))
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            start_new_session=True,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(TESTS.parent / "src")},
        )
        self.wait_for("waiting", len(kinds))

    def wait_for(self, name: str, count: int) -> None:
        deadline = time.monotonic() + 120
        while len(list(self.folder.glob(f"*/{name}"))) < count:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def tell(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def end(self) -> tuple[int, str, float]:
        """The exit code, what was said, and the seconds it took."""
        began = time.monotonic()
        _, said = self.process.communicate(timeout=120)
        return self.process.returncode, said, time.monotonic() - began


@pytest.mark.parametrize(
    ("number", "code", "runs"), [(signal.SIGTERM, 143, 1), (signal.SIGINT, 130, 2), (signal.SIGHUP, 129, 1)]
)
def test_a_stop_of_any_kind_lets_every_run_save(number, code, runs, tmp_path):
    running = Running(tmp_path, *("wait",) * runs)
    running.tell(number)
    assert running.end()[:2] == (code, SAVED)
    assert all((tmp_path / str(one) / "saved").exists() for one in range(runs))


def test_a_run_that_hangs_when_it_should_save_is_named(tmp_path):
    running = Running(tmp_path, "wait", "deaf")
    told = time.time()
    running.tell(signal.SIGINT)
    code, said, seconds = running.end()
    assert code == 130
    assert said == (
        "stopped; deaf 1 had not saved and resumes from the last checkpoint, other runs from where they were: give the "
        "same command again."
    )
    assert (tmp_path / "0" / "saved").stat().st_mtime - told < 1.0
    assert seconds < 10


def test_a_second_ctrl_c_ends_the_waiting_and_further_ones_show_nothing(tmp_path):
    running = Running(tmp_path, "deaf", "deaf", patience=60.0)
    running.tell(signal.SIGINT)
    time.sleep(0.5)
    running.tell(signal.SIGINT)
    for _ in range(3):
        time.sleep(0.02)
        running.tell(signal.SIGINT)
    code, said, seconds = running.end()
    assert code == 130
    assert "Traceback" not in said
    assert said.startswith("stopped; deaf 0, deaf 1 had not saved and resume from the last checkpoint, other runs")
    assert seconds < 30


def test_under_nohup_a_closed_terminal_ends_nothing(tmp_path):
    running = Running(tmp_path, "wait", hangup="SIG_IGN")
    running.tell(signal.SIGHUP)
    time.sleep(1.0)
    assert running.process.poll() is None
    assert not (tmp_path / "0" / "saved").exists()
    running.tell(signal.SIGINT)
    assert running.end()[:2] == (130, SAVED)


class Told(Watch):
    def __init__(self) -> None:
        self.silent_jobs: list[str] = []

    def silent(self, job: Job, minutes: int) -> None:
        assert minutes == 0
        # a worker that is not up yet has written nothing either
        if (job.folder / "tries").exists():
            self.silent_jobs.append(job.name)


def test_a_worker_that_writes_nothing_is_named_once(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "SILENCE_SECONDS", 0.5)
    watch = Told()
    assert run_jobs(work, jobs(tmp_path, "slow", "fine"), 2, watch) == []
    assert watch.silent_jobs == ["slow 0"]
