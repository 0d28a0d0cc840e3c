"""A penalty with a target: the controller, what it measures, when it pushes, its state and refusals."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch

import headwise as hw
from headwise.errors import SettingError
from headwise.heads.taps import count_effective_heads
from headwise.strength import SATURATED, Control, Target, advance
from similarity.test_relative import make, norms, task


def steer_plant(target: Target, gain: float, control: Control, level: float) -> tuple[Control, float, float, float]:
    """300 steps of E <- E + 0.1 (3 + gain r - E) + noise; returns its end, and mean E and r of the last 100."""
    ratios, levels = [], []
    for _ in range(300):
        level += 0.1 * (3 + gain * control.ratio - level) + 0.1 * float(torch.randn(()))
        control = advance(control, target, level, 8)
        ratios.append(control.ratio)
        levels.append(level)
    return control, level, sum(levels[-100:]) / 100, sum(ratios[-100:]) / 100


@pytest.mark.parametrize("gain", [4.0, 8.0, 30.0])
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


@pytest.mark.parametrize("term", [hw.similarity.CKA(), hw.similarity.SpanOverlap()], ids=str)
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


def test_what_cannot_be_is_refused():
    heads = hw.find_heads(make(layers=1))
    with pytest.raises(SettingError, match=r"asks for 3\.5 effective heads, and layers\.0\.self_attn has 3"):
        hw.Disagreement(heads, hw.similarity.CKA(), strength=Target(3.5))
    wrong = (("effective_heads", 0.5), ("effective_heads", None), ("highest", 0.0), ("integral", -1.0), ("decay", 1.0))
    for name, value in wrong:
        with pytest.raises(SettingError, match=f"Target.{name} is"):
            Target(**{"effective_heads": 2.0, name: value})
