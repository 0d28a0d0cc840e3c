"""The pages of a paper, rendered from its records: RESULTS.md, and one page of details for each record."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.errors import DataError
from headwise.lab.experiment.run_folder import read_json
from headwise.lab.papers.claims_grids import build_claims_grids
from headwise.lab.papers.plateau import describe_plateau, describe_rise
from headwise.lab.papers.reproduction import OWN, describe_lack
from headwise.lab.results.cells import Grid
from headwise.lab.results.grids import NOTE, describe_doubt

FOLDER = "results"
PAGE = "RESULTS.md"
# Records of the first format hold text, judged by another method.
FORMAT = 2
# Of runs that are not finished; the record has all.
MOST_NAMED = 8
INTRODUCTION = """# Results

Written by `headwise reproduce` from the records in `results/`, not by hand. Each section has the claims, the paper's
numbers and the figures; the details have every table, the data and the versions. How comparisons are judged is on the
[page on statistics](../../docs/statistics.md); what differs from the paper is in [DEVIATIONS](DEVIATIONS.md).
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
    lines = [f"## {name_section(found)}", "", f"Source: {found['source']}. [Details]({FOLDER}/{details}).", ""]
    if found.get("format") != FORMAT:
        lines += ["**Judged by version 0.1**, before the tests were calibrated.", ""]
    if found["missing"]:
        first, more = found["missing"][:MOST_NAMED], len(found["missing"]) - MOST_NAMED
        named = ", ".join(first) + (f", and {more} more" if more > 0 else "")
        lines += [f"**Not finished: {len(found['missing'])} runs** ({named}).", ""]
    if lack := describe_lack(found.get("left_out", ()), found.get("unasked", ())):
        lines += [lack, ""]
    for part, table in found.get("tables", {}).items():
        doubt, rise = table.get("doubt"), describe_rise(table)
        lines += [f"{_name(part)}{describe_doubt(doubt)}", ""] if doubt else []
        lines += [f"{_name(part)}{rise}", ""] if rise else []
    for grid in build_claims_grids(found["claims"])[:1]:
        lines += [grid.to_markdown(), ""]
    if found.get("published"):
        other = OTHER_GROUPED if found.get("grouped") else OTHER
        ours = SAME if found["comparable"] else f"{other}{_name_data(found)}"
        lines += [Grid.from_record(found["published"]).to_markdown(), "", ours, ""]
    for picture in found.get("pictures", ()):
        lines += [f"![{picture['alt']}]({FOLDER}/{picture['file']})", "", picture["caption"], ""]
    return "\n".join(lines)


def _render_details(found: Mapping[str, Any]) -> str:
    lines = [f"# {name_section(found)}", "", f"Source: {found['source']}. [All results](../{PAGE})."]
    commands = [f"$ {line}" for line in found["command"].splitlines()]
    lines += ["", _describe_extra(found), "", "```console", *commands, "```", ""]
    if found.get("described"):
        lines += ["Data:", "", *(f"* {one}" for one in found["described"]), ""]
    curves = {part: text for part, table in found.get("tables", {}).items() if (text := describe_plateau(table))}
    if curves:
        lines += ["Training:", "", *(f"* {_name(part)}{text}" for part, text in curves.items()), ""]
    for grid in build_claims_grids(found["claims"])[1:]:
        lines += [grid.to_markdown(), ""]
    for grid in found["grids"]:
        lines += [Grid.from_record(grid).to_markdown(), ""]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    initial = f" Begins with {found['begun']}." if found.get("begun") else ""
    metric = f"Primary metric, named beforehand: {found['primary']}."
    lines += [
        NOTE if found.get("format") == FORMAT else EARLIER,
        "",
        f"{metric} Data {found['data']}.{initial} {versions}.",
        "",
    ]
    return "\n".join(lines)


def _name_data(found: Mapping[str, Any]) -> str:
    """Return what our data are, without their sizes; "" where the task knows no more than that they are texts."""
    names = [_SIZES.split(described)[0] for described in found.get("described", ())]
    named = [name for name in names if not name.endswith("texts")]
    return f" Our data: {'; '.join(named)}." if named else ""


def _name(part: str) -> str:
    return f"{part}: " if part else ""


def _describe_extra(found: Mapping[str, Any]) -> str:
    if found["source"] == OWN:
        return f"{found['extra'][0].upper()}{found['extra'][1:]}."
    return f"Beyond the paper: {found['extra']}."
