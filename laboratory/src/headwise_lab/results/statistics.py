"""Means over seeds and test items with their intervals and tests; docs/statistics.md has the method and its checks.

The verdict on a difference: its adjusted p-value, the detectable effect, and the published effect. For translations,
sacreBLEU's paired tests of each run of an arm against its control's run with the same seed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from headwise.errors import DataError, SettingError, require_range
from headwise.input_files import read_numbered_lines
from headwise_lab.data.arrays import digest
from headwise_lab.experiment.run_folder import read_json, write_json

LEVEL = 0.95
POWER = 0.80
# Means that differ by a smaller share of the largest differ by rounding alone.
ROUNDING = 1e-12
# In standard deviations of a normal distribution: 1.4826 MAD is one of them.
APART = 5 * 1.4826
# Up to this number of seeds every choice of signs is tried, beyond it so many random ones.
ALL_SIGNS, RANDOM_SIGNS = 12, 9_999

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and test items, whose interval is the wider one of two.

    With D the mean of d[s, n] over S seeds and N items, D[s] and D[n] the means of its rows and columns, and

        MSs = N sum_s (D[s] - D)^2 / (S - 1)            MSn = S sum_n (D[n] - D)^2 / (N - 1)
        MSe = (sum d^2 - S N D^2 - (S - 1) MSs - (N - 1) MSn) / ((S - 1) (N - 1))            X = max(0, MSn - MSe)

    the two standard errors, with their degrees of freedom, are

        se1^2 = MSs / (S N)          df1 = S - 1                            Student's t over the means of seeds
        se2^2 = (MSs + X) / (S N)    df2 = (MSs + X)^2 / (MSs^2/(S-1) + MSn^2/(N-1) + MSe^2/((S-1)(N-1)))

    the second of crossed random effects (Satterthwaite 1946), df2 at least S - 1, and left out where X = 0. An interval
    is D -+ max_i t(df_i) se_i, a p-value the larger one of the two. A single seed has an interval over items.

    Where the items are of several fixed sets, as those of several tasks are, MSn and MSe are taken around the means of
    each set, and N - 1 becomes N less the number of sets.

    Attributes:
        by_seed: D[s], the mean of each seed over items.
        items: Number of test items N; 1 where items are not at issue.
        between_items: MSn; 0 for one item.
        rest: MSe; 0 for one item or one seed.
        least: The lowest possible value: printed intervals end there.
        most: The highest possible value.
        drawn: What differs between the rows, as in "seed".
        independent: Number of rows that are independent, where not all are.
        sets: Number of fixed sets that the items are of.
    """

    by_seed: tuple[float, ...]
    items: int = 1
    between_items: float = field(default=0.0, repr=False)
    rest: float = field(default=0.0, repr=False)
    least: float = -math.inf
    most: float = math.inf
    drawn: str = "seed"
    independent: int | None = None
    sets: int = field(default=1, repr=False)

    @property
    def value(self) -> float:
        """The mean."""
        return math.fsum(self.by_seed) / len(self.by_seed)

    @property
    def seeds(self) -> int:
        """Number of independent runs."""
        return len(self.by_seed) if self.independent is None else self.independent

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval, no lower than the lowest possible value."""
        return max(self.interval()[0], min(self.least, self.value))

    @property
    def high(self) -> float:
        """Upper end, no higher than the highest possible value."""
        return min(self.interval()[1], max(self.most, self.value))

    @cached_property
    def p(self) -> float:
        """Two-sided p-value of the mean being zero; 1 if nothing differs between seeds or items."""
        if self.value == 0.0 or self.has_equal_seeds:
            return 1.0
        return min(1.0, max((2 * _exceed(abs(self.value), *one) for one in self.standard_errors), default=1.0))

    @property
    def is_one_number(self) -> bool:
        """Whether there is one run with one item and so no interval."""
        return len(self.by_seed) == self.items == 1

    @cached_property
    def has_equal_seeds(self) -> bool:
        """Whether several seeds have the same mean, so that nothing tells how much seeds differ."""
        return len(self.by_seed) > 1 and np.ptp(self.by_seed) <= ROUNDING * max(map(abs, self.by_seed))

    @cached_property
    def standard_errors(self) -> tuple[tuple[float, float], ...]:
        """The standard errors with their degrees of freedom; empty for one number."""
        seeds, items = len(self.by_seed), self.items
        if seeds == 1:
            return ((math.sqrt(self.between_items / items), items - self.sets),) if items > self.sets else ()
        between_seeds = 0.0 if self.has_equal_seeds else items * float(np.var(self.by_seed, ddof=1))
        over_seeds = math.sqrt(between_seeds / (seeds * items)), seeds - 1
        excess = max(0.0, self.between_items - self.rest)
        if excess == 0.0:
            return (over_seeds,)
        total = between_seeds + excess
        freedom = total**2 / (
            between_seeds**2 / (seeds - 1)
            + self.between_items**2 / (items - self.sets)
            + self.rest**2 / ((seeds - 1) * (items - self.sets))
        )
        return over_seeds, (math.sqrt(total / (seeds * items)), max(freedom, seeds - 1))

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Return the ends of the interval at a level, wherever they lie."""
        half = max((_scale(error, (1 + level) / 2, freedom) for error, freedom in self.standard_errors), default=0.0)
        return self.value - half, self.value + half

    def detectable(self, alpha: float = 1 - LEVEL) -> float:
        """Return the smallest effect that a test at level alpha finds with 80 % power.

        It is (t(1 - alpha/2, df) + t(0.80, df)) se, of the standard error with the wider interval.

        >>> round(Estimate((0.1, 0.2, 0.3, 0.4, 0.5)).detectable(), 3)
        0.263
        """
        widest = max(self.standard_errors, key=lambda one: _scale(one[0], 1 - alpha / 2, one[1]), default=(0.0, 1.0))
        return _scale(widest[0], 1 - alpha / 2, widest[1]) + _scale(widest[0], POWER, widest[1])

    def p_above(self, bound: float) -> float:
        """Return the one-sided p-value of the mean being no higher than `bound`.

        >>> round(Estimate((0.1, 0.2, 0.3, 0.4, 0.5)).p_above(0.15), 3)
        0.051
        """
        if self.has_equal_seeds or not self.standard_errors:
            return 1.0
        return max(_exceed(self.value - bound, *one) for one in self.standard_errors)

    def p_within(self, bound: float) -> float:
        """Return the p-value of two one-sided tests of the mean lying outside -+ `bound` (Schuirmann 1987).

        >>> one = Estimate((0.0, 0.1, -0.1, 0.05, -0.05))
        >>> one.p_within(0.1) < 0.05 < one.p_within(0.05)
        True
        """
        return max(self.p_above(-bound), replace(self, by_seed=tuple(-one for one in self.by_seed)).p_above(-bound))

    @property
    def stands_apart(self) -> bool:
        """Whether the mean of a seed is further than 5 x 1.4826 MAD from their median."""
        distances = np.abs(np.asarray(self.by_seed) - np.median(self.by_seed))
        return len(self.by_seed) > 2 and bool(distances.max() > APART * np.median(distances) > 0.0)

    def flip_signs(self) -> float:
        """Return the p-value of flipping the signs of the means of seeds, which assumes no normal distribution.

        It is the share of choices of signs, that as they are included, whose sum is as far from zero. Items are fixed.
        Its least value for S seeds is 2 / 2^S.

        >>> Estimate((0.1, 0.2, 0.3, 0.1, 0.2)).flip_signs()
        0.0625
        """
        means = np.asarray(self.by_seed)
        if len(means) <= ALL_SIGNS:
            signs = 1.0 - 2.0 * (np.arange(2 ** len(means))[:, None] >> np.arange(len(means)) & 1)
        else:
            drawn = np.random.default_rng(0).choice([-1.0, 1.0], (RANDOM_SIGNS, len(means)))
            signs = np.vstack([np.ones(len(means)), drawn])
        observed = abs(means.sum())
        return float(np.mean(np.abs(signs @ means) >= observed * (1 - ROUNDING)))


