"""What a worker process is given to do; imports what a kind of job needs once it is asked for one.

Owns the dispatch from a job's settings to the function that does it, so that a worker starts quickly.
"""

from __future__ import annotations

from pathlib import Path

import torch

from headwise.lab.analyses.registry import AnalysisSettings, analyze
from headwise.lab.experiment.job import Heartbeat
from headwise.lab.experiment.settings import RunSettings
from headwise.lab.training import processes
from headwise.lab.training.baseline import BaselineSettings, run_baseline
from headwise.lab.training.cross_validation import gather_parts


def do_job(settings: RunSettings | BaselineSettings | AnalysisSettings, folder: Path, heartbeat: Heartbeat) -> None:
    """Do one run on one thread in its folder; see `train_run`, `run_baseline` and `analyze`."""
    torch.set_num_threads(1)
    if isinstance(settings, BaselineSettings):
        run_baseline(settings, folder)
        gather_parts(settings, folder)
        return
    if isinstance(settings, AnalysisSettings):
        analyze(settings, folder)
        return
    # Hugging Face's Trainer takes seconds to import, and only arms need it
    from headwise.lab.training.train import train_run

    train_run(settings, folder, heartbeat)
    processes.by_first(lambda: gather_parts(settings, folder))
