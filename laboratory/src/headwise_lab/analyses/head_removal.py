"""The cost of removing each head of a trained model on the test set (An et al. 2020, Figure 2; Michel et al. 2019)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headwise.errors import DataError
from headwise.heads.ablation import ablate
from headwise.heads.heads import Site
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.evaluation import METRICS, Loss
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.results.runs import LOSS, Drop, HeadDrops, parse_head_drops, summarize_run
from headwise_lab.results.statistics import estimate
from headwise_lab.training.trained import Trained, load_trained

# Intermediate results; removed at the end.
UNFINISHED = "unfinished-redundancy.json"
# Scores of one model on one machine differ by rounding only.
SAME = 1e-6

Values = dict[str, NDArray[np.float64]]


def measure_redundancy(settings: RunSettings, folder: Path) -> dict[str, Any]:
    """Return the cost of removing each head on the test set, in the task's metric (decoded greedily) and in loss.

    With v the values of the test items under the whole model and v_h those without head h, whose means are the score,
    the cost is mean(v - v_h), for a loss mean(v_h - v), with an interval over items, paired.
    """
    trained = load_trained(settings, folder)
    every = [(site, head) for site in trained.heads for head in range(site.num_heads)]
    with torch.no_grad():
        whole = _compute_values(trained)
        record = _read_unfinished(folder / UNFINISHED, whole)
        for site, head in every[len(record["heads"]) :]:
            one = replace(trained.heads, sites=(site,))
            with ablate(one, head):
                without = _compute_values(trained)
            record["heads"].append(_record_head(site, head, whole, without))
            run_folder.write_json(folder / UNFINISHED, record)
            progress = {"step": len(record["heads"]), "steps": len(every), "note": f"{len(record['heads'])} heads"}
            run_folder.write_json(folder / run_folder.PROGRESS, progress)
    numbers = summarize_run([_read_drops(record, score) for score in record["scores"]])
    (folder / UNFINISHED).unlink(missing_ok=True)
    return {"numbers": numbers, **record}


def _compute_values(trained: Trained) -> Values:
    """Return the values of the test items on each score, [N]; their mean is the score."""
    task, model, data = trained.task, trained.model, trained.data
    return {
        task.metric: METRICS[task.metric].values(task.greedy(model, data)),
        LOSS: Loss().values(task.losses(model, data)),
    }


def _read_unfinished(path: Path, whole: Values) -> dict[str, Any]:
    scores = {score: float(values.mean()) for score, values in whole.items()}
    if not path.exists():
        return {"scores": scores, "items": len(next(iter(whole.values()))), "heads": []}
    record = run_folder.read_json(path)
    known = {drops.score: drops.whole for drops in parse_head_drops(path, record)}
    for score, found in scores.items():
        kept = known.get(score)
        if kept is None or abs(kept - found) > SAME * max(1.0, abs(found)):
            raise DataError(f"{path} was measured at {score} {kept}, this model has {found}; delete it and run again.")
    return record


def _record_head(site: Site, head: int, whole: Values, without: Values) -> dict[str, Any]:
    drops = {}
    for score, values in whole.items():
        cost = without[score] - values if score == LOSS else values - without[score]
        found = estimate(cost[None])
        drops[score] = {"value": found.value, "low": found.low, "high": found.high}
    return {"site": site.name, "kind": site.kind, "layer": site.layer, "head": head, "drops": drops}


def _read_drops(record: dict[str, Any], score: str) -> HeadDrops:
    drops = [
        Drop(head["site"], head["kind"], head["layer"], head["head"], **head["drops"][score])
        for head in record["heads"]
    ]
    return HeadDrops(score, record["scores"][score], record["items"], tuple(drops))