def estimate(
    values: NDArray[np.integer | np.floating | np.bool_],
    *,
    least: float = -math.inf,
    most: float = math.inf,
    sets: Sequence[int] | None = None,
) -> Estimate:
    """Return the mean of `values` over seeds and test items.

    Args:
        values: [S, N], one row per seed, one column per test item; one column where items are not at issue.
        least: The lowest possible mean.
        most: The highest possible mean.
        sets: The number of the fixed set that each item is of, from 0 on; None for one set.

    Raises:
        SettingError: `values` are not a non-empty finite [S, N].

    Example:
        >>> found = estimate(np.array([[1, 1, 0, 1], [1, 0, 0, 1]]))
        >>> found.value, found.by_seed
        (0.625, (0.75, 0.5))
    """
    rows = np.asarray(values, dtype=np.float64)
    if rows.ndim != 2 or rows.size == 0 or not np.isfinite(rows).all():
        raise SettingError(
            f"scores have shape {rows.shape}; expected finite numbers, one row per seed, one column per item."
        )
    seeds, items = rows.shape
    by_seed = rows.mean(axis=1)
    between_items = rest = 0.0
    _, members = np.unique(np.zeros(items) if sets is None else sets, return_inverse=True)
    number = int(members.max()) + 1
    if items > number:
        inside = rows - _average_sets(rows, members)
        by_item = inside.mean(axis=0)
        between_items = seeds * float(np.vdot(by_item, by_item)) / (items - number)
        if seeds > 1:
            left = inside - by_item
            rest = float(np.vdot(left, left)) / ((seeds - 1) * (items - number))
    # of equal columns rounding leaves some 1e-33
    negligible = (ROUNDING * float(np.abs(rows).max())) ** 2
    if between_items <= negligible:
        between_items = 0.0
    return Estimate(tuple(by_seed.tolist()), items, between_items, rest, least, most, sets=number)


