"""The JSON record of a reproduction, and RESULTS.md, rendered from all records of a paper."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from headwise.atomic import write_whole
from headwise.errors import DataError
from headwise.lab.experiment.registry import named_task
from headwise.lab.experiment.run_folder import prepare_folder, read_json, write_json, write_text
from headwise.lab.papers.claims import Found, Judged, judge
from headwise.lab.papers.data import InitialRuns
from headwise.lab.papers.grouped_table import build_grouped_grid
from headwise.lab.papers.reproduction import Column, PaperRow, Published, Reproduction, describe_lack
from headwise.lab.results.cells import NONE, Grid, format_number, format_percent
from headwise.lab.results.evidence import Evidence
from headwise.lab.results.figures import Picture
from headwise.lab.results.grids import NOTE, diversity_grid, list_grids, verdict_grid
from headwise.lab.results.table import PLAIN, Table

FOLDER = "results"
PAGE = "RESULTS.md"
INTRODUCTION = """# Results

Written by `headwise reproduce` from the records in `results/`, not by hand. How each comparison is judged stands in the
laboratory's page of the documentation; what differs from the paper, in `DEVIATIONS.md` beside this.
"""
OTHER = "Ours are on other data or another size: only the order of the rows can be compared."
# Where arms are columns.
OTHER_GROUPED = (
    "Ours are on other data or another size: compare the order of the arms within a task or a mean, and no number "
    "with one of the paper's."
)
SAME = "Ours are on the data and the size that the paper names."


@dataclass(frozen=True)
class Reproduced:
    """A reproduction whose runs are done, or some of them.

    Attributes:
        reproduction: What was run.
        scale: At which scale.
        data: Name of the data of each part; "" where the task has one kind alone.
        evidence: The runs of each part that has any.
        tables: The table of each of these parts.
        drawn: Its figures of parts, in addition to those of each table.
        initial_runs: What its runs began with; None where they began with nothing.
    """

    reproduction: Reproduction
    scale: str
    data: Mapping[str, str]
    evidence: Mapping[str, Evidence]
    tables: Mapping[str, Table]
    drawn: tuple[Picture, ...] = ()
    initial_runs: InitialRuns | None = None

    @property
    def file(self) -> str:
        """The name of its record: version of the paper, figure or table, scale (and that of initial runs), data."""
        paper, _, name = self.reproduction.id.partition("/")
        version = paper.partition("-")[2]
        names = [*([version] if version else []), name, self.scale]
        if self.initial_runs is not None and self.initial_runs.scale != self.scale:
            names.append(f"after-{self.initial_runs.task}-{self.initial_runs.scale}")
        return "-".join(names + [name for name in dict.fromkeys(self.data.values()) if name]) + ".json"

    def picture_file(self, picture: Picture) -> str:
        """Return the name of a figure's file."""
        return f"{Path(self.file).stem}-{picture.name}.png"

    @cached_property
    def judged(self) -> tuple[Judged, ...]:
        """Its claims with their verdicts."""
        scales = named_task(self.reproduction.task).scales
        return judge(self.reproduction.claims_at(self.scale, scales), self.evidence)

    @cached_property
    def pictures(self) -> tuple[Picture, ...]:
        """Its figures, that of its claims before those of parts."""
        overview = self.reproduction.overview
        first = None if overview is None else overview(self.judged)
        return self.drawn if first is None else (first, *self.drawn)

    @property
    def canonical(self) -> Callable[[str, str], str]:
        """The function from (part, arm as the reproduction writes it) to the arm's name at the scale."""
        return self.reproduction.canonical(self.scale, named_task(self.reproduction.task).scales)

    @property
    def is_the_papers(self) -> bool:
        """Whether every part that was run is on the data and of the size that the paper names."""
        sizes = {part.name: part.sizes[self.scale] for part in self.reproduction.parts_at(self.scale)}
        return all(sizes[part].corpus is not None and sizes[part].corpus == self.data[part] for part in self.evidence)


def build_claims_grid(judged: tuple[Judged, ...]) -> Grid | None:
    """Return claims, findings and verdicts; None where no claim is about these parts."""
    if not judged:
        return None
    rows = tuple((one.claim.statement, "; ".join(_list_findings(one)), one.verdict) for one in judged)
    return Grid("The paper's claims", ("claim", "here", "verdict"), rows, "lll")


def build_published_grid(found: Reproduced) -> Grid | None:
    """Return the paper's numbers and ours, or None where it prints none."""
    published = found.reproduction.published
    if published is None:
        return None
    title = f"The paper's numbers ({published.on}) beside ours ({_describe_place(found)})"
    if found.reproduction.groups:
        groups = found.reproduction.groups
        return build_grouped_grid(title, published, groups, found.tables, found.evidence, found.canonical)
    several = len({row.part for row in published.rows}) > 1
    header = ["the paper's row", *(["part"] if several else []), "arm"]
    for place, column in enumerate(published.columns):
        header += [
            f"{column.title}, paper",
            *([f"{_choose_title(column)}, here"] if _is_first(published, place) else []),
        ]
    rows = tuple(_build_published_row(found, published, row, several=several) for row in published.rows)
    return Grid(title, tuple(header), rows, "l" * (2 + several) + "r" * (len(header) - 2 - several))


