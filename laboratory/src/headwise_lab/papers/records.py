"""The JSON record of a reproduction.

A paper's table whose rows are groups of data sets: its numbers and ours, and the mean of each group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from headwise.atomic import write_whole
from headwise.errors import DataError
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.run_folder import VOCABULARY, prepare_folder, read_json, write_json, write_text
from headwise_lab.papers.claims import Judged, judge, map_judgements
from headwise_lab.papers.data import InitialRuns, find_archive, pack_runs
from headwise_lab.papers.pages import FOLDER, FORMAT, PAGE, record_claims, render
from headwise_lab.papers.reproduction import Column, PaperRow, Published, Reproduction, resize_scale
from headwise_lab.results.cells import NONE, Cell, Grid, Number, show_number, show_percent, show_printed
from headwise_lab.results.evidence import Evidence, index_by_seed
from headwise_lab.results.figures import Picture
from headwise_lab.results.grids import diversity_grid, list_grids, verdict_grid
from headwise_lab.results.statistics import estimate, holm
from headwise_lab.results.table import PLAIN, Table, make_record
from headwise_lab.results.tabulate import make_table
from headwise_lab.tune import BestDraw

MAJORITY = "majority"
LEVEL = 0.05
MARKED = (
    "; scores in parentheses are not significantly above chance: the majority class, or 1/labels if higher (one-sided "
    "at 0.05 over seeds and sentences, Holm-adjusted over all scores of the grid)"
)


def build_grouped_grid(
    title: str,
    published: Published,
    groups: Mapping[str, Sequence[str]],
    tables: Mapping[str, Table],
    evidence: Mapping[str, Evidence],
    canonical: Callable[[str, str], str],
) -> Grid:
    """Return parts by arms, the paper's number before ours, and below a group the means over its parts that were run.

    A score in parentheses is not told to be better than the larger of the majority baseline and 1 / labels, in a
    one-sided test adjusted over all scores of the grid. The paper's means are over the same parts as ours.

    Raises:
        DataError: The labels of a run are not known.
    """
    doubtful = _find_at_chance(tables, evidence)
    arms = list(dict.fromkeys(row.arm for table in tables.values() for row in table.arms))
    cells = {(row.part, canonical(row.part, row.arm)): row.cells[0] for row in published.rows if row.part in tables}
    known = [arm for arm in arms if any((part, arm) in cells for part in tables)]
    rows: list[tuple[Cell, ...]] = []
    for group, members in groups.items():
        there = [part for part in members if part in tables]
        rows += [(part, *_build_row(part, arms, known, cells, tables.get(part), doubtful)) for part in members]
        if there:
            means: list[Cell] = []
            for arm in arms:
                if arm in known:
                    means.append(Number(fmean(float(cells[part, arm]) for part in there), digits=2))
                ours = [row.score.value for part in there if (row := tables[part].row(arm)) is not None]
                means.append(show_number(fmean(ours) if len(ours) == len(there) else None, 2, factor=100))
            which = "" if len(there) == len(members) else f" ({', '.join(there)})"
            rows.append((f"{group}: mean{which}", NONE, *means))
    header = ["task", MAJORITY]
    for arm in arms:
        header += [f"{arm}, paper", f"{arm}, here"] if arm in known else [f"{arm}, here"]
    return Grid(title + MARKED, tuple(header), tuple(rows), "l" + "r" * (len(header) - 1))


def _build_row(
    part: str,
    arms: Sequence[str],
    known: Sequence[str],
    cells: Mapping[tuple[str, str], str],
    table: Table | None,
    doubtful: set[tuple[str, str]],
) -> list[Cell]:
    majority = None if table is None else table.row(MAJORITY)
    found: list[Cell] = [NONE if majority is None else show_percent(majority.score, interval=False)]
    for arm in arms:
        if arm in known:
            found.append(show_printed(cells.get((part, arm), "")))
        row = None if table is None else table.row(arm)
        shown = NONE if row is None else show_percent(row.score)
        found.append(replace(shown, form="({})") if isinstance(shown, Number) and (part, arm) in doubtful else shown)
    return found


def _find_at_chance(tables: Mapping[str, Table], evidence: Mapping[str, Evidence]) -> set[tuple[str, str]]:
    """Return part and arm of each score that is not significantly above chance."""
    p_values: dict[tuple[str, str], float] = {}
    for part, table in tables.items():
        majority = table.row(MAJORITY)
        if majority is None:
            continue
        results = evidence[part].results
        for row in table.arms:
            runs = list(index_by_seed(results.runs, row.arm).values())
            # of many labels the most frequent one may not occur in test at all
            chance = max(majority.score.value, 1.0 / _count_labels(runs[0].folder))
            scores = np.stack([results.metric.values(run.statistics) for run in runs])
            p_values[part, row.arm] = estimate(scores).p_above(chance)
    adjusted = holm(list(p_values.values()))
    return {cell for cell, p in zip(p_values, adjusted, strict=True) if p > LEVEL}


def _count_labels(folder: Path) -> int:
    kept = read_json(folder / VOCABULARY)
    try:
        return len(kept["labels"])
    except (KeyError, TypeError) as error:
        raise DataError(f"{folder / VOCABULARY} does not hold the run's labels ({error}); train it again.") from None


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
        tuned: The best draw of each arm, by its name; empty for arms as they are.
        absent: The runs that were asked for of parts that have none yet, as text.
    """

    reproduction: Reproduction
    scale: str
    data: Mapping[str, str]
    evidence: Mapping[str, Evidence]
    tables: Mapping[str, Table]
    drawn: tuple[Picture, ...] = ()
    initial_runs: InitialRuns | None = None
    tuned: Mapping[str, BestDraw] = field(default_factory=dict)
    absent: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """The name of its record: version of the paper, figure or table, scale (and that of initial runs), data."""
        paper, _, name = self.reproduction.id.partition("/")
        version = paper.partition("-")[2]
        names = [*([version] if version else []), name, self.scale]
        if self.initial_runs is not None and self.initial_runs.scale != self.scale:
            names.append(f"after-{self.initial_runs.task}-{self.initial_runs.scale}")
        names += [name for name in dict.fromkeys(self.data.values()) if name]
        return "-".join([*names, *(["tuned"] if self.tuned else [])]) + ".json"

    def picture_file(self, picture: Picture) -> str:
        """Return the name of a figure's file."""
        return f"{Path(self.file).stem}-{picture.name}.png"

    @cached_property
    def judged(self) -> tuple[Judged, ...]:
        """Its claims with their verdicts."""
        return judge_parts(self.reproduction, self.scale, self.evidence)

    @cached_property
    def pictures(self) -> tuple[Picture, ...]:
        """Its figures, that of its claims before those of parts."""
        overview = self.reproduction.overview
        first = None if overview is None else overview(self.judged)
        return self.drawn if first is None else (first, *self.drawn)

    @property
    def runs(self) -> list[tuple[Path, list[Path]]]:
        """For each part the folder of its comparison, and those of its runs."""
        found = [[run.folder for run in one.results.runs] for one in self.evidence.values()]
        return [(folders[0].parents[1], folders) for folders in found]

    @property
    def canonical(self) -> Callable[[str, str], str]:
        """The function from (part, arm as the reproduction writes it) to the arm's name at the scale."""
        return self.reproduction.canonical(self.scale, named_task(self.reproduction.task).scales)

    @property
    def is_the_papers(self) -> bool:
        """Whether every part that was run is on the data that the paper names, at the scale as it is."""
        sizes = {part.name: part.sizes[self.scale] for part in self.reproduction.parts_at(self.scale)}
        scales = named_task(self.reproduction.task).scales
        return all(
            sizes[part].corpus is not None
            and sizes[part].corpus == self.data[part]
            and found.results.scale == resize_scale(sizes[part], scales).name
            for part, found in self.evidence.items()
        )