def _average_sets(rows: Array, members: NDArray[np.intp]) -> Array:
    """Return the mean of each row over the set that each item is of, [S, N]."""
    sizes = np.bincount(members)
    means = np.stack([np.bincount(members, row) / sizes for row in rows])
    return means[:, members]


def score(values: NDArray, *, least: float = 0.0) -> Estimate:
    """Return the score of an arm, within [least, 1].

    Args:
        values: [S, N], one row per seed, one column per test item.
        least: The lowest possible score: 0, or -1 for a correlation.
    """
    return estimate(values, least=least, most=1.0)


def difference(arm: NDArray, control: NDArray, *, least: float = 0.0, starts: Sequence[int] | None = None) -> Estimate:
    """Return the score of an arm minus its control's, paired by seed and item, within -+ (1 - least).

    Args:
        arm: Values of the arm, [S, N], one row per seed, one column per test item.
        control: Values of the control under the same seeds on the same items, [S, N].
        least: The lowest possible score, as in `score`.
        starts: Seed of the earlier run that each row started from; see `estimate_over_starts`.

    Raises:
        SettingError: The shapes differ.

    Example:
        >>> one, other = np.array([[1.0, 1.0], [0.0, 1.0]]), np.array([[0.0, 1.0], [0.0, 1.0]])
        >>> found = difference(one, other, starts=(3, 3))
        >>> found.value, found.seeds, found.drawn
        (0.25, 1, 'pre-training')
    """
    if arm.shape != control.shape:
        raise SettingError(
            f"arm and control have shapes {arm.shape} and {control.shape}; expected the same seeds and items in both."
        )
    leads = arm.astype(np.float64) - control.astype(np.float64)
    return replace(estimate_over_starts(leads, starts), least=least - 1.0, most=1.0 - least)


def estimate_over_starts(leads: Array, starts: Sequence[int] | None, sets: Sequence[int] | None = None) -> Estimate:
    """Return the mean of rows, where rows that started from the same earlier run are averaged first.

    Fine-tunings of one pre-training do not show how much pre-training varies; a method that acts in pre-training is
    judged over pre-trainings. All starts have equal weight. Of a single start, for which there is no verdict, the
    interval is over its rows.

    Args:
        leads: [S, N], one row per run.
        starts: Seed of the earlier run that each row started from; None if they started from scratch.
        sets: The fixed set that each item is of, as in `estimate`.

    Example:
        >>> found = estimate_over_starts(np.array([[1.0], [3.0], [5.0]]), (0, 0, 1))
        >>> found.value, found.seeds, found.drawn
        (3.5, 2, 'pre-training')
    """
    if starts is None:
        return estimate(leads, sets=sets)
    places, different = np.asarray(starts), list(dict.fromkeys(starts))
    if len(different) == 1:
        return replace(estimate(leads, sets=sets), drawn="pre-training", independent=1)
    means = np.stack([leads[places == start].mean(axis=0) for start in different])
    return replace(estimate(means, sets=sets), drawn="pre-training")


