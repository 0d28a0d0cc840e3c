"""Running jobs in parallel with progress on the console: training runs, then analyses of the trained models."""

import os
from collections.abc import Sequence

import torch
from rich.console import Console

from headwise_lab.analyses.registry import AnalysisSettings, find_analysis, is_analyzed
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.run_folder import Failure, Job
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.jobs.progress import choose_watch
from headwise_lab.jobs.torchrun import run_together
from headwise_lab.jobs.workers import Engine, do_job, run_jobs, run_on
from headwise_lab.training import processes


def do_jobs(
    jobs: Sequence[Job], finished: int, workers: int, console: Console, *, engine: Engine | None = None
) -> list[Failure]:
    """Run jobs on a pool, or an engine elsewhere, with progress on the console; `finished` others count as done."""
    if not jobs:
        return []
    with choose_watch(console, jobs, finished) as watch:
        if processes.launched():
            return run_together(jobs, watch)
        if engine is not None:
            return run_on(engine, jobs, workers, watch)
        return run_jobs(do_job, jobs, workers, watch)


def do_analyses(name: str, jobs: Sequence[Job], workers: int, console: Console) -> list[Failure]:
    """Do an analysis on each of these runs that has a trained model and not yet this analysis; return the failures."""
    every = [
        Job(f"{name} of {job.name}", job.folder, AnalysisSettings(name, run), kind=f"{name} of {job.kind}")
        for job in jobs
        if isinstance(run := job.settings, RunSettings) and run_folder.is_finished(job.folder)
        if run.seed == 0 or not find_analysis(name, run.task).once
    ]
    left = [job for job in every if not is_analyzed(job.settings, job.folder)]
    for job in left:
        # the progress of training is not that of the analysis
        (job.folder / run_folder.PROGRESS).unlink(missing_ok=True)
    return do_jobs(left, len(every) - len(left), workers, console)


def count_workers() -> int:
    """Return the default number of parallel workers: the number of available cores, at most four with a GPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 4) if torch.cuda.is_available() else cores
