"""Running a reproduction: its comparisons, their folders, and what is shown and recorded afterwards.

`--out` has a folder for each task, size and data, shared by all reproductions, so that each run is done once; and a
folder with the page of each reproduction.
"""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from headwise.atomic import write_whole
from headwise.errors import DataError, SettingError
from headwise.report.html import Page
from headwise_lab.analyses.registry import identify_inputs
from headwise_lab.compare import (
    REPORT,
    Comparison,
    find_run_folder,
    is_divided,
    plan_runs,
    read_train_seconds,
    test_in_pairs,
    write_table,
)
from headwise_lab.experiment import run_folder as runs
from headwise_lab.experiment.arm import escape_arm_name
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.run_folder import Failure, Job
from headwise_lab.experiment.scale import ScaleOptions, with_options
from headwise_lab.jobs.pool import do_analyses, do_jobs
from headwise_lab.papers.data import (
    find_corpus_name,
    find_data,
    find_part_folder,
    find_text,
    name_data,
    read_initial_runs,
    require_initial_runs,
)
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.figures import draw_pictures
from headwise_lab.papers.pages import build_claims_grids, record_claims
from headwise_lab.papers.records import (
    Reproduced,
    build_measures_grid,
    build_published_grid,
    build_summed_grid,
    build_tuned_grid,
    name_in_part,
    tabulate_parts,
    write_records,
)
from headwise_lab.papers.reproduction import OWN, Part, Reproduction, arm_names, resize_scale
from headwise_lab.results.cells import NONE, Grid
from headwise_lab.results.evidence import read_evidence
from headwise_lab.results.grids import verdict_grid
from headwise_lab.results.pages import add_grids, add_pictures
from headwise_lab.results.runs import COMPARISON, STEP_TIME
from headwise_lab.tune import BestDraw, read_tuned

# Prepared data, kept once for all comparisons below --out.
CACHE = "data"
# Lines of grids that are shown; the page has the rest.
MOST_LINES = 50


@dataclass(frozen=True)
class Plan:
    """One part of a reproduction and its comparison.

    Attributes:
        part: The part.
        comparison: Its runs; the folder may hold those of other reproductions too.
        before: The parts of another reproduction whose runs its own begin with.
        tuned: The best draw of each arm, by its name; empty for arms as they are.
    """

    part: Part
    comparison: Comparison
    before: tuple[Plan, ...] = ()
    tuned: Mapping[str, BestDraw] = field(default_factory=dict)

    @property
    def folders(self) -> list[Path]:
        """The folder of each run."""
        own = self.comparison
        return [find_run_folder(own.out, arm.folder, seed) for arm in own.arms for seed in own.seeds]

    @property
    def finished(self) -> list[Path]:
        """The folders of the runs that are finished."""
        return [folder for folder in self.folders if runs.is_finished(folder)]


def choose_seeds(scale: str) -> int:
    """Return how many seeds a reproduction takes unless told: five, which verdicts need; two for a look."""
    return 2 if scale == "demo" else 5


