"""A task's model with an arm on it: what a run trains.

Owns the choice of the model and of the part whose heads the arm acts on, and the refusal of an arm that does not fit
the task. Attaching the methods is `methods`'.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from headwise.checks import SettingError
from headwise.lab.arms import Arm
from headwise.lab.methods import Methods
from headwise.lab.tasks.task import Data, Scale, Task, WithModels, WithRoles

__all__ = ["armed"]


def armed(task: Task, arm: Arm, data: Data, scale: Scale, *, seed: int) -> tuple[nn.Module, Methods]:
    """Return a new model whose parameters are drawn, and the arm's methods on it.

    Args:
        task: The task.
        arm: The arm.
        data: The task's data.
        scale: Its scale.
        seed: Seed of the run.

    Raises:
        SettingError: The task has no such model, or no words that roles could be made from.
        DataError: A role needs what the data does not have.
    """
    if arm.model is not None:
        models = task.models if isinstance(task, WithModels) else ()
        if not isinstance(task, WithModels) or arm.model not in models:
            raise SettingError(
                f"task {task.name} has no model {arm.model}; models besides its own: {models or 'none'}."
            )
        model: Any = task.other_model(arm.model, data, scale)
        return model, Methods(arm, model, None, seed=seed)
    masks = None
    if arm.guided is not None:
        if not isinstance(task, WithRoles):
            raise SettingError(f"task {task.name} has no words with roles; guided heads need a task that has.")
        masks = task.role_masks(arm.guided, data, scale, seed)
    model = task.model(data, scale)
    return model, Methods(
        arm, model, task.studied(model), seed=seed, compile_routing=scale.compile_routing, masks=masks
    )
