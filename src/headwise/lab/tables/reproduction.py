"""A reproduction: the runs behind a paper's table or figure, its claims, and the record kept of them.

Owns the record (JSON beside a paper's notes) and the rendering of all records of a paper to RESULTS.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.checks import DataError
from headwise.lab.claims import Claim, Found, Judged, judge
from headwise.lab.grids import NOTE, Grid, grids, markdown_of
from headwise.lab.results import read_results
from headwise.lab.runs import prepare_folder, read_json, write_json, write_text
from headwise.lab.table import make_table

__all__ = ["Reproduction", "record", "render", "write_records"]

FOLDER = "results"
PAGE = "RESULTS.md"
INTRODUCTION = """# Results

Written by `headwise reproduce` from the records in `results/`, not by hand. How each comparison is judged stands in the
laboratory's page of the documentation; what differs from the paper, in `DEVIATIONS.md` beside this.
"""


@dataclass(frozen=True)
class Reproduction:
    """What stands behind one table or figure of a paper.

    Attributes:
        id: The paper's short name and the table's or figure's, for example "diversify/figure-4".
        title: What it shows.
        source: Where in the paper, and which of its numbers there are to compare with.
        task: The task of the laboratory.
        arms: The arms, as `--arms` takes them.
        extra: What is run beyond the paper, and why.
        claims: What the paper says of it.
    """

    id: str
    title: str
    source: str
    task: str
    arms: str
    extra: str
    claims: tuple[Claim, ...]

    def file(self, scale: str) -> str:
        """Return the name of the record of this reproduction at a scale."""
        return f"{self.id.partition('/')[2]}-{scale}.json"


def record(reproduction: Reproduction, out: Path, command: str) -> dict[str, Any]:
    """Return the record of a reproduction from the folder of its comparison: everything RESULTS.md shows.

    Raises:
        DataError: The folder holds no comparison, or a damaged one.
    """
    results = read_results(out)
    table = make_table(results)
    return {
        "id": reproduction.id,
        "title": reproduction.title,
        "source": reproduction.source,
        "extra": reproduction.extra,
        "scale": table.scale,
        "data": table.data,
        "primary": table.primary,
        "command": command,
        "claims": [_claim(judged) for judged in judge(reproduction.claims, results)],
        "grids": [_grid(grid) for grid in grids(table)],
        "missing": list(table.missing),
        "versions": dict(table.versions),
    }


def write_records(reproduction: Reproduction, out: Path, paper: Path, command: str) -> Path:
    """Write the record under `paper`/results and render `paper`/RESULTS.md anew; return the page's path."""
    found = record(reproduction, out, command)
    prepare_folder(paper / FOLDER)
    write_json(paper / FOLDER / reproduction.file(found["scale"]), found)
    write_text(paper / PAGE, render(paper))
    return paper / PAGE


def render(paper: Path) -> str:
    """Return RESULTS.md of a paper from its records, in the order of their names.

    Raises:
        DataError: There is no record, or one is damaged; the message names it.
    """
    paths = sorted((paper / FOLDER).glob("*.json"))
    if not paths:
        raise DataError(f"{paper / FOLDER} holds no record; `headwise reproduce` writes them.")
    parts = [INTRODUCTION]
    for path in paths:
        try:
            parts.append(_section(read_json(path)))
        except (KeyError, TypeError) as error:
            raise DataError(f"{path} is not the record of a reproduction ({error}); make it again.") from None
    return "\n".join(parts)


def _section(found: Mapping[str, Any]) -> str:
    lines = [f"## {found['id']} at scale {found['scale']}: {found['title']}", "", f"Source: {found['source']}."]
    lines += ["", f"Beyond the paper: {found['extra']}.", "", "```console", f"$ {found['command']}", "```", ""]
    if found["missing"]:
        lines += [f"**Not finished: {len(found['missing'])} runs** ({', '.join(found['missing'])}).", ""]
    claims = Grid(
        "The paper's claims",
        ("claim", "here", "verdict"),
        tuple((c["statement"], "; ".join(c["contrasts"]), c["verdict"]) for c in found["claims"]),
        "lll",
    )
    tables = [Grid(g["title"], tuple(g["header"]), tuple(map(tuple, g["rows"])), g["align"]) for g in found["grids"]]
    for grid in (claims, *tables):
        lines += [markdown_of(grid), ""]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines += [NOTE, "", f"Primary metric, named beforehand: {found['primary']}. Data {found['data']}. {versions}.", ""]
    return "\n".join(lines)


def _claim(judged: Judged) -> dict[str, Any]:
    return {
        "statement": judged.claim.statement,
        "verdict": judged.verdict,
        "contrasts": [_contrast(found) for found in judged.found],
    }


def _contrast(found: Found) -> str:
    if found.estimate is None or found.adjusted is None:
        return f"{found.contrast}: not run"
    value, low, high = (100 * number for number in (found.estimate.value, found.estimate.low, found.estimate.high))
    return f"{found.contrast}: {value:+.2f} points [{low:+.2f}, {high:+.2f}], p = {found.adjusted:.3f}"


def _grid(grid: Grid) -> dict[str, Any]:
    return {"title": grid.title, "header": list(grid.header), "rows": [list(r) for r in grid.rows], "align": grid.align}
