"""The optimizer of every run; Muon on the projections of heads and another one on the rest, as one optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headwise.heads.heads import Heads
from headwise.optim.muon import PerHeadMuon, split_heads
from headwise_lab.experiment.arm import Orthogonalize
from headwise_lab.experiment.scale import Recipe

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
    `orthogonalize` the projections of `heads` are trained by Muon, at the rates of their groups.
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
    blocks = split_heads(heads, per_head=orthogonalize.per_head)

    def select(split: bool) -> list[dict[str, Any]]:
        parts = [{**group, "params": [p for p in group["params"] if (p in blocks) == split]} for group in whole]
        return [group for group in parts if group["params"]]

    names = {parameter: name for name, parameter in model.named_parameters()}
    return PerHeadMuon(select(True), blocks, build(select(False)), names=names, momentum=orthogonalize.momentum)
