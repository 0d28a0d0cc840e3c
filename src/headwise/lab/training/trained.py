"""A finished run's model: built as it was trained, with what of its arm outlives training, and its weights.

Owns the way back from a run's folder to a model. Must not know what is done with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn

from headwise.errors import DataError, HeadwiseError
from headwise.heads.heads import Heads
from headwise.lab.experiment import run_folder
from headwise.lab.experiment.arm import Arm
from headwise.lab.experiment.arm_record import KEYS, restore_arm
from headwise.lab.experiment.guided import Guided
from headwise.lab.experiment.method import Aggregate, OtherModel
from headwise.lab.experiment.registry import named_task
from headwise.lab.experiment.settings import RunSettings
from headwise.lab.experiment.task import MaskMaker, Task
from headwise.lab.training.attach import Methods, build_model, find_target

# The methods that a trained model still has; the others act on gradients, or during training only.
LASTING = (Aggregate, Guided, OtherModel)


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
    if not run_folder.is_finished(folder) or not (folder / run_folder.WEIGHTS).exists():
        raise DataError(f"{folder} holds no finished run; give the comparison's command again to go on with it.")
    task, scale = named_task(settings.task), settings.scale
    data = task.load(settings.data, scale, settings.cache)
    model, masks = build_model(task, settings.arm, data, scale, seed=settings.seed)
    methods = revived(
        folder,
        task.remaining_arm(settings.arm, data),
        model,
        task,
        seed=settings.seed,
        masks=masks,
        compile_routing=scale.compile_routing,
    )
    if methods.heads is None:
        raise DataError(f"the model of arm {settings.arm.name} has no heads to look at; leave that arm out.")
    return Trained(task, data, model, methods.heads)


def revived(
    folder: Path,
    arm: Arm,
    model: nn.Module,
    task: Task,
    *,
    seed: int,
    masks: MaskMaker | None = None,
    compile_routing: bool = False,
) -> Methods:
    """Give a new model what the finished run in `folder` has: what of its arm outlives training, and its weights.

    The model is then in evaluation mode, on the GPU where there is one.

    Args:
        folder: The run's folder.
        arm: The run's arm, or what of it outlives training.
        model: A new model of the run's sizes; changed in place.
        task: The run's task.
        seed: The run's seed.
        masks: Makes the role masks of a batch; None where no head is guided.
        compile_routing: Whether the arm's routing is compiled.

    Raises:
        DataError: The weights are damaged or of another model.
    """
    left = replace(arm, methods=tuple(method for method in arm.methods if isinstance(method, LASTING)))
    methods = Methods(
        left, model, find_target(task, arm, model), seed=seed, compile_routing=compile_routing, masks=masks
    )
    path = folder / run_folder.WEIGHTS
    try:
        load_model(model, str(path))
    except (SafetensorError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{path} does not hold the weights of this run ({reason}); delete {folder} and train it again."
        ) from None
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    return methods


def read_arm(folder: Path, record: Mapping[str, Any]) -> Arm:
    """Return what of the arm of a run's settings outlives training, as it was written when the run began.

    Args:
        folder: The run's folder.
        record: Its `settings.json`.

    Raises:
        DataError: The record does not say it.
    """
    try:
        arm = record["arm"]
        lasting = {name: arm[name] for name in ("name", *KEYS[Aggregate].values())}
        # the arm of a record from before there were roles or other models has neither
        return restore_arm(lasting | {name: arm.get(name) for name in ("guided", "model")})
    except (KeyError, TypeError, AttributeError, HeadwiseError) as error:
        raise DataError(
            f"{folder / run_folder.SETTINGS} does not say what its arm is ({error}); was it made by another version?"
        ) from error