def holm(p_values: Sequence[float], planned: int = 0) -> list[float]:
    """Return p-values adjusted so that the chance of any false finding among all of them stays bounded (Holm 1979).

    The k-th smallest of m is multiplied by m - k + 1; a larger p never gets a smaller adjusted one.

    Args:
        p_values: The p-values of a family.
        planned: Number of tests of the family m, where some could not be done.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    >>> holm([0.01], planned=5)
    [0.05]
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest, family = [0.0] * len(p_values), 0.0, max(planned, len(p_values))
    for rank, index in enumerate(order):
        require_range("p", p_values[index], low=0.0, high=1.0)
        largest = max(largest, min(1.0, (family - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def _scale(error: float, probability: float, freedom: float) -> float:
    return float(special.stdtrit(freedom, probability)) * error


def _exceed(distance: float, error: float, freedom: float) -> float:
    """Return how likely Student's t exceeds a distance over its standard error."""
    if error == 0.0:
        return 0.5 if distance == 0.0 else float(distance < 0.0)
    return float(special.stdtr(freedom, -distance / error))


MINIMUM_SEEDS = 5
# A difference is a finding at this adjusted p-value.
ALPHA = 0.05
BORNE_OUT, LESS, CONTRADICTED = "borne out", "better, by less than published", "contradicted"
NOT_FOUND, EQUIVALENT = "published gain not found", "published gain not found, equivalent within half of it"
UNCLEAR, NOT_SHOWN = "cannot tell", "not shown"
# The verdict on several differences is the first of these that one of them has.
ORDER = (CONTRADICTED, NOT_FOUND, EQUIVALENT, UNCLEAR, NOT_SHOWN, LESS, BORNE_OUT)


@dataclass(frozen=True)
class Judgement:
    """What is said of one difference.

    Attributes:
        estimate: The difference.
        family: Number of tests it was adjusted for; 0 if it is not tested.
        adjusted: Its Holm-adjusted p-value; None without a verdict.
        published: The published difference, in the units of the estimate; None where none is known.
        doubt: Why its task gives no verdict; "" where it does.
    """

    estimate: Estimate
    family: int = 0
    adjusted: float | None = None
    published: float | None = None
    doubt: str = ""

    @property
    def reversed(self) -> Judgement:
        """The judgement on the difference with its sides exchanged."""
        one = self.estimate
        turned = replace(one, by_seed=tuple(-value for value in one.by_seed), least=-one.most, most=-one.least)
        return replace(self, estimate=turned, published=None if self.published is None else -self.published)

    @property
    def undecided(self) -> str:
        """Why there is no verdict, "" where there is one."""
        return describe_undecided(self.estimate) or (f"no verdict ({self.doubt})" if self.doubt else "")

    @property
    def gain(self) -> float | None:
        """The published gain; None where the other side was ahead, or none is known."""
        return self.published if self.published is not None and self.published > 0.0 else None

    @property
    def detectable(self) -> float | None:
        """The smallest effect that a test at 5 % finds with 80 % power; None with too few or equal seeds."""
        return None if describe_undecided(self.estimate) else self.estimate.detectable() or None

    @property
    def detectable_in_family(self) -> float | None:
        """The smallest effect that a test at 5 % over the number of tests finds with 80 % power."""
        return self.estimate.detectable(ALPHA / self.family) if self.family and self.detectable else None

    @property
    def holds_gain(self) -> bool | None:
        """Whether the published gain lies inside the 95 % interval; None where none is known."""
        if self.gain is None:
            return None
        low, high = self.estimate.interval()
        return low <= self.gain <= high

    @property
    def equivalence(self) -> float | None:
        """The p-value of the difference lying outside -+ half the published gain; None where none is known."""
        return None if self.gain is None else self.estimate.p_within(self.gain / 2)

    @property
    def words(self) -> str:
        """The verdict without reference to what was published; "" if there is no test."""
        return "" if not self.family else self.undecided or describe(self.estimate, self.adjusted)

    @property
    def claim_words(self) -> str:
        """The verdict on the claim that the difference is above zero, and as large as published."""
        if self.undecided:
            return self.undecided
        high = self.estimate.interval()[1]
        if self.adjusted is not None and self.adjusted <= ALPHA:
            if self.estimate.value < 0.0:
                return CONTRADICTED
            return LESS if self.gain is not None and self.gain > high else BORNE_OUT
        # equal means of all seeds give an interval of no width, which leaves out every gain
        if self.gain is None or self.estimate.has_equal_seeds:
            return NOT_SHOWN
        if self.gain <= high:
            return UNCLEAR
        return EQUIVALENT if self.estimate.p_within(self.gain / 2) <= ALPHA else NOT_FOUND

    @property
    def note(self) -> str:
        """What else is to be said of it; "" for nothing."""
        if describe_undecided(self.estimate) or not self.estimate.stands_apart:
            return ""
        return f"one {self.estimate.drawn} stands apart: p of flipped signs {self.estimate.flip_signs():.3f}"


