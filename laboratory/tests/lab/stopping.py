"""Runs that are stopped and go on, and what must then be the same as without the stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from headwise_lab.experiment.settings import RunSettings
from headwise_lab.training.train import train_run


def stop_after(steps: int) -> Callable[[], bool]:
    """Return a heartbeat that stops a run after so many."""
    left = iter(range(steps))
    return lambda: next(left, None) is None


def same_bits(one: Path, other: Path) -> bool:
    """Whether two runs have the same weights."""
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_goes_on_to_the_same_bits(settings: RunSettings, place: Path, *, stopped: int) -> None:
    """Train in `place` / "whole" without a stop and in `place` / "run" with one, and compare weights and answers."""
    whole, run = place / "whole", place / "run"
    train_run(settings, whole)
    train_run(settings, run, stop_after(stopped))
    assert not (run / "result.json").exists()
    train_run(settings, run)
    assert same_bits(whole, run)
    first, second = (np.load(folder / "predictions.npz")["predicted"] for folder in (whole, run))
    assert first.tolist() == second.tolist()
