"""The optimizer of every run.

Owns its choice; rates and decay are the recipe's.
"""

from __future__ import annotations

import torch
from torch import nn

from headwise.lab.tasks.task import Recipe

__all__ = ["optimizer_of"]

MOMENTUM = 0.9


def optimizer_of(model: nn.Module, rate: float, recipe: Recipe) -> torch.optim.Optimizer:
    """Return Adam with decoupled weight decay, or SGD with momentum, on all parameters of a model."""
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM, weight_decay=recipe.weight_decay)
    # the fused form costs a small model least; without decay AdamW is Adam as Kingma and Ba wrote it
    return torch.optim.AdamW(
        model.parameters(),
        lr=rate,
        betas=recipe.betas,
        eps=recipe.epsilon,
        weight_decay=recipe.weight_decay,
        fused=True,
    )
