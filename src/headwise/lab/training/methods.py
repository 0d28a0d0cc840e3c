"""An arm on a model: aggregators, penalty, repulsion, DropHead and role masks, attached in the order they need.

Owns that order: aggregators before the parameters are drawn, the penalty after them, repulsion once there is an
optimizer. Must not know tasks or training loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.disagreement.penalty import Disagreement
from headwise.heads.find import find_heads
from headwise.heads.heads import Heads
from headwise.lab.experiment.arm import KINDS, Arm
from headwise.lab.experiment.seeding import initialise, key
from headwise.lab.experiment.task import MaskMaker
from headwise.lab.role_masks.encoder import mask_encoder
from headwise.lab.training import processes
from headwise.lab.training.drophead import DropHead
from headwise.repulsion.repel import Repulsion, repel
from headwise.roles.guide import Guidance, guide
from headwise.routing.aggregate import aggregate
from headwise.routing.modules import Residual, Routing


class Methods:
    """The methods of one arm, attached to one model whose parameters they draw.

    Args:
        arm: The arm.
        model: The model; its aggregators are put in place and every parameter is drawn anew.
        part: The part of the model whose heads the arm acts on; None for a model without attention.
        seed: Seed of the run; each thing that draws has a stream of its own.
        compile_routing: Whether the arm's routing is compiled with `torch.compile`.
        masks: Makes the role masks of a batch from the arguments of the model's forward; None where no head is guided.
        rule_layers: Layers that the arm's rule acts on where the arm names none; None for all.
    """

    def __init__(
        self,
        arm: Arm,
        model: nn.Module,
        part: nn.Module | None,
        *,
        seed: int,
        compile_routing: bool = False,
        masks: MaskMaker | None = None,
        rule_layers: tuple[int, ...] | None = None,
    ) -> None:
        self.arm, self.seed, self.masks = arm, seed, masks
        self.rule_layers = rule_layers if arm.layers is None else arm.layers
        self.penalty: Disagreement | None = None
        self.drophead: DropHead | None = None
        self.repulsion: Repulsion | None = None
        self.heads: Heads | None = None
        if part is None:
            initialise(model, seed)
            return
        self.heads = find_heads(part)
        if arm.aggregation is not None:
            setting = _compiled(arm.aggregation) if compile_routing else arm.aggregation
            aggregate(_chosen(self.heads, arm.aggregation_layers, arm.aggregation_kinds), setting)
        initialise(model, seed)
        if arm.term is not None:
            chosen = _chosen(self.heads, arm.layers, arm.kinds)
            there = {site.kind for site in chosen}
            weights = {
                kind: weight for kind, weight in zip(KINDS, arm.kind_weights or (), strict=False) if kind in there
            }
            self.penalty = Disagreement(chosen, arm.term, weights=weights, across=processes.group())
        if arm.drophead:
            self.drophead = DropHead(self.heads, arm.drophead, seed=key(seed, "drophead"))
        if masks is not None:
            _guide(model, self.heads, masks)

    def repel(self, optimizer: torch.optim.Optimizer) -> None:
        """Attach the arm's rule to the optimizer; the loop calls `apply_repulsion` before it clips."""
        if self.arm.rule is not None and self.heads is not None:
            heads = _chosen(self.heads, self.rule_layers, self.arm.kinds)
            if self.arm.projections is not None:
                heads = heads.projection(*self.arm.projections)
            noise_seed = key(self.seed, "noise")
            self.repulsion = repel(optimizer, heads, self.arm.rule, when="manual", seed=noise_seed)

    def penalized(self, loss: Tensor) -> Tensor:
        """Return the loss with the arm's penalty added."""
        if self.penalty is None:
            return loss
        return loss + self.arm.penalty_weight * self.penalty()

    def apply_repulsion(self) -> Tensor | None:
        """Apply the rule to the gradients and return its force ratio; None without a rule.

        The norm of all repulsion over the norm of all drive: a group that the loss hardly moves, as queries and keys
        are at the start, would dominate a mean of the groups' ratios.
        """
        if self.repulsion is None:
            return None
        self.repulsion.apply()
        last = self.repulsion.last
        return last.repulsion_norm.norm() / last.driving_norm.norm()

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Evaluation mode without gradients, nothing captured for the penalty, and the old mode afterwards."""
        training = model.training
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self.penalty is not None:
                stack.enter_context(self.penalty.taps.paused())
            model.eval()
            try:
                yield
            finally:
                model.train(training)

    def state_dict(self) -> dict[str, Any]:
        """Return what the methods draw from, for a checkpoint."""
        state: dict[str, Any] = {}
        if self.drophead is not None:
            state["drophead"] = self.drophead.generator.get_state()
        if self.repulsion is not None:
            state["repulsion"] = self.repulsion.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        if self.drophead is not None:
            self.drophead.generator.set_state(state["drophead"])
        if self.repulsion is not None:
            self.repulsion.load_state_dict(state["repulsion"])


def _guide(model: Any, heads: Heads, masks: MaskMaker) -> None:
    """Give each forward of the model the masks of its batch; where the model encodes a source, those of the source."""
    if hasattr(model, "get_encoder"):
        mask_encoder(
            model,
            lambda ids, real: masks({"input_ids": ids, "attention_mask": real}),
            sites=heads.kind("self"),
        )
        return
    model.register_forward_pre_hook(_masked(masks, guide(heads)), with_kwargs=True, prepend=True)


def _masked(masks: MaskMaker, guidance: Guidance) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def before(_model: nn.Module, _arguments: tuple[Any, ...], batch: dict[str, Any]) -> None:
        guidance(masks(batch))

    return before


def _chosen(heads: Heads, layers: tuple[int, ...] | None, kinds: tuple[str, ...] | None) -> Heads:
    if kinds is not None:
        heads = heads.kind(*kinds)
    if layers is None:
        return heads
    # the layers of each stack and kind are counted from 0
    every = dict.fromkeys(site.kind for site in heads)
    return replace(heads, sites=tuple(site for kind in every for site in heads.kind(kind).layers(*layers)))


def _compiled(setting: Routing | Residual) -> Routing | Residual:
    if isinstance(setting, Residual):
        return replace(setting, routing=_compiled(setting.routing))
    return replace(setting, chunks=replace(setting.chunks, compile=True))
