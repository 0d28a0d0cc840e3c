"""Runs handed to an engine elsewhere: the same folders and failures; a worker that is killed loses its run alone."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest

from headwise.errors import SettingError
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.run_folder import Failure, Job, Watch
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.jobs import launchers
from headwise_lab.jobs.launchers import Launcher, open_engine, run_elsewhere
from headwise_lab.options import parse_launch_options
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES
from lab.jobs.pool_target import do_work, jobs


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


class Recorded(Watch):
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.most = self.now = 0

    def started(self, job: Job) -> None:
        self.events.append(("started", job.name))
        self.now += 1
        self.most = max(self.most, self.now)

    def ended(self, job: Job, failure: Failure | None) -> None:
        self.events.append(("done" if failure is None else "failed", job.name))
        self.now -= 1


def _answer(job: Job, connection: Any) -> None:
    connection.send(do_work(job))


class ProcessEngine:
    """An engine of the interface both libraries have: a job is a process, and its death an error of its result."""

    def __init__(self) -> None:
        self.threads, self.closed = ThreadPoolExecutor(4), False
        self.processes: list[SpawnProcess] = []
        self.futures: list[Future[Failure | None]] = []

    def submit(self, _function: Callable[[Job], Failure | None], job: Job) -> Any:
        ours, theirs = get_context("spawn").Pipe()
        process = get_context("spawn").Process(target=_answer, args=(job, theirs), daemon=True)
        process.start()
        theirs.close()
        self.processes.append(process)

        def answer() -> Failure | None:
            try:
                return ours.recv()
            except EOFError:
                process.join()
                raise RuntimeError(f"the worker died with {process.exitcode}") from None

        future: Any = self.threads.submit(answer)
        future.cancel = process.kill
        self.futures.append(future)
        return future

    def close(self) -> None:
        self.closed = True
        self.threads.shutdown(wait=False)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_runs_elsewhere_end_as_runs_here_do(tmp_path: Path):
    watch, engine = Recorded(), ProcessEngine()
    given = jobs(tmp_path, "fail", "die", "refuse", "fine", "fine")
    failures = run_elsewhere(engine, given, 2, watch)
    assert sorted((failure.job.name, failure.refused) for failure in failures) == [
        ("die 1", False),
        ("fail 0", False),
        ("refuse 2", True),
    ]
    by_name = {failure.job.name: str(failure) for failure in failures}
    assert "its process ended (the worker died with -9); run the same command again" in by_name["die 1"]
    assert by_name["fail 0"].startswith("fail 0 failed: ValueError: the first line (log:")
    assert {failure.job for failure in failures} <= set(given)
    assert {("done", "fine 3"), ("done", "fine 4")} <= set(watch.events)
    assert watch.most == 2
    assert engine.closed
    # the command is given again: what had died is tried a second time, in the same folder
    assert not run_elsewhere(ProcessEngine(), [Job("again", tmp_path / "1", "fine")], 1, Watch())
    assert (tmp_path / "1" / "tries").read_text() == "2"


def test_ctrl_c_cancels_what_was_submitted(tmp_path: Path):
    engine = ProcessEngine()

    class Interrupted(Watch):
        def tick(self) -> None:
            if (tmp_path / "0" / "waiting").exists():
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_elsewhere(engine, jobs(tmp_path, "wait"), 1, Interrupted())
    assert engine.closed
    (process,), (future,) = engine.processes, engine.futures
    # the thread that waits for the process reaps it, and who else does may be told of nothing
    wait([future], timeout=30)
    assert process.exitcode == -9


def test_paths_are_the_same_in_another_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from headwise_lab.tasks.logic.scales import LOGIC_SCALES
    from headwise_lab.training.baseline import BaselineSettings

    monkeypatch.chdir(tmp_path)
    seen: list[Job] = []

    class Engine(ProcessEngine):
        def submit(self, function: Callable[[Job], Failure | None], job: Job) -> Any:
            seen.append(job)
            return super().submit(function, Job("fine", job.folder, "fine"))

    settings = BaselineSettings("logic", LOGIC_SCALES["demo"], "majority", data=None, cache=Path("cache"))
    run_elsewhere(Engine(), [Job("one", Path("runs/one"), settings)], 1, Watch())
    assert (seen[0].folder, seen[0].settings.cache) == (tmp_path / "runs" / "one", tmp_path / "cache")


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


@pytest.mark.slow
def test_submitit_runs_jobs_and_a_killed_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On submitit's own local cluster, whose jobs are processes as Slurm's are."""
    pytest.importorskip("submitit")
    monkeypatch.setattr(launchers, "do_one", do_work)
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}:{Path(__file__).parents[4] / 'src'}")
    engine = open_engine(Launcher("slurm", {"cluster": "local", "timeout_min": 5}), tmp_path)
    failures = run_elsewhere(engine, jobs(tmp_path, "fine", "die", "refuse"), 3, Watch())
    assert_as_expected(failures)
    assert (tmp_path / "0" / "tries").read_text() == "1"
    with pytest.raises(SettingError, match=r"launcher slurm: submitit refused"):
        open_engine(Launcher("slurm", {"cluster": "local", "nonsense": 3}), tmp_path)


@pytest.mark.slow
def test_ray_runs_jobs_and_a_killed_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("ray")
    monkeypatch.setattr(launchers, "do_one", do_work)
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}:{Path(__file__).parents[4] / 'src'}")
    began = time.monotonic()
    failures = run_elsewhere(
        open_engine(Launcher("ray"), tmp_path), jobs(tmp_path, "fine", "die", "refuse"), 2, Watch()
    )
    assert_as_expected(failures)
    assert (tmp_path / "0" / "tries").read_text() == "1"
    assert time.monotonic() - began < 200
    assert not importlib.import_module("ray").is_initialized()