def make_plans(
    reproduction: Reproduction,
    scale: str,
    *,
    seeds: int | Mapping[str, int],
    data: Path | None,
    out: Path,
    workers: int,
    options: ScaleOptions | None = None,
    tuned: Path | None = None,
) -> tuple[Plan, ...]:
    """Return the comparisons of a reproduction in their folders below `out`; nothing is written.

    Args:
        reproduction: What to run; `with_data` leaves out what there is no data for.
        scale: One of its scales.
        seeds: Number of runs per arm, or that of each part by its name.
        data: Folder of the data, or with a folder for each corpus.
        out: Folder of all comparisons.
        workers: Number of parallel runs.
        options: Changes of the scale from the command line.
        tuned: Folder of a tuning, of which every arm takes its best draw; None for arms as they are.

    Raises:
        DataError: The data or an arm's best draw cannot be found.
        SettingError: An option is none of the task's, or the tuning is of other sizes.
    """
    task, before, place = named_task(reproduction.task), (), find_data(reproduction, data)
    if reproduction.after and options is not None and options.pretrained is not None:
        require_initial_runs(options.pretrained, REPRODUCTIONS[reproduction.after].task, reproduction.id)
    elif reproduction.after:
        options = options or ScaleOptions(scale)
        # as many pre-trainings of each arm as the fine-tunings begin with
        size = reproduction.parts_at(scale)[0].sizes[scale]
        starts: Any = with_options(resize_scale(size, task.scales), options, task.name)
        first, text = REPRODUCTIONS[reproduction.after], find_text(data)
        before = make_plans(first, scale, seeds=starts.starts, data=text, out=out, workers=workers)
        options = replace(options, pretrained=before[0].comparison.out)
    plans: list[Plan] = []
    for part in reproduction.parts_at(scale):
        begun = next((plan.comparison.out for plan in plans if plan.part.name == part.after), None)
        if part.after and begun is None:
            raise DataError(f"{part.name} begins with the runs of {part.after}, which is not among the parts to run.")
        folder = find_part_folder(reproduction, place, part.sizes[scale].corpus, scale)
        model = resize_scale(part.sizes[scale], task.scales)
        names = arm_names(part.arms, model)
        if options is not None:
            chosen = options if begun is None else replace(options, pretrained=begun)
            model = with_options(model, chosen, reproduction.task)
        if changed := sorted({*arm_names(part.arms, model)}.symmetric_difference(names)):
            raise SettingError(
                f"at the sizes of --set the arms of {reproduction.id} are not those of scale {scale}: "
                f"{', '.join(changed)}; expected sizes that leave its layers and heads as they are."
            )
        inputs = (folder, *(getattr(model, name, None) for name in ("pipeline", "pretrained")))
        words = [reproduction.task, model.name, *map(name_data, inputs)]
        arms, best = tuple(parse_arm(text) for text in names), {}
        if tuned is not None:
            arms, best = read_tuned(tuned, arms, reproduction.task, model)
            words.append("tuned")
        comparison = Comparison(
            reproduction.task,
            arms,
            tuple(range(seeds if isinstance(seeds, int) else seeds[part.name])),
            model,
            out / "-".join(filter(None, words)),
            folder,
            workers,
            cache=out / CACHE,
            options=options,
            tuned=tuned,
        )
        plans.append(Plan(part, comparison, before, best))
    return tuple(plans)


def write_commands(reproduction: Reproduction, scale: str, plans: Sequence[Plan], options: str, more: str) -> str:
    """Return the commands that make these plans, a line for each number of seeds.

    `options` choose scale and sizes; `more` stands after seeds and parts. The reproduction has all of its parts.
    """
    by_seeds: dict[int, list[str]] = {}
    for plan in plans:
        by_seeds.setdefault(len(plan.comparison.seeds), []).append(plan.part.name)
    every = [part.name for part in reproduction.parts_at(scale)]
    lines = []
    for seeds, names in by_seeds.items():
        named = "" if names == every else "".join(f" --part {shlex.quote(name)}" for name in names)
        lines.append(f"headwise reproduce {reproduction.id} {options} --seeds {seeds}{named}{more}")
    return "\n".join(lines)


def require_analysable(reproduction: Reproduction, plans: Sequence[Plan]) -> None:
    """Refuse plans whose analysis would be about something that is not there, before anything is trained.

    Raises:
        SettingError: The command does not name it.
        DataError: It cannot be read.
    """
    if reproduction.analysis:
        for plan in plans:
            identify_inputs(reproduction.analysis, reproduction.task, plan.comparison.scale)