def judge_family(
    estimates: Sequence[Estimate],
    published: Sequence[float | None] | None = None,
    *,
    planned: int = 0,
    doubts: Sequence[str] | None = None,
) -> list[Judgement]:
    """Return the judgements of one family of tests.

    Args:
        estimates: The differences.
        published: The published difference of each, or None.
        planned: Number of tests of the family, with those that could not be done.
        doubts: Why the task of each gives no verdict; "" where it does.
    """
    family, many = max(planned, len(estimates)), len(estimates)
    judged = [
        Judgement(found, family, None, gain, doubt)
        for found, gain, doubt in zip(estimates, published or [None] * many, doubts or [""] * many, strict=True)
    ]
    # what has no verdict counts as a test that finds nothing
    adjusted = iter(holm([one.estimate.p for one in judged if not one.undecided], family))
    return [one if one.undecided else replace(one, adjusted=next(adjusted)) for one in judged]


def describe(found: Estimate, adjusted: float | None) -> str:
    """Return whether a difference was found, and its adjusted p-value.

    >>> describe(Estimate((0.02, 0.03, 0.02, 0.01, 0.02)), 0.004)
    'better (p = 0.004)'
    """
    if adjusted is None:
        return "not tested"
    words = "no difference shown"
    if adjusted <= ALPHA:
        words = "better" if found.value > 0 else "worse"
    if adjusted < 0.001:
        return f"{words} (p < 0.001)"
    return f"{words} (p = {adjusted:.{3 if adjusted < 0.1 else 2}f})"


def omit_p(words: str) -> str:
    """Return a verdict in words without its p-value, where that stands in a column of its own.

    >>> omit_p("better (p = 0.004)"), omit_p("no verdict (3 seeds)")
    ('better', 'no verdict (3 seeds)')
    """
    return words.partition(" (p ")[0]


def describe_undecided(found: Estimate) -> str:
    """Return why there is no verdict, "" where there is one.

    >>> describe_undecided(Estimate((0.02, 0.03, 0.01)))
    'no verdict (3 seeds)'
    >>> describe_undecided(Estimate((0.2, 0.2, 0.2, 0.2, 0.2)))
    'no verdict (seeds do not differ)'
    """
    if found.seeds < MINIMUM_SEEDS:
        return f"no verdict ({found.seeds} {found.drawn}{'s' * (found.seeds != 1)})"
    if found.has_equal_seeds and found.value != 0.0:
        return f"no verdict ({found.drawn}s do not differ)"
    return ""


# sacreBLEU's defaults, fixed here so that no environment variable or later version changes them.
SEED, RESAMPLES, TRIALS = 12345, 1000, 10_000
METRICS = ("BLEU", "chrF")


