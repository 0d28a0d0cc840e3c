"""Intervals, tests and verdicts for runs that share their test items and seeds: both are resampled."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from headwise.errors import SettingError, require_integer, require_range

MINIMUM_SEEDS = 5
RESAMPLES = 2000

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and test items, with its interval.

    Attributes:
        value: The mean.
        low: Lower end of the interval.
        high: Upper end of the interval.
        p: Two-sided p-value of the mean being zero.
        seeds: Number of independent runs S.
        items: Number of test items N.
        drawn: What differs between them, as in "seed".
    """

    value: float
    low: float
    high: float
    p: float
    seeds: int
    items: int
    drawn: str = "seed"

    @property
    def is_one_number(self) -> bool:
        """Whether there is one run with one item and so no interval."""
        return self.seeds == self.items == 1 and self.low == self.high


def score(values: NDArray, *, seed: int, resamples: int = RESAMPLES, least: float = 0.0) -> Estimate:
    """Return the score of an arm with its 95 % interval, within [least, 1]; see `estimate`.

    Args:
        values: [S, N], one row per seed, one column per test item.
        seed: Seed of the resampling.
        resamples: Number of resamples.
        least: The lowest possible score: 0, or -1 for a correlation.
    """
    found = estimate(values, seed=seed, resamples=resamples)
    return replace(found, low=max(found.low, least), high=min(found.high, 1.0))


def difference(
    arm: NDArray,
    control: NDArray,
    *,
    seed: int,
    resamples: int = RESAMPLES,
    least: float = 0.0,
    starts: Sequence[int] | None = None,
) -> Estimate:
    """Return the score of an arm minus its control's with its 95 % interval, within -+ (1 - least); see `estimate`.

    Args:
        arm: Values of the arm, [S, N], one row per seed, one column per test item.
        control: Values of the control under the same seeds on the same items, [S, N].
        seed: Seed of the resampling.
        resamples: Number of resamples.
        least: The lowest possible score, as in `score`.
        starts: Seed of the earlier run that each row started from; see `estimate_over_starts`.

    Raises:
        SettingError: The shapes differ.

    Example:
        >>> one, other = np.array([[1.0, 1.0], [0.0, 1.0]]), np.array([[0.0, 1.0], [0.0, 1.0]])
        >>> found = difference(one, other, seed=0, starts=(3, 3))
        >>> found.value, found.seeds, found.drawn
        (0.25, 1, 'pre-training')
    """
    if arm.shape != control.shape:
        raise SettingError(
            f"arm and control have shapes {arm.shape} and {control.shape}; expected the same seeds and items in both."
        )
    leads = arm.astype(np.float64) - control.astype(np.float64)
    found = estimate_over_starts(leads, starts, seed=seed, resamples=resamples)
    return replace(found, low=max(found.low, least - 1.0), high=min(found.high, 1.0 - least))


def estimate_over_starts(
    leads: Array, starts: Sequence[int] | None, *, seed: int, resamples: int = RESAMPLES
) -> Estimate:
    """Return the mean of rows, where rows that started from the same earlier run count as one.

    Fine-tunings of one pre-training do not show how much pre-training varies; a method that acts in pre-training is
    judged over pre-trainings. All starts have equal weight. The interval is the wider one of that over starts and
    that over rows, as with one start the former covers test items only.

    Args:
        leads: [S, N], one row per run.
        starts: Seed of the earlier run that each row started from; None if they started from scratch.
        seed: Seed of the resampling.
        resamples: Number of resamples.

    Example:
        >>> found = estimate_over_starts(np.array([[1.0], [3.0], [5.0]]), (0, 0, 1), seed=0)
        >>> found.value, found.seeds, found.drawn
        (3.5, 2, 'pre-training')
    """
    rows = estimate(leads, seed=seed, resamples=resamples)
    if starts is None:
        return rows
    places = np.asarray(starts)
    means = np.stack([leads[places == start].mean(axis=0) for start in dict.fromkeys(starts)])
    found = estimate(means, seed=seed, resamples=resamples)
    half = max(found.high - found.value, rows.high - rows.value)
    return Estimate(
        found.value,
        found.value - half,
        found.value + half,
        max(found.p, rows.p),
        found.seeds,
        found.items,
        drawn="pre-training",
    )


