"""One page of all claims of all papers: what each found, what we found, and how much our runs could have shown.

The pictures of doses come first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headwise_lab.experiment.registry import named_task
from headwise_lab.papers.claims import EFFICACY, MANIPULATION
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.pages import FOLDER, FORMAT, PAGE, is_shown_in_points, name_section, read_records
from headwise_lab.papers.reproduction import OWN
from headwise_lab.papers.run import choose_seeds
from headwise_lab.results.cells import NONE, Cell, Grid, Link, Number, choose_digits
from headwise_lab.results.statistics import ORDER

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
_CONTRADICTED = ORDER[0]
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


def build_overview(papers: Path) -> str:
    """Return the page of the claims of every paper below a folder, in Markdown.

    Raises:
        DataError: A record is damaged.
    """
    found = _read_papers(papers)
    records = [record for paper in found.values() for record in paper.values()]
    parts = ["# Claims", "", *_introduce(records), "", *_show_doses(found)]
    for folder, paper in found.items():
        rows = [row for record in paper.values() for row in _list_rows(record, folder.name)]
        links = f"[Results]({folder.name}/{PAGE}), [deviations]({folder.name}/DEVIATIONS.md)."
        parts += [f"## {folder.name}", "", links, "", Grid("Claims", _HEADER, tuple(rows), "llrrrll").to_markdown(), ""]
    parts += ["## Not run", "", _WHY_ABSENT, "", _list_absent({record["id"] for record in records}).to_markdown(), ""]
    return "\n".join(parts)


def summarize_claims(papers: Path, most: int = 4) -> str:
    """Return how claims ended, and the scores that moved furthest among those with a verdict either way, in Markdown.

    Claims of version 0.1 are counted and not listed.

    Args:
        papers: Folder with a folder for each paper.
        most: How many contrasts of each verdict to list at the most, the largest of each table.

    Raises:
        DataError: A record is damaged.
    """
    records = _read_papers(papers)
    lines = [_count([record for paper in records.values() for record in paper.values()])]
    for verdict in (ORDER[-1], _CONTRADICTED):
        found = [
            (one, record["id"], f"{folder.name}/{PAGE}#{_make_anchor(record)}")
            for folder, paper in records.items()
            for record in paper.values()
            for claim in record["claims"]
            if record.get("format") == FORMAT
            and _omit_reason(claim["verdict"]) == verdict
            and (one := choose_deciding(_read_contrasts(record, claim), verdict)) is not None
            and one.points
        ]
        # the largest of each table, the later ones of a dict being kept
        largest = {to: (one, name) for one, name, to in sorted(found, key=lambda item: abs(item[0].value))}
        shown = [
            f"[{name}: {one.contrast}]({papers.parent.name}/{papers.name}/{to}) {_show(one)}"
            for to, (one, name) in sorted(largest.items(), key=lambda item: -abs(item[1][0].value))[:most]
        ]
        if shown:
            lines.append(f"The largest {verdict}, one a table, in points: {'; '.join(shown)}.")
    return "\n\n".join(lines)


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
        points, gain = match["points"] is not None, published.get(match["contrast"])
        value, low, high = (float(match[name]) for name in ("value", "low", "high"))
        p_value = None if match["p"] is None else float(match["p"])
        return Measured(match["contrast"], value, low, high, points, p_value, published=_scale(gain, points))
    if found.get("value") is None or found.get("low") is None:
        return None
    points = is_shown_in_points(found["measure"])
    value, low, high, alone, in_family, gain = (
        _scale(found[name], points)
        for name in ("value", "low", "high", "detectable", "detectable_in_family", "published")
    )
    if value is None or low is None or high is None:
        return None
    words, p_value = found["verdict"], found["p_holm"]
    return Measured(found["contrast"], value, low, high, points, p_value, alone, in_family, gain, verdict=words)


def choose_deciding(contrasts: Sequence[Measured], verdict: str) -> Measured | None:
    """Return the contrast that decides a claim: one with its verdict, and of several the furthest from holding.

    A claim is contradicted by the contrast with the smallest p-value below zero, and otherwise held up by the one with
    the largest p-value.
    """
    verdict = _omit_reason(verdict)
    own = [one for one in contrasts if _omit_reason(one.verdict) == verdict] or list(contrasts)
    if verdict == _CONTRADICTED:
        own = [one for one in own if one.value < 0] or own
        return min(own, key=_order, default=None)
    return max(own, key=_order, default=None)


def _omit_reason(verdict: str) -> str:
    """Return a verdict without why there is none, or what was left out."""
    return verdict.partition(" (")[0]


def _order(found: Measured) -> tuple[float, float]:
    return 1.0 if found.p is None else found.p, -found.value


def _scale(value: float | None, points: bool) -> float | None:
    return None if value is None else value * 100 if points else value


def _read_papers(papers: Path) -> dict[Path, dict[Path, Mapping[str, Any]]]:
    return {folder: read_records(folder) for folder in sorted(path.parent for path in papers.glob(f"*/{FOLDER}"))}


def _make_anchor(record: Mapping[str, Any]) -> str:
    """Return the anchor of a record's section, as GitHub makes it from the heading."""
    return re.sub(r"[^\w\- ]", "", name_section(record).lower()).replace(" ", "-")


