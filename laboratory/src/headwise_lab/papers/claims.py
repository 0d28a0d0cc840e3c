"""What a paper claims of its runs, and whether ours bear it out.

A claim has contrasts, which are tested, and numbers shown with them, which are not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwise_lab.results.cells import Cell, Line, Number
from headwise_lab.results.evidence import Evidence, index_by_seed, match_seeds
from headwise_lab.results.runs import MEASURES, STEP_RATIO, Results, Run, read_starts
from headwise_lab.results.statistics import ORDER, Estimate, Judgement, estimate_over_starts, judge_family
from headwise_lab.results.table import find_doubt

ABSENT, UNMEASURED = "not run", "not measured"
MEASURED, NO_VERDICT = "measured, not tested", "no verdict (nothing measured)"
# Contrasts of heads check that a method acted; those of what it costs have no test. Each kind is a family of its own.
EFFICACY, MANIPULATION, COST = "efficacy", "manipulation check", "cost"
OF_HEADS = {*MEASURES, "head_vector_cosine", "redundant_share", "raising_share", "different_words"}
OF_COST = {"parameters", "step_seconds", "step_ratio", "train_seconds", "decoding_seconds"}

# The runs of each part by its name.
Parts = Mapping[str, Evidence]
# The canonical name of an arm in a part.
Canonical = Callable[[str, str], str]


@dataclass(frozen=True)
class Shown:
    """Means over seeds of a number of each run: of several arms in one part, or with `least` of one arm over parts.

    Attributes:
        measure: The number's name in a run's record; `STEP_RATIO` is the median time of a step over plain's, of steps
            timed in turn or else of the runs themselves.
        arms: Names of the arms.
        parts: The parts they are run in.
        label: What the number is called in the text.
        digits: Digits behind the point.
        scale: What it is multiplied by; 100 for shares in percent.
        least: Whether the text names the part where the number is smallest, and how many seeds agree.
    """

    measure: str
    arms: tuple[str, ...]
    parts: tuple[str, ...] = ("",)
    label: str = ""
    digits: int = 2
    scale: float = 1.0
    least: bool = False

    def named(self, canonical: Canonical) -> Shown:
        """Return it with each arm's canonical name, each once."""
        return replace(self, arms=tuple(dict.fromkeys(canonical(self.parts[0], arm) for arm in self.arms)))

    def line(self, parts: Parts) -> Line:
        """Return the numbers as they are shown."""
        if self.least:
            return self._find_least(parts)
        (part,) = self.parts
        cells = {arm: self._find(arm, parts[part]) if part in parts else ABSENT for arm in self.arms}
        return Line(f"{self.label} in {part}" if part else self.label, cells)

    def _find(self, arm: str, evidence: Evidence) -> Cell:
        if self.measure == STEP_RATIO:
            ratios = evidence.of(arm, STEP_RATIO).values()
            if not ratios:
                own, plain = (evidence.of(name, "step_seconds") for name in (arm, "plain"))
                ratios = [own[seed] / plain[seed] for seed in own.keys() & plain.keys() if plain[seed] > 0]
            return Number(statistics.median(ratios), digits=self.digits) if ratios else ABSENT
        value = evidence.mean(arm, self.measure)
        if value is None:
            return UNMEASURED if evidence.has(arm) else ABSENT
        return Number(value, digits=self.digits, factor=self.scale)

    def _find_least(self, parts: Parts) -> Line:
        (arm,) = self.arms
        label = f"least {self.measure} of {arm}"
        found = {part: parts[part].of(arm, self.measure) if part in parts else {} for part in self.parts}
        seeds = set.intersection(*map(set, found.values()))
        if not seeds:
            return Line(label, {", ".join(self.parts): ABSENT})
        means = {part: statistics.fmean(values[seed] for seed in seeds) for part, values in found.items()}
        least = min(means, key=lambda part: means[part])
        agreeing = sum(min(found, key=lambda part: found[part][seed]) == least for seed in seeds)
        shown = {part: Number(mean, digits=3) for part, mean in means.items()}
        return Line(label, shown, f"; least in {least}, as {agreeing} of {len(seeds)} seeds agree")


