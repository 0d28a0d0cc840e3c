"""A comparison: arms x seeds on one task, each run in a separate folder, then the table, the figures and the page.

Run again, it keeps finished runs and resumes interrupted ones; nothing is overwritten.
"""

import importlib.util
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from headwise.atomic import FILES, OWN, seal
from headwise.errors import DataError, HeadwiseError, SettingError, require_choice, require_integer
from headwise.report.html import Page
from headwise.repulsion.repel import Repel
from headwise_lab.experiment import run_folder as runs
from headwise_lab.experiment.arm import Arm, Orthogonalize
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.run_folder import Failure, Job
from headwise_lab.experiment.scale import Scale, ScaleOptions
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.experiment.task import Data, Task
from headwise_lab.jobs.launchers import LOCAL, Launcher, open_engine
from headwise_lab.jobs.pool import do_analyses, do_jobs
from headwise_lab.results.figures import HALVES_NAME, write_figures
from headwise_lab.results.grids import render_terminal
from headwise_lab.results.pages import fill_page, write_title
from headwise_lab.results.runs import (
    COMPARISON,
    HALVE,
    PAIRED,
    REDUNDANCY,
    REFERENCES,
    STEP_TIME,
    TEST,
    pair_with_controls,
    read_results,
)
from headwise_lab.results.statistics import run_paired_tests
from headwise_lab.results.table import Table, make_record, read_table
from headwise_lab.training.attach import attach_arm
from headwise_lab.training.baseline import BaselineSettings
from headwise_lab.training.cross_validation import find_run, gather_parts, list_scales, split_job
from headwise_lab.training.optimizer import build_optimizer

RESULTS = "results.json"
REPORT = "report.html"
FIGURES = "figures"
CACHE = "data"
CONFIG = "run.toml"
TUNING = "tuning.json"
# What Hugging Face's Trainer can report to, of what needs no account or can do without.
REPORTERS = ("wandb", "trackio")


@dataclass(frozen=True)
class Comparison:
    """What is compared, on what, and where the results go.

    Attributes:
        task: Name of the task.
        arms: The arms; each is run with every seed.
        seeds: The seeds.
        scale: Sizes of data, model and training.
        out: Folder of the comparison.
        data: Folder of the data; None generates it.
        workers: Number of parallel runs, each on one thread.
        cache: Folder of prepared data; None for one inside `out`.
        options: Options that change the scale; None if there are none.
        launcher: Where the runs are done.
        report_to: Where each run reports its epochs beside TensorBoard's files; see `REPORTERS`.
        tuned: Folder of the tuning that the arms' settings come from; None for the arms as they are named.
    """

    task: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    scale: Scale
    out: Path
    data: Path | None = None
    workers: int = 1
    cache: Path | None = None
    options: ScaleOptions | None = None
    launcher: Launcher = LOCAL
    report_to: tuple[str, ...] = ()
    tuned: Path | None = None

    def __post_init__(self) -> None:
        named_task(self.task)
        for name in self.report_to:
            require_choice("report_to", name, REPORTERS)
            if importlib.util.find_spec(name) is None:
                raise SettingError(f"report_to is {name}, which is not installed; pip install {name}.")
        require_integer("workers", self.workers, low=1)
        if not self.arms or not self.seeds:
            raise SettingError(
                f"{len(self.arms)} arms and {len(self.seeds)} seeds were given; expected at least one of each."
            )
        for seed in self.seeds:
            require_integer("seed", seed, low=0, high=2**32 - 1)


def compare(
    comparison: Comparison,
    console: Console,
    *,
    redundancy: bool = False,
    halve: bool = False,
    step_times: bool = False,
    config: str = "",
) -> list[Failure]:
    """Do every run of a comparison that is not finished, then write its table, figures and page.

    Args:
        comparison: What to compare.
        console: Where progress and table are shown.
        redundancy: Whether to remove each head of each trained model alone afterwards and measure the cost.
        halve: Whether to remove half of the heads of each trained model afterwards, and train it a little further.
        step_times: Whether to time steps of each arm in turn with steps of plain afterwards.
        config: The options as TOML, kept as run.toml once the folder is known to be this comparison's.

    Returns:
        The runs that failed; the table is made from the others.

    Raises:
        SettingError: The folder cannot be written or holds another comparison, an arm does not fit the model, or
            `redundancy`, `halve` or `step_times` is combined with cross-validation.
        DataError: The data cannot be read.
        KeyboardInterrupt: Ctrl-C; every run has saved its state.
    """
    out = comparison.out
    jobs = plan_runs(comparison, console)
    if config:
        runs.write_text(out / CONFIG, config)
    asked = ((REDUNDANCY, redundancy), (HALVE, halve), (STEP_TIME, step_times))
    analyses = [name for name, wanted in asked if wanted]
    if analyses and is_divided(jobs[-1]):
        raise SettingError(
            f"--{analyses[0]} needs one trained model per run, and with --folds a run has several; omit one of them."
        )
    left = runs.list_left(jobs)
    elsewhere = left and comparison.launcher.name != "local"
    engine = open_engine(comparison.launcher, out) if elsewhere else None
    failures = do_jobs(left, len(jobs) - len(left), comparison.workers, console, engine=engine)
    for name in analyses:
        failures += do_analyses(name, jobs, comparison.workers, console)
    if any(runs.is_finished(find_run(job)) for job in jobs):
        command = " ".join([write_command(comparison), *(f"--{name}" for name in analyses)])
        publish(out, comparison.seeds, console, command)
    return failures