@dataclass(frozen=True)
class Pair:
    """Two runs of one seed, an arm's and its control's, as files of translations, one line per test item."""

    arm: str
    against: str
    seed: int
    system: Path
    baseline: Path


@dataclass(frozen=True)
class SystemTest:
    """Results of sacreBLEU's tests of one system against another.

    Attributes:
        metric: "BLEU" or "chrF".
        score: The system's score, 0 to 100; `baseline` is that of the other system.
        bootstrap: p-value of the paired bootstrap (Koehn 2004).
        randomisation: p-value of paired approximate randomisation (Riezler and Maxwell 2005).
    """

    metric: str
    score: float
    baseline: float
    bootstrap: float
    randomisation: float


@dataclass(frozen=True)
class PairedTests:
    """The tests of one arm against its control on "BLEU" or "chrF", one per shared seed; p-values are not pooled."""

    arm: str
    against: str
    metric: str
    seeds: tuple[int, ...]
    tests: tuple[SystemTest, ...]

    def select(self, seeds: Sequence[int]) -> PairedTests:
        """Return the tests of these seeds only."""
        kept = [(seed, test) for seed, test in zip(self.seeds, self.tests, strict=True) if seed in seeds]
        return replace(self, seeds=tuple(seed for seed, _ in kept), tests=tuple(test for _, test in kept))

    @property
    def difference(self) -> float:
        """Mean over seeds of the arm's score minus its control's."""
        return fmean(test.score - test.baseline for test in self.tests)

    @property
    def ahead(self) -> int:
        """Seeds in which the arm is ahead with a bootstrap p of at most 0.05."""
        return sum(test.score > test.baseline and test.bootstrap <= ALPHA for test in self.tests)

    @property
    def behind(self) -> int:
        """Seeds in which it is behind likewise."""
        return sum(test.score < test.baseline and test.bootstrap <= ALPHA for test in self.tests)


def compute_p_values(
    baseline: Sequence[str], systems: Mapping[str, Sequence[str]], references: Sequence[str]
) -> tuple[dict[str, tuple[SystemTest, ...]], dict[str, str]]:
    """Return each system's tests against the baseline, and the signature of each kind of test.

    Equals `sacrebleu references -i baseline systems --paired-bs -m bleu chrf` and `--paired-ar`, with a fixed seed.

    Args:
        baseline: Its translations, one per item.
        systems: Translations of each system by name.
        references: One per item.

    Example:
        >>> text = ["a small dog runs over the grass", "two birds sing in a tree", "it rains on the old town"] * 4
        >>> worse = [line.replace("a", "the") for line in text]
        >>> tests, signatures = compute_p_values(worse, {"same": text}, text)
        >>> tests["same"][0].metric, tests["same"][0].score > tests["same"][0].baseline
        ('BLEU', True)
        >>> signatures["BLEU, paired bootstrap"].split("|")[1:3]
        ['bs:1000', 'seed:12345']
    """
    # slow to import, and not needed for other tasks
    import sacrebleu
    from sacrebleu.significance import PairedTest

    found: dict[str, list[list[Any]]] = {}
    signatures: dict[str, str] = {}
    for kind, name, samples in (("bs", "paired bootstrap", RESAMPLES), ("ar", "approximate randomisation", TRIALS)):
        named = [("baseline", baseline), *systems.items()]
        # texts of some tasks are tokenized already, which sacreBLEU would remark on
        scorers = {"BLEU": sacrebleu.BLEU(force=True), "chrF": sacrebleu.CHRF()}
        with _fixed_seed():
            test = PairedTest(named, scorers, [references], test_type=kind, n_samples=samples)
            signed, scores = test()
        # sacreBLEU names the second by its beta, in the order in which they were given
        found[kind] = [scores[key] for key in signed]
        signatures |= {f"{metric}, {name}": str(signed[key]) for metric, key in zip(METRICS, signed, strict=True)}
    tests = {
        system: tuple(
            SystemTest(metric, *map(float, (bs[place].score, bs[0].score, bs[place].p_value, ar[place].p_value)))
            for metric, bs, ar in zip(METRICS, found["bs"], found["ar"], strict=True)
        )
        for place, system in enumerate(systems, start=1)
    }
    return tests, signatures


