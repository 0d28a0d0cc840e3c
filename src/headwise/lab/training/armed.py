"""A task's model with an arm on it: what a run trains.

Owns the choice of the model and of the part whose heads the arm acts on, and the refusal of an arm that does not fit
the task. Attaching the methods is `methods`'.
"""

from __future__ import annotations

from torch import nn

from headwise.errors import SettingError
from headwise.lab.experiment.arm import Arm
from headwise.lab.experiment.task import (
    Data,
    MakesMasks,
    Scale,
    Task,
    WithModels,
    WithRoles,
    WithRuleLayers,
    WithStarts,
)
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
    arm = left_of(task, arm, data)
    studied = None if arm.model is not None else task.studied(model)
    layers = task.rule_layers(scale) if isinstance(task, WithRuleLayers) else None
    methods = Methods(
        arm, model, studied, seed=seed, compile_routing=scale.compile_routing, masks=masks, rule_layers=layers
    )
    return model, methods


def bare(task: Task, arm: Arm, data: Data, scale: Scale, *, seed: int) -> tuple[nn.Module, MakesMasks | None]:
    """Return the model of an arm before anything of the arm is on it, and what makes its role masks, if it has roles.

    Arguments as for `armed`.

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
        return task.other_model(arm.model, data, scale), None
    masks = None
    if arm.guided is not None:
        if not isinstance(task, WithRoles):
            raise SettingError(f"task {task.name} has no words with roles; guided heads need a task that has.")
        masks = task.role_masks(arm.guided, data, scale, seed)
    if isinstance(task, WithStarts):
        return task.started(arm, data, scale, seed), masks
    return task.model(data, scale), masks


def start_of(task: Task, arm: Arm, data: Data, scale: Scale, seed: int) -> int | None:
    """Return which of its arm's earlier runs a run begins with; None where it draws everything itself."""
    return task.start_of(arm, data, scale, seed) if isinstance(task, WithStarts) else None


def left_of(task: Task, arm: Arm, data: Data) -> Arm:
    """Return what an arm does to the model that its runs begin with; the arm itself where nothing was done before."""
    return task.remaining(arm, data) if isinstance(task, WithStarts) else arm
