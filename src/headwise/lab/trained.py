"""A finished run's model: built as it was trained, with its arm's aggregators, and its weights.

Owns the way back from a run's folder to a model. Must not know what is done with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_model
from torch import nn

from headwise.checks import DataError
from headwise.heads import Heads
from headwise.lab import runs
from headwise.lab.armed import armed
from headwise.lab.settings import RunSettings
from headwise.lab.tasks.named import named_task
from headwise.lab.tasks.task import Task

__all__ = ["Trained", "load_trained"]


class Trained(NamedTuple):
    """A trained model in evaluation mode, with what it was trained on."""

    task: Task
    data: Any
    model: nn.Module
    heads: Heads


def load_trained(settings: RunSettings, folder: Path) -> Trained:
    """Return the model of the finished run in `folder`.

    Args:
        settings: What the run was made from.
        folder: Its folder.

    Raises:
        DataError: The run is not finished, or its weights are damaged or of another model.
    """
    path = folder / runs.WEIGHTS
    if not runs.is_finished(folder) or not path.exists():
        raise DataError(f"{folder} holds no finished run; give the comparison's command again to go on with it.")
    task = named_task(settings.task)
    data = task.load(settings.data, settings.scale, settings.cache)
    model, methods = armed(task, settings.arm, data, settings.scale, seed=settings.seed)
    if methods.heads is None:
        raise DataError(f"the model of arm {settings.arm.name} has no heads to look at; leave that arm out.")
    try:
        load_model(model, str(path))
    except Exception as error:
        # safetensors has an error class of its own, torch raises RuntimeError
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{path} does not hold this run's weights ({reason}); delete {folder} and run again.") from None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Trained(task, data, model.to(device).eval(), methods.heads)
