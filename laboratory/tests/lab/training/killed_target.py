"""A run in a process that may be killed; a module of its own because that process imports it."""

from __future__ import annotations

from pathlib import Path

import torch

from headwise_lab.experiment.settings import RunSettings
from headwise_lab.training.train import train_run


def train(settings: RunSettings, folder: Path) -> None:
    torch.set_num_threads(1)
    train_run(settings, folder)