def estimate(
    scores: NDArray[np.integer | np.floating | np.bool_],
    *,
    seed: int,
    resamples: int = RESAMPLES,
    level: float = 0.95,
) -> Estimate:
    """Return the mean of `scores` with an interval from a hierarchical bootstrap, seeds x test items.

    Each resample draws S seeds and, because all seeds answer the same items, one set of N items for all of them
    (Owen 2007, "The pigeonhole bootstrap"). With s the standard error under both sources of variation, in the data and
    (*) in a resample, the interval is mean -+ c s, where c is the level's quantile of |mean* - mean| / s*, but no less
    than Student's t with S - 1 degrees of freedom; resamples without any spread do not count for c.
    p = (1 + #{|mean* - mean| / s* >= |mean| / s}) / (resamples + 1), but no less than t's.

    Percentiles of mean* would be simpler and wrong: five seeds of two equal arms differ in the same direction once
    in 16 times, and then no resample crosses zero.

    Args:
        scores: [S, N], one row per seed, one column per test item. If S = 1 the interval is over items only; for a
            single number it is empty, and p is 1.
        seed: Seed of the resampling.
        resamples: Number of resamples.
        level: Coverage of the interval, in (0, 1).

    Returns:
        Mean, interval and p-value.

    Raises:
        SettingError: `scores` are not a non-empty finite [S, N], or a setting is out of range.

    Example:
        >>> answers = np.array([[1, 1, 0, 1], [1, 0, 0, 1]])
        >>> estimate(answers, seed=0).value
        0.625
    """
    require_integer("resamples", resamples, low=1)
    require_range("level", level, low=0.0, high=1.0, low_open=True)
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 2 or values.size == 0 or not np.isfinite(values).all():
        raise SettingError(
            f"scores have shape {values.shape}; expected finite numbers, one row per seed, one column per item."
        )
    seeds, items = values.shape
    # most items have equal columns: draw how often each distinct column occurs
    columns, counts = np.unique(values, axis=1, return_counts=True)
    generator = np.random.default_rng(seed)
    drawn_items = generator.multinomial(items, counts / items, size=resamples) / items
    drawn_seeds = generator.multinomial(seeds, np.full(seeds, 1 / seeds), size=resamples) / seeds
    (mean,), (error,) = _mean_and_error(columns, (counts / items)[None], np.full((1, seeds), 1 / seeds), items)
    means, errors = _mean_and_error(columns, drawn_items, drawn_seeds, items)
    scaled = _ratio(np.abs(means - mean), errors)
    observed = _ratio(np.abs(mean), error)
    freedom = seeds - 1 if seeds > 1 else items - 1
    # a resample of a nearly constant column may have no spread, and so no information about the width
    spread = scaled[np.isfinite(scaled)]
    critical = np.quantile(spread, level, method="higher") if 2 * len(spread) > resamples else 0.0
    p = (1 + np.count_nonzero(scaled >= observed)) / (resamples + 1)
    if freedom > 0:
        critical = max(critical, stats.t.ppf((1 + level) / 2, freedom))
        p = max(p, 2 * stats.t.sf(observed, freedom))
    else:
        p = 1.0
    half = float(critical * error) if error > 0 else 0.0
    return Estimate(float(mean), float(mean - half), float(mean + half), float(p), seeds, items)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted so that the chance of any false finding among all of them stays bounded (Holm 1979).

    The k-th smallest of m is multiplied by m - k + 1; a larger p never gets a smaller adjusted one.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        require_range("p", p_values[index], low=0.0, high=1.0)
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def verdict(found: Estimate, adjusted: float, *, level: float = 0.05) -> str:
    """Return the verdict on a difference in words.

    Args:
        found: Arm minus control.
        adjusted: Its p-value after adjustment for all comparisons of the table.
        level: Largest adjusted p-value that counts as a finding.

    >>> verdict(Estimate(0.02, 0.01, 0.03, 0.001, seeds=3, items=500), 0.004)
    'no verdict (3 seeds)'
    >>> verdict(Estimate(0.02, 0.01, 0.03, 0.001, seeds=5, items=500), 0.004)
    'better (p = 0.004)'
    """
    if found.seeds < MINIMUM_SEEDS:
        return describe_undecided(found.seeds, found.drawn)
    words = "no difference shown"
    if adjusted <= level:
        words = "better" if found.value > 0 else "worse"
    if adjusted < 0.001:
        return f"{words} (p < 0.001)"
    return f"{words} (p = {adjusted:.{3 if adjusted < 0.1 else 2}f})"


def describe_undecided(runs: int, drawn: str) -> str:
    """Return the verdict if there are too few independent runs.

    >>> describe_undecided(1, "pre-training")
    'no verdict (1 pre-training)'
    """
    return f"no verdict ({runs} {drawn}{'s' * (runs != 1)})"


def _mean_and_error(columns: Array, item_shares: Array, seed_shares: Array, items: int) -> tuple[Array, Array]:
    """Return mean and standard error [R] of columns [S, P] under shares of items [R, P] and of seeds [R, S].

    Crossed random effects: A and B are the variances of the mean estimated from seed means and from item means; both
    contain the residual C, so s^2 = A + B - C, but no less than A or B.
    """
    seeds = len(columns)
    seed_means = item_shares @ columns.T
    item_means = seed_shares @ columns
    mean = np.einsum("rs,rs->r", seed_shares, seed_means)
    square = mean * mean
    between_seeds = np.clip(np.einsum("rs,rs->r", seed_shares, seed_means**2) - square, 0, None)
    between_items = np.clip(np.einsum("rp,rp->r", item_shares, item_means**2) - square, 0, None)
    total = np.einsum("rs,sr->r", seed_shares, columns**2 @ item_shares.T) - square
    rest = np.clip(total - between_seeds - between_items, 0, None)
    # one seed, or one item, has no spread
    a = between_seeds / (seeds - 1) if seeds > 1 else np.zeros_like(mean)
    b = between_items / (items - 1) if items > 1 else np.zeros_like(mean)
    c = rest / ((seeds - 1) * (items - 1)) if seeds > 1 and items > 1 else np.zeros_like(mean)
    return mean, np.sqrt(np.maximum(np.maximum(a, b), a + b - c))


def _ratio(distance: Array, error: Array) -> Array:
    # rounding may leave about 1e-17 of a zero distance
    distance = np.where(distance < 1e-12, 0.0, distance)
    return np.divide(distance, error, out=np.where(distance > 0, np.inf, 0.0), where=error > 0)
