"""What a paper claims of its runs.

Numbers shown with a claim without a test: what runs cost, how large a model is, where a curve is lowest.

What a contrast of a claim is in our runs: its leads by seed, over test items or in a number of each run.

Whether our runs bear out what a paper claims.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from headwise_lab.results.cells import Cell, Line, Number
from headwise_lab.results.evidence import Evidence, index_by_seed, match_seeds
from headwise_lab.results.runs import MEASURES, STEP_RATIO, Run, read_starts
from headwise_lab.results.statistics import ORDER, Estimate, Judgement, estimate_over_starts, judge_family
from headwise_lab.results.table import find_doubt

ABSENT, UNMEASURED = "not run", "not measured"


class _PerArm:
    """A label with one value for each arm of a part."""

    label: str
    arms: tuple[str, ...]
    part: str

    @property
    def parts(self) -> tuple[str, ...]:
        """The part the values come from."""
        return (self.part,)

    def named(self, canonical: Callable[[str, str], str]) -> Self:
        """Return it with each arm's name replaced by `canonical(part, name)`, each once."""
        arms = tuple(dict.fromkeys(canonical(self.part, arm) for arm in self.arms))
        this: Any = self  # a dataclass in each subclass
        return replace(this, arms=arms)

    def is_measured(self, parts: Mapping[str, Evidence]) -> bool:
        """Return whether any arm has a value."""
        return any(self._find(arm, parts) not in (ABSENT, UNMEASURED) for arm in self.arms)

    def line(self, parts: Mapping[str, Evidence]) -> Line:
        """Return the value of each arm."""
        place = f" in {self.part}" if self.part else ""
        return Line(f"{self.label}{place}", {arm: self._find(arm, parts) for arm in self.arms})

    def _find(self, arm: str, parts: Mapping[str, Evidence]) -> Cell:
        raise NotImplementedError


@dataclass(frozen=True)
class Numbers(_PerArm):
    """Means over seeds of a number of each run.

    Attributes:
        measure: The number's name in a run's record.
        label: What it is called in the text.
        arms: Names of the arms.
        part: The part they are run in.
        digits: Digits behind the point.
        scale: What it is multiplied by; 100 for shares in percent.
    """

    measure: str
    label: str
    arms: tuple[str, ...]
    part: str = ""
    digits: int = 2
    scale: float = 1.0

    def _find(self, arm: str, parts: Mapping[str, Evidence]) -> Cell:
        if self.part not in parts:
            return ABSENT
        value = parts[self.part].mean(arm, self.measure)
        if value is not None:
            return Number(value, digits=self.digits, factor=self.scale)
        return UNMEASURED if parts[self.part].has(arm) else ABSENT


@dataclass(frozen=True)
class StepTimes(_PerArm):
    """Time of a training step over plain's: of steps timed in turn, or of the runs themselves; median over seeds.

    Attributes:
        arms: Names of the arms.
        part: The part they are run in.
    """

    arms: tuple[str, ...]
    part: str = ""
    label: str = field(default="step time over plain", init=False, repr=False)

    def _find(self, arm: str, parts: Mapping[str, Evidence]) -> Cell:
        if self.part not in parts:
            return ABSENT
        ratios = parts[self.part].of(arm, STEP_RATIO).values()
        if not ratios:
            own, plain = (parts[self.part].of(name, "step_seconds") for name in (arm, "plain"))
            ratios = [own[seed] / plain[seed] for seed in own.keys() & plain.keys() if plain[seed] > 0]
        return Number(statistics.median(ratios), digits=2) if ratios else ABSENT


