"""Whether our runs bear out what a paper claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headwise.lab.papers.claims import COST, EFFICACY, MANIPULATION, Claim, Contrast
from headwise.lab.papers.leads import read_leads
from headwise.lab.results.cells import Line
from headwise.lab.results.evidence import Evidence
from headwise.lab.results.statistics import Estimate, estimate_over_starts
from headwise.lab.results.tabulate import find_doubt
from headwise.lab.results.verdicts import ORDER, Judgement, judge_family

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