def judge_parts(reproduction: Reproduction, scale: str, evidence: Mapping[str, Evidence]) -> tuple[Judged, ...]:
    """Return the claims of a reproduction with their verdicts."""
    return judge(reproduction.claims_at(scale, named_task(reproduction.task).scales), evidence)


def tabulate_parts(reproduction: Reproduction, scale: str, evidence: Mapping[str, Evidence]) -> dict[str, Table]:
    """Return one table per part. Only differences named by a claim have a verdict."""
    judged = judge_parts(reproduction, scale, evidence)
    return {
        part: make_table(found.results, map_judgements(judged, part, len(found.results.bins)))
        for part, found in evidence.items()
    }


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
            *(["step time over plain, paper"] if column.per_second else []),
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
    rows = tuple((arm, *(_show_range(found.evidence[part], arm, measure) for measure, part in columns)) for arm in arms)
    header = ("arm", *(f"{measure}, {part}".removesuffix(", ") for measure, part in columns))
    return Grid("mean over seeds (least to most)", header, rows, "l" + "r" * len(columns))


def build_summed_grid(found: Reproduced) -> Grid | None:
    """Return the grid of all parts together, or None where a reproduction has none."""
    summed = found.reproduction.summed
    return None if summed is None else summed(found.evidence, found.tables)


def build_tuned_grid(found: Reproduced) -> Grid | None:
    """Return the settings that each arm was tuned to, and the draws; None where arms were run as they are named."""
    if not found.tuned:
        return None
    header = ("arm", "run as", "its score on dev", "draws", "runs of each", "scores of the others")
    rows = tuple((name, *_describe_draws(draw)) for name, draw in found.tuned.items())
    return Grid("the best draw of each arm on dev", header, rows, "llrrrr")


def _describe_draws(draw: BestDraw) -> tuple[Cell, ...]:
    if not draw.tried:
        return draw.arm, NONE, NONE, NONE, NONE
    best, *others = sorted((100 * score for _, score in draw.tried), reverse=True)
    ranked = ", ".join(f"{score:.1f}" for score in others)
    return draw.arm, show_number(best, 1), str(len(draw.tried)), str(draw.seeds), ranked or NONE


