"""Running a reproduction: its comparisons, their folders, and what is shown and recorded afterwards.

`--out` has a folder for each task, size and data, shared by all reproductions, so that each run is done once; and a
folder with the page of each reproduction.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from headwise.atomic import write_whole
from headwise.errors import DataError, SettingError
from headwise.lab.analyses.registry import identify_inputs
from headwise.lab.compare import Comparison, find_run_folder, is_divided, plan_runs, publish_table, test_in_pairs
from headwise.lab.experiment import run_folder as runs
from headwise.lab.experiment.arm_text import parse_arm
from headwise.lab.experiment.job import Failure, Job
from headwise.lab.experiment.registry import named_task
from headwise.lab.experiment.scale_options import ScaleOptions, with_options
from headwise.lab.jobs.pool import do_analyses, do_jobs
from headwise.lab.papers.claims_grids import build_claims_grids, record_claims
from headwise.lab.papers.data import (
    InitialRuns,
    find_corpus_name,
    find_data,
    find_part_folder,
    find_text,
    name_data,
    read_initial_runs,
    require_initial_runs,
)
from headwise.lab.papers.figures import draw_pictures
from headwise.lab.papers.index import REPRODUCTIONS
from headwise.lab.papers.records import (
    Reproduced,
    build_measures_grid,
    build_published_grid,
    build_summed_grid,
    build_tuned_grid,
    name_in_part,
    tabulate_parts,
    write_records,
)
from headwise.lab.papers.reproduction import Part, Reproduction
from headwise.lab.papers.sizes import arm_names, resize_scale
from headwise.lab.results.evidence import Evidence, read_evidence
from headwise.lab.results.runs import STEP_TIME
from headwise.lab.tune import BestDraw, read_tuned

# Prepared data, kept once for all comparisons below --out.
CACHE = "data"


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
        comparison = self.comparison
        return [
            find_run_folder(comparison.out, arm.folder, seed) for arm in comparison.arms for seed in comparison.seeds
        ]

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
    """Return the comparisons of a reproduction; nothing is written.

    Args:
        reproduction: What to run; `with_data` leaves out what there is no data for.
        scale: One of its scales.
        seeds: Number of runs per arm, or that of each part by its name.
        data: Folder of the data, or with a folder for each corpus.
        out: Folder that holds the comparisons' folders.
        workers: Number of parallel runs.
        options: Changes of the scale from the command line.
        tuned: Folder of a tuning, of which every arm takes its best draw; None for arms as they are.

    Raises:
        DataError: The data or an arm's best draw cannot be found.
        SettingError: An option is none of the task's, or the tuning is of other sizes.
    """
    task, before, text = named_task(reproduction.task), (), data
    data, plans = find_data(reproduction, data), []
    if reproduction.after and options is not None and options.pretrained is not None:
        require_initial_runs(options.pretrained, REPRODUCTIONS[reproduction.after].task, reproduction.id)
    elif reproduction.after:
        first = REPRODUCTIONS[reproduction.after]
        options = options or ScaleOptions(scale)
        # as many pre-trainings of each arm as the fine-tunings begin with
        starts: Any = with_options(
            resize_scale(reproduction.parts_at(scale)[0].sizes[scale], task.scales), options, task.name
        )
        before = make_plans(first, scale, seeds=starts.starts, data=find_text(text), out=out, workers=workers)
        options = replace(options, pretrained=before[0].comparison.out)
    for part in reproduction.parts_at(scale):
        begun = next((plan.comparison.out for plan in plans if plan.part.name == part.after), None)
        if part.after and begun is None:
            raise DataError(f"{part.name} begins with the runs of {part.after}, which is not among the parts to run.")
        folder = find_part_folder(reproduction, data, part.sizes[scale].corpus, scale)
        model = resize_scale(part.sizes[scale], task.scales)
        if options is not None:
            chosen = options if begun is None else replace(options, pretrained=begun)
            model = with_options(model, chosen, reproduction.task)
        inputs = (folder, *(getattr(model, name, None) for name in ("pipeline", "pretrained")))
        words = [reproduction.task, model.name, *map(name_data, inputs)]
        names = reproduction.arms_at(scale, task.scales)[part.name]
        if changed := sorted({*arm_names(part.arms, model)}.symmetric_difference(names)):
            raise SettingError(
                f"at the sizes of --set the arms of {reproduction.id} are not those of scale {scale}: "
                f"{', '.join(changed)}; expected sizes that leave its layers and heads as they are."
            )
        arms = tuple(parse_arm(text) for text in names)
        best: dict[str, BestDraw] = {}
        if tuned is not None:
            arms, best = read_tuned(tuned, arms, reproduction.task, model)
            words.append("tuned")
        place = out / "-".join(word for word in words if word)
        comparison = Comparison(
            reproduction.task,
            arms,
            tuple(range(seeds if isinstance(seeds, int) else seeds[part.name])),
            model,
            place,
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

    Args:
        reproduction: The reproduction with all of its parts.
        scale: One of its scales.
        plans: The plans of some or all of these parts.
        options: The options that choose scale and sizes.
        more: What else the command has, after its seeds and parts.
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
    """Do every run of a reproduction that is not finished, in one pool, then the analyses of the finished ones.

    Steps of each arm are timed with the first seed.

    Returns:
        The runs and analyses that failed.

    Raises:
        SettingError: A folder cannot be written, holds another comparison, or an arm does not fit its model.
        DataError: The data cannot be read.
        KeyboardInterrupt: Ctrl-C; every run has saved where it is.
    """
    require_analysable(reproduction, plans)
    first, second = ([plan for plan in plans if bool(plan.part.after) == later] for later in (False, True))
    stages = [(reproduction, first), (reproduction, second)]
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
    workers = plans[0].comparison.workers
    left = runs.list_left(jobs)
    failures = do_jobs(left, len(jobs) - len(left), workers, console)
    # a run of several folds has several models, of which none is timed
    timed = None if any(is_divided(job) for job in jobs) else STEP_TIME
    for analysis in filter(None, (reproduction.analysis, timed)):
        failures += do_analyses(analysis, jobs, workers, console)
    return failures


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
        part = plan.part.name
        found = _read_part_evidence(plan, console)
        if found is None:
            arms, seeds = plan.comparison.arms, plan.comparison.seeds
            absent += [name_in_part(f"{arm.name} seed {seed}", part) for arm in arms for seed in seeds]
        else:
            evidence[part] = found
            data[part] = find_corpus_name(found.results.data, plan.comparison.data, out / CACHE)
    if not evidence:
        raise DataError(f"no run of {reproduction.id} at scale {scale} is finished; give the same command again.")
    tables = tabulate_parts(reproduction, scale, evidence)
    places = {plan.part.name: plan.comparison.out for plan in plans}
    drawn = draw_pictures(reproduction, places, evidence, tables)
    begun = _find_initial_runs(plans, out / CACHE) if reproduction.after else None
    tuned = {arm: draw for plan in plans for arm, draw in plan.tuned.items()}
    reproduced = Reproduced(reproduction, scale, data, evidence, tables, drawn, begun, tuned, tuple(absent))
    place = find_page_folder(reproduced, out)
    _write_pages(reproduction, plans, evidence, place, console)
    show(reproduced, out, console, command)
    if paper is not None:
        console.print(f"written: {write_records(reproduced, paper, command)}", highlight=False, markup=False)
    return reproduced


def find_page_folder(found: Reproduced, out: Path) -> Path:
    """Return the folder of a reproduction's pages."""
    return out / f"{found.reproduction.id.partition('/')[0]}-{Path(found.file).stem}"


