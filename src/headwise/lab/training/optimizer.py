"""The optimizer of every run."""

from typing import Any

import torch
from torch import nn

from headwise.heads.blocks import head_blocks
from headwise.heads.heads import Heads
from headwise.lab.experiment.method import Orthogonalize
from headwise.lab.experiment.scale import Recipe
from headwise.lab.training.muon import MuonAndRest

MOMENTUM = 0.9


def build_optimizer(
    model: nn.Module,
    rate: float,
    recipe: Recipe,
    orthogonalize: Orthogonalize | None = None,
    heads: Heads | None = None,
) -> torch.optim.Optimizer:
    """Return Adam with decoupled weight decay, or SGD with momentum, on all parameters of a model.

    A model with `parameter_groups(rate, weight_decay)` chooses the rate and decay of each of its groups. With
    `orthogonalize` the projections of `heads` are trained by Muon, at the rates of their groups; the model must not be
    moved to another device then.
    """
    decay = recipe.weight_decay
    grouped: Any = getattr(model, "parameter_groups", None)
    groups: Any = model.parameters() if grouped is None else grouped(rate, decay)

    def build(parameters: Any) -> torch.optim.Optimizer:
        if recipe.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM, weight_decay=decay)
        # the fused form costs a small model least; without decay AdamW is Adam as Kingma and Ba wrote it
        return torch.optim.AdamW(
            parameters, lr=rate, betas=recipe.betas, eps=recipe.epsilon, weight_decay=decay, fused=True
        )

    if orthogonalize is None or heads is None:
        return build(groups)
    whole = [{"params": list(groups)}] if grouped is None else list(groups)
    whole = [{"lr": rate, "weight_decay": decay, **group} for group in whole]
    blocks = head_blocks(heads, per_head=orthogonalize.per_head)
    return MuonAndRest(blocks, whole, build, momentum=orthogonalize.momentum)
