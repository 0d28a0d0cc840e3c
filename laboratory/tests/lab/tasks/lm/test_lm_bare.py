"""The benchmark of the task against a bare script, at toy size."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from lab.tasks.lm.lm_toy import TOY, prepare_toy, write_documents

pytestmark = pytest.mark.full

FOLDER = Path(__file__).parents[5] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch):
    # the folder has the module that all benchmarks share
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("lm_bare_benchmark", FOLDER / "lm_bare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_bare_script_comes_to_the_same_loss(benchmark, tmp_path):
    scale = dataclasses.replace(TOY, steps=60, rounds=2, accumulation=2, learning_rate=1e-2, test_rows=40)
    found = benchmark.compare_losses(scale, prepare_toy(tmp_path), 1, tmp_path)
    assert abs(found["apart"]) < 1e-4
    assert all(loss < 5.0 for losses in found["losses"].values() for loss in losses), "both have learned"


def test_a_record_is_written_and_a_slower_task_or_another_loss_fails(benchmark, tmp_path, monkeypatch):
    text = write_documents(tmp_path / "docs.jsonl", 250)
    monkeypatch.setitem(benchmark.LM_SCALES, "demo", dataclasses.replace(TOY, steps=4))
    options = [
        "--data",
        str(text),
        "--seeds",
        "1",
        "--rounds",
        "1",
        "--turn-steps",
        "2",
        "--out",
        str(tmp_path / "r.json"),
    ]
    monkeypatch.setattr(sys, "argv", ["lm_bare.py", *options])
    monkeypatch.setattr(benchmark, "LEAST_SPEED", 0.0)
    benchmark.main()
    record = json.loads((tmp_path / "r.json").read_text())
    assert len(record["losses"]["bare"]) == 1
    assert record["ratio"] > 0
    monkeypatch.setattr(benchmark, "LEAST_SPEED", 1e6)
    with pytest.raises(SystemExit, match=r"^1$"):
        benchmark.main()
    monkeypatch.setattr(benchmark, "LEAST_SPEED", 0.0)
    losses = iter((5.0, 5.03))
    for name in ("train_ours", "train_bare"):
        monkeypatch.setattr(benchmark, name, lambda *_: (next(losses, 5.0), 1.0))
    with pytest.raises(SystemExit, match=r"^1$"):
        benchmark.main()
    assert json.loads((tmp_path / "r.json").read_text())["apart"] == pytest.approx(5.0 / 5.03 - 1)
