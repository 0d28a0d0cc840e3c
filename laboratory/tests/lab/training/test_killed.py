"""Runs that are killed, at random moments or in the middle of a shard, end with the bits of one that was left alone."""

from __future__ import annotations

import dataclasses
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import pytest

from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.training.train import train_run
from lab.stopping import assert_same_run
from lab.tasks.lm import lm_toy
from lab.tasks.logic import logic_toy
from lab.tasks.pretraining import pretraining_toy
from lab.training import killed_target

pytestmark = pytest.mark.full

KILLS = 50
TOY = dataclasses.replace(
    logic_toy.TOY, dropout=0.1, epochs=3, batch_size=16, generated_draws=2000, train_examples=160, dev_examples=60
)
# Noise, dropout, a penalty and new parameters: all that a checkpoint must keep.
ARMS = ("spos", "output+em", "drophead")
# A shard of a prime number of rows ends where a batch does only after as many steps.
SHARD_ROWS = 37
PACKED: dict[str, Any] = {
    "lm": dataclasses.replace(lm_toy.TOY, steps=50, rounds=2, dropout=0.1, batch_size=4, accumulation=2),
    "pretraining": dataclasses.replace(pretraining_toy.TOY, steps=50, rounds=2, dropout=0.1),
}
PACKED_ARMS = [("lm", arm) for arm in ("svgd", "spos+em:layers=0", "cka+talking", "muon-heads")]
PACKED_ARMS += [("pretraining", arm) for arm in ("svgd", "spos+em:capsules=4,layers=0")]


class Runs:
    """Starts runs in processes that are forked from one that has imported everything."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        tasks = [f"headwise_lab.tasks.{name}.task" for name in ("logic", *PACKED)]
        self.context.set_forkserver_preload(["lab.training.killed_target", *tasks])

    def start(self, settings: RunSettings, folder: Path) -> Any:
        """A process that begins or resumes a run."""
        process = self.context.Process(target=killed_target.train, args=(settings, folder))
        process.start()
        return process

    def finish(self, settings: RunSettings, folder: Path) -> float:
        """Do a run to its end; return the seconds from the beginning of its training."""
        process = self.start(settings, folder)
        wait_for_training(process, folder, 0)
        began = time.monotonic()
        process.join(300)
        assert process.exitcode == 0
        return time.monotonic() - began


def wait_for_training(process: Any, folder: Path, before: int) -> None:
    """Wait until a process writes the progress of training, for the first time after `before`."""
    while process.is_alive() and written(folder) <= before:
        time.sleep(0.002)


def written(folder: Path) -> int:
    path = folder / "progress.json"
    return path.stat().st_mtime_ns if path.exists() else 0


@pytest.mark.slow
def test_runs_killed_at_fifty_random_moments_end_with_the_bits_of_undisturbed_ones(tmp_path: Path):
    def settings(arm: str, save_seconds: float = 0.0) -> RunSettings:
        return RunSettings("logic", TOY, parse_arm(arm), 3, cache=tmp_path / "cache", save_seconds=save_seconds)

    runs, draw = Runs(), random.Random(5)
    seconds = {arm: runs.finish(settings(arm), tmp_path / f"whole-{arm}") for arm in ARMS}
    kills = finished = resumable = 0
    while kills < KILLS:
        arm = ARMS[finished % len(ARMS)]
        folder = tmp_path / f"run-{finished}"
        before = written(folder)
        process = runs.start(settings(arm, draw.choice((0.0, 0.0, 0.1))), folder)
        # one in ten before training begins
        if draw.random() < 0.9:
            wait_for_training(process, folder, before)
        process.join(draw.uniform(0.0, 0.6) * seconds[arm])
        if process.is_alive():
            process.kill()
            process.join()
            kills += 1
            resumable += any(folder.glob("checkpoint-*"))
        if (folder / "result.json").exists() or kills == KILLS:
            # one that was killed at its very end cleans up
            process = runs.start(settings(arm), folder)
            process.join(300)
            assert process.exitcode == 0
            assert_same_run(tmp_path / f"whole-{arm}", folder)
            finished += 1
    assert resumable > KILLS // 2
    assert finished >= len(ARMS)


def steps_of(run: Path) -> int:
    """Steps of the newest checkpoint; 0 before there is one."""
    return max((int(path.name.rpartition("-")[2]) for path in run.glob("checkpoint-*")), default=0)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "arm"), PACKED_ARMS)
def test_a_run_killed_in_the_middle_of_a_shard_goes_on_to_the_same_bits(task: str, arm: str, tmp_path: Path):
    toy, scale, runs = {"lm": lm_toy, "pretraining": pretraining_toy}[task], PACKED[task], Runs()
    data = toy.prepare_toy(tmp_path, SHARD_ROWS)
    assert named_task(task).load(data, scale, None).shards[0] == SHARD_ROWS
    settings = RunSettings(task, scale, parse_arm(arm), seed=3, data=data, save_seconds=0.0)
    whole, run = tmp_path / "whole", tmp_path / "run"
    train_run(settings, whole)
    for steps in (7, 29):
        process, deadline = runs.start(settings, run), time.monotonic() + 300
        while steps_of(run) < steps:
            assert process.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.kill()
        process.join()
        assert steps <= steps_of(run) < scale.steps
        rows = steps_of(run) * scale.batch_size * scale.recipe.accumulation
        assert rows % SHARD_ROWS, "the kill is inside a shard"
        assert not (run / "result.json").exists()
    left, done = scale.steps - steps_of(run), []
    train_run(settings, run, lambda: bool(done.append(True)))
    # from the beginning it would come to the same bits too
    assert len(done) <= left
    assert_same_run(whole, run)
