"""A run on packed text that is killed without a warning in the middle of a shard ends with the same bits."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.packed_text.prepare import prepare_text
from headwise_lab.tasks.pretraining.data import PACKING
from headwise_lab.tasks.pretraining.task import PretrainingTask
from headwise_lab.training.train import train_run
from lab.stopping import same_bits
from lab.tasks.lm import lm_toy
from lab.tasks.pretraining import pretraining_toy

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[5]
# a shard of a prime number of rows ends where a batch does only after as many steps
SHARD_ROWS = 37
SCALES = {
    "lm": dataclasses.replace(lm_toy.TOY, steps=50, rounds=2, dropout=0.1, batch_size=4, accumulation=2),
    "pretraining": dataclasses.replace(pretraining_toy.TOY, steps=50, rounds=2, dropout=0.1),
}
ARMS = [("lm", arm) for arm in ("svgd", "spos+em:layers=0", "cka+talking", "muon-heads")]
ARMS += [("pretraining", arm) for arm in ("svgd", "spos+em:capsules=4,layers=0")]


def settings(task: str, arm: str, data: Path) -> RunSettings:
    """A run that saves after every step."""
    return RunSettings(task, SCALES[task], parse_arm(arm), seed=3, data=data, save_seconds=0.0)


def prepare(task: str, folder: Path) -> Path:
    """A prepared folder of shards of so many rows."""
    if task == "lm":
        made = lm_toy.prepare_toy(folder, SHARD_ROWS)
        assert lm_toy.open_toy(made).shards[0] == SHARD_ROWS
        return made
    preparation = dataclasses.replace(pretraining_toy.TOY.preparation, shard_bytes=SHARD_ROWS * 32)
    files = (pretraining_toy.write_jsonl(folder / "docs.jsonl.gz", 120),)
    prepare_text(PACKING, files, preparation, "f" * 16, folder / "prepared")
    assert PretrainingTask().load(folder / "prepared", SCALES[task], None).shards[0] == SHARD_ROWS
    return folder / "prepared"


def steps_of(run: Path) -> int:
    """Steps of the newest checkpoint; 0 before there is one."""
    return max((int(path.name.rpartition("-")[2]) for path in run.glob("checkpoint-*")), default=0)


def kill_after(steps: int, task: str, arm: str, data: Path, run: Path) -> None:
    """Train in another process until a checkpoint has so many steps, and kill it where it stands."""
    # as many threads as the whole run here has, and as the laboratory's workers have: sums over more have other bits
    script = "import sys, torch; torch.set_num_threads(1); from pathlib import Path\n"
    script += "from lab.tasks.lm.test_packed_killed import settings, train_run\n"
    script += "train_run(settings(*sys.argv[1:3], Path(sys.argv[3])), Path(sys.argv[4]))"
    path = os.pathsep.join(str(ROOT / place) for place in ("src", "laboratory/src", "laboratory/tests"))
    with subprocess.Popen(
        [sys.executable, "-c", script, task, arm, str(data), str(run)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        deadline = time.monotonic() + 300
        while steps_of(run) < steps:
            assert process.poll() is None, process.stderr.read() if process.stderr else b""
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(("task", "arm"), ARMS)
def test_a_run_killed_in_the_middle_of_a_shard_goes_on_to_the_same_bits(task, arm, tmp_path):
    scale, text = SCALES[task], prepare(task, tmp_path)
    whole, run = tmp_path / "whole", tmp_path / "run"
    train_run(settings(task, arm, text), whole)
    for steps in (7, 29):
        kill_after(steps, task, arm, text, run)
        assert steps <= steps_of(run) < scale.steps
        rows = steps_of(run) * scale.batch_size * scale.recipe.accumulation
        assert rows % SHARD_ROWS, "the kill is inside a shard"
        assert not (run / "result.json").exists()
    left, done = scale.steps - steps_of(run), []

    def heartbeat() -> bool:
        done.append(True)
        return False

    train_run(settings(task, arm, text), run, heartbeat)
    # from the beginning it would come to the same bits too
    assert len(done) <= left
    assert same_bits(whole, run)
    assert (whole / "epochs.jsonl").read_bytes() == (run / "epochs.jsonl").read_bytes()
    results = [json.loads((folder / "result.json").read_text()) for folder in (whole, run)]
    for result in results:
        for timed in ("step_seconds", "train_seconds", "record_digest", "file_digests"):
            result.pop(timed)
    assert results[0] == results[1]
    assert sorted(path.name for path in run.iterdir()) == sorted(path.name for path in whole.iterdir())