def build_measures_grid(found: Reproduced) -> Grid | None:
    """Return the numbers that a reproduction is about, arms by parts, or None where it is about the score."""
    reproduction = found.reproduction
    if not reproduction.measures:
        return None
    parts, arms = list(found.evidence), list(dict.fromkeys(r.arm for t in found.tables.values() for r in t.arms))
    columns = [(measure, part) for measure in reproduction.measures for part in parts]
    rows = tuple(
        (arm, *(_format_range(found.evidence[part], arm, measure) for measure, part in columns)) for arm in arms
    )
    header = ("arm", *(f"{measure}, {part}".removesuffix(", ") for measure, part in columns))
    return Grid("mean over seeds (least to most)", header, rows, "l" + "r" * len(columns))


def build_summed_grid(found: Reproduced) -> Grid | None:
    """Return the grid of all parts together, or None where a reproduction has none."""
    summed = found.reproduction.summed
    return None if summed is None else summed(found.evidence, found.tables)


def record(found: Reproduced, command: str) -> dict[str, Any]:
    """Return everything that RESULTS.md shows of a reproduction, as JSON data."""
    reproduction, tables = found.reproduction, found.tables
    published = build_published_grid(found)
    measured = build_measures_grid(found)
    # a reproduction about other numbers shows only the verdicts on the score
    chosen = list_grids if measured is None else lambda table: (verdict_grid(table), diversity_grid(table))
    every = [_add_title(grid, part) for part, table in tables.items() for grid in chosen(table)]
    return {
        "id": reproduction.id,
        "title": reproduction.title,
        "source": reproduction.source,
        "extra": reproduction.extra,
        "scale": found.scale,
        "data": ", ".join(dict.fromkeys(_describe_data(found, part) for part in tables)),
        "described": [said for part, one in found.evidence.items() if (said := _add_part(part, one.results.described))],
        "begun": None if found.initial_runs is None else str(found.initial_runs),
        "primary": "; ".join(dict.fromkeys(table.primary for table in tables.values())),
        "command": command,
        "claims": [
            {"statement": one.claim.statement, "verdict": one.verdict, "contrasts": _list_findings(one)}
            for one in found.judged
        ],
        "published": None if published is None else _record_grid(published),
        "comparable": found.is_the_papers,
        "grouped": bool(reproduction.groups),
        "pictures": [
            {"file": found.picture_file(one), "caption": one.caption, "alt": one.alt}
            for one in (picture.for_record for picture in found.pictures)
        ],
        "grids": [_record_grid(one) for one in (build_summed_grid(found), measured, *every) if one is not None],
        "left_out": list(reproduction.left_out),
        "missing": [f"{run} in {part}" if part else run for part, table in tables.items() for run in table.missing],
        "versions": {name: version for table in tables.values() for name, version in table.versions.items()},
    }


def write_records(found: Reproduced, paper: Path, command: str) -> Path:
    """Write the record under `paper`/results and render `paper`/RESULTS.md anew; return the page's path."""
    prepare_folder(paper / FOLDER)
    for picture in found.pictures:
        write_whole(paper / FOLDER / found.picture_file(picture), picture.for_record.png)
    write_json(paper / FOLDER / found.file, record(found, command))
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
            parts.append(_render_section(read_json(path)))
        except (KeyError, TypeError) as error:
            raise DataError(f"{path} is not the record of a reproduction ({error}); make it again.") from None
    return "\n".join(parts)


def _render_section(found: Mapping[str, Any]) -> str:
    lines = [f"## {found['id']} at scale {found['scale']}: {found['title']}", "", f"Source: {found['source']}."]
    lines += ["", f"Beyond the paper: {found['extra']}.", "", "```console", f"$ {found['command']}", "```", ""]
    if found.get("described"):
        lines += ["Data:", "", *(f"* {one}" for one in found["described"]), ""]
    if found["missing"]:
        lines += [f"**Not finished: {len(found['missing'])} runs** ({', '.join(found['missing'])}).", ""]
    if found.get("left_out"):
        lines += [describe_lack(found["left_out"]), ""]
    rows = tuple((c["statement"], "; ".join(c["contrasts"]), c["verdict"]) for c in found["claims"])
    if rows:
        lines += [Grid("The paper's claims", ("claim", "here", "verdict"), rows, "lll").to_markdown(), ""]
    if found.get("published"):
        other = OTHER_GROUPED if found.get("grouped") else OTHER
        lines += [_read_grid(found["published"]).to_markdown(), "", SAME if found["comparable"] else other, ""]
    for picture in found.get("pictures", ()):
        lines += [f"![{picture['alt']}]({FOLDER}/{picture['file']})", "", picture["caption"], ""]
    for grid in found["grids"]:
        lines += [_read_grid(grid).to_markdown(), ""]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    initial = f" Begins with {found['begun']}." if found.get("begun") else ""
    metric = f"Primary metric, named beforehand: {found['primary']}."
    lines += [NOTE, "", f"{metric} Data {found['data']}.{initial} {versions}.", ""]
    return "\n".join(lines)


