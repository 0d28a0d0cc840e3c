"""Runs that are stopped or killed and go on, and what must then be the same as without that."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from headwise_lab.experiment.settings import RunSettings
from headwise_lab.training.train import train_run

# What a clock told, and digests of files that hold such.
TIMED = ("step_seconds", "train_seconds", "record_digest", "file_digests")


def stop_after(steps: int) -> Callable[[], bool]:
    """Return a heartbeat that stops a run after so many."""
    left = iter(range(steps))
    return lambda: next(left, None) is None


def same_bits(one: Path, other: Path) -> bool:
    """Whether two runs have the same weights."""
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def read_untimed(run: Path) -> dict[str, Any]:
    """The result of a run without what a clock told."""
    found = json.loads((run / "result.json").read_text())
    found.get("answers", {}).pop("decoding_seconds", None)
    return {name: value for name, value in found.items() if name not in TIMED}


def assert_same_run(whole: Path, run: Path) -> None:
    """Two runs have the same files with the same weights, answers, records and scores."""
    assert same_bits(whole, run)
    one, other = (np.load(folder / "predictions.npz") for folder in (whole, run))
    assert all(np.array_equal(one[name], other[name]) for name in one.files)
    assert read_untimed(whole) == read_untimed(run)
    names, others = (
        sorted(path.name for path in folder.iterdir() if path.name != "log.txt") for folder in (whole, run)
    )
    assert names == others
    for name in {"epochs.jsonl", "settings.json", "predictions.txt", "vocabulary.json"} & {*names}:
        assert (whole / name).read_bytes() == (run / name).read_bytes(), name


def assert_goes_on_to_the_same_bits(settings: RunSettings, place: Path, *, stopped: int) -> None:
    """Train in `place` / "whole" without a stop and in `place` / "run" with one, and compare the two."""
    whole, run = place / "whole", place / "run"
    train_run(settings, whole)
    train_run(settings, run, stop_after(stopped))
    assert not (run / "result.json").exists()
    assert list(run.glob("checkpoint-*"))
    train_run(settings, run)
    assert_same_run(whole, run)
