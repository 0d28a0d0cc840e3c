"""The optimizer of every run."""

from typing import Any

import torch
from torch import nn

from headwise.lab.experiment.scale import Recipe

MOMENTUM = 0.9


def build_optimizer(model: nn.Module, rate: float, recipe: Recipe) -> torch.optim.Optimizer:
    """Return Adam with decoupled weight decay, or SGD with momentum, on all parameters of a model.

    A model with `parameter_groups(rate, weight_decay)` chooses the rate and decay of each of its groups.
    """
    decay = recipe.weight_decay
    group: Any = getattr(model, "parameter_groups", None)
    parameters = model.parameters() if group is None else group(rate, decay)
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM, weight_decay=decay)
    # the fused form costs a small model least; without decay AdamW is Adam as Kingma and Ba wrote it
    return torch.optim.AdamW(
        parameters, lr=rate, betas=recipe.betas, eps=recipe.epsilon, weight_decay=decay, fused=True
    )
