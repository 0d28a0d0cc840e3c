"""Repulsion with a target: forces at the controllers' ratios, measurements, state and refusals."""

from __future__ import annotations

import json
from importlib import import_module

import pytest
import torch

import headwise as hw
from cases import cases
from headwise.errors import NotFired, SettingError
from headwise.strength import SATURATED

TARGET = hw.SVGD(alpha=hw.Target(3.0))
RULES = {
    "svgd": lambda alpha: hw.SVGD(alpha=alpha, kernel=hw.kernels.NormalizedRBF()),
    "function": lambda alpha: hw.repulsion.FunctionSVGD(alpha=alpha),
    "span": lambda alpha: hw.repulsion.SpanSVGD(alpha=alpha),
    "cosine": lambda alpha: hw.repulsion.CosinePenalty(alpha=alpha),
}


def make(layers: int = 2) -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int, tokens: int = 7) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    (model(torch.randn(4, tokens, 12)) - 0.3).square().mean().backward()
    optimizer.step()


def make_optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(layer.parameters(), lr=0.05) for layer in model.layers]


def attach(model: torch.nn.Module, rule=TARGET, **settings) -> tuple[torch.optim.Optimizer, hw.repulsion.Repulsion]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return optimizer, hw.repel(hw.find_heads(model), rule, optimizer, **settings)


@cases("name", RULES)
def test_each_attention_is_repelled_at_the_ratio_of_its_controller(name: str):
    model = make()
    optimizer, repulsion = attach(model, RULES[name](hw.Target(3.0, proportional=2.0)), every=2)
    for seed in range(3):
        step(model, optimizer, seed)
    controls = repulsion.steering.controls
    ratios = [control.ratio for control in controls.values()]
    assert len(set(ratios)) == 2
    assert all(0.01 < ratio < 1.0 for ratio in ratios)
    last = repulsion.last
    for group, ratio in zip(last.names, last.force_ratio.tolist(), strict=True):
        assert ratio == pytest.approx(controls[group.rpartition(" ")[0]].ratio, rel=1e-4)
    repulsion.strength = 0.5
    step(model, optimizer, 3)
    assert repulsion.last.force_ratio[0].item() == pytest.approx(ratios[0] / 2, rel=1e-4)
    repulsion.check()


def test_a_controller_that_stays_at_its_highest_is_told_once(caplog):
    model = make()
    optimizer, _ = attach(
        model, hw.repulsion.SpanSVGD(alpha=hw.Target(3.0, highest=1e-6, integral=0.0, back=0.0)), every=1
    )
    told = []
    for seed in range(SATURATED + 2):
        told.append(len(caplog.records))
        step(model, optimizer, seed)
    assert told == [0] * SATURATED + [2, 2]
    assert "the target is likely out of reach" in caplog.messages[1]


def test_heads_that_are_diverse_enough_are_not_repelled():
    model, plain = make(), make()
    optimizer, repulsion = attach(model, hw.SVGD(alpha=hw.Target(1.01)), every=1)
    other, _ = attach(plain, hw.SVGD(alpha=0.0))
    for seed in range(2):
        step(model, optimizer, seed)
        step(plain, other, seed)
    assert repulsion.last.repulsion_norm.tolist() == [0.0] * 6
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, two)


def test_outputs_are_captured_at_measured_steps_only():
    model = make()
    optimizer, repulsion = attach(model, every=3)
    held, numbers = [], []
    for seed in range(7):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        (model(torch.randn(4, 7, 12)) - 0.3).square().mean().backward()
        held.append(sum(len(record.here.own.calls) for record in repulsion.steering._taps._records))
        optimizer.step()
        numbers.append(next(iter(repulsion.steering.controls.values())).effective_heads)
    assert held == [2, 0, 0, 2, 0, 0, 2]
    assert len(set(numbers)) == 3


def test_stacks_take_a_strength_for_each_group(monkeypatch: pytest.MonkeyPatch):
    found = []
    for stacked in (False, True):
        monkeypatch.setattr("headwise.repulsion.step.stacks_on", lambda _device, on=stacked: on)
        model = make()
        optimizer, repulsion = attach(model, hw.SVGD(alpha=hw.Target(3.0, proportional=2.0)), every=2)
        for seed in range(3):
            step(model, optimizer, seed)
        found.append((repulsion.last.force_ratio, [p.detach() for p in model.parameters()]))
    torch.testing.assert_close(found[0][0].sort().values, found[1][0].sort().values, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0.0, atol=1e-6)