def do_plans(reproduction: Reproduction, plans: Sequence[Plan], console: Console) -> list[Failure]:
    """Do every run that is not finished, in one pool, then the analyses of the finished ones; return what failed.

    Steps of each arm are timed with the first seed. At Ctrl-C every run has saved where it is.

    Raises:
        SettingError: A folder cannot be written, holds another comparison, or an arm does not fit its model.
        DataError: The data cannot be read.
    """
    require_analysable(reproduction, plans)
    stages = [(reproduction, [plan for plan in plans if bool(plan.part.after) == later]) for later in (False, True)]
    if plans[0].before:
        stages.insert(0, (REPRODUCTIONS[reproduction.after], list(plans[0].before)))
    failures: list[Failure] = []
    for owner, members in stages:
        # what begins with the runs of a stage cannot begin without them
        if members and not failures:
            failures += _do_stage(owner, members, console)
    return failures


def _do_stage(reproduction: Reproduction, plans: Sequence[Plan], console: Console) -> list[Failure]:
    jobs = [_name_job(job, plan) for plan in plans for job in plan_runs(plan.comparison, console)]
    workers, left = plans[0].comparison.workers, runs.list_left(jobs)
    failures = do_jobs(left, len(jobs) - len(left), workers, console)
    # a run of several folds has several models, of which none is timed
    timed = None if any(is_divided(job) for job in jobs) else STEP_TIME
    for analysis in filter(None, (reproduction.analysis, timed)):
        failures += do_analyses(analysis, jobs, workers, console)
    return failures


def _name_job(job: Job, plan: Plan) -> Job:
    return replace(job, name=f"{plan.part.name}: {job.name}") if plan.part.name else job


def report(
    reproduction: Reproduction,
    scale: str,
    plans: Sequence[Plan],
    out: Path,
    paper: Path | None,
    console: Console,
    command: str,
) -> Reproduced:
    """Show tables, claims and the paper's numbers, and write the pages; with `paper`, also its record and RESULTS.md.

    Raises:
        DataError: No run is finished, or a folder is damaged.
        NotFired: An arm did the same as plain.
    """
    evidence, data, absent = {}, {}, []
    for plan in plans:
        part, own = plan.part.name, plan.comparison
        if plan.finished:
            test_in_pairs(own.out, console)
        found = read_evidence(own.out, [arm.name for arm in own.arms], own.seeds)
        if found is None:
            absent += [name_in_part(f"{arm.name} seed {seed}", part) for arm in own.arms for seed in own.seeds]
        else:
            evidence[part] = found
            data[part] = find_corpus_name(found.results.data, own.data, out / CACHE)
    if not evidence:
        raise DataError(f"no run of {reproduction.id} at scale {scale} is finished; give the same command again.")
    tables = tabulate_parts(reproduction, scale, evidence)
    places = {plan.part.name: plan.comparison.out for plan in plans}
    drawn = draw_pictures(reproduction, places, evidence, tables)
    begun = None
    if reproduction.after:
        first = next(plan for plan in plans if not plan.part.after)
        trained: Any = first.comparison.scale
        text = first.before[0].comparison.data if first.before else None
        begun = read_initial_runs(Path(trained.pretrained), text, out / CACHE)
    tuned = {arm: draw for plan in plans for arm, draw in plan.tuned.items()}
    reproduced = Reproduced(reproduction, scale, data, evidence, tables, drawn, begun, tuned, tuple(absent))
    for plan in plans if reproduction.pages is not None else ():
        part, own = plan.part.name, plan.comparison
        if part in evidence and reproduction.pages is not None:
            folder = _find_part_page(find_page_folder(reproduced, out), part)
            runs.prepare_folder(folder)
            for path in reproduction.pages(folder, own.out, own.data, evidence[part]):
                console.print(f"written: {path}", highlight=False, markup=False, soft_wrap=True)
    show(reproduced, out, console, command)
    if paper is not None:
        console.print(f"written: {write_records(reproduced, paper, command)}", highlight=False, markup=False)
    return reproduced


def find_page_folder(found: Reproduced, out: Path) -> Path:
    """Return the folder of a reproduction's pages."""
    return out / f"{found.reproduction.id.partition('/')[0]}-{Path(found.file).stem}"


def _find_part_page(place: Path, part: str) -> Path:
    return place / part.replace(" ", "-") if part else place


