"""Groups mixed in single precision by columns, against the rule in float64, and which groups are not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.repulsion import step
from headwise.repulsion.groups import find_groups
from headwise.repulsion.rules import Rule
from headwise.repulsion.step import apply_rule
from repulsion.by_hand import expected_gradients

WIDTH, HEADS = 128, 4
RULES = {
    "svgd": hw.SVGD(alpha=0.7, step_size=0.3),
    "prior": hw.SVGD(alpha=0.7, step_size=0.3, prior_precision=0.2, data_size=3.0, inverse_temperature=1.7),
    "relative": hw.SVGD(alpha=hw.Relative(0.3), step_size=0.3),
    "imq": hw.SVGD(alpha=0.7, kernel=hw.kernels.IMQ()),
}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the groups that were mixed by columns."""
    names: list[str] = []
    apply = step.apply_by_columns

    def noted(rule, batch, *rest):
        names.extend(group.name for group, _ in batch)
        return apply(rule, batch, *rest)

    monkeypatch.setattr(step, "apply_by_columns", noted)
    return names


def make() -> nn.Module:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def act(model: nn.Module, rule: Rule, *, scale: torch.Tensor | None = None):
    return apply_rule(rule, find_groups(hw.find_heads(model)), strength=0.5, scale=scale)


def require_close(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        # sums over heads of float32, whose distances have lost at most four bits
        largest = float(expected[name].abs().max())
        torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=0, atol=2e-6 * largest)


@pytest.mark.parametrize("most", [2**18, 2**10])
@pytest.mark.parametrize("rule", RULES)
def test_gradients_and_norms_are_those_of_float64(rule: str, most: int, taken: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step, "MIXED_PART", most)
    model, exact = make(), make().double()
    expected = expected_gradients(model, RULES[rule], strength=0.5)
    found, wanted = act(model, RULES[rule]), act(exact, RULES[rule])
    assert len(taken) == 3
    require_close(model, expected)
    for name in ("driving_norm", "repulsion_norm", "particle_norm"):
        torch.testing.assert_close(getattr(found, name).double(), getattr(wanted, name), rtol=1e-5, atol=1e-9)
    assert found.finite.all()
    assert not found.equal.any()


def test_the_default_dtype_is_of_no_concern(taken: list):
    model, twin = make(), make()
    act(model, RULES["svgd"])
    torch.set_default_dtype(torch.float64)
    try:
        act(twin, RULES["svgd"])
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(taken) == 6
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_scale_of_the_gradients_multiplies_all(taken: list):
    model, scaled = make(), make()
    for parameter in scaled.parameters():
        parameter.grad *= 1024.0
    found, wanted = act(scaled, RULES["prior"], scale=torch.tensor(1024.0)), act(model, RULES["prior"])
    assert len(taken) == 6
    for own, plain in zip(scaled.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own.grad / 1024.0, plain.grad)
    torch.testing.assert_close(found.driving_norm, wanted.driving_norm)
    torch.testing.assert_close(found.repulsion_norm, wanted.repulsion_norm)


@pytest.mark.parametrize("difference", [1e-2, 1e-4])
def test_heads_of_which_two_are_close_are_mixed_in_float64(difference: float, taken: list):
    model = make()
    query = hw.find_heads(model).slices()[0]
    heads = query.of(model.in_proj_weight.detach())
    heads[2] = heads[1] + difference * heads[2]
    expected = expected_gradients(model, RULES["svgd"], strength=0.5)
    act(model, RULES["svgd"])
    assert taken == ["key", "value"]
    require_close(model, expected)


@pytest.mark.parametrize(("ratio", "wanted"), [(1.3, ["query", "key", "value"]), (0.7, ["key", "value"])])
def test_distances_above_the_share_are_apart_and_those_below_are_not(ratio: float, wanted: list, taken: list):
    model = make()
    heads = hw.find_heads(model).slices()[0].of(model.in_proj_weight.detach())
    # two heads c + s x and c + s y: squared distance 2 s^2 of squared norms 2 (1 + s^2)
    heads.copy_(torch.randn(heads.shape[1:]) + math.sqrt(ratio * step.APART) * heads / heads.std())
    act(model, RULES["svgd"])
    assert taken == wanted


@pytest.mark.parametrize("most", [2**18, 2**10])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("rule", ["svgd", "relative"])
def test_gradients_that_are_not_finite_stay(
    rule: str, value: float, most: int, taken: list, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(step, "MIXED_PART", most)
    model, before = make(), make()
    for own in (model, before):
        own.in_proj_weight.grad[WIDTH + 3, 77] = value
    found = act(model, RULES[rule])
    assert len(taken) == 3
    assert found.finite.tolist() == [True, False, True]
    key = slice(WIDTH, 2 * WIDTH)
    assert model.in_proj_weight.grad[key].equal(before.in_proj_weight.grad[key]) or math.isnan(value)
    torch.testing.assert_close(model.in_proj_weight.grad[key], before.in_proj_weight.grad[key], equal_nan=True)
    assert model.in_proj_weight.grad[:WIDTH].isfinite().all()
    assert not found.driving_norm[1].isfinite()


def test_a_head_that_is_not_finite_is_left_to_float64(taken: list):
    model = make()
    with torch.no_grad():
        model.in_proj_weight[5, 5] = math.nan
    found = act(model, RULES["svgd"])
    assert len(taken) == 2
    assert found.finite.sum() == 2


def test_rules_on_directions_and_other_dtypes_are_not_taken(taken: list):
    act(make(), hw.SVGD(kernel=hw.kernels.NormalizedRBF()))
    act(make().double(), RULES["svgd"])
    assert taken == []