def _list_findings(judged: Judged) -> list[str]:
    return [*(_write_contrast(found) for found in judged.found), *judged.shown]


def _write_contrast(found: Found) -> str:
    if found.estimate is None:
        reason = found.reason.removeprefix("was ")
        return f"{found.contrast}: {reason}"
    numbers = found.estimate.value, found.estimate.low, found.estimate.high
    if found.contrast.measure is None:
        value, low, high = (f"{100 * value:+.2f}" for value in numbers)
        value += " points"
    else:
        value, low, high = (f"{value:+.4g}" for value in numbers)
    if found.estimate.is_one_number:
        return f"{found.contrast}: {value} (one run)"
    p_value = "" if found.adjusted is None else f", p = {found.adjusted:.3f}"
    return f"{found.contrast}: {value} [{low}, {high}]{p_value}"


def _format_range(evidence: Evidence, arm: str, measure: str) -> str:
    values = evidence.of(arm, measure).values()
    if not values:
        return NONE
    mean = format_number(fmean(values))
    return mean if len(values) == 1 else f"{mean} ({format_number(min(values))} to {format_number(max(values))})"


def _build_published_row(found: Reproduced, published: Published, row: PaperRow, *, several: bool) -> tuple[str, ...]:
    reproduction = found.reproduction
    there = row.part in {part.name for part in reproduction.parts_at(found.scale)}
    # a row that is quoted alone has no arm, and a baseline has a name as it is
    baseline = row.arm in named_task(reproduction.task).baselines
    arm = (row.arm if baseline else found.canonical(row.part, row.arm)) if there and row.arm else ""
    table = found.tables.get(row.part)
    cells = [row.name, *([row.part] if several else []), arm or NONE]
    evidence = found.evidence.get(row.part)
    for place, (column, printed) in enumerate(zip(published.columns, row.cells, strict=True)):
        cells.append(_add_step_time(published, row, place) if column.per_second else printed or NONE)
        if _is_first(published, place):
            cells.append(NONE if table is None or evidence is None else _format_own(table, evidence, arm, column))
    return tuple(cells)


def _is_first(published: Published, place: int) -> bool:
    """Whether no earlier column shows the same number of ours."""
    own = published.columns[place]
    return (own.ours, own.measure) not in [(column.ours, column.measure) for column in published.columns[:place]]


def _add_step_time(published: Published, row: PaperRow, place: int) -> str:
    """Return steps a second as printed, with the step time over plain's that follows."""
    plain = next(one for one in published.rows if one.arm == PLAIN and one.part == row.part)
    return f"{row.cells[place]} (time {float(plain.cells[place]) / float(row.cells[place]):.2f})"


def _format_own(table: Table, evidence: Evidence, arm: str, column: Column) -> str:
    if column.ours == "measure":
        return _format_range(evidence, arm, column.measure)
    row, plain = table.row(arm), table.row(PLAIN)
    if row is None:
        return NONE
    if column.ours == "score":
        return format_percent(row.score)
    if column.ours == "step time":
        return NONE if row.step_ratio is None else f"{row.step_ratio:.2f}"
    if row.parameters is None:
        return NONE
    more = 0 if plain is None or plain.parameters is None else row.parameters - plain.parameters
    return f"{row.parameters:,}" + (f" (+{more:,})" if more else "")


def _choose_title(column: Column) -> str:
    if column.ours == "measure":
        return column.title
    return {"score": column.title, "step time": "step time over plain", "parameters": "parameters"}[column.ours]


def _describe_place(found: Reproduced) -> str:
    return ", ".join([*dict.fromkeys(filter(None, found.data.values())), f"scale {found.scale}"])


def _describe_data(found: Reproduced, part: str) -> str:
    name, fingerprint = found.data.get(part, ""), found.tables[part].data
    return f"{name} {fingerprint}".strip()


def _add_part(part: str, described: str) -> str:
    return f"{part}: {described}" if part and described and not described.startswith(part) else described


def _add_title(grid: Grid, part: str) -> Grid:
    return replace(grid, title=f"{part}: {grid.title}") if part else grid


def _record_grid(grid: Grid) -> dict[str, Any]:
    return {"title": grid.title, "header": list(grid.header), "rows": [list(r) for r in grid.rows], "align": grid.align}


def _read_grid(found: Mapping[str, Any]) -> Grid:
    return Grid(found["title"], tuple(found["header"]), tuple(map(tuple, found["rows"])), found["align"])