def show(reproduced: Reproduced, out: Path, console: Console, command: str) -> None:
    """Show the claims of a reproduction, then what fits the screen, and write its page and pictures below `out`."""
    place, reproduction = find_page_folder(reproduced, out), reproduced.reproduction
    found, *power = build_claims_grids(record_claims(reproduced.judged)) or (None,)
    # the verdict first: what was found is long
    claims = found and found.select("claim", "verdict", "here")
    builders = (build_published_grid, build_summed_grid, build_measures_grid, build_tuned_grid)
    numbers = [grid for build in builders if (grid := build(reproduced)) is not None]
    page, pictures = Page(reproduction.title), reproduced.pictures
    source = "" if reproduction.source == OWN else f", of {reproduction.source}"
    heading = f"{reproduction.id} at scale {reproduced.scale}{source}."
    page.paragraph(heading if claims is None else f"{heading} {count_verdicts(claims)}", kind="lead")
    add_grids(page, *filter(None, (claims,)), *numbers, note=reproduction.lack)
    add_pictures(page, pictures)
    add_grids(page, *power)
    runs.prepare_folder(place)
    for picture in pictures:
        write_whole(place / f"{picture.name}.png", picture.png)
    for part, table in reproduced.tables.items():
        folder = _find_part_page(place, part)
        if part:
            add_grids(page, replace(verdict_grid(table), title=f"{part} (its page: {folder.name}/{REPORT})"))
        write_table(table, folder, Page(f"{reproduction.title}: {part}") if part else page, command)
    page.write(place / REPORT)
    console.print(heading, highlight=False, markup=False, style="bold")
    _show_what_fits(claims, [*numbers, *map(verdict_grid, reproduced.tables.values())], console)
    if reproduction.lack:
        console.print(reproduction.lack, highlight=False, markup=False, soft_wrap=True)
    console.print(f"page: {place / REPORT}", highlight=False, markup=False, soft_wrap=True)


def count_verdicts(claims: Grid) -> str:
    """Return how many claims have each verdict.

    >>> count_verdicts(Grid("Claims", ("claim", "verdict"), (("a", "borne out"), ("b", "borne out")), "ll"))
    'Of 2 claims: 2 borne out.'
    """
    counted = Counter(row[0] for row in claims.select("verdict").text)
    total = f"Of {len(claims.rows)} claims" if len(claims.rows) > 1 else "Of 1 claim"
    return f"{total}: {', '.join(f'{count} {verdict}' for verdict, count in counted.items())}."


def _show_what_fits(claims: Grid | None, others: Sequence[Grid], console: Console) -> None:
    """Show the claims, without what was found where that is long, and each other grid that still fits."""
    room = MOST_LINES
    for grid in (*filter(None, (claims,)), *others):
        shown = grid
        if grid is claims and len(console.render_lines(grid)) > room:
            console.print(count_verdicts(grid), highlight=False, markup=False)
            short = grid.select("verdict", "claim")
            kept = [n for n in range(len(grid.rows) + 1) if len(console.render_lines(short.first(n))) <= room]
            shown = short.first(kept[-1])
        if (lines := len(console.render_lines(shown))) <= room:
            console.print(shown)
            room -= lines


