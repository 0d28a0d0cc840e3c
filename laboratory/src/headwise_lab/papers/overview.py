"""One page of all claims of all papers: what each found, what we found, and how much our runs could have shown.

The pictures of doses come first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from headwise_lab.experiment.registry import named_task
from headwise_lab.papers.claims import EFFICACY, MANIPULATION
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.pages import FOLDER, FORMAT, PAGE, is_shown_in_points, name_section, read_records
from headwise_lab.papers.reproduction import OWN
from headwise_lab.papers.run import choose_seeds
from headwise_lab.results.cells import NONE, Cell, Grid, Link, Number, choose_digits
from headwise_lab.results.statistics import CONTRADICTED

# The records of each paper by the name of its folder, and where these folders are.
Papers = Mapping[str, Sequence[Mapping[str, Any]]]
PLACE = "laboratory/papers"
# The ids of the studies of doses begin with this.
DOSES = "diversity/dose-"
# What a record of the first format says of a contrast: "svgd over plain: +0.52 points [-0.31, +1.35], p = 0.412".
_TEXT = re.compile(
    r"(?P<contrast>.+): (?P<value>[+-][\d.]+)(?P<points> points)? \[(?P<low>[^,\]]+), (?P<high>[^\]]+)\]"
    r"(, p = (?P<p>[\d.]+))?( \(.*\))?"
)
# What a part of a record says of data that stand in for the paper's.
_STAND_IN = re.compile(r"(?P<part>[^:]+): (?P<data>\w+), since .+ is absent")
_KINDS = {EFFICACY: "comparisons of scores", MANIPULATION: "checks of what a method does to heads"}
_HEADER = ("claim", "contrast that decides it", "published", "ours", "detectable", "verdict", "table")
_WHY_ABSENT = (
    "These need more time than was available on two cores: each row counts its runs, and `headwise reproduce ID "
    "--dry-run` says what they cost where runs of their kind have finished. They need nothing else but their "
    "[data](../../docs/reproducing.md). Records of version 0.1 were not made again for the same reason; "
    "`repulsive/table-5` needs people to rate texts. Tables above may lack parts, such as a larger model or a set "
    "without data; their pages leave those rows blank."
)
_READING = (
    "Published and ours are differences, ours with its 95 % interval: in points for scores, in units of the number for "
    "others. A claim of several contrasts shows the one that decides it; a comparison that several claims name is "
    "counted once. Detectable is the smallest difference that our test finds with 80 % power: tested alone, to tested "
    "among all of its family. Claims marked version 0.1 were judged before the tests were calibrated, by a bootstrap "
    "that finds less than its level allows, and also where plain is not shown to beat a model without attention; their "
    "records hold text and cannot be computed again. See [how arms are compared](../../docs/statistics.md)."
)


@dataclass(frozen=True)
class Measured:
    """A contrast as a record has it: numbers in points for scores, in the units of the number for others.

    Attributes:
        contrast: Its name.
        value: What was found.
        low: Lower end of the 95 % interval.
        high: Upper end.
        points: Whether it is about scores.
        p: Its adjusted p-value; None where it is not tested.
        detectable: The smallest effect found with 80 % power, as if tested alone; None in records of version 0.1.
        detectable_in_family: The same among all contrasts of its family; None where it is not tested.
        published: What the paper found; None where it prints no such number.
        verdict: Its own verdict; "" in records of version 0.1.
    """

    contrast: str
    value: float
    low: float
    high: float
    points: bool
    p: float | None
    detectable: float | None = None
    detectable_in_family: float | None = None
    published: float | None = None
    verdict: str = ""


def read_papers(papers: Path) -> dict[str, list[Mapping[str, Any]]]:
    """Return the records of each paper by the name of its folder, of which `papers` holds one for each.

    Raises:
        DataError: A record is damaged.
    """
    folders = sorted(path.parent for path in papers.glob(f"*/{FOLDER}"))
    return {folder.name: list(read_records(folder).values()) for folder in folders}


def build_overview(papers: Papers) -> str:
    """Return the page of the claims of every paper, in Markdown."""
    records = [record for paper in papers.values() for record in paper]
    written = "Written by `make api` from the records in `*/results/`, not by hand."
    parts = ["# Claims", "", written, "", _count(records), "", _READING, "", *_show_doses(papers)]
    for folder, paper in papers.items():
        rows = tuple(row for record in paper for row in _list_rows(record, folder))
        links = f"[Results]({folder}/{PAGE}), [deviations]({folder}/DEVIATIONS.md)."
        parts += [f"## {folder}", "", links, "", Grid("Claims", _HEADER, rows, "llrrrll").to_markdown(), ""]
    parts += ["## Not run", "", _WHY_ABSENT, "", _list_absent({record["id"] for record in records}).to_markdown(), ""]
    return "\n".join(parts)


def read_contrast(found: Mapping[str, Any] | str, published: Mapping[str, float | None]) -> Measured | None:
    """Return a contrast of a record, or None where it has no interval.

    Args:
        found: The contrast in the record: numbers, or text in records of version 0.1.
        published: What the paper found for each contrast, as a share for scores.

    Example:
        >>> read_contrast("em over plain: -0.30 points [-0.71, +0.12], p = 0.362", {"em over plain": 0.0095}).published
        0.95
    """
    if isinstance(found, str):
        match = _TEXT.fullmatch(found)
        if match is None:
            return None
        value, low, high = (float(match[name]) for name in ("value", "low", "high"))
        points, p_value = match["points"] is not None, None if match["p"] is None else float(match["p"])
        gain = _scale(published.get(match["contrast"]), points)
        return Measured(match["contrast"], value, low, high, points, p_value, published=gain)
    if found.get("value") is None or found.get("low") is None or found["high"] is None:
        return None
    points = is_shown_in_points(found["measure"])
    names = ("value", "low", "high", "detectable", "detectable_in_family", "published")
    numbers: dict[str, Any] = {name: _scale(found[name], points) for name in names}
    return Measured(found["contrast"], **numbers, points=points, p=found["p_holm"], verdict=found["verdict"])


def choose_deciding(contrasts: Sequence[Measured], verdict: str) -> Measured | None:
    """Return the contrast that decides a claim: one with its verdict, and of several the furthest from holding.

    A claim is contradicted by the contrast with the smallest p-value below zero, and otherwise held up by the one with
    the largest p-value.
    """
    verdict = _omit_reason(verdict)
    own = [one for one in contrasts if _omit_reason(one.verdict) == verdict] or list(contrasts)

    def order(one: Measured) -> tuple[float, float]:
        return 1.0 if one.p is None else one.p, -one.value

    if verdict == CONTRADICTED:
        return min([one for one in own if one.value < 0] or own, key=order, default=None)
    return max(own, key=order, default=None)


def _decide(record: Mapping[str, Any], claim: Mapping[str, Any]) -> Measured | None:
    """Return the contrast that decides a claim; where other data stand in for the paper's, its name says so."""
    # later records hold it themselves
    published = {} if record.get("format") == FORMAT else _find_published(record["id"], record["scale"])
    found = [one for found in claim["contrasts"] if (one := read_contrast(found, published)) is not None]
    for match in filter(None, map(_STAND_IN.match, record.get("described", ()))):
        old, new = f" in {match['part']}", f" in {match['part']} ({match['data']})"
        found = [replace(one, contrast=one.contrast.replace(old, new)) for one in found]
    return choose_deciding(found, claim["verdict"])


