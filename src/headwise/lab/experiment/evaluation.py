"""The scores of a trained model per bin, and how similar its heads are."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from headwise import metrics
from headwise.heads.capture import Capture
from headwise.heads.heads import Heads, Site
from headwise.heads.taps import Taps
from headwise.lab.data.batching import batch_by_length
from headwise.lab.experiment.metrics import Metric
from headwise.report.measure import group_readable

PAIRWISE = (
    "effective_heads",
    "effective_heads_weighted",
    "debiased_cka",
    "distance",
    "output_cosine",
    "output_cka",
    "position_js",
)


def scores_by_bin(metric: Metric, statistics: NDArray, bins: NDArray[np.integer]) -> dict[str, Any]:
    """Return {"pooled": score, "bins": {bin: score}} of items with statistics [N] or [N, K] in bins [N].

    >>> from headwise.lab.experiment.metrics import Accuracy
    >>> scores_by_bin(Accuracy(), np.array([True, False, True]), np.array([1, 1, 2]))
    {'pooled': 0.6666666666666666, 'bins': {'1': 0.5, '2': 1.0}}
    """
    per_bin = {str(b): float(metric.values(statistics[bins == b]).mean()) for b in np.unique(bins).tolist()}
    return {"pooled": float(metric.values(statistics).mean()), "bins": per_bin}


def spread_evenly(items: int, most: int) -> NDArray[np.int64]:
    """Return at most `most` places spread evenly over `items`.

    >>> spread_evenly(9, 3).tolist()
    [0, 4, 8]
    """
    return np.unique(np.linspace(0, items - 1, min(most, items)).astype(np.int64))


def spread_batches(lengths: NDArray[np.int64], most: int, size: int) -> Iterator[NDArray[np.int64]]:
    """Yield at most `most` places spread evenly over items of these lengths, in batches of similar length.

    >>> [batch.tolist() for batch in spread_batches(np.array([5, 9, 4, 2, 3]), 3, 2)]
    [[4, 2], [0]]
    """
    chosen = spread_evenly(len(lengths), most)
    for batch in batch_by_length(lengths[chosen], size):
        yield chosen[batch]


def round_to_bins(values: ArrayLike, ends: Sequence[int]) -> NDArray[np.int64]:
    """Return each value rounded up to the end of its bin; the last bin has all larger values.

    >>> round_to_bins([3, 5, 6, 99], (5, 10)).tolist()
    [5, 5, 10, 10]
    """
    return np.array(ends)[np.minimum(np.searchsorted(ends, values), len(ends) - 1)]


def select_with_weights(heads: Heads, forward: Callable[[], object]) -> Heads:
    """Return the attentions whose weights a forward pass shows, perhaps none."""
    groups = group_readable(heads, forward)[0]
    found = [site.name for read, sites in groups.items() if "weights" in read for site in sites]
    return replace(heads, sites=tuple(site for site in heads if site.name in found))


@dataclass(frozen=True)
class Diversity:
    """How alike heads are.

    Attributes:
        means: Means over sites, by measure.
        sites: The measures of each site, by name.
    """

    means: dict[str, float | None]
    sites: dict[str, dict[str, float]]


def diversity(heads: Heads | None, probe: Callable[[], Iterable[None]]) -> Diversity:
    """Return how alike the heads are, at each site and on average.

    Args:
        heads: The heads; None for a model without attention.
        probe: Returns what runs the model on one batch per item, anew each time; see `Task.probe`.

    Returns:
        "effective_heads", "effective_heads_weighted" (by variance) and "debiased_cka" of the contributions of heads,
        or of their outputs where no linear output projection follows; "distance" (Dist of An et al. 2020, per token),
        "output_cosine", "output_cka", "position_js" (Jensen-Shannon of attention rows), "parameter_cosine" (mean
        absolute), "particle_norm"; None for all but the last if sites have one head, and for all without heads. Where
        weights cannot be read, a site has no "position_js"; the mean is over the others, and None if there are none.
    """
    pairwise = (*PAIRWISE, "parameter_cosine")
    if heads is None:
        return Diversity(dict.fromkeys((*pairwise, "particle_norm")), {})
    parameters = [head_slice.read().flatten(1) for head_slice in heads.slices()]
    norms = torch.cat([metrics.particle_norms(particles) for particles in parameters])
    measured: dict[str, float | None] = {"particle_norm": float(norms.mean())}
    if min(site.num_heads for site in heads) < 2:
        return Diversity(dict.fromkeys(pairwise) | measured, {})
    measured["parameter_cosine"] = _mean(
        # a key/value head that all query heads share has nothing to be compared with
        [float(metrics.parameter_cosine(particles).mean_absolute) for particles in parameters if len(particles) > 1]
    )
    sites: dict[str, _Site] = {site.name: _Site(site) for site in heads}
    with ExitStack() as attached:
        taps = [
            attached.enter_context(Taps(group, outputs=True, weights="weights" in read))
            for read, group in group_readable(heads, lambda: next(iter(probe()), None))[0].items()
        ]
        for _ in probe():
            for capture in (capture for tap in taps for capture in tap.read()):
                sites[capture.site.name].add(capture)
    found = {name: site.means() for name, site in sites.items()}
    for measure in PAIRWISE:
        known = [site[measure] for site in found.values() if measure in site]
        measured[measure] = _mean(known) if known else None
    return Diversity(measured, found)


class _Site:
    """Sums over batches of the measures of one site."""

    def __init__(self, site: Site) -> None:
        self.tokens = 0
        self.output_weights = site.find_output_weights()
        self.sums: dict[str, float] = dict.fromkeys(("distance", "output_cosine"), 0.0)
        self.moments: metrics.OutputMoments | None = None
        self.contributions: metrics.OutputMoments | None = None

    def add(self, capture: Capture) -> None:
        outputs, weights, keep = capture.outputs, capture.weights, capture.query_keep
        assert outputs is not None
        count = capture.queries
        self.tokens += count
        self.sums["distance"] += count * float(metrics.head_distance(outputs, keep))
        self.sums["output_cosine"] += count * float(metrics.output_cosine(outputs, keep))
        if weights is not None:
            own = count * float(metrics.attention_jensen_shannon(weights, keep))
            self.sums["position_js"] = self.sums.get("position_js", 0.0) + own
        moments = metrics.output_moments(outputs, keep)
        self.moments = moments if self.moments is None else self.moments + moments
        if self.output_weights is not None:
            moments = metrics.output_moments(outputs, keep, output_weights=self.output_weights)
            self.contributions = moments if self.contributions is None else self.contributions + moments

    def means(self) -> dict[str, float]:
        """Return each of `PAIRWISE` that was read."""
        assert self.moments is not None
        contributions = self.moments if self.contributions is None else self.contributions
        number, weighted, _ = contributions.effective_heads()
        return {
            "effective_heads": number,
            "effective_heads_weighted": weighted,
            "debiased_cka": float(contributions.debiased_cka()),
            "output_cka": float(self.moments.linear_cka()),
            **{name: total / self.tokens for name, total in self.sums.items()},
        }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
