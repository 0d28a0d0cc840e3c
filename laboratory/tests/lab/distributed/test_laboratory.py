"""Runs of every task that two processes train together: the numbers of one, and a checkpoint for either."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from distributed.processes import Processes
from headwise.errors import SettingError
from headwise.heads.ablation import HeadDropping
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.tasks.logic.model import PairClassifier
from headwise_lab.training import processes
from headwise_lab.training.attach import Methods
from headwise_lab.training.train import train_run
from lab.tasks.glue.glue_toy import write_model
from lab.tasks.logic import logic_toy
from lab.tasks.toys import toy_run

# two processes import torch for seconds
pytestmark = pytest.mark.full
# Batches divide unevenly, and the last has one example, less than there are processes; without dropout nothing is drawn
# apart.
TOY = dataclasses.replace(
    logic_toy.TOY, epochs=2, batch_size=15, dropout=0.0, generated_draws=2000, train_examples=76, dev_examples=30
)
STEPS = 6  # an epoch


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def settings(arm: str, cache: Path, **changes: Any) -> RunSettings:
    return RunSettings("logic", TOY, parse_arm(arm), seed=3, cache=cache, **changes)


def epochs(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "epochs.jsonl").read_text().splitlines()]


def assert_same_run(folder: Path, expected: Path) -> None:
    for found, one in zip(epochs(folder), epochs(expected), strict=True):
        assert found["train_loss"] == pytest.approx(one["train_loss"], rel=1e-7)
        assert found["dev"] == one["dev"]
        assert found["force_ratio"] == (one["force_ratio"] and pytest.approx(one["force_ratio"], rel=1e-5))
    weights = load_file(folder / "model.safetensors")
    for name, tensor in load_file(expected / "model.safetensors").items():
        assert tensor.dtype == torch.float64
        torch.testing.assert_close(weights[name], tensor, rtol=0.0, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}")
    result, other = (json.loads((place / "result.json").read_text()) for place in (folder, expected))
    assert result["score"]["pooled"] == other["score"]["pooled"]
    assert not list(folder.glob("checkpoint-*"))
    assert not (folder / ".writing").exists()


def train(given: RunSettings, folder: Path, steps: int | None = None) -> None:
    left = iter(range(10**6 if steps is None else steps - 1))
    # so that Adam, which divides by the root of small squares, does not make differences of rounding large
    torch.set_default_dtype(torch.float64)
    try:
        train_run(given, folder, lambda: next(left, None) is None)
    finally:
        torch.set_default_dtype(torch.float32)


def test_two_processes_give_the_loss_curve_of_one(two: Processes, cache: Path, tmp_path: Path):
    for arm in ("plain", "spos+output:weight=0.7", "em:capsules=4", "svgd+position"):
        given, place = settings(arm, cache), tmp_path / arm
        train(given, place / "one")
        two.run(train, given, place / "two")
        assert_same_run(place / "two", place / "one")


@pytest.mark.parametrize("first", ["one", "two"])
def test_a_checkpoint_of_one_process_serves_two_and_the_other_way_round(
    two: Processes, first: str, cache: Path, tmp_path: Path
):
    given = settings("spos+output:weight=0.7", cache)
    train(given, tmp_path / "whole")
    moved = tmp_path / "moved"
    # in the middle of the second epoch
    stop = STEPS + 3
    for turn in (first, "two" if first == "one" else "one"):
        steps = stop if turn == first else None
        if turn == "one":
            train(given, moved, steps)
        else:
            two.run(train, given, moved, steps)
        if turn == first:
            assert [path.name for path in moved.glob("checkpoint-*")] == [f"checkpoint-{stop}"]
            assert not (moved / "result.json").exists()
    assert_same_run(moved, tmp_path / "whole")


def test_processes_drop_other_heads_and_go_on_with_their_own(two: Processes):
    first, second = two.run(draw_dropped)
    assert first == draw_dropped()
    assert first != second


def draw_dropped() -> list[float]:
    """Return what decides the first heads dropped, after a checkpoint was seen to go on with those that follow."""

    def attach(state: dict[str, Any] | None = None) -> Methods:
        model = PairClassifier(5, 7, TOY)
        methods = Methods(parse_arm("drophead:rate=0.5"), model, model.encoder, seed=3)
        if state is not None:
            methods.load_state_dict(state)
        return methods

    def draw(methods: Methods) -> list[float]:
        (dropping,) = methods.run.of(HeadDropping)
        return torch.rand(4, generator=dropping.generator).tolist()

    methods = attach()
    first = draw(methods)
    # the first process writes the checkpoint
    state = processes.agree(methods.state_dict())
    following = draw(methods)
    assert draw(attach(state)) == following
    # of one process
    assert draw(attach(state | {"generators": state["generators"][:1]})) == (first if processes.rank() else following)
    return first


def test_a_refusal_is_the_same_in_every_process(two: Processes, cache: Path, tmp_path: Path):
    given = settings("plain", cache)
    train(given, tmp_path / "run")
    two.run(assert_refused, dataclasses.replace(given, seed=4), tmp_path / "run")


def assert_refused(given: RunSettings, folder: Path) -> None:
    with pytest.raises(SettingError, match="has seed 3 but 4 is requested"):
        train_run(given, folder)
    assert processes.agree(processes.rank()) == 0


def test_what_the_first_process_does_alone_waits_for_no_other(two: Processes):
    two.run(assert_alone)


def assert_alone() -> None:
    assert processes.by_first(processes.count) == 1
    with processes.alone():
        assert processes.count() == 1
        assert processes.group() is None
    assert processes.count() == 2


COMMAND = r"""
import dataclasses, os, sys

