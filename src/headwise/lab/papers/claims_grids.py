"""Claims as JSON data, and the grids of claims and of what each contrast could have shown."""

from collections.abc import Mapping, Sequence
from typing import Any

from headwise.lab.analyses.shrinking import SCORE
from headwise.lab.papers.judge import Found, Judged
from headwise.lab.results.cells import NONE, Cell, Grid, Line, Number, choose_digits, show_number
from headwise.lab.results.table import record_judgement

POWER = "What each contrast could have shown"
POWER_HEADER = (
    "contrast",
    "family",
    "detectable",
    "published",
    "in our interval",
    "p of lying outside half of it",
    "verdict",
)


def build_claims_grids(claims: Sequence[Mapping[str, Any]]) -> tuple[Grid, ...]:
    """Return claims with findings and verdicts, and what each contrast could have shown, from their records."""
    rows = []
    for claim in claims:
        lines = (str(Line.from_record(one)) for one in claim.get("shown", ()))
        rows.append(
            (claim["statement"], "; ".join([*map(_write_contrast, claim["contrasts"]), *lines]), claim["verdict"])
        )
    # each contrast once; records of the first format hold text alone
    tested = {
        one["contrast"]: _list_power(one)
        for claim in claims
        for one in claim["contrasts"]
        if not isinstance(one, str) and one.get("family")
    }
    grids = (
        Grid("Claims", ("claim", "here", "verdict"), tuple(rows), "lll"),
        Grid(POWER, POWER_HEADER, tuple(tested.values()), "llrrlrl"),
    )
    return tuple(grid for grid in grids if grid.rows)


def record_claims(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Return claims with their findings and verdicts as JSON data."""
    return [
        {
            "statement": one.claim.statement,
            "verdict": one.verdict,
            "contrasts": [_record_contrast(found) for found in one.found],
            "shown": [line.to_record() for line in one.shown],
        }
        for one in judged
    ]


def _record_contrast(found: Found) -> dict[str, Any]:
    contrast = found.contrast
    said = {"contrast": str(contrast), "arm": contrast.arm, "against": contrast.against, "parts": list(contrast.parts)}
    said |= {"measure": contrast.measure, "kind": contrast.kind, "verdict": found.verdict, "reason": found.reason}
    return said if found.judgement is None else said | record_judgement(found.judgement)


def _write_contrast(found: Mapping[str, Any] | str) -> str:
    if isinstance(found, str):
        return found
    if "value" not in found:
        return f"{found['contrast']}: {found['reason'].removeprefix('was ')}"
    alone = found["items"] == len(found["by_seed"]) == 1
    shown = _show_difference(found, found["value"], *((None, None) if alone else (found["low"], found["high"])))
    p_value = "" if (p := found["p_holm"]) is None else f", p = {p:.3f}" if p >= 0.001 else ", p < 0.001"
    note = f" ({found['note']})" if found["note"] else " (one run)" if alone else ""
    return f"{found['contrast']}: {shown}{p_value}{note}"


def _show_difference(found: Mapping[str, Any], value: float | None, *ends: float | None, signed: bool = True) -> Cell:
    """Return a difference in points, or in the units of a number of each run."""
    if value is None and (not ends or None in ends):
        return NONE
    low, high = ends or (None, None)
    if is_shown_in_points(found["measure"]):
        # what is detectable alone and in its family is no interval
        digits = choose_digits(2, *((low, high) if signed else (low,)), factor=100)
        return Number(value, low, high, digits=digits, factor=100, signed=signed, form="{} points" if signed else "{}")
    return Number(value, low, high, signed=signed)


def is_shown_in_points(measure: str | None) -> bool:
    """Return whether differences in a number, None for the metric, are shown times 100, as those of scores are.

    >>> is_shown_in_points("score_heads_50"), is_shown_in_points("effective_heads")
    (True, False)
    """
    return measure is None or measure.startswith(f"{SCORE}_")


def _list_power(found: Mapping[str, Any]) -> tuple[Cell, ...]:
    inside = {None: NONE, True: "yes", False: "no"}[found["holds_published"]]
    return (
        found["contrast"],
        found["kind"],
        _show_difference(found, None, found["detectable"], found["detectable_in_family"], signed=False),
        _show_difference(found, found["published"]),
        inside,
        show_number(found["p_equivalence"], 3),
        found["verdict"],
    )
