"""Muon on heads and another optimizer on the rest step as each would alone, at the rates of one schedule."""

from __future__ import annotations

import copy

import torch
from torch import nn

import headwise as hw
from cases import cases
from headwise_lab.experiment.arm import Orthogonalize
from headwise_lab.experiment.scale import Recipe
from headwise_lab.training.optimizer import build_optimizer

RECIPE = Recipe(0.02, 3, 2, weight_decay=0.1)


class Grouped(nn.TransformerEncoderLayer):
    """A model with groups of its own, the second at another rate."""

    def parameter_groups(self, rate: float, decay: float) -> list[dict]:
        attention = list(self.self_attn.parameters())
        own = {id(parameter) for parameter in attention}
        others = [parameter for parameter in self.parameters() if id(parameter) not in own]
        return [{"params": others, "lr": rate}, {"params": attention, "lr": 0.3 * rate, "weight_decay": 0.5 * decay}]


def build(kind: type[nn.TransformerEncoderLayer] = nn.TransformerEncoderLayer) -> nn.Module:
    torch.manual_seed(0)
    return kind(12, 3, 16, dropout=0.0, batch_first=True)


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range, schedule: float = 1.0) -> None:
    for step in steps:
        torch.manual_seed(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.randn(2, 5, 12)).square()[..., :5].mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= schedule


@cases("kind", [nn.TransformerEncoderLayer, Grouped])
@cases("per_head", [False, True])
def test_both_step_as_two_optimizers_under_one_schedule(per_head: bool, kind):
    model, other = build(kind), build(kind)
    heads = hw.find_heads(model)
    train(model, [build_optimizer(model, 0.02, RECIPE, Orthogonalize(per_head), heads)], range(3), schedule=0.8)
    blocks = hw.heads.head_blocks(hw.find_heads(other), per_head=per_head)
    share = 0.3 if kind is Grouped else 1.0
    muon = torch.optim.Muon(
        list(blocks),
        lr=0.02 * share,
        weight_decay=0.1 * (0.5 if kind is Grouped else 1.0),
        adjust_lr_fn="match_rms_adamw",
    )
    blocks.attach(muon)
    held = {id(parameter) for parameter in blocks.wholes}
    biases = [p for p in other.self_attn.parameters() if id(p) not in held]
    inside = {id(parameter) for parameter in other.self_attn.parameters()}
    outside = [p for p in other.parameters() if id(p) not in inside]
    rest = torch.optim.AdamW(
        [
            {"params": outside},
            {"params": biases, "lr": 0.02 * share, "weight_decay": muon.param_groups[0]["weight_decay"]},
        ],
        lr=0.02,
        weight_decay=0.1,
        # the gradient of key biases is rounding alone, which Adam enlarges
        fused=True,
    )
    train(other, [muon, rest], range(3), schedule=0.8)
    plain = build(kind)
    for (name, one), two, start in zip(model.named_parameters(), other.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, two, msg=name)
        assert not torch.equal(one, start)


def test_updates_of_heads_and_of_whole_matrices_are_as_large_as_those_of_adamw():
    torch.manual_seed(1)
    sizes = {}
    recipe = Recipe(0.02, 3, 2)
    for name, method in {"heads": Orthogonalize(True), "whole": Orthogonalize(False)}.items():
        model = nn.TransformerEncoderLayer(64, 4, 16, dropout=0.0, batch_first=True)
        before = copy.deepcopy(model)
        optimizer = build_optimizer(model, 0.02, recipe, method, hw.find_heads(model))
        model(torch.randn(8, 9, 64)).square()[..., :5].mean().backward()
        optimizer.step()
        change = (model.self_attn.in_proj_weight - before.self_attn.in_proj_weight).detach()
        sizes[name] = float(change[128:].square().mean().sqrt()) / 0.02
    # singular values of the orthogonalized update lie between about 0.5 and 1.2
    assert all(0.1 < size < 0.26 for size in sizes.values()), sizes


def test_a_restored_state_goes_on_to_the_same_bits():
    whole, first, second = build(), build(), build()
    method = Orthogonalize(per_head=True)
    train(whole, [build_optimizer(whole, 0.02, RECIPE, method, hw.find_heads(whole))], range(4), schedule=0.8)
    optimizer = build_optimizer(first, 0.02, RECIPE, method, hw.find_heads(first))
    train(first, [optimizer], range(2), schedule=0.8)
    second.load_state_dict(first.state_dict())
    other = build_optimizer(second, 0.02, RECIPE, method, hw.find_heads(second))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(second, [other], range(2, 4), schedule=0.8)
    assert all(torch.equal(one, two) for one, two in zip(whole.parameters(), second.parameters(), strict=True))
    assert all(p.grad is not None for p in second.parameters())
    other.zero_grad()
    assert all(p.grad is None for p in second.parameters())
