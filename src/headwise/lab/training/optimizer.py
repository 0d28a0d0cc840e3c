"""The optimizer of every run."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from headwise.lab.experiment.scale import Recipe

MOMENTUM = 0.9


@runtime_checkable
class Grouped(Protocol):
    """A model whose parameters are not all trained at one rate and one decay."""

    def parameter_groups(self, rate: float, weight_decay: float) -> list[dict[str, Any]]:
        """Return the groups of the optimizer, each with "params", "lr" and "weight_decay"."""
        ...


def build_optimizer(model: nn.Module, rate: float, recipe: Recipe) -> torch.optim.Optimizer:
    """Return Adam with decoupled weight decay, or SGD with momentum, on all parameters of a model."""
    decay = recipe.weight_decay
    parameters = model.parameter_groups(rate, decay) if isinstance(model, Grouped) else model.parameters()
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM, weight_decay=decay)
    # the fused form costs a small model least; without decay AdamW is Adam as Kingma and Ba wrote it
    return torch.optim.AdamW(
        parameters,
        lr=rate,
        betas=recipe.betas,
        eps=recipe.epsilon,
        weight_decay=recipe.weight_decay,
        fused=True,
    )