def show_step_times(arms: tuple[str, ...], part: str = "") -> Shown:
    """Return the time of a training step of some arms over plain's."""
    return Shown(STEP_RATIO, arms, (part,), "step time over plain")


@dataclass(frozen=True)
class Contrast:
    """The score of one arm minus another's, expected to be above zero.

    Attributes:
        arm: Name of the arm that should be ahead.
        against: Name of the arm that should be behind.
        bins: First and last bin; None for all items.
        beyond: First and last bin of a range whose difference is taken off: the contrast is then that the lead is
            larger on `bins` than there. None for a plain difference.
        of: What the bins count, as in "operators".
        part: The part of the reproduction that `arm` is run in.
        against_part: The part that `against` is run in; None for the same.
        measure: A number of each run instead of the score, as in "NLL"; one value a seed, so only seeds are chance.
        less: A contrast whose difference is taken off.
        over: Parts whose differences are averaged with equal weight; `part` is then unused, and `less` has parts to
            average too.
        published: What the paper found, in the units of ours; None where it prints no such numbers.
        doses: Arms of rising strength in equal steps, of which `arm` is the last and `against` the first: the contrast
            is then the least-squares slope over all of them, per step; see `follow_doses`. Empty for two arms.
    """

    arm: str
    against: str
    bins: tuple[int, int] | None = None
    beyond: tuple[int, int] | None = None
    of: str = "operators"
    part: str = ""
    against_part: str | None = None
    measure: str | None = None
    less: Contrast | None = None
    over: tuple[str, ...] = ()
    published: float | None = None
    doses: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The family it is in: "efficacy", "manipulation check" or "cost"."""
        name = (self.measure or "").partition(" of ")[0]
        return MANIPULATION if name in OF_HEADS else COST if name in OF_COST else EFFICACY

    @property
    def sides(self) -> tuple[str, str]:
        """The part of each of its two arms; of several parts the first."""
        if self.over:
            return self.over[0], self.over[0]
        return self.part, self.part if self.against_part is None else self.against_part

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts it is about."""
        return (self.over or self.sides) + (() if self.less is None else self.less.parts)

    @property
    def is_empty(self) -> bool:
        """Whether both sides are one arm, as may happen at a scale with few layers."""
        return self.arm == self.against and len({*self.sides}) == 1

    def within(self, known: Collection[str]) -> Contrast:
        """Return it with means over those parts alone that are known."""
        over = tuple(part for part in self.over if part in known)
        return replace(self, over=over, less=None if self.less is None else self.less.within(known))

    def named(self, canonical: Canonical) -> Contrast:
        """Return it with each arm's canonical name."""
        one, other = self.sides
        less = None if self.less is None else self.less.named(canonical)
        doses = tuple(canonical(one, arm) for arm in self.doses)
        return replace(
            self, arm=canonical(one, self.arm), against=canonical(other, self.against), less=less, doses=doses
        )

    def __str__(self) -> str:
        if self.over:
            text = f"{self.arm} over {self.against}, mean of {', '.join(self.over)}"
            return text if self.less is None else f"{text}, less that of {', '.join(self.less.over)}"
        one, other = self.sides
        text = f"slope from {self.against} to {self.arm}" if self.doses else f"{self.arm} over {self.against}"
        if one != other and not self.doses:
            text = f"{self.arm} in {one} over {self.against} in {other}"
        elif one:
            text += f" in {one}"
        if self.bins is not None:
            text += f" on {self.bins[0]} to {self.bins[1]} {self.of}"
        if self.measure is not None:
            text = f"{self.measure.replace('_', ' ')} of {text}"
        if self.beyond is not None:
            text += f", less its lead on {self.beyond[0]} to {self.beyond[1]}"
        return text if self.less is None else f"{text}, less that of {replace(self.less, measure=None)}"


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, in our words.

    It holds when each of its contrasts is above zero. What no test decides (that two things are equal, what something
    costs) is measured and shown without a verdict.

    Attributes:
        statement: What the paper states, in our words.
        contrasts: What it means for the arms.
        shown: Numbers shown with it.
        tested: Whether the contrasts are tested; False shows them with their intervals alone.
    """

    statement: str
    contrasts: tuple[Contrast, ...] = ()
    shown: tuple[Shown, ...] = ()
    tested: bool = True


def follow_doses(doses: Sequence[str], part: str = "", measure: str | None = None) -> Contrast:
    """Return the slope of the score, or of a number of each run, over arms of rising strength in equal steps.

    It is sum_k (k - m) s_k / sum_k (k - m)^2 with m the mean of the steps k: one test for all strengths of a method.

    >>> print(follow_doses(("cka:ratio=0.1", "cka", "cka:ratio=1.0"), measure="effective_heads"))
    effective heads of slope from cka:ratio=0.1 to cka:ratio=1.0
    """
    return Contrast(doses[-1], doses[0], part=part, measure=measure, doses=tuple(doses))


class _Term(NamedTuple):
    """One mean of a contrast, with its sign."""

    sign: float
    part: str
    arm: str
    bins: tuple[int, int] | None


def _list_sums(contrast: Contrast) -> list[tuple[float, list[_Term]]]:
    """Return the sums of means that a contrast is the weighted sum of: one, or one for each part of a mean."""
    if not contrast.over:
        return [(1.0, _list_terms(contrast))]
    own = replace(contrast, over=(), less=None)
    sums = [(1.0 / len(contrast.over), _list_terms(replace(own, part=part))) for part in contrast.over]
    return sums + ([] if contrast.less is None else [(-weight, terms) for weight, terms in _list_sums(contrast.less)])


def _list_terms(contrast: Contrast, sign: float = 1.0) -> list[_Term]:
    one, other = contrast.sides
    if contrast.doses:
        steps = np.arange(len(contrast.doses)) - (len(contrast.doses) - 1) / 2
        weights = sign * steps / (steps**2).sum()
        return [_Term(float(w), one, arm, contrast.bins) for w, arm in zip(weights, contrast.doses, strict=True)]
    terms = []
    for weight, bins in [(sign, contrast.bins)] + ([] if contrast.beyond is None else [(-sign, contrast.beyond)]):
        terms += [_Term(weight, one, contrast.arm, bins), _Term(-weight, other, contrast.against, bins)]
    return terms + ([] if contrast.less is None else _list_terms(contrast.less, -sign))


def measure_contrast(contrast: Contrast, parts: Parts) -> Estimate | str:
    """Return a contrast in our runs, over shared seeds and test items, or why it could not be measured."""
    if contrast.is_empty:
        return "is one arm at this scale"
    if any(part not in parts for part in contrast.parts):
        return "was not run"
    sums = _list_sums(contrast)
    if contrast.measure is not None:
        return _measure_numbers(sums, contrast.measure, parts)
    terms = [term for _, own in sums for term in own]
    runs = match_seeds([(parts[term.part], term.arm) for term in terms])
    seeds = sorted(set.intersection(*map(set, runs)))
    of_term = dict(zip(terms, runs, strict=True))
    leads, sets = [], []
    for weight, own in sums:
        found = _read_leads([(term, parts[term.part].results, of_term[term]) for term in own], seeds)
        if isinstance(found, str):
            return found
        leads.append((weight, found[0]))
        before = max(sets, default=-1) + 1
        sets += [before + place for place in found[1]]
    whole = np.concatenate([values * (weight * len(sets) / values.shape[1]) for weight, values in leads], axis=1)
    return estimate_over_starts(whole, _find_starts(runs, seeds), sets)


def _read_leads(
    terms: Sequence[tuple[_Term, Results, Mapping[int, Run]]], seeds: Sequence[int]
) -> tuple[NDArray[np.float64], list[int]] | str:
    """Return values whose mean is a sum of means, [S, N], and the set of each item, or why there are none."""
    first = terms[0][1]
    inside = np.stack([_select_bins(first.bins, term.bins) for term, _, _ in terms])
    if any(results.metric.own_test for _, results, _ in terms):
        return "compares models that were scored on different test items"
    if not all(_share_items(first, results) for _, results, _ in terms):
        return "is on different test sets"
    if not inside.any(axis=1).all():
        return "has no test items"
    if not seeds:
        return "was not run"
    used = inside.any(axis=0)
    values = np.zeros((len(seeds), inside.shape[1]))
    for (term, _, runs), mask in zip(terms, inside, strict=True):
        factor = term.sign * np.count_nonzero(used) / np.count_nonzero(mask)
        for row, seed in enumerate(seeds):
            values[row, mask] += factor * first.metric.values(runs[seed].statistics[mask])
    # items that the same terms are about are one set
    _, places = np.unique(inside[:, used], axis=1, return_inverse=True)
    return values[:, used], np.ravel(places).tolist()


def _measure_numbers(sums: Sequence[tuple[float, list[_Term]]], measure: str, parts: Parts) -> Estimate | str:
    terms = [(weight * term.sign, term) for weight, own in sums for term in own]
    found = [parts[term.part].of(term.arm, measure) for _, term in terms]
    runs = [index_by_seed(parts[term.part].results.runs, term.arm) for _, term in terms]
    seeds = sorted(set.intersection(*map(set, found)))
    if not seeds:
        # what heads are worth is not measured where the score is zero with all of them
        return "was not measured" if set.intersection(*map(set, runs)) else "was not run"
    leads = [sum(sign * values[seed] for (sign, _), values in zip(terms, found, strict=True)) for seed in seeds]
    return estimate_over_starts(np.array(leads)[:, None], _find_starts(runs, seeds))


def _share_items(one: Results, other: Results) -> bool:
    return other.data == one.data and other.metric == one.metric and np.array_equal(other.bins, one.bins)


def _find_starts(runs: Sequence[Mapping[int, Run]], seeds: Sequence[int]) -> tuple[int, ...] | None:
    """Return the starts of runs that are compared; a baseline among them has none."""
    known = (read_starts(found[seed] for seed in seeds) for found in runs)
    return next((starts for starts in known if starts is not None), None)


def _select_bins(bins: NDArray[np.int64], ends: tuple[int, int] | None) -> NDArray[np.bool_]:
    return np.ones(len(bins), dtype=bool) if ends is None else (bins >= ends[0]) & (bins <= ends[1])


@dataclass(frozen=True)
class Found:
    """A contrast as measured.

    Attributes:
        contrast: The contrast.
        judgement: What was found, with its verdict; None where it could not be measured.
        reason: Why it was not measured; "" where it was.
    """

    contrast: Contrast
    judgement: Judgement | None
    reason: str = ""

    @property
    def estimate(self) -> Estimate | None:
        """The difference."""
        return None if self.judgement is None else self.judgement.estimate

    @property
    def verdict(self) -> str:
        """The verdict on the contrast alone; "" if it is not tested."""
        if self.judgement is None:
            return f"no verdict ({self.contrast} {self.reason})"
        return self.judgement.claim_words if self.judgement.family else ""


@dataclass(frozen=True)
class Judged:
    """A claim with what was found, the numbers shown with it and the verdict in words."""

    claim: Claim
    found: tuple[Found, ...]
    shown: tuple[Line, ...]
    verdict: str


def judge(claims: Sequence[Claim], parts: Parts) -> tuple[Judged, ...]:
    """Return the verdict on each claim.

    Each contrast is the mean over shared seeds and test items; see `statistics.Estimate`. Holm's adjustment covers the
    tested contrasts of all claims, those of efficacy apart from checks of manipulation; each counts once, also one that
    could not be measured. A contrast above zero is "borne out", or "better, by less than published" if its interval
    ends below the published gain; one below zero is "contradicted"; else it is "not shown", or where a gain was
    published "published gain not found" or "cannot tell", as the interval leaves it out or holds it. A claim has the
    worst of its contrasts' verdicts. With fewer than five seeds there is no verdict (runs that began with one earlier
    run, in which the method acted, count as one), and of efficacy there is none where plain is not shown to beat a
    baseline without attention; the verdict on a claim that has other contrasts leaves these out, and says so. Without a
    test the words are "measured, not tested", where there is anything to measure.
    """
    known = {one: _measure(one, parts) for claim in claims for one in claim.contrasts}
    doubted = {part: find_doubt(found.results) for part, found in parts.items()}
    for kind in (EFFICACY, MANIPULATION):
        planned = {one for claim in claims if claim.tested for one in claim.contrasts if one.kind == kind}
        family = [one for one in known if one in planned and known[one].judgement is not None]
        judged = judge_family(
            [found for one in family if (found := known[one].estimate) is not None],
            [one.published for one in family],
            planned=len(planned),
            doubts=[_find_doubt(one, doubted, parts) if kind == EFFICACY else "" for one in family],
        )
        known |= {one: replace(known[one], judgement=found) for one, found in zip(family, judged, strict=True)}
    return tuple(
        _judge_claim(claim, [known[one] for one in claim.contrasts], [one.line(parts) for one in claim.shown])
        for claim in claims
    )


def map_judgements(judged: Sequence[Judged], part: str, items: int) -> dict[tuple[str, str], Judgement]:
    """Return the judgement on each difference over all items of a part, by arm and other arm, in both directions."""
    found = {}
    for one in (one for claim in judged for one in claim.found):
        contrast, judgement = one.contrast, one.judgement
        plain = contrast.measure is None and not contrast.over and contrast.beyond is None and contrast.less is None
        if plain and judgement is not None and set(contrast.parts) == {part} and judgement.estimate.items == items:
            found[contrast.arm, contrast.against] = judgement
            found[contrast.against, contrast.arm] = judgement.reversed
    return found


def _measure(contrast: Contrast, parts: Parts) -> Found:
    found = measure_contrast(contrast, parts)
    if isinstance(found, str):
        return Found(contrast, None, found)
    return Found(contrast, Judgement(found, published=contrast.published))


def _find_doubt(contrast: Contrast, doubted: Mapping[str, str], parts: Parts) -> str:
    """Return why a contrast gets no verdict; "" where it gets one, as every difference to a baseline itself does."""
    runs = (run for part in contrast.parts for run in parts[part].results.runs)
    if any(run.baseline and run.arm in (contrast.arm, contrast.against) for run in runs):
        return ""
    return next((doubted[part] + (f" in {part}" if part else "") for part in contrast.parts if doubted[part]), "")


def _judge_claim(claim: Claim, found: Sequence[Found], shown: Sequence[Line]) -> Judged:
    deciding = [one for one in found if claim.tested and one.contrast.kind != COST]
    if deciding:
        verdict = _decide(deciding)
    else:
        numbers = [cell for line in shown for cell in line.values.values() if isinstance(cell, Number)]
        verdict = MEASURED if numbers or any(one.judgement is not None for one in found) else NO_VERDICT
    return Judged(claim, tuple(found), tuple(shown), verdict)


def _decide(found: Sequence[Found]) -> str:
    if absent := [one.verdict for one in found if one.judgement is None]:
        return absent[0]
    judged = sorted((one.judgement for one in found if one.judgement is not None), key=lambda one: one.estimate.seeds)
    kept = [one for one in judged if not one.doubt]
    if undecided := next(filter(None, (one.undecided for one in kept or judged)), ""):
        return undecided
    words = {one.claim_words for one in kept}
    verdict = next(one for one in ORDER if one in words)
    if len(kept) == len(judged):
        return verdict
    doubts = "; ".join(dict.fromkeys(one.doubt for one in judged if one.doubt))
    return f"{verdict} ({len(judged) - len(kept)} of {len(judged)} contrasts left out: {doubts})"