def _omit_reason(verdict: str) -> str:
    """Return a verdict without why there is none, or what was left out."""
    return verdict.partition(" (")[0]


def _scale(value: float | None, points: bool) -> float | None:
    return None if value is None else value * 100 if points else value


def _link(record: Mapping[str, Any], folder: str) -> str:
    """Return where a record's section is, with the anchor that GitHub makes from its heading."""
    anchor = re.sub(r"[^\w\- ]", "", name_section(record).lower()).replace(" ", "-")
    return f"{folder}/{PAGE}#{anchor}"


def _show(found: Measured) -> Number:
    digits = choose_digits(2, found.low, found.high) if found.points else None
    return Number(found.value, found.low, found.high, digits=digits, signed=True)


def _show_detectable(found: Measured) -> Cell:
    if found.detectable is None:
        return NONE
    # what is not tested is in no family
    most = found.detectable if found.detectable_in_family is None else found.detectable_in_family
    return Number(None, found.detectable, most, digits=choose_digits(2, found.detectable) if found.points else None)


def _list_rows(record: Mapping[str, Any], folder: str) -> Iterator[tuple[Cell, ...]]:
    link = Link(record["id"], to=_link(record, folder))
    for claim in record["claims"]:
        verdict = claim["verdict"] if record.get("format") == FORMAT else f"{claim['verdict']} (version 0.1)"
        one = _decide(record, claim)
        cells: tuple[Cell, ...] = (NONE,) * 4
        if one is not None:
            known = one.published
            gain = NONE if known is None else Number(known, digits=2 if one.points else None, signed=True)
            cells = one.contrast, gain, _show(one), _show_detectable(one)
        yield claim["statement"], *cells, verdict, link


