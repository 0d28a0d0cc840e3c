"""The cost of removing each head of a trained model on the test set (An et al. 2020, Figure 2; Michel et al. 2019)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headwise.errors import DataError
from headwise.heads.ablation import ablate
from headwise.heads.heads import Site
from headwise.lab.experiment import run_folder
from headwise.lab.experiment.metrics import METRICS, Loss
from headwise.lab.experiment.seeding import derive_key
from headwise.lab.experiment.settings import RunSettings
from headwise.lab.results.head_drops import LOSS, Drop, HeadDrops, summarize_run
from headwise.lab.results.statistics import estimate
from headwise.lab.training.trained import Trained, load_trained

# What is done so far; gone once the analysis is kept.
UNFINISHED = "unfinished-redundancy.json"
RESAMPLES = 500
# Scores of one model on one machine differ by rounding alone.
SAME = 1e-6

Values = dict[str, NDArray[np.float64]]


def measure_redundancy(settings: RunSettings, folder: Path) -> dict[str, Any]:
    """Return what the removal of each head costs on the test set: of the task's metric, decoded greedily, and of loss.

    With v the values of the test items under the whole model and v_h those without head h, whose means are the score,
    the cost is mean(v - v_h), for a loss mean(v_h - v), with an interval over items, paired. Nothing is chosen by it.

    Args:
        settings: What the run was made from.
        folder: Its folder. What was measured is kept there head by head, so that a stopped analysis goes on.

    Raises:
        DataError: The run's weights cannot be read, or what was kept is of other weights.
    """
    trained = load_trained(settings, folder)
    every = [(site, head) for site in trained.heads for head in range(site.num_heads)]
    with torch.no_grad():
        whole = _values(trained)
        record = _begin(folder / UNFINISHED, whole)
        for site, head in every[len(record["heads"]) :]:
            one = replace(trained.heads, sites=(site,))
            with ablate(one, head):
                without = _values(trained)
            record["heads"].append(_head(site, head, whole, without))
            run_folder.write_json(folder / UNFINISHED, record)
            progress = {"step": len(record["heads"]), "steps": len(every), "note": f"{len(record['heads'])} heads"}
            run_folder.write_json(folder / run_folder.PROGRESS, progress)
    numbers = summarize_run([_drops(record, score) for score in record["scores"]])
    (folder / UNFINISHED).unlink(missing_ok=True)
    return {"numbers": numbers, **record}


def _values(trained: Trained) -> Values:
    """Return the values of the test items on each score, [N]; their mean is the score."""
    task, model, data = trained.task, trained.model, trained.data
    return {
        task.metric: METRICS[task.metric].values(task.greedy(model, data)),
        LOSS: Loss().values(task.losses(model, data)),
    }


def _begin(path: Path, whole: Values) -> dict[str, Any]:
    scores = {score: float(values.mean()) for score, values in whole.items()}
    if not path.exists():
        return {"scores": scores, "items": len(next(iter(whole.values()))), "heads": []}
    record = run_folder.read_json(path)
    for score, found in scores.items():
        kept = record["scores"].get(score)
        if kept is None or abs(kept - found) > SAME * max(1.0, abs(found)):
            raise DataError(f"{path} was measured at {score} {kept}, this model has {found}; delete it and go on.")
    return record


def _head(site: Site, head: int, whole: Values, without: Values) -> dict[str, Any]:
    drops = {}
    for score, values in whole.items():
        cost = without[score] - values if score == LOSS else values - without[score]
        found = estimate(cost[None], seed=derive_key("redundancy", score, site.name, head), resamples=RESAMPLES)
        drops[score] = {"value": found.value, "low": found.low, "high": found.high}
    return {"site": site.name, "kind": site.kind, "layer": site.layer, "head": head, "drops": drops}


def _drops(record: dict[str, Any], score: str) -> HeadDrops:
    drops = [
        Drop(head["site"], head["kind"], head["layer"], head["head"], **head["drops"][score])
        for head in record["heads"]
    ]
    return HeadDrops(score, record["scores"][score], record["items"], tuple(drops))
