"""Optimizers and the callback of a run, called as the Trainer calls them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

import headwise as hw
from cases import cases
from headwise.nn.additive import AdditiveAttention
from headwise.texts.batching import LengthBatches
from headwise_lab.experiment.arm import Orthogonalize
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.scale import Recipe
from headwise_lab.training.attach import Methods
from headwise_lab.training.callback import RunCallback
from headwise_lab.training.optimizer import build_optimizer
from headwise_lab.training.train import never

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


def attach_to(arm: str, kind: str = "additive") -> tuple[nn.Module, Methods]:
    model = AdditiveAttention(6, 5, 3) if kind == "additive" else nn.TransformerEncoderLayer(6, 2, 8)
    return model, Methods(parse_arm(arm), model, model, seed=4)


@cases("kind", ["additive", "packed"])
def test_queries_are_drawn_longer_and_nothing_else_is(kind: str):
    plain, _ = attach_to("plain", kind)
    longer, methods = attach_to("queries-longer:drawn=2.5", kind)
    (query,) = methods.heads.projection("query").slices()
    with torch.no_grad():
        query.of(query.parameter).div_(2.5)
    for one, other in zip(plain.parameters(), longer.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_queries_alone_are_trained_faster():
    model, methods = attach_to("queries-faster:rate=3.0")
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "weight_decay": 0.1}], lr=0.2)
    methods.repel(optimizer)
    rates = {id(one): group["lr"] for group in optimizer.param_groups for one in group["params"]}
    assert {name: round(rates[id(one)], 9) for name, one in model.named_parameters()} == {
        "hidden.weight": 0.2,
        "score.weight": 0.6,
    }
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1]


def test_queries_that_share_a_parameter_are_refused():
    model, methods = attach_to("queries-faster", "packed")
    with pytest.raises(hw.errors.SettingError, match="holds more than queries"):
        methods.repel(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_step_in_which_the_loss_moves_no_head_has_no_force_ratio(tmp_path):
    run = RunCallback(
        tmp_path, 3, batches=[], dropout_seed=0, evaluate=lambda: {"dev": {"pooled": 0.5}}, heartbeat=never
    )
    for ratio in (0.5, float("nan"), 0.25):
        run.add(torch.tensor(1.0), torch.tensor(ratio))
    args, control = TrainingArguments(output_dir=str(tmp_path), report_to="none"), TrainerControl()
    run.on_epoch_end(args, TrainerState(global_step=3, max_steps=6), control)
    assert run.records[0]["force_ratio"] == 0.375
    run.add(torch.tensor(1.0), torch.tensor(float("nan")))
    run.on_epoch_end(args, TrainerState(global_step=6, max_steps=6), control)
    assert run.records[1]["force_ratio"] is None
    assert run.force_ratio == 0.375


def test_the_callback_seeds_dropout_only_for_a_new_run_and_tells_the_batches_their_epoch(tmp_path):
    batches = LengthBatches([3] * 20, batch_size=2, seed=0)
    run = RunCallback(tmp_path, len(batches), batches=batches, dropout_seed=11, evaluate=dict, heartbeat=never)
    args, control = TrainingArguments(output_dir=str(tmp_path), report_to="none"), TrainerControl()
    torch.manual_seed(0)
    run.on_train_begin(args, TrainerState(global_step=0, max_steps=20), control)
    fresh = torch.get_rng_state()
    assert torch.equal(fresh, torch.manual_seed(11).get_state())
    torch.manual_seed(0)
    run.on_train_begin(args, TrainerState(global_step=5, max_steps=20), control)
    assert not torch.equal(torch.get_rng_state(), fresh)
    run.on_epoch_begin(args, TrainerState(global_step=10, max_steps=20), control)
    assert batches.epoch == 1