@dataclass(frozen=True)
class Least:
    """The part with the smallest value of a measure, on average and per seed.

    Attributes:
        measure: The number's name in a run's record.
        arm: Name of the arm.
        among: The parts, in their order.
    """

    measure: str
    arm: str
    among: tuple[str, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts it looks at."""
        return self.among

    def named(self, canonical: Callable[[str, str], str]) -> Least:
        """Return it with the canonical name."""
        return replace(self, arm=canonical(self.among[0], self.arm))

    def is_measured(self, parts: Mapping[str, Evidence]) -> bool:
        """Return whether a seed has the number in every part."""
        return bool(self._seeds(parts))

    def line(self, parts: Mapping[str, Evidence]) -> Line:
        """Return the means, and how many seeds say with them where it is least."""
        found = {part: parts[part].of(self.arm, self.measure) for part in self.among if part in parts}
        label, seeds = f"least {self.measure} of {self.arm}", self._seeds(parts)
        if not seeds:
            return Line(label, {", ".join(self.among): ABSENT})
        means = {part: statistics.fmean(values[seed] for seed in seeds) for part, values in found.items()}
        least = min(means, key=lambda part: means[part])
        agreeing = sum(min(found, key=lambda part: found[part][seed]) == least for seed in seeds)
        shown = {part: Number(mean, digits=3) for part, mean in means.items()}
        return Line(label, shown, f"; least in {least}, as {agreeing} of {len(seeds)} seeds agree")

    def _seeds(self, parts: Mapping[str, Evidence]) -> set[int]:
        return set.intersection(
            *(set(parts[part].of(self.arm, self.measure)) if part in parts else set() for part in self.among)
        )


Shown = Numbers | StepTimes | Least


# Contrasts of heads check that a method acted; those of what it costs have no test. Each kind is a family of its own.
EFFICACY, MANIPULATION, COST = "efficacy", "manipulation check", "cost"
OF_HEADS = {*MEASURES, "head_vector_cosine", "redundant_share", "raising_share", "different_words"}
OF_COST = {"parameters", "step_seconds", "step_ratio", "train_seconds", "decoding_seconds"}


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
    def parts(self) -> tuple[str, ...]:
        """The parts it is about."""
        if self.over:
            return self.over + (() if self.less is None else self.less.parts)
        own = (self.part, self.part if self.against_part is None else self.against_part)
        return own + (() if self.less is None else self.less.parts)

    @property
    def is_empty(self) -> bool:
        """Whether both sides are one arm, as may happen at a scale with few layers."""
        return self.arm == self.against and (bool(self.over) or len({*self.parts[:2]}) == 1)

    def within(self, known: Collection[str]) -> Contrast:
        """Return it with means over those parts alone that are known."""
        over = tuple(part for part in self.over if part in known)
        return replace(self, over=over, less=None if self.less is None else self.less.within(known))

    def named(self, canonical: Callable[[str, str], str]) -> Contrast:
        """Return it with each arm's name replaced by `canonical(part, name)`."""
        one, other = (self.over[0],) * 2 if self.over else self.parts[:2]
        less = None if self.less is None else self.less.named(canonical)
        doses = tuple(canonical(one, arm) for arm in self.doses)
        arms = canonical(one, self.arm), canonical(other, self.against)
        return replace(self, arm=arms[0], against=arms[1], less=less, doses=doses)

    def __str__(self) -> str:
        if self.over:
            text = f"{self.arm} over {self.against}, mean of {', '.join(self.over)}"
            return text if self.less is None else f"{text}, less that of {', '.join(self.less.over)}"
        one, other = self.parts[:2]
        if self.doses:
            text = f"slope from {self.against} to {self.arm}" + (f" in {one}" if one else "")
        elif one == other:
            text = f"{self.arm} over {self.against}" + (f" in {one}" if one else "")
        else:
            text = f"{self.arm} in {one} over {self.against} in {other}"
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


def compare_arms(
    arms: str | Sequence[str], against: str | Sequence[str], parts: Collection[str] = ("",), measure: str | None = None
) -> tuple[Contrast, ...]:
    """Return the contrast of every arm with every arm it is set against, in each part.

    >>> [str(contrast) for contrast in compare_arms(("svgd", "em"), "plain", ("base",))]
    ['svgd over plain in base', 'em over plain in base']
    """
    ahead, behind = ((names,) if isinstance(names, str) else names for names in (arms, against))
    return tuple(
        Contrast(one, other, part=part, measure=measure) for part in parts for one in ahead for other in behind
    )


def compare_parts(arm: str, most: str, least: str, measure: str, less: Contrast | None = None) -> Contrast:
    """Return a number of one arm in a part, minus its number in another part."""
    return Contrast(arm, arm, part=most, against_part=least, measure=measure, less=less)


def follow_doses(doses: Sequence[str], part: str = "", measure: str | None = None) -> Contrast:
    """Return the slope of the score, or of a number of each run, over arms of rising strength in equal steps.

    It is sum_k (k - m) s_k / sum_k (k - m)^2 with m the mean of the steps k: one test for all strengths of a method.

    >>> print(follow_doses(("cka:ratio=0.1", "cka", "cka:ratio=1.0"), measure="effective_heads"))
    effective heads of slope from cka:ratio=0.1 to cka:ratio=1.0
    """
    return Contrast(doses[-1], doses[0], part=part, measure=measure, doses=tuple(doses))


def claim_control(statement: str, contrasts: tuple[Contrast, ...]) -> Claim:
    """Return a claim that compares a method with our control."""
    return Claim(f"{statement} (our control; the paper has none).", contrasts)


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
        return "compares models that were scored on different test items"
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


MEASURED, NO_VERDICT = "measured, not tested", "no verdict (nothing measured)"


@dataclass(frozen=True)
class Found:
    """A contrast as measured.

    Attributes:
        contrast: The contrast.
        judgement: What was found and what is said of it; None where it could not be measured.
        reason: Why it was not measured; "" where it was.
    """

    contrast: Contrast
    judgement: Judgement | None
    reason: str = ""

    @property
    def estimate(self) -> Estimate | None:
        """What was found."""
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


def judge(claims: Sequence[Claim], parts: Mapping[str, Evidence]) -> tuple[Judged, ...]:
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
    doubted = {part: find_doubt(found.results) for part, found in parts.items()}
    known = {contrast: _measure(contrast, parts) for claim in claims for contrast in claim.contrasts}
    for kind in (EFFICACY, MANIPULATION):
        planned = {one for claim in claims if claim.tested for one in claim.contrasts if one.kind == kind}
        family = [one for one in known if one in planned and known[one].estimate is not None]
        estimates = [found for one in family if (found := known[one].estimate) is not None]
        published = [one.published for one in family]
        doubts = [_find_doubt(one, doubted, parts) if kind == EFFICACY else "" for one in family]
        judged = judge_family(estimates, published, planned=len(planned), doubts=doubts)
        known |= {one: replace(known[one], judgement=found) for one, found in zip(family, judged, strict=True)}
    return tuple(_judge_claim(claim, [known[one] for one in claim.contrasts], parts) for claim in claims)


def map_judgements(judged: Sequence[Judged], part: str, items: int) -> dict[tuple[str, str], Judgement]:
    """Return what was said of differences over all items of a part, by arm and other arm, each in both directions."""
    found = {}
    for one in (one for claim in judged for one in claim.found):
        contrast, judgement = one.contrast, one.judgement
        plain = contrast.measure is None and not contrast.over and contrast.beyond is None and contrast.less is None
        if plain and judgement is not None and set(contrast.parts) == {part} and judgement.estimate.items == items:
            found[contrast.arm, contrast.against] = judgement
            found[contrast.against, contrast.arm] = judgement.reversed
    return found


def _find_doubt(contrast: Contrast, doubted: Mapping[str, str], parts: Mapping[str, Evidence]) -> str:
    """Return why a contrast gets no verdict; "" where it gets one, as every difference to a baseline itself does."""
    runs = (run for part in contrast.parts for run in parts[part].results.runs)
    if any(run.baseline and run.arm in (contrast.arm, contrast.against) for run in runs):
        return ""
    doubts = (f"{doubted[part]} in {part}" if part else doubted[part] for part in contrast.parts if doubted[part])
    return next(doubts, "")


def _judge_claim(claim: Claim, found: Sequence[Found], parts: Mapping[str, Evidence]) -> Judged:
    shown = tuple(number.line(parts) for number in claim.shown)
    return Judged(claim, tuple(found), shown, _describe(claim, found, parts))


def _measure(contrast: Contrast, parts: Mapping[str, Evidence]) -> Found:
    leads = read_leads(contrast, parts)
    if isinstance(leads, str):
        return Found(contrast, None, reason=leads)
    return Found(
        contrast, Judgement(estimate_over_starts(leads.values, leads.starts, leads.sets), published=contrast.published)
    )


def _describe(claim: Claim, found: Sequence[Found], parts: Mapping[str, Evidence]) -> str:
    if claim.tested and any(one.contrast.kind != COST for one in found):
        return _decide([one for one in found if one.contrast.kind != COST])
    measured = any(one.estimate is not None for one in found) or any(one.is_measured(parts) for one in claim.shown)
    return MEASURED if measured else NO_VERDICT


def _decide(found: Sequence[Found]) -> str:
    if absent := [one.verdict for one in found if one.estimate is None]:
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
