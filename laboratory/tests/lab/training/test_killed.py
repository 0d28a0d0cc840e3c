"""Runs that are killed at fifty random moments end with the bits of a run that was left alone."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.tasks.logic.scales import LOGIC_SCALES
from lab.stopping import same_bits
from lab.training import killed_target

pytestmark = pytest.mark.full

KILLS = 50
TOY = dataclasses.replace(
    LOGIC_SCALES["demo"],
    name="toy",
    width=8,
    heads=2,
    classifier_width=16,
    dropout=0.1,
    epochs=3,
    batch_size=16,
    warmup_steps=3,
    generated_draws=2000,
    train_examples=160,
    dev_examples=60,
)
# Noise, dropout, a penalty and new parameters: all that a checkpoint must keep.
ARMS = ("spos", "output+em", "drophead")
TIMED = ("step_seconds", "train_seconds")


class Runs:
    """Starts runs in processes that are forked from one that has imported everything."""

    def __init__(self, cache: Path) -> None:
        self.context, self.cache = multiprocessing.get_context("forkserver"), cache
        self.context.set_forkserver_preload(["lab.training.killed_target", "headwise_lab.tasks.logic.task"])

    def start(self, arm: str, folder: Path, save_seconds: float = 0.0) -> Any:
        """A process that begins or resumes a run."""
        settings = RunSettings("logic", TOY, parse_arm(arm), seed=3, cache=self.cache, save_seconds=save_seconds)
        process = self.context.Process(target=killed_target.train, args=(settings, folder))
        process.start()
        return process

    def finish(self, arm: str, folder: Path) -> float:
        """Do a run to its end; return the seconds from the beginning of its training."""
        process = self.start(arm, folder)
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
    runs, draw = Runs(tmp_path / "cache"), random.Random(5)
    seconds = {arm: runs.finish(arm, tmp_path / f"whole-{arm}") for arm in ARMS}
    kills = finished = resumable = 0
    while kills < KILLS:
        arm = ARMS[finished % len(ARMS)]
        folder = tmp_path / f"run-{finished}"
        before = written(folder)
        process = runs.start(arm, folder, draw.choice((0.0, 0.0, 0.1)))
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
            process = runs.start(arm, folder)
            process.join(300)
            assert process.exitcode == 0
            assert_same(tmp_path / f"whole-{arm}", folder)
            finished += 1
    assert resumable > KILLS // 2
    assert finished >= len(ARMS)


def assert_same(whole: Path, run: Path) -> None:
    """A run that was killed has the files of one that was not: the same bits but for what was timed."""
    assert same_bits(whole, run)
    for name in ("epochs.jsonl", "settings.json"):
        assert (whole / name).read_bytes() == (run / name).read_bytes(), name
    one, other = (np.load(folder / "predictions.npz") for folder in (whole, run))
    assert all(np.array_equal(one[name], other[name]) for name in one.files)
    results = [json.loads((folder / "result.json").read_text()) for folder in (whole, run)]
    # a digest of what was timed differs
    kept = [
        {name: one for name, one in result.items() if name not in TIMED and "digest" not in name} for result in results
    ]
    assert kept[0] == kept[1]
    shown = [sorted(path.name for path in folder.iterdir() if path.name != "log.txt") for folder in (whole, run)]
    assert shown[0] == shown[1]