if __name__ == "__main__":
    os.write(2, b"one of %s\n" % os.environ["WORLD_SIZE"].encode())
    from headwise.cli.main import main
    from headwise_lab.tasks.logic.scales import LOGIC_SCALES as scales

    scales["demo"] = dataclasses.replace(
        scales["demo"], width=8, heads=2, classifier_width=16, dropout=0.0, epochs=1, batch_size=16, warmup_steps=3,
        generated_draws=2000, train_examples=81, dev_examples=30,
    )
    main(sys.argv[1:])
"""


def launched(launcher: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *launcher, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def write_script(place: Path) -> list[str]:
    (place / "command.py").write_text(COMMAND)
    return [str(place / "command.py")]


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# several processes on one machine are what it calls multi_gpu, with and without a GPU
ACCELERATE = [
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no"),
]


@pytest.mark.parametrize(
    "launcher",
    [pytest.param(TORCHRUN, id="torchrun"), pytest.param(ACCELERATE, id="accelerate", marks=pytest.mark.slow)],
)
def test_a_launcher_runs_a_comparison(launcher: list[str], tmp_path: Path):
    out = tmp_path / "runs"
    given = ["compare", "logic", "--arms", "plain,output", "--seeds", "1", "--out", str(out)]
    done = launched([*launcher, *write_script(tmp_path)], *given)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("one of 2") == 2
    # the first process alone speaks
    assert done.stdout.count("output seed 0 is done") == 1
    assert (out / "report.html").exists()
    for arm in ("plain", "output"):
        assert np.isfinite(epochs(out / arm / "seed-0")[0]["train_loss"])


@pytest.mark.slow
def test_torchrun_tunes(tmp_path: Path):
    out = tmp_path / "draws"
    done = launched([*TORCHRUN, *write_script(tmp_path)], "tune", "logic", "output", "--draws", "2", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" with\noutput") == 1


@pytest.mark.slow
def test_torchrun_runs_a_reproduction_whose_analyses_are_the_first_one_s_alone(tmp_path: Path):
    given = ["reproduce", "diversify/figure-4", "--scale", "demo", "--seeds", "1", "--out", str(tmp_path / "runs")]
    done = launched([*TORCHRUN, *write_script(tmp_path)], *given)
    assert done.returncode == 0, done.stderr
    # the step time of an arm with a penalty, which in training is of the batches of all processes
    assert done.stdout.count("step-time of output seed 0 is done") == 1


@pytest.mark.slow
def test_a_command_that_is_refused_ends_all_processes_and_says_so_once(tmp_path: Path):
    refused = launched([*TORCHRUN, "-m", "headwise"], "compare", "logic", "--arms", "nonsense", "--out", str(tmp_path))
    assert refused.returncode != 0
    assert refused.stderr.count("headwise: ") == 1
    assert "nonsense" in refused.stderr


# Batches divide unevenly, and by tokens or at the end are of unequal size; without dropout nothing is drawn apart.
TEXTS = {"batch_size": 15, "train_examples": 76, "dropout": 0.0}
TRANSLATION = {"train_examples": 75, "dropout": 0.0, "vocabulary_size": 300, "heads": 4, "beams": 1}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("translation", "spos:kinds=self+output:weight=0.7", TRANSLATION),
    ("translation", "svgd-relative+em:layers=0,kinds=self,capsules=4", TRANSLATION),
    ("classification", "svgd+guided:roles=window/separator", TEXTS),
    ("sentence", "spos+output:weight=0.7", TEXTS),
    ("probing", "svgd+output:weight=0.7", TEXTS),
    # five texts of 16 words a batch
    ("graph2text", "spos+output:weight=0.7", {"epochs": 2, "tokens": 80, "beams": 1, "dropout": 0.0}),
    ("glue", "svgd:layers=0+output:weight=0.7", {"batch_size": 15, "train_examples": 52}),
    # what replaces a masked token is drawn apart in each process, as dropout is: the generator alone has one curve
    ("pretraining", "svgd:layers=0", {"dropout": 0.0, "discriminator_weight": 0.0}),
]


@pytest.mark.parametrize(("task", "arm", "sizes"), CASES)
def test_two_processes_train_as_one_does(two: Processes, task: str, arm: str, sizes: dict[str, Any], tmp_path: Path):
    given = toy_run(task, tmp_path / "data", arm, **sizes)
    if task == "glue":
        model = write_model(tmp_path / "model", dropout=0.0)
        given = dataclasses.replace(given, scale=dataclasses.replace(given.scale, pretrained=model))
    train(given, tmp_path / "one")
    two.run(train, given, tmp_path / "two")
    if task != "pretraining":
        assert_same_run(tmp_path / "two", tmp_path / "one")
    curves = [[epoch["train_loss"] for epoch in epochs(tmp_path / name)] for name in ("one", "two")]
    assert curves[1] == pytest.approx(curves[0], rel=1e-7)
