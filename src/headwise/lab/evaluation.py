"""What is asked of a model after training: its answers on a split, and how alike its heads are.

Owns the loops over a split without gradients; callers put the model into evaluation mode. The measures are the
library's `metrics`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from headwise import metrics
from headwise.heads import Heads
from headwise.lab.batches import length_sorted
from headwise.lab.tasks.logic import LogicSplit, collate
from headwise.taps import Capture, Taps

__all__ = ["accuracies", "diversity", "predict"]

BATCH = 256
PAIRWISE = ("distance", "output_cosine", "output_cka", "position_js", "parameter_cosine")


def predict(model: nn.Module, split: LogicSplit) -> NDArray[np.int64]:
    """Return the predicted label of each example of a split, [N], in the split's order."""
    device = next(model.parameters()).device
    predicted = np.zeros(len(split), dtype=np.int64)
    for batch in length_sorted(split.lengths, BATCH):
        sides = collate([split[index] for index in batch])
        logits = model(sides["premise"].to(device), sides["hypothesis"].to(device))["logits"]
        predicted[batch] = logits.argmax(dim=-1).cpu().numpy()
    return predicted


def accuracies(correct: NDArray[np.bool_], bins: NDArray[np.integer]) -> dict[str, Any]:
    """Return {"pooled": accuracy, "bins": {bin: accuracy}} of answers [N] in bins [N].

    >>> accuracies(np.array([True, False, True]), np.array([1, 1, 2]))
    {'pooled': 0.6666666666666666, 'bins': {'1': 0.5, '2': 1.0}}
    """
    per_bin = {str(number): float(correct[bins == number].mean()) for number in np.unique(bins).tolist()}
    return {"pooled": float(correct.mean()), "bins": per_bin}


def diversity(model: nn.Module, heads: Heads, split: LogicSplit, *, examples: int = 512) -> dict[str, float | None]:
    """Return how alike the heads are: means over sites, on examples spread evenly over a split.

    Args:
        model: The model.
        heads: Its heads.
        split: Where the examples come from.
        examples: How many are used at most.

    Returns:
        "distance" (Dist of An et al. 2020, per token), "output_cosine", "output_cka", "position_js" (Jensen-Shannon
        of attention rows), "parameter_cosine" (mean absolute), "particle_norm"; None for all but the last with one
        head a site, where there are no pairs.
    """
    parameters = [slab.view(slab.parameter).flatten(1) for slab in heads.slabs()]
    norms = torch.cat([metrics.particle_norms(particles) for particles in parameters])
    measured: dict[str, float | None] = {"particle_norm": float(norms.mean())}
    if min(site.num_heads for site in heads) < 2:
        return dict.fromkeys(PAIRWISE) | measured
    measured["parameter_cosine"] = _mean(
        [float(metrics.parameter_cosine(particles).mean_absolute) for particles in parameters]
    )
    sites: dict[str, _Site] = {site.name: _Site() for site in heads}
    device = next(model.parameters()).device
    chosen = np.unique(np.linspace(0, len(split) - 1, min(examples, len(split))).astype(int))
    with Taps(heads, outputs=True, weights=True) as taps:
        for batch in length_sorted(split.lengths[chosen], BATCH):
            sides = collate([split[int(chosen[index])] for index in batch])
            model(sides["premise"].to(device), sides["hypothesis"].to(device))
            for capture in taps.read():
                sites[capture.site.name].add(capture)
    for name in PAIRWISE[:-1]:
        measured[name] = _mean([site.mean(name) for site in sites.values()])
    return measured


class _Site:
    """Sums over batches of what was measured at one site."""

    def __init__(self) -> None:
        self.tokens = 0
        self.sums: dict[str, float] = dict.fromkeys(("distance", "output_cosine", "position_js"), 0.0)
        self.moments: metrics.OutputMoments | None = None

    def add(self, capture: Capture) -> None:
        outputs, weights, keep = capture.outputs, capture.weights, capture.query_keep
        assert outputs is not None
        assert weights is not None
        count = outputs.shape[0] * outputs.shape[1] if keep is None else int(keep.sum())
        self.tokens += count
        self.sums["distance"] += count * float(metrics.head_distance(outputs, keep))
        self.sums["output_cosine"] += count * float(metrics.output_cosine(outputs, keep))
        self.sums["position_js"] += count * float(metrics.attention_jensen_shannon(weights, keep))
        moments = metrics.output_moments(outputs, keep)
        self.moments = moments if self.moments is None else self.moments + moments

    def mean(self, name: str) -> float:
        if name == "output_cka":
            assert self.moments is not None
            return float(self.moments.linear_cka())
        return self.sums[name] / self.tokens


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
