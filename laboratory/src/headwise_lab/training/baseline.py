"""Baselines as runs: they get folders like those of arms, so that every table has their rows."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.errors import require_choice
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.evaluation import METRICS, scores_by_bin
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.run_folder import write_result
from headwise_lab.experiment.scale import Scale
from headwise_lab.experiment.settings import Whole, load_data, read_versions
from headwise_lab.results.runs import MEASURES


@dataclass(frozen=True)
class BaselineSettings:
    """Everything a baseline's row is made from; as `RunSettings`, with a name instead of an arm."""

    task: str
    scale: Scale
    name: str
    seed: int = 0
    data: Path | None = None
    cache: Path | None = None
    fingerprint: str = ""
    whole: Whole | None = None

    def __post_init__(self) -> None:
        require_choice("name", self.name, named_task(self.task).baselines)

    def record(self) -> dict[str, Any]:
        """Return what determines the row's numbers, as JSON data."""
        return {
            "task": self.task,
            "data": self.fingerprint,
            "seed": self.seed,
            "baseline": self.name,
            "scale": run_folder.as_record(self.scale),
        }


def run_baseline(settings: BaselineSettings, folder: Path) -> None:
    """Fit one baseline, predict the test split, and write the folder of a finished run."""
    run_folder.claim(folder, settings.record())
    if run_folder.is_finished(folder):
        return
    began = time.monotonic()
    task = named_task(settings.task)
    data = load_data(settings)
    answers = task.baseline(settings.name, data, settings.seed)
    run_folder.write_answers(folder, answers.statistics, answers.predicted, answers.text)
    result = {
        "task": settings.task,
        "scale": settings.scale.name,
        "arm": settings.name,
        "control": None,
        "seed": settings.seed,
        "settings": settings.record(),
        "score": scores_by_bin(METRICS[task.metric], answers.statistics, task.difficulties(data)),
        "dev_score": None,
        "answers": dict(answers.measures),
        "signatures": dict(answers.signatures),
        "parameters": None,
        "step_seconds": None,
        "train_seconds": time.monotonic() - began,
        **dict.fromkeys(MEASURES),
        "versions": read_versions("numpy", "scikit-learn"),
    }
    write_result(folder, result)
