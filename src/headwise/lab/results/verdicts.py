"""What is said of a difference: adjusted for its family, beside what could have been found and what was published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headwise.lab.results.statistics import Estimate, holm

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
