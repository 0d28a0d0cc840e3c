"""Runs made of several trainings, such as the folds of a cross-validation: one job per part, and one result."""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headwise_lab.data.arrays import read_arrays
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.evaluation import METRICS, scores_by_bin
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.run_folder import Job, require_intact, write_result
from headwise_lab.experiment.settings import RunSettings, Whole
from headwise_lab.experiment.task import Task
from headwise_lab.results.runs import MEASURES, TEST
from headwise_lab.training.baseline import BaselineSettings

PART = "part-"


def list_scales(task: Task, settings: RunSettings | BaselineSettings) -> Sequence[Any]:
    """Return the scales of the trainings that a run is made of; its own scale alone where it is one training."""
    return task.parts(settings.data, settings.scale, settings.cache)


def split_job(job: Job, scales: Sequence[Any]) -> list[Job]:
    """Return the jobs of a run: itself, or one a part, in folders below its own."""
    if len(scales) == 1:
        return [job]
    whole = Whole(job.settings.scale, len(scales))
    return [
        dataclasses.replace(
            job,
            name=f"{job.name} part {number}",
            folder=job.folder / f"{PART}{number}",
            settings=dataclasses.replace(job.settings, scale=scale, whole=whole),
        )
        for number, scale in enumerate(scales)
    ]


def find_run(job: Job) -> Path:
    """Return the folder of the run that a job does, or does a part of."""
    return job.folder if job.settings.whole is None else job.folder.parent


def gather_parts(settings: RunSettings | BaselineSettings, folder: Path) -> None:
    """Write the result of a run once all its parts, of which `folder` is one, are finished.

    Answers are concatenated in the order of the parts. The dev score, the measures of heads and other numbers are means
    over the parts; the training time is their sum.
    """
    if settings.whole is None:
        return
    run, whole = folder.parent, dataclasses.replace(settings, scale=settings.whole.scale, whole=None)
    folders = [run / f"{PART}{number}" for number in range(settings.whole.parts)]
    if run_folder.is_finished(run) or not all(run_folder.is_finished(part) for part in folders):
        return
    run_folder.claim(run, whole.record())
    for part in folders:
        require_intact(part)
    results = [run_folder.read_json(part / run_folder.RESULT) for part in folders]
    answers = [read_arrays(part / run_folder.PREDICTIONS) for part in folders]
    found, predicted = (np.concatenate([part[name] for part in answers]) for name in ("statistics", "predicted"))
    run_folder.write_answers(run, found, predicted, None)
    metric = METRICS[named_task(settings.task).metric]
    result = {
        **results[0],
        "settings": whole.record(),
        "score": scores_by_bin(metric, found, read_arrays(run.parents[1] / TEST)["bins"]),
        "parts": [part["score"]["pooled"] for part in results],
        "train_seconds": sum(part["train_seconds"] for part in results),
        "answers": _average([part["answers"] for part in results]),
        "sites": {site: _average([part["sites"][site] for part in results]) for site in results[0].get("sites") or {}},
        **_average(results, ("dev_score", "step_seconds", *MEASURES)),
    }
    write_result(run, result)


def _average(parts: Sequence[Mapping[str, Any]], names: Iterable[str] = ()) -> dict[str, float | None]:
    """Return the mean of each number over the parts that have it."""
    known = {name: [part[name] for part in parts if part.get(name) is not None] for name in names or parts[0]}
    return {name: statistics.fmean(values) if values else None for name, values in known.items()}