def plan_runs(comparison: Comparison, console: Console) -> list[Job]:
    """Return every run of a comparison, finished or not, after its folder, data and arms were checked.

    Raises:
        SettingError: The folder cannot be written, holds another comparison, an arm does not fit the model, or the arms
            were tuned on other data.
        DataError: The data cannot be read, or a model that a run starts from does not exist.
    """
    runs.prepare_folder(comparison.out)
    task = named_task(comparison.task)
    data = task.load(comparison.data, comparison.scale, _find_cache(comparison), progress=console.is_terminal)
    console.print(data.summary(), highlight=False, markup=False, soft_wrap=True)
    tuned = None if comparison.tuned is None else dict(runs.read_json(comparison.tuned / TUNING)).get("data")
    if comparison.tuned is not None and tuned != data.fingerprint:
        raise SettingError(
            f"{comparison.tuned} was tuned on data with digest {tuned}, and the data now has {data.fingerprint}; tune "
            "the arms on this data, or name the other --data."
        )
    for arm in comparison.arms:
        left = [
            seed for seed in comparison.seeds if not runs.is_finished(find_run_folder(comparison.out, arm.folder, seed))
        ]
        if len(left) == len(comparison.seeds):
            # an arm that was trained here fits, and a model takes seconds to make
            require_fits(arm, task, data, comparison.scale)
        for seed in left:
            # fail now rather than after hours if the initial run does not exist
            task.initial_run(arm, data, comparison.scale, seed)
    # only now, so that a refusal leaves the folder free
    _claim(comparison, task, data)
    jobs = _list_jobs(comparison, task, data)
    for job in jobs:
        runs.require_same(job.folder / runs.SETTINGS, job.settings.record())
    return jobs


def describe_fixed(comparison: Comparison, data: Data | None = None) -> dict[str, Any]:
    """Return what two comparisons must have in common for their runs to be comparable; data that is None is read."""
    task = named_task(comparison.task)
    cache = _find_cache(comparison)
    read = task.load(comparison.data, comparison.scale, cache, progress=False) if data is None else data
    return {
        "task": comparison.task,
        "scale": comparison.scale.name,
        "sizes": runs.as_record(comparison.scale),
        "data": read.fingerprint,
        "primary": task.primary,
        "metric": task.metric,
        "difficulty": task.difficulty,
    }


def is_divided(job: Job) -> bool:
    """Return whether a run is made of several trainings, whose models are several too."""
    return job.settings.whole is not None or len(list_scales(named_task(job.settings.task), job.settings)) > 1


def publish(out: Path, seeds: Sequence[int], console: Console, command: str) -> None:
    """Show the table of the finished runs of some seeds, and write its JSON form, figures and page with the command."""
    test_in_pairs(out, console)
    table = read_table(out, seeds)
    write_table(table, out, Page(write_title(table)), command)
    console.print(render_terminal(table))
    if table.halved:
        console.print(f"picture: {out / FIGURES / HALVES_NAME}.png", highlight=False, markup=False, soft_wrap=True)
    console.print(f"page: {out / REPORT}", highlight=False, markup=False, soft_wrap=True)


def write_table(table: Table, folder: Path, page: Page, command: str) -> None:
    """Write the JSON form and the figures of a table into a folder, and a page that it ends."""
    runs.prepare_folder(folder / FIGURES)
    runs.write_json(folder / RESULTS, make_record(table))
    fill_page(page, table, write_figures(table, folder / FIGURES), command).write(folder / REPORT)


def test_in_pairs(out: Path, console: Console) -> None:
    """Run sacreBLEU's paired tests of each arm against its control if there are references; keep results in `out`."""
    if not (out / REFERENCES).exists():
        return
    pairs = pair_with_controls(read_results(out).runs)
    done = run_paired_tests(pairs, out / REFERENCES, out / PAIRED)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("sacreBLEU's paired tests", total=len(pairs))
        for count in done:
            progress.update(bar, completed=count)


def write_command(comparison: Comparison) -> str:
    """Return the command of a comparison, with all arms recorded in its folder."""
    record = runs.read_json(comparison.out / COMPARISON)
    words = ["headwise", "compare", comparison.task, "--arms", ",".join(record["arms"])]
    words += ["--seeds", str(max(comparison.seeds) + 1)]
    words += (comparison.options or ScaleOptions(comparison.scale.name)).words()
    words += [] if comparison.data is None else ["--data", str(comparison.data)]
    words += [] if comparison.tuned is None else ["--tuned", str(comparison.tuned)]
    return shlex.join([*words, "--out", str(comparison.out)])


