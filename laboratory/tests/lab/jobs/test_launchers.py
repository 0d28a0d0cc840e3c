"""Runs handed to an engine elsewhere: the same folders and failures; a worker that is killed loses its run alone."""

from __future__ import annotations

import dataclasses
import importlib
import time
from concurrent.futures import Future
from pathlib import Path
from typing import cast

import pytest
from typing_extensions import override

from headwise.errors import SettingError
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.run_folder import Failure, Job, Watch
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.jobs import launchers
from headwise_lab.jobs.launchers import Elsewhere, Launcher, open_engine
from headwise_lab.jobs.workers import Submitted, run_on
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

    engine, given = Inline(), jobs(Path(), "fail", "die", "refuse", "fine", "fine")
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
        run_on(engine, jobs(tmp_path, "wait", "wait"), 1, Interrupted())
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


@pytest.mark.full
def test_submitit_runs_jobs_and_a_killed_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On submitit's own local cluster, whose jobs are processes as Slurm's are."""
    pytest.importorskip("submitit")
    monkeypatch.setattr(launchers, "do_one", do_work)
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}:{Path(__file__).parents[4] / 'src'}")
    engine = open_engine(Launcher("slurm", {"cluster": "local", "timeout_min": 5}), tmp_path)
    failures = run_on(engine, jobs(tmp_path, "fine", "die", "refuse"), 3, Watch())
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
    failures = run_on(open_engine(Launcher("ray"), tmp_path), jobs(tmp_path, "fine", "die", "refuse"), 2, Watch())
    assert_as_expected(failures)
    assert (tmp_path / "0" / "tries").read_text() == "1"
    assert time.monotonic() - began < 200
    assert not importlib.import_module("ray").is_initialized()
