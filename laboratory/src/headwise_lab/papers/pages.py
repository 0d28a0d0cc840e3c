"""The pages of a paper, rendered from its records: RESULTS.md, and one page of details for each record.

Whether training was long enough: the score of plain on dev by epoch, and what the last third of epochs added.

Claims as JSON data, and the grids of claims and of what each contrast could have shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import DataError
from headwise_lab.analyses.shrinking import SCORE
from headwise_lab.experiment.run_folder import read_json
from headwise_lab.papers.claims import Found, Judged
from headwise_lab.papers.reproduction import OWN, describe_lack
from headwise_lab.results.cells import NONE, Cell, Grid, Line, Number, choose_digits, show_number
from headwise_lab.results.grids import NOTE, describe_doubt
from headwise_lab.results.statistics import Estimate, estimate
from headwise_lab.results.table import PLAIN, record_judgement

# Fewer epochs have no last third.
EPOCHS = 3


def describe_plateau(table: Mapping[str, Any]) -> str:
    """Return the scores of plain on dev by epoch, from the record of a table; "" where there are too few epochs."""
    curves = _read_curves(table)
    if curves is None:
        return ""
    scores = ", ".join(str(Number(value, digits=1, factor=100)) for value in curves.mean(axis=0))
    return f"Score of plain on dev after each epoch, mean over seeds: {scores}. {_describe(curves)}"


def describe_rise(table: Mapping[str, Any]) -> str:
    """Return what the last third of the epochs added to plain's best score on dev, and whether it is above zero."""
    curves = _read_curves(table)
    return "" if curves is None else _describe(curves)


def find_rise(curves: NDArray[np.float64]) -> Estimate:
    """Return the best score of the last third of the epochs, rounded down, less the best one before, over seeds.

    Args:
        curves: Scores on dev, [S, E], one row per seed.

    >>> find_rise(np.array([[0.2, 0.5, 0.6], [0.3, 0.6, 0.5]])).by_seed
    (0.09999999999999998, -0.09999999999999998)
    """
    last = curves.shape[1] // 3
    return estimate((curves[:, -last:].max(axis=1) - curves[:, :-last].max(axis=1))[:, None])


def _describe(curves: NDArray[np.float64]) -> str:
    found, epochs = find_rise(curves), curves.shape[1]
    last = "The last epoch" if epochs // 3 == 1 else f"The last {epochs // 3} of {epochs} epochs"
    ends = (None, None) if found.is_one_number else (found.low, found.high)
    added = Number(found.value, *ends, digits=2, factor=100, signed=True)
    state = "" if found.is_one_number else "; it still rose" if found.low > 0.0 else "; no further rise is shown"
    return f"{last} added {added} points to plain's best score on dev{state}."


def _read_curves(table: Mapping[str, Any]) -> NDArray[np.float64] | None:
    runs = next((row["runs"] for row in table["rows"] if row["arm"] == PLAIN), [])
    lengths = {len(run["dev"]) for run in runs}
    return np.array([run["dev"] for run in runs]) if len(lengths) == 1 and min(lengths) >= EPOCHS else None


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
        lines = [*map(_write_contrast, claim["contrasts"]), *map(str, map(Line.from_record, claim.get("shown", ())))]
        rows.append((claim["statement"], "; ".join(lines), claim["verdict"]))
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


FOLDER = "results"
PAGE = "RESULTS.md"
# Records of the first format hold text, judged by another method.
FORMAT = 2
# Of runs that are not finished; the record has all.
MOST_NAMED = 8
INTRODUCTION = """# Results

Written by `headwise reproduce` from the records in `results/`, not by hand. Each section has the claims, the paper's
numbers and the figures; the details have every table, the data and the versions. How comparisons are judged is on the
[page on statistics](../../../docs/statistics.md); what differs from the paper is in [DEVIATIONS](DEVIATIONS.md).
"""
OTHER = "Ours are on other data or another size: only the order of the rows can be compared."
# Where arms are columns.
OTHER_GROUPED = (
    "Ours are on other data or another size: compare the order of the arms within a task or a mean, and no number "
    "with one of the paper's."
)
EARLIER = (
    "**Judged by version 0.1**, before the tests were calibrated: by a bootstrap over seeds and test items that finds "
    "less than its level allows, with one family of Holm's adjustment for all contrasts. Brackets are 95 % intervals "
    "over seeds and test items, ± is half of one; differences are in points."
)
# Where the description of data goes on to its sizes.
_SIZES = re.compile(r"\n|: (?=\d)")
SAME = "Ours are on the data and the size that the paper names."


