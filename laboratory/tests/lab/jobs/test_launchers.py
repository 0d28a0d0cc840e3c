"""Launchers, progress and stopping of jobs."""

from __future__ import annotations

import dataclasses
import io
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console
from typing_extensions import override

from headwise.cli import output
from headwise.errors import SettingError
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.run_folder import PROGRESS, Failure, Job, Watch, write_json
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.jobs import launchers, workers
from headwise_lab.jobs.launchers import Elsewhere, Launcher, open_engine
from headwise_lab.jobs.progress import Bars, Clock, Lines, choose_watch
from headwise_lab.jobs.workers import SAVED, Submitted, run_jobs, run_on
from headwise_lab.options import parse_launch_options
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES
from lab.jobs.pool_target import do_work, work
from lab.jobs.pool_target import jobs as pool_jobs


def test_files_named_by_the_scale_and_pairs_of_files_mean_the_same_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "glove.txt").touch()
    scale = dataclasses.replace(
        CLASSIFICATION_SCALES["demo"], embeddings=Path("glove.txt"), pipeline=Path("en_core_web_sm")
    )
    settings = RunSettings("classification", scale, parse_arm("plain"), 0, data=Path("my.en,my.de"), cache=Path("kept"))
    job = launchers._resolve_paths(Job("plain seed 0", Path("run"), settings))
    assert job.folder == tmp_path / "run"
    assert job.settings.data == Path(f"{tmp_path}/my.en,{tmp_path}/my.de")
    assert job.settings.cache == tmp_path / "kept"
    assert job.settings.scale.embeddings == tmp_path / "glove.txt"
    # an installed package has no place
    assert job.settings.scale.pipeline == Path("en_core_web_sm")
    assert job.settings.record() == settings.record()


class Inline(Elsewhere):
    """An engine with the interface of both libraries: a job is done at once, and the death of a process an error."""

    def __init__(self, *, ends: bool = True) -> None:
        self.ends, self.closed = ends, False
        self.sent: list[tuple[Job, Future[Failure | None]]] = []

    @override
    def send(self, job: Job) -> Submitted:
        future: Future[Failure | None] = Future()
        if self.ends and job.settings == "die":
            future.set_exception(RuntimeError("the worker died with -9"))
        elif self.ends:
            future.set_result(do_work(job))
        self.sent.append((job, future))
        return cast(Submitted, future)

    @override
    def close(self) -> None:
        self.closed = True


def test_runs_elsewhere_end_as_runs_here_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    events: list[tuple[str, str]] = []

    class Recorded(Watch):
        def started(self, job: Job) -> None:
            events.append(("started", job.name))

        def ended(self, job: Job, failure: Failure | None) -> None:
            events.append(("done" if failure is None else "failed", job.name))

    engine, given = Inline(), pool_jobs(Path(), "fail", "die", "refuse", "fine", "fine")
    failures = run_on(engine, given, 2, Recorded())
    found = sorted((failure.job.name, failure.refused) for failure in failures)
    assert found == [("die 1", False), ("fail 0", False), ("refuse 2", True)]
    by_name = {failure.job.name: str(failure) for failure in failures}
    assert "its process ended (the worker died with -9); run the same command again" in by_name["die 1"]
    assert by_name["fail 0"].startswith("fail 0 failed: ValueError: the first line (log:")
    assert {failure.job for failure in failures} <= set(given)
    assert events[:4] == [("started", "fail 0"), ("started", "die 1"), ("failed", "fail 0"), ("failed", "die 1")]
    assert {("done", "fine 3"), ("done", "fine 4")} <= set(events)
    assert engine.closed
    # an engine works in another working directory
    assert [job.folder for job, _ in engine.sent] == [tmp_path / str(number) for number in range(5)]


def test_ctrl_c_cancels_what_was_submitted(tmp_path: Path):
    class Interrupted(Watch):
        def tick(self) -> None:
            raise KeyboardInterrupt

    engine = Inline(ends=False)
    with pytest.raises(KeyboardInterrupt, match="submitted runs were canceled and resume from their last checkpoints"):
        run_on(engine, pool_jobs(tmp_path, "wait", "wait"), 1, Interrupted())
    assert engine.closed
    assert [future.cancelled() for _, future in engine.sent] == [True]


def test_what_is_no_launcher_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with pytest.raises(SettingError, match=r"launcher.*local.*slurm.*ray"):
        Launcher("condor")
    with pytest.raises(SettingError, match=r"local takes no options; got timeout_min"):
        Launcher("local", {"timeout_min": 4})
    assert parse_launch_options(["slurm_partition=gpu", "timeout_min=90", "num_gpus=0.5"]) == {
        "slurm_partition": "gpu",
        "timeout_min": 90,
        "num_gpus": 0.5,
    }

    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(launchers.importlib, "import_module", absent)
    with pytest.raises(
        SettingError, match=r"launcher ray needs ray, which is not installed; pip install .headwise-lab\["
    ):
        open_engine(Launcher("ray"), tmp_path)


def assert_as_expected(failures: list[Failure]) -> None:
    found = sorted((failure.job.name, failure.refused) for failure in failures)
    assert found == [("die 1", False), ("refuse 2", True)], [str(failure) for failure in failures]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        # submitit's own local cluster, whose jobs are processes as Slurm's are
        pytest.param("slurm", {"cluster": "local", "timeout_min": 5}, marks=pytest.mark.full),
        pytest.param("ray", {}, marks=pytest.mark.slow),
    ],
)
def test_another_program_runs_jobs_and_a_killed_one_is_told(name, options, tmp_path: Path, monkeypatch):
    library = pytest.importorskip({"slurm": "submitit"}.get(name, name))
    monkeypatch.setattr(launchers, "do_one", do_work)
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}:{Path(__file__).parents[4] / 'src'}")
    began = time.monotonic()
    engine = open_engine(Launcher(name, options), tmp_path)
    assert_as_expected(run_on(engine, pool_jobs(tmp_path, "fine", "die", "refuse"), 2, Watch()))
    assert (tmp_path / "0" / "tries").read_text() == "1"
    assert time.monotonic() - began < 200
    if name == "ray":
        assert not library.is_initialized()
    else:
        with pytest.raises(SettingError, match=r"launcher slurm: submitit refused"):
            open_engine(Launcher("slurm", {"cluster": "local", "nonsense": 3}), tmp_path)


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


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "code", "runs"), [(signal.SIGTERM, 143, 1), (signal.SIGINT, 130, 2), (signal.SIGHUP, 129, 1)]
)
def test_a_stop_of_any_kind_lets_every_run_save(number, code, runs, tmp_path):
    running = Running(tmp_path, *("wait",) * runs)
    running.tell(number)
    assert running.end()[:2] == (code, SAVED)
    assert all((tmp_path / str(one) / "saved").exists() for one in range(runs))


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.full
def test_a_worker_that_writes_nothing_is_named_once(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "SILENCE_SECONDS", 0.5)
    watch = Told()
    assert run_jobs(work, pool_jobs(tmp_path, "slow", "fine"), 2, watch) == []
    assert watch.silent_jobs == ["slow 0"]