@cases("gone_on", [3, 5, 6])
def test_a_run_goes_on_from_what_was_saved_in_the_same_handle_or_another(gone_on: int):
    def go_on(model, optimizer, repulsion):
        repulsion.load_state_dict(state)
        model.load_state_dict(weights)
        for seed in range(3, 7):
            step(model, optimizer, seed)
        return repulsion.steering.controls, {name: tensor.clone() for name, tensor in model.state_dict().items()}

    model, other = make(), make()
    optimizer, repulsion = attach(model, every=3)
    for seed in range(3):
        step(model, optimizer, seed)
    state = json.loads(json.dumps(repulsion.state_dict()))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for seed in range(3, gone_on):
        step(model, optimizer, seed)
    # after five steps nothing is captured for the next; after six this call is
    model(torch.randn(4, 7, 12))
    found = [go_on(model, optimizer, repulsion) for _ in range(2)] + [go_on(other, *attach(other, every=3))]
    for controls, parameters in found[1:]:
        assert controls == found[0][0]
        assert all(torch.equal(parameters[name], tensor) for name, tensor in found[0][1].items())
    with pytest.raises(SettingError, match="the state holds none; expected those of layers"):
        repulsion.load_state_dict({name: value for name, value in state.items() if name != "controls"})
    name, control = next(iter(state["controls"].items()))
    for broken, message in (
        ({**control, "ratio": -1.0}, r"Control\.ratio is -1\.0"),
        ({**control, "effective_heads": "3"}, r"Control\.effective_heads is '3'"),
        ({**control, "integral": float("nan")}, r"Control\.integral is nan"),
        ({**control, "at_highest": 1.5}, r"Control\.at_highest is 1\.5"),
        ({"ratio": 0.5}, "expected a mapping with ratio, effective_heads, integral, at_highest"),
    ):
        with pytest.raises(SettingError, match=rf"the controller of layers\.0\.self_attn.*{message}"):
            repulsion.load_state_dict({**state, "controls": {**state["controls"], name: broken}})
    assert repulsion.steering.controls == found[0][0]


def test_closures_that_are_called_again_and_steps_left_out_are_no_steps_of_a_controller():
    model = make()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=3)
    repulsion = hw.repel(hw.find_heads(model), TARGET, optimizer, every=2)
    x, calls = torch.randn(4, 7, 12), []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        calls.append(repulsion.steering.steps)
        loss = (model(x) - 0.3).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert len(calls) > 4
    assert repulsion.steering.steps == repulsion.steps == 2
    repulsion.remove()
    optimizer, repulsion = attach(model, every=2, when="manual")
    for left_out in (False, True, False):
        optimizer.zero_grad()
        (model(x) - 0.3).square().mean().backward()
        repulsion.apply()
        if not left_out:
            optimizer.step()
    assert repulsion.steering.steps == repulsion.steps == 2


def test_strength_that_was_never_measured_is_named_and_removal_removes_what_measures():
    model = make()
    optimizer, repulsion = attach(model)
    torch.manual_seed(0)
    (model(torch.randn(1, 3, 12)) - 0.3).square().mean().backward()
    optimizer.step()
    assert repulsion.last.repulsion_norm.sum() == 0
    with pytest.raises(
        NotFired, match=r"layers\.0\.self_attn, layers\.1\.self_attn: the effective number of heads was nev"
    ):
        repulsion.check()
    repulsion.remove()
    assert not repulsion.steering.attached


@cases("when", ["step", "manual"])
def test_the_first_of_several_optimizers_measures_for_all(when: str):
    alone, together = make(), make()
    optimizer, expected = attach(alone, every=2)
    parts = make_optimizers(together)
    repulsion = hw.repel(hw.find_heads(together), TARGET, parts, every=2, when=when)
    for seed in range(8):
        step(alone, optimizer, seed)
        torch.manual_seed(seed)
        together.zero_grad()
        (together(torch.randn(4, 7, 12)) - 0.3).square().mean().backward()
        if when == "manual":
            repulsion.apply()
        for part in parts:
            part.step()
    assert repulsion.steering.controls == expected.steering.controls
    assert len({control.effective_heads for control in repulsion.steering.controls.values()}) == 2


def test_an_attention_that_was_not_called_leaves_the_others_controllers_to_go_on():
    model = make()
    optimizer, repulsion = attach(model, every=1)
    for seed in range(2):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        (model.layers[0](torch.randn(4, 7, 12)) - 0.3).square().mean().backward()
        optimizer.step()
    first, other = repulsion.steering.controls.values()
    assert first.ratio > 0.0
    assert other.effective_heads is None
    with pytest.raises(NotFired, match=r"layers\.1\.self_attn"):
        repulsion.check()


def test_a_step_of_many_micro_batches_is_measured_on_the_last_of_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(import_module("headwise.repulsion.repel"), "NEWEST", 2)
    found = []
    for skipped in (0, 3):
        model = make(layers=1)
        optimizer, repulsion = attach(model, every=1)
        for seed in range(skipped, 5):
            torch.manual_seed(seed)
            (model(torch.randn(4, 7, 12)) - 0.3).square().mean().backward()
        optimizer.step()
        found.append(repulsion.steering.controls)
    assert found[0] == found[1]
    assert found[0]["layers.0.self_attn"].effective_heads is not None


def test_an_optimizer_that_goes_on_alone_is_measured():
    model = make()
    parts = make_optimizers(model)
    repulsion = hw.repel(hw.find_heads(model), TARGET, parts, every=2)
    for seed in range(4):
        step(model, parts[0], seed)
    assert repulsion.steering.steps == 4
    before = dict(repulsion.steering.controls)
    for seed in range(4, 8):
        step(model, parts[1], seed)
    # its first step might have been the second optimizer's part of the last
    assert repulsion.steering.steps == 7
    again = make()
    resumed = hw.repel(hw.find_heads(again), TARGET, make_optimizers(again), every=2)
    resumed.load_state_dict(repulsion.state_dict())
    assert resumed.steering.steps == 7
    resumed.load_state_dict({name: value for name, value in repulsion.state_dict().items() if name != "control_steps"})
    assert resumed.steering.steps == max(attachment.steps for attachment in resumed._attachments)
    with pytest.raises(SettingError, match="control_steps is -1"):
        resumed.load_state_dict({**repulsion.state_dict(), "control_steps": -1})
    assert all(control.integral > before[name].integral for name, control in repulsion.steering.controls.items())
