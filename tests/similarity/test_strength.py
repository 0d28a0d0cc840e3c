"""The relative strength of a penalty: gradients at the ratio, averaging, limits, state and refusals."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch

import headwise as hw
from cases import cases
from headwise.errors import SettingError, ShapeError
from headwise.heads.taps import count_effective_heads
from headwise.similarity.penalty import KEPT, MOST
from headwise.strength import SATURATED, Control, Target, advance


def make(layers: int = 2) -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).double()


def task(model: torch.nn.Module, seed: int = 1, **arguments: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(seed)
    return (model(torch.randn(4, 7, 12, dtype=torch.float64), **arguments) - 0.3).square().mean()


def relative(model: torch.nn.Module, **settings: Any) -> hw.similarity.Disagreement:
    return hw.Disagreement(hw.find_heads(model), hw.similarity.CKA(), strength=hw.Relative(0.3), **settings)


def norms(model: torch.nn.Module, scalar: torch.Tensor) -> list[torch.Tensor]:
    """The norm of the gradient of a scalar on the attention parameters of each layer."""
    found = []
    for layer in model.layers:
        own = [layer.self_attn.in_proj_weight, layer.self_attn.out_proj.weight]
        parts = torch.autograd.grad(scalar, own, retain_graph=True, allow_unused=True)
        found.append(torch.stack([part.norm() for part in parts if part is not None]).norm())
    return found


@cases(
    "term", [hw.similarity.CKA(), hw.similarity.Output() + 0.5 * hw.similarity.SpanOverlap(), hw.similarity.MapCosine()]
)
def test_each_layer_is_pushed_by_the_ratio(term):
    model = make()
    heads = hw.find_heads(model)
    penalty = hw.Disagreement(heads, term, strength=hw.Relative(0.3))
    loss = task(model)
    total = penalty.loss(loss)
    # the parameters of the last layer are reached by its own penalty alone
    assert (norms(model, total - loss)[-1] / norms(model, loss)[-1]).item() == pytest.approx(0.3)
    assert [share.item() for share in penalty.relative.shares.values()] == pytest.approx([0.3, 0.3])


@cases("weight", [0.5, -0.5])
def test_the_weight_of_a_kind_multiplies_the_ratio(weight: float):
    model = make()
    whole = relative(model)
    half = relative(model, weights={"self": weight})
    loss = task(model)
    pushed = whole.loss(loss) - loss
    torch.testing.assert_close(half.loss(loss) - loss, weight * pushed)
    assert [share.item() for share in half.relative.shares.values()] == pytest.approx([0.15, 0.15])


def test_parameters_are_those_that_are_trained_at_each_measurement():
    model = make()
    penalty = relative(model, every=1)
    model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()}, assign=True)
    loss = task(model)
    assert (norms(model, penalty.loss(loss) - loss)[-1] / norms(model, loss)[-1]).item() == pytest.approx(0.3)
    model.layers[0].self_attn.in_proj_weight.requires_grad_(False)
    loss = task(model)
    penalty.loss(loss).backward()
    assert model.layers[0].self_attn.in_proj_weight.grad is None
    for parameter in model.layers[1].self_attn.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(hw.errors.NotFired, match=r"layers\.1\.self_attn: no parameter of its heads is trainable"):
        penalty.loss(task(model))


def test_the_weight_is_a_constant_of_the_step():
    model = make(layers=1)
    penalty = relative(model)
    loss = task(model)
    total = penalty.loss(loss)
    total.backward()
    found = model.layers[0].self_attn.in_proj_weight.grad.clone()
    plain = hw.Disagreement(hw.find_heads(model), hw.similarity.CKA())
    model.zero_grad()
    loss = task(model)
    weight = 0.3 * norms(model, loss)[0] / norms(model, (value := plain()))[0]
    (loss + weight.detach() * value).backward()
    torch.testing.assert_close(found, model.layers[0].self_attn.in_proj_weight.grad)


def test_weights_are_averaged_and_measured_every_few_steps():
    model = make(layers=1)
    penalty = relative(model, every=3)
    wanted, used = [], []
    for step in range(7):
        torch.manual_seed(step)
        loss = task(model, step)
        total = penalty.loss(loss)
        plain = hw.Disagreement(hw.find_heads(model), hw.similarity.CKA())
        task(model, step)
        value = plain()
        plain.remove()
        wanted.append(math.log(0.3 * norms(model, task(model, step))[0] / norms(model, value)[0]))
        used.append(math.log((total - loss).item() / value.item()))
        penalty.taps.read()
    first = wanted[0]
    second = KEPT * first + (1 - KEPT) * wanted[3]
    third = KEPT * second + (1 - KEPT) * wanted[6]
    assert used == pytest.approx([first] * 3 + [second] * 3 + [third])


def test_a_weight_stays_below_a_multiple_of_its_first():
    model = make(layers=1)
    penalty = relative(model, every=1)
    penalty.loss(task(model))
    first = penalty.relative.state_dict()["logarithms"]["layers.0.self_attn"]
    for _ in range(40):
        penalty.loss(1e6 * task(model))
    last = penalty.relative.state_dict()["logarithms"]["layers.0.self_attn"]
    assert last - first == pytest.approx(math.log(MOST))


@cases("term", [hw.similarity.Output(), hw.similarity.CKA()])
@cases("factor", [1e-4, 1.0, 1e8])
def test_gradients_that_half_precision_cannot_hold_are_measured(term, factor: float):
    found = []
    for half in (False, True):
        model = make().float()
        penalty = hw.Disagreement(hw.find_heads(model), term, strength=hw.Relative(0.3))
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.float16, enabled=half):
            outputs = model(torch.randn(4, 7, 12))
        penalty.loss(factor * (outputs.float() - 0.3).square().mean())
        found.append(list(penalty.relative.state_dict()["logarithms"].values()))
    assert len(found[0]) == 2
    # processors round products in half precision differently
    assert found[1] == pytest.approx(found[0], abs=0.05)


@cases("factor", [0.0, math.nan, math.inf])
def test_a_loss_without_a_sound_gradient_changes_no_weight(factor: float):
    model = make(layers=1)
    penalty = relative(model, every=1)
    penalty.loss(factor * task(model))
    assert penalty.relative.state_dict()["logarithms"] == {}
    penalty.loss(task(model))
    before = penalty.relative.state_dict()["logarithms"]
    penalty.loss(factor * task(model))
    assert penalty.relative.state_dict()["logarithms"] == before


def test_evaluation_returns_the_loss_and_measures_nothing():
    model = make(layers=1).eval()
    penalty = relative(model)
    with torch.no_grad():
        loss = task(model)
        assert penalty.loss(loss) is loss
    assert penalty.relative.steps == 0


def test_a_resumed_run_goes_on_with_the_same_weights():
    model = make(layers=1)
    penalty = relative(model, every=2)
    for step in range(3):
        penalty.loss(task(model, step))
    state = copy.deepcopy(penalty.relative.state_dict())
    expected = penalty.loss(task(model, 9)).item()
    penalty.remove()
    again = relative(model, every=2)
    again.relative.load_state_dict(state)
    assert again.loss(task(model, 9)).item() == pytest.approx(expected, rel=1e-6)
    with pytest.raises(SettingError, match="names 'other'"):
        again.relative.load_state_dict({**state, "first": {"other": 1.0}})
    with pytest.raises(SettingError, match="expected a mapping with steps, logarithms, first, shares"):
        again.relative.load_state_dict({"steps": 1})


def test_without_a_strength_a_call_is_the_similarity_and_a_tenth_is_added():
    model = make(layers=1)
    penalty = hw.Disagreement(hw.find_heads(model), hw.similarity.Output())
    assert penalty.state_dict() == {}
    task(model)
    value = penalty()
    torch.testing.assert_close(value.detach(), penalty.last)
    loss = task(model)
    total = penalty.loss(loss)
    torch.testing.assert_close(value.detach(), penalty.last)
    assert (norms(model, total - loss)[0] / norms(model, loss)[0]).item() == pytest.approx(0.1)
    again = hw.Disagreement(hw.find_heads(model), hw.similarity.Output())
    again.load_state_dict(penalty.state_dict())
    assert again.relative.state_dict() == penalty.state_dict()
    again.load_state_dict({})
    assert again.relative is None


def test_strengths_that_cannot_be_are_refused():
    model = make(layers=1)
    with pytest.raises(SettingError, match=r"strength is '0\.3'; expected a number, hw\.Relative"):
        hw.Disagreement(hw.find_heads(model), hw.similarity.CKA(), strength="0.3")
    with pytest.raises(SettingError, match="every is 0"):
        relative(model, every=0)
    penalty = relative(model)
    loss = task(model)
    for call, error, message in (
        (penalty, SettingError, r"write loss = penalty\.loss"),
        (lambda: penalty.loss(torch.stack([loss, loss])), ShapeError, r"loss is a tensor of shape \(2,\)"),
        (lambda: penalty.loss(loss.detach()), hw.errors.NotFired, "the loss carries no gradient"),
    ):
        with pytest.raises(error, match=message):
            call()


# Targets


def steer_plant(target: Target, gain: float, control: Control, level: float) -> tuple[Control, float, float, float]:
    """300 steps of E <- E + 0.1 (3 + gain r - E) + noise; returns its end, and mean E and r of the last 100."""
    ratios, levels = [], []
    for _ in range(300):
        level += 0.1 * (3 + gain * control.ratio - level) + 0.1 * float(torch.randn(()))
        control = advance(control, target, level, 8)
        ratios.append(control.ratio)
        levels.append(level)
    return control, level, sum(levels[-100:]) / 100, sum(ratios[-100:]) / 100


@cases("gain", [4.0, 8.0, 30.0])
def test_the_controller_reaches_its_target_and_follows_it_down(gain: float):
    torch.manual_seed(0)
    control, level, mean, ratio = steer_plant(Target(6.0), gain, Control(), 3.0)
    assert mean == pytest.approx(6.0, abs=0.1)
    assert ratio == pytest.approx(3.0 / gain, abs=0.06)
    _, _, mean, ratio = steer_plant(Target(4.0), gain, control, level)
    assert mean == pytest.approx(4.0, abs=0.1)
    assert ratio == pytest.approx(1.0 / gain, abs=0.06)


def test_an_unreachable_target_saturates_without_windup():
    torch.manual_seed(0)
    control, level, mean, _ = steer_plant(Target(6.0), 2.0, Control(), 3.0)
    assert mean == pytest.approx(5.0, abs=0.1)
    assert control.ratio == 1.0
    assert control.saturated
    assert control.at_highest > SATURATED
    assert control.integral < 2.0
    control, _, mean, ratio = steer_plant(Target(4.0), 2.0, control, level)
    assert mean == pytest.approx(4.0, abs=0.1)
    assert ratio == pytest.approx(0.5, abs=0.1)
    assert not control.saturated


def test_one_step_of_the_controller():
    target = Target(5.0, highest=0.4, proportional=0.5, integral=0.2, back=0.3, decay=0.6)
    control = advance(Control(ratio=0.1, effective_heads=3.0, integral=0.3), target, 2.0, 4)
    average = 0.6 * 3.0 + 0.4 * 2.0
    error = (5.0 - average) / 4
    raw = 0.5 * error + 0.3
    assert raw > 0.4
    assert control == Control(0.4, pytest.approx(average), pytest.approx(0.3 + 0.2 * error + 0.3 * (0.4 - raw)), 1)
    below = advance(control, Target(1.5, decay=0.0), 4.0, 4)
    assert below.ratio == 0.0
    assert below.at_highest == 0
    assert advance(control, target, math.nan, 4) is control


def test_the_measured_number_is_that_of_the_contributions():
    model = make(layers=1)
    heads = hw.find_heads(model)
    padding = torch.zeros(4, 7, dtype=torch.bool)
    padding[1, 4:] = padding[3, 2:] = True
    with hw.Taps(heads, outputs=True) as taps:
        task(model, src_key_padding_mask=padding)
        captures = taps.read()
    site = captures[0].site
    expected = hw.metrics.output_moments(captures[0].outputs, ~padding, output_weights=site.find_output_weights())
    assert float(count_effective_heads(captures)) == pytest.approx(expected.effective_heads().number, rel=1e-9)
    # two calls are one set of tokens, and a mask given overrides that of the call
    both = captures[0].outputs.repeat(2, 1, 1, 1)
    expected = hw.metrics.output_moments(both, output_weights=site.find_output_weights())
    every = torch.ones(4, 7, dtype=torch.bool)
    measured = float(count_effective_heads(captures * 2, every))
    assert measured == pytest.approx(expected.effective_heads().number, rel=1e-9)
    few = torch.zeros(4, 7, dtype=torch.bool)
    few[0, :3] = True
    assert math.isnan(float(count_effective_heads(captures, few)))


def test_heads_that_are_diverse_enough_are_left_alone():
    model = make(layers=2)
    penalty = hw.Disagreement(hw.find_heads(model), hw.similarity.CKA(), strength=Target(1.01), every=1)
    loss = task(model)
    assert torch.equal(penalty.loss(loss), loss)
    assert all(control.effective_heads > 1.01 for control in penalty.relative.controls.values())
    assert penalty.last > 0


def test_a_controller_that_stays_at_its_highest_is_told_once(caplog):
    model = make(layers=2)
    target = Target(3.0, highest=1e-6, integral=0.0, back=0.0)
    penalty = hw.Disagreement(hw.find_heads(model), hw.similarity.SpanOverlap(), strength=target, every=1)
    told = []
    for _ in range(SATURATED + 2):
        told.append(len(caplog.records))
        penalty.loss(task(model))
    assert told == [0] * SATURATED + [2, 2]
    assert "layers.1.self_attn has 2." in caplog.messages[1]
    assert "the target is likely out of reach" in caplog.messages[1]


@cases("term", [hw.similarity.CKA(), hw.similarity.SpanOverlap()])
def test_heads_below_the_target_are_pushed_at_the_ratio_of_their_controller(term):
    model = make(layers=2)
    penalty = hw.Disagreement(hw.find_heads(model), term, strength=Target(3.0, proportional=2.0), every=1)
    loss = task(model)
    added = penalty.loss(loss) - loss
    controls = penalty.relative.controls.values()
    for pushed, own, control in [*zip(norms(model, added), norms(model, loss), controls, strict=True)][1:]:
        assert 0.01 < control.ratio < 1.0
        assert (pushed / own).item() == pytest.approx(control.ratio)


def test_training_reaches_the_target():
    model = make(layers=1)
    with torch.no_grad():
        # copies
        for start in (0, 12, 24):
            rows = model.layers[0].self_attn.in_proj_weight[start : start + 12].view(3, 4, 12)
            rows.copy_(rows[:1] + 0.02 * torch.randn(3, 4, 12).double())
        columns = model.layers[0].self_attn.out_proj.weight.view(12, 3, 4)
        columns.copy_(columns[:, :1] + 0.02 * torch.randn(12, 3, 4).double())
    target = Target(1.3, highest=3.0, proportional=5.0)
    penalty = hw.Disagreement(hw.find_heads(model), hw.similarity.CKA(), strength=target, every=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    numbers, ratios = [], []
    for step in range(100):
        optimizer.zero_grad()
        penalty.loss(task(model, step)).backward()
        optimizer.step()
        (control,) = penalty.relative.controls.values()
        numbers.append(control.effective_heads)
        ratios.append(control.ratio)
    assert numbers[0] < 1.2
    assert max(numbers) > 1.29
    assert ratios[-1] < 0.9 * max(ratios)


def test_a_resumed_run_goes_on_with_the_same_controllers():
    model = make(layers=1)
    heads = hw.find_heads(model)
    penalty = hw.Disagreement(heads, hw.similarity.CKA(), strength=Target(3.0), every=2)
    for step in range(3):
        penalty.loss(task(model, step))
    state = json.loads(json.dumps(penalty.relative.state_dict()))
    expected = [penalty.loss(task(model, step)).item() for step in (9, 10, 11)]
    penalty.remove()
    again = hw.Disagreement(heads, hw.similarity.CKA(), strength=Target(3.0), every=2)
    again.relative.load_state_dict(copy.deepcopy(state))
    assert [again.loss(task(model, step)).item() for step in (9, 10, 11)] == pytest.approx(expected, rel=1e-6)
    again.remove()
    other = hw.Disagreement(heads, hw.similarity.CKA(), strength=hw.Relative(0.3))
    with pytest.raises(SettingError, match="expected those of nothing: resume with the strength it was saved with"):
        other.relative.load_state_dict(state)


def test_targets_that_cannot_be_are_refused():
    heads = hw.find_heads(make(layers=1))
    with pytest.raises(SettingError, match=r"asks for 3\.5 effective heads, and layers\.0\.self_attn has 3"):
        hw.Disagreement(heads, hw.similarity.CKA(), strength=Target(3.5))
    wrong = (("effective_heads", 0.5), ("effective_heads", None), ("highest", 0.0), ("integral", -1.0), ("decay", 1.0))
    for name, value in wrong:
        with pytest.raises(SettingError, match=f"Target.{name} is"):
            Target(**{"effective_heads": 2.0, name: value})