def estimate_minutes(comparison: Comparison, arms: Sequence[Arm]) -> float | None:
    """Return how long runs of further arms take at the pace of the finished runs in the folder; None without any."""
    found = [read_train_seconds(place.parent) for place in comparison.out.glob(f"*/seed-*/{runs.RESULT}")]
    past = [seconds for seconds in found if seconds is not None]
    return len(arms) * len(comparison.seeds) * fmean(past) / comparison.workers / 60 if past else None


def read_train_seconds(folder: Path) -> float | None:
    """Return how long the finished run in a folder trained; None for a baseline or a damaged run."""
    try:
        return float(runs.read_json(folder / runs.RESULT)["train_seconds"])
    except (DataError, ValueError, KeyError, TypeError, OverflowError):
        return None


def find_run_folder(out: Path, arm: str, seed: int) -> Path:
    """Return the folder of one run of a comparison; `arm` is an arm's folder name or a baseline's name."""
    return out / arm / f"seed-{seed}"


def require_fits(arm: Arm, task: Task, data: Data, scale: Scale) -> None:
    """Check that an arm can be put on the model of a scale; raises SettingError if not."""
    try:
        model, methods = attach_arm(task, arm, data, scale, seed=0)
        if arm.find(Repel) is not None:
            # an optimizer imports torch's compiler, which takes a second
            methods.repel(torch.optim.Adam(model.parameters()))
        if (orthogonalize := arm.find(Orthogonalize)) is not None:
            build_optimizer(model, scale.recipe.learning_rate, scale.recipe, orthogonalize, methods.heads)
    except HeadwiseError as error:
        raise SettingError(f"arm {arm.name} does not fit the model of scale {scale.name}: {error}") from None


def _find_cache(comparison: Comparison) -> Path:
    return comparison.cache or comparison.out / CACHE


def _claim(comparison: Comparison, task: Task, data: Data) -> None:
    """Write the record of the comparison, adding to the arms and seeds of an earlier one in the same folder."""
    out, path = comparison.out, comparison.out / COMPARISON
    fixed = describe_fixed(comparison, data)
    arms, seeds = [arm.name for arm in comparison.arms], list(comparison.seeds)
    if path.exists():
        old = runs.read_json(path)
        if not isinstance(old, dict) or not {"arms", "seeds"} <= old.keys():
            raise DataError(f"{path} is not the record of a comparison; choose another --out.")
        varying = ("arms", "seeds", "shown", "described", "named", FILES, OWN)
        runs.require_same(path, fixed | {name: old[name] for name in varying if name in old})
        arms = [*old["arms"], *(name for name in arms if name not in old["arms"])]
        seeds = sorted({*old["seeds"], *seeds})
    # these do not affect any run, so an older folder may be updated
    shown = [runs.as_record(measure) for measure in task.shown]
    named = "" if comparison.data is None else comparison.data.resolve().name
    told = {"described": data.summary(), "named": named, "shown": shown, "arms": arms, "seeds": seeds}
    runs.write_arrays(out / TEST, bins=task.difficulties(data))
    references = task.references(data)
    if references is not None:
        runs.write_text(out / REFERENCES, "".join(f"{line}\n" for line in references))
    runs.write_json(path, seal(fixed | told, out, [TEST] if references is None else [TEST, REFERENCES]))


def _list_jobs(comparison: Comparison, task: Task, data: Data) -> list[Job]:
    """Return all runs or their parts, the baselines first, then seed by seed so that all arms advance evenly."""
    shared: dict[str, Any] = {
        "task": comparison.task,
        "scale": comparison.scale,
        "fingerprint": data.fingerprint,
        "data": comparison.data,
        "cache": _find_cache(comparison),
    }
    model = f"{comparison.task} {comparison.scale.name}"
    rows = [
        Job(
            name,
            find_run_folder(comparison.out, name, 0),
            BaselineSettings(name=name, **shared),
            weight=0.05,
            kind=f"{model} {name}",
        )
        for name in task.baselines
    ]
    rows += [
        Job(
            f"{arm.name} seed {seed}",
            find_run_folder(comparison.out, arm.folder, seed),
            RunSettings(arm=arm, seed=seed, report_to=comparison.report_to, **shared),
            kind=f"{model} {arm.name}",
        )
        for seed in comparison.seeds
        for arm in comparison.arms
    ]
    scales = list_scales(task, rows[-1].settings)
    # the parts of a run taken over from a record are not there
    jobs = [part for row in rows for part in ([row] if runs.is_finished(row.folder) else split_job(row, scales))]
    for job in jobs:
        # if the command was stopped in between, all parts may be finished and the run not
        gather_parts(job.settings, job.folder)
    return jobs
