"""Baselines as runs: the rows `counts` and `majority` get folders like those of arms, so they stand in every table.

Owns what such a folder holds. The predictions are `models/baselines`'.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.checks import require_choice
from headwise.lab import runs
from headwise.lab.evaluation import accuracies
from headwise.lab.tasks.logic import LogicTask, Scale
from headwise.lab.versions import versions

__all__ = ["BASELINES", "BaselineSettings", "baseline_run"]

BASELINES = ("majority", "counts")


@dataclass(frozen=True)
class BaselineSettings:
    """Everything a baseline's row is made from; as `RunSettings`, with a name in the place of the arm."""

    task: str
    scale: Scale
    name: str
    seed: int = 0
    data: Path | None = None
    cache: Path | None = None
    fingerprint: str = ""

    def __post_init__(self) -> None:
        require_choice("name", self.name, BASELINES)

    def record(self) -> dict[str, Any]:
        """Return what determines the row's numbers, as JSON data."""
        return {
            "task": self.task,
            "data": self.fingerprint,
            "seed": self.seed,
            "baseline": self.name,
            "scale": runs.as_record(self.scale),
        }


def baseline_run(settings: BaselineSettings, folder: Path) -> None:
    """Fit one baseline, ask it about the test split, and leave the folder of a finished run."""
    # scikit-learn takes seconds to import, and only the worker that fits a baseline needs it
    from headwise.lab.models import baselines

    runs.claim(folder, settings.record())
    if runs.is_finished(folder):
        return
    began = time.monotonic()
    data = LogicTask.load(settings.data, settings.scale, settings.cache)
    if settings.name == "counts":
        predicted = baselines.counts(data.train, data.test, len(data.vocabulary), seed=settings.seed)
    else:
        predicted = baselines.majority(data.train, data.test)
    correct = predicted == data.test.labels
    runs.write_arrays(folder / runs.PREDICTIONS, correct=correct, predicted=predicted)
    result = {
        "task": settings.task,
        "scale": settings.scale.name,
        "arm": settings.name,
        "control": None,
        "seed": settings.seed,
        "settings": settings.record(),
        "accuracy": accuracies(correct, data.test.bins),
        "dev_accuracy": None,
        "parameters": None,
        "step_seconds": None,
        "train_seconds": time.monotonic() - began,
        "distance": None,
        "output_cosine": None,
        "output_cka": None,
        "position_js": None,
        "parameter_cosine": None,
        "particle_norm": None,
        "force_ratio": None,
        "versions": versions("numpy", "scikit-learn"),
    }
    runs.write_json(folder / runs.RESULT, result)
