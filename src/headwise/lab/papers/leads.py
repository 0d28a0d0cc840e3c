"""What a contrast of a claim is in our runs: its leads by seed, over test items or in a number of each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headwise.lab.papers.claims import Contrast
from headwise.lab.results.evidence import Evidence, index_by_seed, match_seeds
from headwise.lab.results.runs import Run, read_starts

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Leads:
    """Values whose plain mean is a contrast, [S, N], one row a seed.

    Attributes:
        values: The values.
        starts: Which earlier run each row began with; None where they began with nothing.
        sets: Which fixed set each item is of, a part or a range of bins; None where all are of one.
    """

    values: Array
    starts: tuple[int, ...] | None
    sets: tuple[int, ...] | None = None


@dataclass(frozen=True)
class _Term:
    """One mean of a contrast, with its sign."""

    sign: float
    part: str
    arm: str
    bins: tuple[int, int] | None


def read_leads(contrast: Contrast, parts: Mapping[str, Evidence]) -> Leads | str:
    """Return the leads of a contrast, or why there are none."""
    if contrast.is_empty:
        return "is one arm at this scale"
    if contrast.over:
        return _average_leads(contrast, parts)
    terms = _list_terms(contrast)
    if any(term.part not in parts for term in terms):
        return "was not run"
    if contrast.measure is not None:
        return _read_number_leads(terms, contrast.measure, parts)
    if any(parts[term.part].results.metric.own_test for term in terms):
        return "is of models with tests of their own"
    if not _share_items(terms, parts):
        return "is on different test sets"
    return _read_item_leads(terms, parts)


def _list_terms(contrast: Contrast, sign: float = 1.0) -> list[_Term]:
    one, other = contrast.parts[:2]
    if contrast.doses:
        steps = np.arange(len(contrast.doses)) - (len(contrast.doses) - 1) / 2
        weights = sign * steps / (steps**2).sum()
        return [_Term(float(w), one, arm, contrast.bins) for w, arm in zip(weights, contrast.doses, strict=True)]
    ranges = [(sign, contrast.bins)] + ([] if contrast.beyond is None else [(-sign, contrast.beyond)])
    terms = []
    for weight, bins in ranges:
        terms += [_Term(weight, one, contrast.arm, bins), _Term(-weight, other, contrast.against, bins)]
    return terms + ([] if contrast.less is None else _list_terms(contrast.less, -sign))


def _share_items(terms: Sequence[_Term], parts: Mapping[str, Evidence]) -> bool:
    first, *rest = (parts[term.part].results for term in terms)
    return all(
        other.data == first.data and other.metric == first.metric and np.array_equal(other.bins, first.bins)
        for other in rest
    )


def _average_leads(contrast: Contrast, parts: Mapping[str, Evidence]) -> Leads | str:
    """Return the leads of a mean over parts, or why there are none."""
    means = [(1.0, contrast)] + ([] if contrast.less is None else [(-1.0, contrast.less)])
    if any(part not in parts for part in contrast.parts):
        return "was not run"
    runs = [
        index_by_seed(parts[part].results.runs, arm)
        for _, mean in means
        for part in mean.over
        for arm in (mean.arm, mean.against)
    ]
    seeds = set.intersection(*(set(found) for found in runs))
    if not seeds:
        return "was not run"
    leads: list[tuple[float, Leads]] = []
    for sign, mean in means:
        for part in mean.over:
            kept = tuple(run for run in parts[part].results.runs if run.seed in seeds)
            own = {part: replace(parts[part], results=replace(parts[part].results, runs=kept))}
            found = _read_item_leads(_list_terms(replace(mean, part=part, over=(), less=None)), own)
            if isinstance(found, str):
                return found
            leads.append((sign / len(mean.over), found))
    items = sum(found.values.shape[1] for _, found in leads)
    weighed = [found.values * (weight * items / found.values.shape[1]) for weight, found in leads]
    sets = np.repeat(np.arange(len(leads)), [found.values.shape[1] for _, found in leads])
    return Leads(np.concatenate(weighed, axis=1), leads[0][1].starts, tuple(sets.tolist()))


def _read_item_leads(terms: Sequence[_Term], parts: Mapping[str, Evidence]) -> Leads | str:
    """Return the leads over the items used, or why there are none."""
    bins = parts[terms[0].part].results.bins
    inside = [_select_bins(bins, term.bins) for term in terms]
    if not all(mask.any() for mask in inside):
        return "has no test items"
    runs = match_seeds([(parts[term.part], term.arm) for term in terms])
    seeds = sorted(set.intersection(*(set(found) for found in runs)))
    if not seeds:
        return "was not run"
    used = np.any(inside, axis=0)
    leads = np.zeros((len(seeds), len(bins)))
    for term, mask, found in zip(terms, inside, runs, strict=True):
        metric = parts[term.part].results.metric
        weight = term.sign * np.count_nonzero(used) / np.count_nonzero(mask)
        for row, seed in enumerate(seeds):
            leads[row, mask] += weight * metric.values(found[seed].statistics[mask])
    _, sets = np.unique(np.stack(inside)[:, used], axis=1, return_inverse=True)
    return Leads(leads[:, used], _find_starts(runs, seeds), tuple(np.ravel(sets).tolist()))


def _read_number_leads(terms: Sequence[_Term], measure: str, parts: Mapping[str, Evidence]) -> Leads | str:
    """Return the leads in a number of each run, one a seed, or why there are none."""
    found = [parts[term.part].of(term.arm, measure) for term in terms]
    seeds = sorted(set.intersection(*(set(values) for values in found)))
    if not seeds:
        ran = [index_by_seed(parts[term.part].results.runs, term.arm) for term in terms]
        # what heads are worth is not measured where the score is zero with all of them
        return "was not measured" if set.intersection(*map(set, ran)) else "was not run"
    leads = [sum(term.sign * values[seed] for term, values in zip(terms, found, strict=True)) for seed in seeds]
    runs = [index_by_seed(parts[term.part].results.runs, term.arm) for term in terms]
    return Leads(np.array(leads)[:, None], _find_starts(runs, seeds))


def _find_starts(runs: Sequence[Mapping[int, Run]], seeds: Sequence[int]) -> tuple[int, ...] | None:
    """Return the starts of runs that are compared; a baseline among them has none."""
    known = (read_starts(found[seed] for seed in seeds) for found in runs)
    return next((starts for starts in known if starts is not None), None)


def _select_bins(bins: NDArray[np.int64], ends: tuple[int, int] | None) -> NDArray[np.bool_]:
    if ends is None:
        return np.ones(len(bins), dtype=bool)
    return (bins >= ends[0]) & (bins <= ends[1])
