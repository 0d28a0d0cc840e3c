"""The optimizer of every run; Muon on the projections of heads and another one on the rest, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from headwise.heads.blocks import HeadBlocks, head_blocks
from headwise.heads.heads import Heads
from headwise_lab.experiment.arm import Orthogonalize
from headwise_lab.experiment.scale import Recipe

RMS = "match_rms_adamw"


class MuonAndRest(Optimizer):
    """Muon on blocks of attention weights (Jordan et al. 2024), and an optimizer of the rest; both step together.

    With G the gradient of a block, M <- m M + G and X = G + m M: theta <- (1 - lr decay) theta - 0.2 lr
    sqrt(max(rows, columns)) NS(X), with NS(X) = U V^T of the singular value decomposition of X, about. The root mean
    square of an update is then about 0.2 lr, as large as AdamW's, for blocks of any shape.

    Args:
        blocks: The blocks.
        groups: Parameter groups of the whole model, each with its rate "lr" and "weight_decay".
        make_rest: Makes the optimizer of groups like these.
        momentum: m.

    Example:
        >>> import headwise as hw
        >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> groups = [{"params": list(model.parameters()), "lr": 0.01, "weight_decay": 0.1}]
        >>> both = MuonAndRest(hw.heads.head_blocks(hw.find_heads(model)), groups, torch.optim.AdamW, momentum=0.95)
        >>> [len(group["params"]) for group in both.param_groups]
        [8, 10]
    """

    def __init__(
        self,
        blocks: HeadBlocks,
        groups: list[dict[str, Any]],
        make_rest: Callable[[list[dict[str, Any]]], Optimizer],
        *,
        momentum: float,
    ) -> None:
        whole, first, others = {id(parameter) for parameter in blocks.wholes}, [], []
        for group in groups:
            given = {id(parameter) for parameter in group["params"]}
            own = [block for block, owner in zip(blocks, blocks.wholes, strict=True) if id(owner) in given]
            rest = [one for one in group["params"] if id(one) not in whole]
            first += [{**group, "params": own}] if own else []
            others += [{**group, "params": rest}] if rest else []
        self.muon = torch.optim.Muon(first, momentum=momentum, adjust_lr_fn=RMS)
        self.rest = make_rest(others)
        blocks.attach(self.muon)
        # the groups are shared, so that a schedule reaches those of both
        super().__init__([*self.muon.param_groups, *self.rest.param_groups], {})

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step both."""
        with torch.enable_grad():
            if closure is not None:
                closure()
        self.muon.step()
        self.rest.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of both."""
        self.muon.zero_grad(set_to_none)
        self.rest.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both."""
        return {"muon": self.muon.state_dict(), "rest": self.rest.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.muon.load_state_dict(state_dict["muon"])
        self.rest.load_state_dict(state_dict["rest"])
        self.param_groups = [*self.muon.param_groups, *self.rest.param_groups]


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