def record(found: Reproduced, command: str) -> dict[str, Any]:
    """Return everything that RESULTS.md shows of a reproduction, as JSON data."""
    reproduction, tables = found.reproduction, found.tables
    published = build_published_grid(found)
    measured = build_measures_grid(found)
    # a reproduction about other numbers shows only the verdicts on the score
    chosen = list_grids if measured is None else lambda table: (verdict_grid(table), diversity_grid(table))
    every = [_add_title(grid, part) for part, table in tables.items() for grid in chosen(table)]
    return {
        "format": FORMAT,
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
        "claims": record_claims(found.judged),
        "published": None if published is None else published.to_record(),
        "comparable": found.is_the_papers,
        "grouped": bool(reproduction.groups),
        "pictures": [
            {"file": found.picture_file(one), "caption": one.caption, "alt": one.alt}
            for one in (picture.for_record for picture in found.pictures)
        ],
        "asked": [part.name for part in reproduction.parts_at(found.scale)],
        "parts": {part: found.data.get(part, "") for part in found.evidence},
        "tables": {part: make_record(table) for part, table in tables.items()},
        "tuned": {name: draw.to_record() for name, draw in found.tuned.items()},
        "grids": [
            one.to_record()
            for one in (build_tuned_grid(found), build_summed_grid(found), measured, *every)
            if one is not None
        ],
        "left_out": list(reproduction.left_out),
        "unasked": list(reproduction.unasked),
        "missing": [
            *(name_in_part(run, part) for part, table in tables.items() for run in table.missing),
            *found.absent,
        ],
        "versions": {name: version for table in tables.values() for name, version in table.versions.items()},
    }


def name_in_part(run: str, part: str) -> str:
    """Return the name of a run with that of its part, where it has one.

    >>> name_in_part("plain seed 0", "3x")
    'plain seed 0 in 3x'
    """
    return f"{run} in {part}" if part else run


def write_records(found: Reproduced, paper: Path, command: str) -> Path:
    """Write the record under `paper`/results and render the pages of `paper` anew; return the path of RESULTS.md.

    The numbers of every run are in an archive of the record's name, of which `recompute` makes it again.
    """
    prepare_folder(paper / FOLDER)
    archive = find_archive(paper / FOLDER / found.file)
    prepare_folder(archive.parent)
    write_whole(archive, pack_runs(found.runs))
    for picture in found.pictures:
        write_whole(paper / FOLDER / found.picture_file(picture), picture.for_record.png)
    write_json(paper / FOLDER / found.file, record(found, command))
    for path, text in render(paper).items():
        write_text(path, text)
    return paper / PAGE


def _show_range(evidence: Evidence, arm: str, measure: str) -> Cell:
    values = evidence.of(arm, measure).values()
    if not values:
        return NONE
    low, high = (min(values), max(values)) if len(values) > 1 else (None, None)
    return Number(fmean(values), low, high)


def _build_published_row(found: Reproduced, published: Published, row: PaperRow, *, several: bool) -> tuple[Cell, ...]:
    reproduction = found.reproduction
    there = row.part in {part.name for part in reproduction.parts_at(found.scale)}
    # a row that is quoted alone has no arm, and a baseline has a name as it is
    baseline = row.arm in named_task(reproduction.task).baselines
    arm = (row.arm if baseline else found.canonical(row.part, row.arm)) if there and row.arm else ""
    table = found.tables.get(row.part)
    cells: list[Cell] = [row.name, *([row.part] if several else []), arm or NONE]
    evidence = found.evidence.get(row.part)
    for place, (column, printed) in enumerate(zip(published.columns, row.cells, strict=True)):
        cells.append(show_printed(printed))
        if column.per_second:
            cells.append(_compute_step_time(published, row, place))
        if _is_first(published, place):
            cells.append(NONE if table is None or evidence is None else _show_own(table, evidence, arm, column))
    return tuple(cells)


def _is_first(published: Published, place: int) -> bool:
    """Whether no earlier column shows the same number of ours."""
    own = published.columns[place]
    return (own.ours, own.measure) not in [(column.ours, column.measure) for column in published.columns[:place]]


def _compute_step_time(published: Published, row: PaperRow, place: int) -> Number:
    """Return the step time over plain's that follows from steps a second."""
    plain = next(one for one in published.rows if one.arm == PLAIN and one.part == row.part)
    return Number(float(plain.cells[place]) / float(row.cells[place]), digits=2)


def _show_own(table: Table, evidence: Evidence, arm: str, column: Column) -> Cell:
    if column.measure:
        return _show_range(evidence, arm, column.measure)
    row = table.row(arm)
    if row is None:
        return NONE
    if column.ours == "score":
        return show_percent(row.score)
    return show_number(row.step_ratio, 2) if column.ours == "step time" else show_number(row.parameters, 0)


def _choose_title(column: Column) -> str:
    if column.measure:
        return f"{column.title} (least to most)"
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