def show_list(out: Path, scale: str, console: Console) -> None:
    """Show every reproduction in a line: its id, its runs at a scale, the hours if finished runs tell, its title."""
    rows = [("id", "runs", "hours", "what it shows")]
    for one in REPRODUCTIONS.values():
        count, hours = _count_runs(out, one, scale)
        rows.append((one.id, count or NONE, hours, one.title))
    known = any(hours for _, _, hours, _ in rows[1:])
    lines = rows if known else [(name, count, title) for name, count, _, title in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    console.print(f"reproductions at scale {scale}", style="bold", highlight=False, markup=False)
    for place, line in enumerate(lines):
        text = Text("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        # one line each: the end of a long title is left out
        text.truncate(console.width, overflow="ellipsis")
        console.print(text, style="" if place else "dim", highlight=False)
    notes = "runs: arms x seeds."
    notes += f" hours: training alone, one run after the other, as finished runs below {out} tell." if known else ""
    notes += " `headwise reproduce ID --dry-run` lists the runs."
    console.print(notes, style="dim", highlight=False, markup=False)


def _count_runs(out: Path, reproduction: Reproduction, scale: str) -> tuple[str, str]:
    """Return the arms x seeds of a reproduction at a scale, and the hours they take; "" for what is not known."""
    if scale not in reproduction.scales:
        return "", ""
    scales, seeds = named_task(reproduction.task).scales, choose_seeds(scale)
    arms = sum(len(names) for names in reproduction.arms_at(scale, scales).values())
    seconds = _estimate_seconds(out, reproduction, scale)
    return f"{arms} x {seeds}", "" if seconds is None else f"{seeds * seconds / 3600:.1f}"


def show_plans(
    reproduction: Reproduction,
    plans: Sequence[Plan],
    console: Console,
    recorded: Mapping[str, Collection[tuple[str, int]]] | None = None,
) -> None:
    """Show the runs of a reproduction, which of them are finished and what the others may cost; nothing is done.

    `recorded` are the runs, by part, that a record has: arm and seed of each. They count as finished.
    """
    rows: list[tuple[str, ...]] = []
    total, seconds = 0, []
    for plan in (*plans[0].before, *plans):
        own, left = plan.comparison, 0
        # a record has no runs of the reproduction before
        kept = (recorded or {}).get(plan.part.name, ()) if plan in plans else ()
        for arm in own.arms:
            folders = {seed: find_run_folder(own.out, arm.folder, seed) for seed in own.seeds}
            done = sum((arm.name, seed) in kept or runs.is_finished(folder) for seed, folder in folders.items())
            left += len(own.seeds) - done
            seeds = f"0 to {max(own.seeds)}" if len(own.seeds) > 1 else "0"
            rows.append((plan.part.name or NONE, arm.name, seeds, str(done), own.out.name))
        total += left
        mean = _average_seconds(plan.finished) if left else 0.0
        seconds.append(None if mean is None else left * mean)
    header = ("part", "arm", "seeds", "finished", "folder")
    console.print(Grid(f"{reproduction.id}: {reproduction.title}", header, tuple(rows), "lllrl", keys=2))
    cost = "no run of each size has finished, so what they cost is not known"
    known = [one for one in seconds if one is not None]
    if len(known) == len(seconds):
        cost = f"about {sum(known) / 3600:.1f} hours of training, one run after the other"
    console.print(f"{total} runs to do: {cost}.", highlight=False, markup=False)
    if reproduction.lack:
        console.print(reproduction.lack, highlight=False, markup=False, soft_wrap=True)


def _average_seconds(folders: Iterable[Path]) -> float | None:
    past = [seconds for folder in folders if (seconds := read_train_seconds(folder)) is not None]
    return statistics.fmean(past) if past else None


def _estimate_seconds(out: Path, reproduction: Reproduction, scale: str) -> float | None:
    """Return the seconds that one seed of every arm took, as far as runs below `out` tell."""
    scales, total = named_task(reproduction.task).scales, 0.0
    for part, arms in reproduction.arms_at(scale, scales).items():
        name = resize_scale(next(one for one in reproduction.parts if one.name == part).sizes[scale], scales).name
        stem = f"{reproduction.task}-{name}"
        places = [place for place in (out / stem, *out.glob(f"{stem}-*")) if _find_scale(place) == name]
        folders = (place / escape_arm_name(arm) for place in places for arm in arms)
        mean = _average_seconds(run for folder in folders for run in folder.glob("seed-*"))
        if mean is None:
            return None
        total += len(arms) * mean
    return total


def _find_scale(comparison: Path) -> str | None:
    record = runs.read_json(comparison / COMPARISON) if (comparison / COMPARISON).exists() else None
    return record.get("scale") if isinstance(record, dict) else None
