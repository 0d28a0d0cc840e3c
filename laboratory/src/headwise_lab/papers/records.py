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
from headwise_lab.results.table import PLAIN, Table, make_record, make_table
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
    printed = {(row.part, canonical(row.part, row.arm)): row.cells[0] for row in published.rows if row.part in tables}
    known = [arm for arm in arms if any((part, arm) in printed for part in tables)]

    def show(part: str, arm: str) -> Cell:
        row = tables[part].row(arm) if part in tables else None
        shown = NONE if row is None else show_percent(row.score, interval=arm != MAJORITY)
        return replace(shown, form="({})") if isinstance(shown, Number) and (part, arm) in doubtful else shown

    columns: dict[str, list[Cell]] = {"task": [], MAJORITY: []}
    for arm in arms:
        columns |= {f"{arm}, {whose}": [] for whose in (["paper", "here"] if arm in known else ["here"])}
    for group, members in groups.items():
        there = [part for part in members if part in tables]
        which = "" if len(there) == len(members) else f" ({', '.join(there)})"
        mean = [f"{group}: mean{which}"] if there else []
        columns["task"] += [*members, *mean]
        columns[MAJORITY] += [*(show(part, MAJORITY) for part in members), *([NONE] * len(mean))]
        for arm in arms:
            if arm in known:
                columns[f"{arm}, paper"] += [show_printed(printed.get((part, arm), "")) for part in members]
                theirs = [fmean(float(printed[part, arm]) for part in there) for _ in mean]
                columns[f"{arm}, paper"] += [Number(value, digits=2) for value in theirs]
            columns[f"{arm}, here"] += [show(part, arm) for part in members]
            ours = [row.score.value for part in there if (row := tables[part].row(arm)) is not None]
            value = fmean(ours) if ours and len(ours) == len(there) else None
            columns[f"{arm}, here"] += [show_number(value, 2, factor=100) for _ in mean]
    return Grid.of(title + MARKED, columns)


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
    def arms(self) -> list[str]:
        """The names of the arms of all tables."""
        return list(dict.fromkeys(row.arm for table in self.tables.values() for row in table.arms))

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
    reproduction, published = found.reproduction, found.reproduction.published
    if published is None:
        return None
    where = ", ".join([*dict.fromkeys(filter(None, found.data.values())), f"scale {found.scale}"])
    title = f"The paper's numbers ({published.on}) beside ours ({where})"
    if reproduction.groups:
        known = found.tables, found.evidence, found.canonical
        return build_grouped_grid(title, published, reproduction.groups, *known)
    rows, parts = published.rows, {row.part for row in published.rows}
    arms = [_find_arm(found, row) for row in rows]
    # a list, for two columns may have one title
    columns: list[tuple[str, Sequence[Cell]]] = [("the paper's row", [row.name for row in rows])]
    columns += [("part", [row.part for row in rows])] if len(parts) > 1 else []
    columns.append(("arm", [arm or NONE for arm in arms]))
    align, shown = "l" * len(columns), set[tuple[str, str]]()
    for place, column in enumerate(published.columns):
        columns.append((f"{column.title}, paper", [show_printed(row.cells[place]) for row in rows]))
        if column.per_second:
            times = [_compute_step_time(published, row, place) for row in rows]
            columns.append(("step time over plain, paper", times))
        # once where several columns have the same number of ours
        if (column.ours, column.measure) not in shown:
            shown.add((column.ours, column.measure))
            ours = [_show_own(found, row.part, arm, column) for row, arm in zip(rows, arms, strict=True)]
            columns.append((f"{_choose_title(column)}, here", ours))
    header, cells = zip(*columns, strict=True)
    return Grid(title, header, tuple(zip(*cells, strict=True)), align + "r" * (len(header) - len(align)))


def build_measures_grid(found: Reproduced) -> Grid | None:
    """Return the numbers that a reproduction is about, arms by parts, or None where it is about the score."""
    if not found.reproduction.measures:
        return None
    columns = {
        f"{measure}, {part}".removesuffix(", "): [_show_range(evidence, arm, measure) for arm in found.arms]
        for measure in found.reproduction.measures
        for part, evidence in found.evidence.items()
    }
    return Grid.of("mean over seeds (least to most)", {"arm": found.arms, **columns})


def build_summed_grid(found: Reproduced) -> Grid | None:
    """Return the grid of all parts together, or None where a reproduction has none."""
    summed = found.reproduction.summed
    return None if summed is None else summed(found.evidence, found.tables)


def build_tuned_grid(found: Reproduced) -> Grid | None:
    """Return the settings that each arm was tuned to, and the draws; None where arms were run as they are named."""
    if not found.tuned:
        return None
    header = ("arm", "run as", "its score on dev", "draws", "runs of each", "scores of the others")
    rows = tuple((name, draw.arm, *_describe_draws(draw)) for name, draw in found.tuned.items())
    return Grid("the best draw of each arm on dev", header, rows, "llrrrr")


def _describe_draws(draw: BestDraw) -> tuple[Cell, ...]:
    if not draw.tried:
        return (NONE,) * 4
    best, *others = sorted((100 * score for _, score in draw.tried), reverse=True)
    ranked = ", ".join(f"{score:.1f}" for score in others)
    return show_number(best, 1), str(len(draw.tried)), str(draw.seeds), ranked or NONE


def record(found: Reproduced, command: str) -> dict[str, Any]:
    """Return everything that RESULTS.md shows of a reproduction, as JSON data."""
    reproduction, tables = found.reproduction, found.tables
    published = build_published_grid(found)
    measured = build_measures_grid(found)
    # a reproduction about other numbers shows only the verdicts on the score
    chosen = list_grids if measured is None else lambda table: (verdict_grid(table), diversity_grid(table))
    every = [
        replace(grid, title=f"{part}: {grid.title}" if part else grid.title)
        for part, table in tables.items()
        for grid in chosen(table)
    ]
    data = [f"{found.data.get(part, '')} {table.results.data}".strip() for part, table in tables.items()]
    return {
        "format": FORMAT,
        "id": reproduction.id,
        "title": reproduction.title,
        "source": reproduction.source,
        "extra": reproduction.extra,
        "scale": found.scale,
        "data": ", ".join(dict.fromkeys(data)),
        "described": [said for part, one in found.evidence.items() if (said := _add_part(part, one.results.described))],
        "begun": None if found.initial_runs is None else str(found.initial_runs),
        "primary": "; ".join(dict.fromkeys(table.results.primary for table in tables.values())),
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
            *(name_in_part(run, part) for part, table in tables.items() for run in table.results.missing),
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


def _find_arm(found: Reproduced, row: PaperRow) -> str:
    """Return the name of a row's arm at the scale; "" for a row that is quoted alone, or whose part is not there."""
    reproduction = found.reproduction
    if not row.arm or row.part not in {part.name for part in reproduction.parts_at(found.scale)}:
        return ""
    # a baseline has a name as it is
    return row.arm if row.arm in named_task(reproduction.task).baselines else found.canonical(row.part, row.arm)


def _compute_step_time(published: Published, row: PaperRow, place: int) -> Number:
    """Return the step time over plain's that follows from steps a second."""
    plain = next(one for one in published.rows if one.arm == PLAIN and one.part == row.part)
    return Number(float(plain.cells[place]) / float(row.cells[place]), digits=2)


def _show_own(found: Reproduced, part: str, arm: str, column: Column) -> Cell:
    table, evidence = found.tables.get(part), found.evidence.get(part)
    if table is None or evidence is None:
        return NONE
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


def _add_part(part: str, described: str) -> str:
    return f"{part}: {described}" if part and described and not described.startswith(part) else described
