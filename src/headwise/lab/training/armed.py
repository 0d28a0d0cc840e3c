"""A task's model with an arm on it: what a run trains.

Owns the choice of the model and of the part whose heads the arm acts on, and the refusal of an arm that does not fit
the task. Attaching the methods is `methods`'.
"""

from __future__ import annotations

from torch import nn

from headwise.errors import SettingError
from headwise.lab.experiment.arm import Arm
from headwise.lab.experiment.scale import Scale
from headwise.lab.experiment.task import Data, MaskMaker, Task
from headwise.lab.training.methods import Methods


def armed(task: Task, arm: Arm, data: Data, scale: Scale, *, seed: int) -> tuple[nn.Module, Methods]:
    """Return a new model whose parameters are drawn, and the arm's methods on it.

    Args:
        task: The task.
        arm: The arm.
        data: The task's data.
        scale: Its scale.
        seed: Seed of the run.

    Raises:
        SettingError: As `bare`, or the arm does not fit the model.
        DataError: A role needs what the data does not have.
    """
    model, masks = bare(task, arm, data, scale, seed=seed)
    target = None if arm.model is not None else task.target(model)
    methods = Methods(
        task.remaining_arm(arm, data),
        model,
        target,
        seed=seed,
        compile_routing=scale.compile_routing,
        masks=masks,
        rule_layers=task.rule_layers(scale),
    )
    return model, methods


def bare(task: Task, arm: Arm, data: Data, scale: Scale, *, seed: int) -> tuple[nn.Module, MaskMaker | None]:
    """Return the model of an arm before anything of the arm is on it, and what makes its role masks, if it has roles.

    Arguments as for `armed`.

    Raises:
        SettingError: The task has no such model, or no words that roles could be made from.
        DataError: A role needs what the data does not have.
    """
    if arm.model is not None:
        if arm.model not in task.models:
            raise SettingError(
                f"task {task.name} has no model {arm.model}; models besides its own: {task.models or 'none'}."
            )
        return task.other_model(arm.model, data, scale), None
    masks = None if arm.guided is None else task.role_masks(arm.guided, data, scale, seed)
    return task.initial_model(arm, data, scale, seed), masks