# a record has many claims
@cache
def _find_published(name: str, scale: str) -> dict[str, float | None]:
    """Return what the paper found for each contrast of a reproduction; nothing where it is not ours any more."""
    reproduction = REPRODUCTIONS.get(name)
    if reproduction is None or scale not in reproduction.scales:
        return {}
    claims = reproduction.claims_at(scale, named_task(reproduction.task).scales)
    return {str(one): one.published for claim in claims for one in claim.contrasts}


def _show_doses(papers: Papers) -> list[str]:
    """Return the pictures of the studies of doses: where diverse heads help, and where they do not."""
    lines: list[str] = []
    for folder, paper in papers.items():
        for record in (record for record in paper if record["id"].startswith(DOSES)):
            for picture in record["pictures"]:
                # what it shows is the same in each
                lines = lines or ["## Doses", "", picture["caption"], ""]
                lines += [f"[{record['title']}]({_link(record, folder)}):", ""]
                lines += [f"![{picture['alt']}]({folder}/{FOLDER}/{picture['file']})", ""]
    return lines


def _count(records: Sequence[Mapping[str, Any]]) -> str:
    """Return how many comparisons ended in which verdict, each counted once; of version 0.1 how many claims."""
    groups: dict[tuple[bool, str], list[Mapping[str, Any]]] = {}
    for record in records:
        whose = "Our own studies" if record["source"] == OWN else "The three papers"
        groups.setdefault((record.get("format") != FORMAT, whose), []).append(record)
    lines = []
    for (earlier, whose), members in sorted(groups.items()):
        claims = [claim for record in members for claim in record["claims"]]
        if earlier:
            counts = {"claims": Counter(_omit_reason(claim["verdict"]) for claim in claims)}
        else:
            counts = _count_comparisons(claims)
        told = []
        for what, verdicts in counts.items():
            each = "; ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
            told += [f"{verdicts.total()} {what} ({each})"] if verdicts else []
        judged = "version 0.1" if earlier else "calibrated tests"
        lines.append(f"{whose}, judged by {judged}, {len(members)} tables and figures: {', '.join(told)}.")
    return "\n\n".join(lines)


def _count_comparisons(claims: Sequence[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """Return the verdicts of each kind of comparison; those with the same numbers are one."""
    # of the score itself a contrast has no measure
    known = {
        (found["kind"], found["measure"], tuple(found["by_seed"])): _omit_reason(found["verdict"])
        for claim in claims
        for found in claim["contrasts"]
        if found["kind"] in _KINDS and found["verdict"]
    }
    return {what: Counter(words for key, words in known.items() if key[0] == kind) for kind, what in _KINDS.items()}


def _list_absent(known: set[str]) -> Grid:
    rows = []
    for name, reproduction in REPRODUCTIONS.items():
        if name in known:
            continue
        scale = "cpu" if "cpu" in reproduction.scales else reproduction.scales[0]
        arms = reproduction.arms_at(scale, named_task(reproduction.task).scales)
        runs = f"{sum(map(len, arms.values()))} arms x {choose_seeds(scale)} seeds of {reproduction.task} at {scale}"
        rows.append((name, reproduction.title, runs))
    return Grid("Tables and figures without a record", ("id", "what it shows", "its runs"), tuple(rows), "lll")