def read_records(paper: Path) -> dict[Path, Mapping[str, Any]]:
    """Return the records of a paper by path, in the order of their names.

    Raises:
        DataError: There is no record, or one is damaged; the message names it.
    """
    paths = sorted((paper / FOLDER).glob("*.json"))
    if not paths:
        raise DataError(f"{paper / FOLDER} holds no record; `headwise reproduce` writes them.")
    records = {path: read_json(path) for path in paths}
    for path, record in records.items():
        if not isinstance(record, dict):
            raise DataError(f"{path} is not the record of a reproduction (no JSON object); make it again.")
    return records


def render(paper: Path) -> dict[Path, str]:
    """Return the text of every page of a paper by its path, RESULTS.md first.

    Raises:
        DataError: There is no record, or one is damaged; the message names it.
    """
    sections, details = [INTRODUCTION], {}
    for path, found in read_records(paper).items():
        try:
            sections.append(_render_section(found, path.with_suffix(".md").name))
            details[path.with_suffix(".md")] = _render_details(found)
        except (KeyError, TypeError) as error:
            raise DataError(f"{path} is not the record of a reproduction ({error}); make it again.") from None
    return {paper / PAGE: "\n".join(sections), **details}


def name_section(found: Mapping[str, Any]) -> str:
    """Return the heading of a record in RESULTS.md."""
    tuned = ", tuned" if found.get("tuned") else ""
    return f"{found['id']} at scale {found['scale']}{tuned}: {found['title']}"


def _render_section(found: Mapping[str, Any], details: str) -> str:
    parts = [f"## {name_section(found)}", f"Source: {found['source']}. [Details]({FOLDER}/{details})."]
    if found.get("format") != FORMAT:
        parts.append("**Judged by version 0.1**, before the tests were calibrated.")
    if missing := found["missing"]:
        more = f", and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        parts.append(f"**Not finished: {len(missing)} runs** ({', '.join(missing[:MOST_NAMED])}{more}).")
    parts.append(describe_lack(found.get("left_out", ()), found.get("unasked", ())))
    for part, table in found.get("tables", {}).items():
        said = describe_doubt(table["doubt"]) if table.get("doubt") else "", describe_rise(table)
        parts += [f"{_name(part)}{one}" for one in said if one]
    parts += [grid.to_markdown() for grid in build_claims_grids(found["claims"])[:1]]
    if found.get("published"):
        other = OTHER_GROUPED if found.get("grouped") else OTHER
        ours = SAME if found["comparable"] else f"{other}{_name_data(found)}"
        parts += [Grid.from_record(found["published"]).to_markdown(), ours]
    for picture in found.get("pictures", ()):
        parts += [f"![{picture['alt']}]({FOLDER}/{picture['file']})", picture["caption"]]
    return _join(parts)


def _render_details(found: Mapping[str, Any]) -> str:
    extra = found["extra"]
    commands = "\n".join(f"$ {line}" for line in found["command"].splitlines())
    curves = {part: text for part, table in found.get("tables", {}).items() if (text := describe_plateau(table))}
    grids = [*build_claims_grids(found["claims"])[1:], *map(Grid.from_record, found["grids"])]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    initial = f" Begins with {found['begun']}." if found.get("begun") else ""
    metric = f"Primary metric, named beforehand: {found['primary']}."
    return _join(
        [
            f"# {name_section(found)}",
            f"Source: {found['source']}. [All results](../{PAGE}).",
            f"{extra[0].upper()}{extra[1:]}." if found["source"] == OWN else f"Beyond the paper: {extra}.",
            f"```console\n{commands}\n```",
            *_list("Data:", found.get("described", ())),
            *_list("Training:", [f"{_name(part)}{text}" for part, text in curves.items()]),
            *(grid.to_markdown() for grid in grids),
            NOTE if found.get("format") == FORMAT else EARLIER,
            f"{metric} Data {found['data']}.{initial} {versions}.",
        ]
    )


def _list(title: str, items: Sequence[str]) -> list[str]:
    return [title, "\n".join(f"* {item}" for item in items)] if items else []


def _join(parts: Sequence[str]) -> str:
    return "\n\n".join(filter(None, parts)) + "\n"


def _name_data(found: Mapping[str, Any]) -> str:
    """Return what our data are, without their sizes; "" where the task knows no more than that they are texts."""
    names = [_SIZES.split(described)[0] for described in found.get("described", ())]
    named = [name for name in names if not name.endswith("texts")]
    return f" Our data: {'; '.join(named)}." if named else ""


def _name(part: str) -> str:
    return f"{part}: " if part else ""
