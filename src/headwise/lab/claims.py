"""What a paper claims of a comparison, and whether the runs bear it out.

Owns the form of a claim (contrasts between arms on ranges of bins) and its verdict. Which claims a paper makes is in
`tables`; the arithmetic is `statistics`'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.lab.protocol import key
from headwise.lab.results import Results, Run
from headwise.lab.statistics import MINIMUM_SEEDS, Estimate, estimate, holm

__all__ = ["Claim", "Contrast", "Found", "Judged", "judge"]

# A claim is settled at this adjusted p-value.
LEVEL = 0.05


@dataclass(frozen=True)
class Contrast:
    """The score of one arm minus another's on a range of bins, expected to be above zero.

    Attributes:
        arm: Name of the arm that should be ahead.
        against: Name of the arm that should be behind.
        bins: First and last bin; None for all items.
        beyond: First and last bin of a range whose difference is taken off: the contrast then says that the lead is
            larger on `bins` than there. None for a plain difference.
        of: What the bins count, as in "operators".
    """

    arm: str
    against: str
    bins: tuple[int, int] | None = None
    beyond: tuple[int, int] | None = None
    of: str = "operators"

    def __str__(self) -> str:
        if self.bins is None:
            return f"{self.arm} over {self.against}"
        lead = f"{self.arm} over {self.against} on {self.bins[0]} to {self.bins[1]} {self.of}"
        return lead if self.beyond is None else f"{lead}, less its lead on {self.beyond[0]} to {self.beyond[1]}"


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, in our words, that holds when each of its contrasts is above zero.

    Attributes:
        statement: What the paper says.
        contrasts: What it means for the arms.
    """

    statement: str
    contrasts: tuple[Contrast, ...]


@dataclass(frozen=True)
class Found:
    """A contrast as measured; None where one of its arms has not run."""

    contrast: Contrast
    estimate: Estimate | None
    adjusted: float | None


@dataclass(frozen=True)
class Judged:
    """A claim with what was found and the verdict in words."""

    claim: Claim
    found: tuple[Found, ...]
    verdict: str


def judge(claims: Sequence[Claim], results: Results) -> tuple[Judged, ...]:
    """Return the verdict on each claim.

    Each contrast is the mean over shared seeds and test items, with the hierarchical bootstrap of
    `statistics.estimate`; Holm's adjustment covers all contrasts of all claims. A claim is "borne out" when every
    contrast is above zero at adjusted p <= 0.05, "contradicted" when one is below zero so, else "not shown"; with
    fewer than five seeds there is no verdict.

    Args:
        claims: The claims of one table or figure.
        results: The comparison.
    """
    measured = [[_measure(contrast, results) for contrast in claim.contrasts] for claim in claims]
    known = [found for row in measured for found in row if found is not None]
    adjusted = iter(holm([found.p for found in known]))
    judged = []
    for claim, row in zip(claims, measured, strict=True):
        found = tuple(
            Found(contrast, value, None if value is None else next(adjusted))
            for contrast, value in zip(claim.contrasts, row, strict=True)
        )
        judged.append(Judged(claim, found, _verdict(found)))
    return tuple(judged)


def _measure(contrast: Contrast, results: Results) -> Estimate | None:
    arm, against = (_by_seed(results.runs, name) for name in (contrast.arm, contrast.against))
    seeds = sorted(arm.keys() & against.keys())
    if not seeds:
        return None
    ranges = [(1.0, _inside(results.bins, contrast.bins))]
    if contrast.beyond is not None:
        ranges.append((-1.0, _inside(results.bins, contrast.beyond)))
    ranges = [(sign, inside) for sign, inside in ranges if inside.any()]
    if not ranges:
        return None
    used = sum(np.count_nonzero(inside) for _, inside in ranges)

    def values(run: Run, sign: float, inside: NDArray[np.bool_]) -> NDArray[np.float64]:
        # values whose plain mean over all items used is the difference between the two means
        return sign * used / np.count_nonzero(inside) * results.metric.values(run.statistics[inside])

    leads = [[values(arm[s], *part) - values(against[s], *part) for part in ranges] for s in seeds]
    return estimate(np.stack([np.concatenate(lead) for lead in leads]), seed=key("claim", str(contrast)))


def _inside(bins: NDArray[np.int64], ends: tuple[int, int] | None) -> NDArray[np.bool_]:
    if ends is None:
        return np.ones(len(bins), dtype=bool)
    return (bins >= ends[0]) & (bins <= ends[1])


def _by_seed(runs: Sequence[Run], arm: str) -> dict[int, Run]:
    return {run.seed: run for run in runs if run.arm == arm}


def _verdict(found: Sequence[Found]) -> str:
    absent = [str(one.contrast) for one in found if one.estimate is None]
    if absent:
        return f"no verdict ({absent[0]} was not run)"
    seeds = min(one.estimate.seeds for one in found if one.estimate is not None)
    if seeds < MINIMUM_SEEDS:
        return f"no verdict ({seeds} seed{'s' * (seeds != 1)})"
    settled = [
        one.estimate.value > 0
        for one in found
        if one.estimate is not None and one.adjusted is not None and one.adjusted <= LEVEL
    ]
    if not all(settled):
        return "contradicted"
    return "borne out" if len(settled) == len(found) else "not shown"