def show(reproduced: Reproduced, out: Path, console: Console, command: str) -> None:
    """Show tables, claims and the paper's numbers of a reproduction, and write its page and pictures below `out`."""
    place, reproduction = find_page_folder(reproduced, out), reproduced.reproduction
    for part, table in reproduced.tables.items():
        title = " ".join(filter(None, ("headwise reproduce", reproduction.id, part)))
        publish_table(table, place / part.replace(" ", "-") if part else place, console, command, title)
    for picture in reproduced.pictures:
        runs.prepare_folder(place)
        write_whole(place / f"{picture.name}.png", picture.png)
        console.print(f"figure: {place / picture.name}.png", highlight=False, markup=False, soft_wrap=True)
    builders = (build_tuned_grid, build_summed_grid, build_measures_grid, build_published_grid)
    made = [build(reproduced) for build in builders]
    for grid in filter(None, (*made, *build_claims_grids(record_claims(reproduced.judged)))):
        console.print(grid)
    if reproduction.lack:
        console.print(reproduction.lack, highlight=False, markup=False, soft_wrap=True)


def _find_initial_runs(plans: Sequence[Plan], cache: Path) -> InitialRuns:
    first = next(plan for plan in plans if not plan.part.after)
    data = first.before[0].comparison.data if first.before else None
    scale: Any = first.comparison.scale
    return read_initial_runs(Path(scale.pretrained), data, cache)


def _write_pages(
    reproduction: Reproduction, plans: Sequence[Plan], evidence: Mapping[str, Evidence], place: Path, console: Console
) -> None:
    if reproduction.pages is None:
        return
    for plan in plans:
        part, comparison = plan.part.name, plan.comparison
        if part not in evidence:
            continue
        folder = place / part.replace(" ", "-") if part else place
        runs.prepare_folder(folder)
        for path in reproduction.pages(folder, comparison.out, comparison.data, evidence[part]):
            console.print(f"written: {path}", highlight=False, markup=False, soft_wrap=True)


def _read_part_evidence(plan: Plan, console: Console) -> Evidence | None:
    if plan.finished:
        test_in_pairs(plan.comparison.out, console)
    return read_evidence(plan.comparison.out, [arm.name for arm in plan.comparison.arms], plan.comparison.seeds)


def _name_job(job: Job, plan: Plan) -> Job:
    return replace(job, name=f"{plan.part.name}: {job.name}") if plan.part.name else job
