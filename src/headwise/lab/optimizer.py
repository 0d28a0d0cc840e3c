"""The optimizer of every run.

Owns its choice; rates and decay are the recipe's.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from headwise.lab.tasks.task import Recipe

__all__ = ["Grouped", "adam"]


@runtime_checkable
class Grouped(Protocol):
    """A model whose parameters are not all trained at one rate and one decay."""

    def parameter_groups(self, rate: float, weight_decay: float) -> list[dict[str, Any]]:
        """Return the groups of the optimizer, each with "params", "lr" and "weight_decay"."""
        ...


def adam(model: nn.Module, rate: float, recipe: Recipe) -> torch.optim.Optimizer:
    """Return Adam on all parameters of a model, with decoupled weight decay."""
    grouped = isinstance(model, Grouped)
    # the fused form costs a small model least; without decay AdamW is Adam as Kingma and Ba wrote it
    return torch.optim.AdamW(
        model.parameter_groups(rate, recipe.weight_decay) if grouped else model.parameters(),
        lr=rate,
        betas=recipe.betas,
        eps=recipe.epsilon,
        weight_decay=recipe.weight_decay,
        fused=True,
    )