def run_paired_tests(pairs: Sequence[Pair], references: Path, kept: Path) -> Iterator[int]:
    """Test every pair whose result is not stored yet and store it; yields the number of pairs done.

    Args:
        pairs: The pairs.
        references: File of references, one line per test item.
        kept: File of results, rewritten after each control.

    Raises:
        DataError: A file is missing or has another number of lines than the references.
    """
    known = _read_tests(kept)
    keys = {pair: _make_key(pair, references) for pair in pairs}
    left = [pair for pair in pairs if keys[pair] not in known["tests"]]
    done = len(pairs) - len(left)
    yield done
    expected = _read_lines(references) if left else []
    left.sort(key=_group_key)
    for _, members in groupby(left, _group_key):
        group = list(members)
        baseline = _read_lines(group[0].baseline, len(expected))
        systems = {pair.arm: _read_lines(pair.system, len(expected)) for pair in group}
        tests, signatures = compute_p_values(baseline, systems, expected)
        known["signatures"] |= signatures
        known["tests"] |= {keys[pair]: [vars(test) for test in tests[pair.arm]] for pair in group}
        # drop results of texts that no longer exist
        known["tests"] = {key: value for key, value in known["tests"].items() if key in keys.values()}
        write_json(kept, known)
        done += len(group)
        yield done


def read_paired_tests(
    pairs: Sequence[Pair], references: Path, kept: Path
) -> tuple[tuple[PairedTests, ...], dict[str, str]]:
    """Return the stored results of the pairs by arm and metric, and the signatures of the tests.

    Raises:
        DataError: `kept` is damaged.
    """
    if not kept.exists() or not references.exists():
        return (), {}
    known = _read_tests(kept)
    found: dict[tuple[str, str, str], dict[int, SystemTest]] = {}
    for pair in pairs:
        for test in known["tests"].get(_make_key(pair, references), ()):
            tests = found.setdefault((pair.arm, pair.against, test["metric"]), {})
            tests[pair.seed] = SystemTest(**test)
    summed = [PairedTests(*names, tuple(sorted(s)), tuple(s[seed] for seed in sorted(s))) for names, s in found.items()]
    summed.sort(key=lambda tests: METRICS.index(tests.metric))
    return tuple(summed), known["signatures"] if summed else {}


def _read_tests(kept: Path) -> dict[str, Any]:
    if not kept.exists():
        return {"signatures": {}, "tests": {}}
    known = read_json(kept)
    try:
        tests = {str(key): [vars(SystemTest(**test)) for test in value] for key, value in known["tests"].items()}
        for metric in (test["metric"] for several in tests.values() for test in several):
            METRICS.index(metric)
        return {"signatures": {str(key): str(value) for key, value in known["signatures"].items()}, "tests": tests}
    except (KeyError, TypeError, AttributeError, ValueError):
        raise DataError(f"{kept} does not hold paired tests; delete it and run the same command again.") from None


def _make_key(pair: Pair, references: Path) -> str:
    import sacrebleu

    done = f"{sacrebleu.__version__} {METRICS} {SEED} {RESAMPLES} {TRIALS}"
    for path in (pair.baseline, pair.system):
        if not path.exists():
            raise DataError(f"{path} does not exist; {_say_how_to_redo(path)}")
    return digest(done, (references, pair.baseline, pair.system))


def _group_key(pair: Pair) -> tuple[str, int]:
    return pair.against, pair.seed


def _read_lines(path: Path, expected: int | None = None) -> list[str]:
    lines = [line for _, line in read_numbered_lines(path)]
    if expected is not None and len(lines) != expected:
        raise DataError(f"{path} has {len(lines)} lines, its references {expected}; {_say_how_to_redo(path)}")
    return lines


def _say_how_to_redo(path: Path) -> str:
    return f"delete the folder {path.parent} and run the same command again, which redoes only this run."


@contextmanager
def _fixed_seed() -> Iterator[None]:
    # sacreBLEU takes a seed from the environment only
    before = os.environ.get("SACREBLEU_SEED")
    os.environ["SACREBLEU_SEED"] = str(SEED)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SACREBLEU_SEED"]
        else:
            os.environ["SACREBLEU_SEED"] = before