def _read_contrasts(record: Mapping[str, Any], claim: Mapping[str, Any]) -> list[Measured]:
    published = _find_published(record)
    found = [one for found in claim["contrasts"] if (one := read_contrast(found, published)) is not None]
    named = {match["part"]: match["data"] for text in record.get("described", ()) if (match := _STAND_IN.match(text))}
    for part, data in named.items():
        found = [replace(one, contrast=one.contrast.replace(f" in {part}", f" in {part} ({data})")) for one in found]
    return found


def _show(found: Measured) -> Number:
    digits = choose_digits(2, found.low, found.high) if found.points else None
    return Number(found.value, found.low, found.high, digits=digits, signed=True)


def _show_detectable(found: Measured) -> Cell:
    if found.detectable is None:
        return NONE
    # what is not tested is in no family
    most = found.detectable if found.detectable_in_family is None else found.detectable_in_family
    return Number(None, found.detectable, most, digits=choose_digits(2, found.detectable) if found.points else None)


def _list_rows(record: Mapping[str, Any], paper: str) -> Iterable[tuple[Cell, ...]]:
    link = Link(record["id"], to=f"{paper}/{PAGE}#{_make_anchor(record)}")
    for claim in record["claims"]:
        one = choose_deciding(_read_contrasts(record, claim), claim["verdict"])
        verdict = claim["verdict"] if record.get("format") == FORMAT else f"{claim['verdict']} (version 0.1)"
        if one is None:
            yield claim["statement"], NONE, NONE, NONE, NONE, verdict, link
            continue
        digits = 2 if one.points else None
        gain = NONE if one.published is None else Number(one.published, digits=digits, signed=True)
        yield claim["statement"], one.contrast, gain, _show(one), _show_detectable(one), verdict, link


def _find_published(record: Mapping[str, Any]) -> dict[str, float | None]:
    """Return what the paper found for each contrast of a reproduction; nothing where it is not ours any more."""
    reproduction, scale = REPRODUCTIONS.get(record["id"]), record["scale"]
    if reproduction is None or scale not in reproduction.scales:
        return {}
    claims = reproduction.claims_at(scale, named_task(reproduction.task).scales)
    return {str(one): one.published for claim in claims for one in claim.contrasts}


def _introduce(records: Sequence[Mapping[str, Any]]) -> list[str]:
    return ["Written by `make api` from the records in `*/results/`, not by hand.", "", _count(records), "", _READING]


def _show_doses(papers: Mapping[Path, Mapping[Path, Mapping[str, Any]]]) -> list[str]:
    """Return the pictures of the studies of doses: where diverse heads help, and where they do not."""
    found = [(folder.name, record) for folder, paper in papers.items() for record in paper.values()]
    shown = [
        (folder, record, picture)
        for folder, record in found
        if record["id"].startswith(DOSES)
        for picture in record["pictures"]
    ]
    # what it shows is the same in each
    lines = ["## Doses", "", shown[0][2]["caption"], ""] if shown else []
    for folder, record, picture in shown:
        lines += [f"[{record['title']}]({folder}/{PAGE}#{_make_anchor(record)}):", ""]
        lines += [f"![{picture['alt']}]({folder}/{FOLDER}/{picture['file']})", ""]
    return lines


def _count(records: Sequence[Mapping[str, Any]]) -> str:
    """Return how many comparisons ended in which verdict, each counted once; of version 0.1 how many claims."""
    groups: dict[tuple[bool, str], list[Mapping[str, Any]]] = {}
    for record in records:
        whose = "Our own studies" if record["source"] == OWN else "The three papers"
        groups.setdefault((record.get("format") != FORMAT, whose), []).append(record)
    lines = []
    for (earlier, whose), those in sorted(groups.items()):
        judged = "version 0.1" if earlier else "calibrated tests"
        counts = {"claims": _count_verdicts(those)} if earlier else _count_comparisons(those)
        told = [
            f"{verdicts.total()} {what} ({_list_counts(verdicts)})" for what, verdicts in counts.items() if verdicts
        ]
        lines.append(f"{whose}, judged by {judged}, {len(those)} tables and figures: {', '.join(told)}.")
    return "\n\n".join(lines)


def _count_comparisons(records: Sequence[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """Return the verdicts of each kind of comparison; those with the same numbers are one."""
    # of the score itself a contrast has no measure
    known: dict[tuple[str, str | None, tuple[float, ...]], str] = {}
    for found in (one for record in records for claim in record["claims"] for one in claim["contrasts"]):
        if found["kind"] in _KINDS and found["verdict"]:
            known[found["kind"], found["measure"], tuple(found["by_seed"])] = _omit_reason(found["verdict"])
    return {what: Counter(words for key, words in known.items() if key[0] == kind) for kind, what in _KINDS.items()}


def _count_verdicts(records: Sequence[Mapping[str, Any]]) -> Counter[str]:
    return Counter(_omit_reason(claim["verdict"]) for record in records for claim in record["claims"])


def _list_counts(verdicts: Counter[str]) -> str:
    return "; ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())


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
