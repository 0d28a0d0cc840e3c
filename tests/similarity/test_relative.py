"""The relative strength of a penalty: gradients at the ratio, averaging, limits, state and refusals."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.errors import SettingError, ShapeError
from headwise.similarity.penalty import KEPT, MOST


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


@pytest.mark.parametrize(
    "term",
    [hw.similarity.CKA(), hw.similarity.Output() + 0.5 * hw.similarity.SpanOverlap(), hw.similarity.MapCosine()],
    ids=str,
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


@pytest.mark.parametrize("weight", [0.5, -0.5])
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


@pytest.mark.parametrize("term", [hw.similarity.Output(), hw.similarity.CKA()], ids=str)
@pytest.mark.parametrize("factor", [1e-4, 1.0, 1e8])
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
    assert found[1] == pytest.approx(found[0], abs=0.02)


@pytest.mark.parametrize("factor", [0.0, math.nan, math.inf])
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


def test_what_cannot_be_is_refused():
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
