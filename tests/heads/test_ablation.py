"""Removing a head zeroes its slice of W_O's input and nothing else."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import headwise as hw
from cases import cases
from heads.attentions import LinearAttention, SeparateAttention


@cases(
    "given",
    [([1, 3],), ((3, 1),), (range(1, 4, 2),), ({1, 3},), (torch.tensor([1, 3]),), (1, [3]), (torch.tensor(1), 3)],
)
def test_heads_are_given_one_by_one_or_in_a_list_and_hold_for_every_site(given: tuple):
    model = nn.Sequential(SeparateAttention(), SeparateAttention())
    heads, x = hw.find_heads(model), torch.randn(2, 6, 12)
    with hw.ablate(heads, 1, 3):
        expected = model(x)
    with hw.ablate(heads, *given) as ablation, hw.Taps(heads, outputs=True) as taps:
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
        for capture in taps.read():
            assert [bool((capture.outputs[:, :, head] == 0).all()) for head in range(4)] == [False, True, False, True]
    assert sorted(ablation.indices) == [1, 3]
    with hw.ablate(heads.where("1"), *given):
        assert not torch.allclose(model(x), expected)


def test_importance_is_the_drop_of_the_users_score_for_every_head():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    with torch.no_grad():
        model.layers[1].self_attn.out_proj.weight[:, 4:] = 0.0
    x = torch.randn(3, 5, 8)
    result = hw.importance(hw.find_heads(model), lambda: float(model(x)[..., 0].square().mean()))
    drops = result.drops["layers.1.self_attn"]
    assert drops[1] == pytest.approx(0.0, abs=1e-6)
    assert abs(float(drops[0])) > 1e-4
    assert model(x)[..., 0].square().mean().item() == pytest.approx(result.baseline)
    assert "drop without each head" in str(result)


def test_wrong_heads_and_scores_that_do_not_run_the_model_are_refused():
    heads = hw.find_heads(SeparateAttention())
    for nothing in ((), ([],), (torch.tensor([]),)):
        with pytest.raises(hw.errors.SettingError, match="given no head"):
            hw.ablate(heads, *nothing)
    for given, told in (
        (4, "4"),
        ([0, 4], "4"),
        ([-1], "-1"),
        ([0.0], r"0\.0"),
        ("0", "'0'"),
        ([[0]], r"\[0\]"),
        (torch.ones(4) > 0, "True"),
    ):
        expected = f"head of the model is {told}; expected an integer of .* at most 3"
        with pytest.raises(hw.errors.SettingError, match=expected):
            hw.ablate(heads, given)
    with pytest.raises(hw.errors.NotFired, match="no forward pass"):
        hw.importance(heads, lambda: 1.0)
    with pytest.raises(hw.errors.NotFired, match="no forward pass"), hw.ablate(heads, 0):
        pass
    without = LinearAttention()
    del without.o_proj
    with pytest.raises(hw.errors.LayoutError, match="no output projection was found"):
        hw.ablate(hw.find_heads(without), 0)


def test_a_refusal_leaves_the_model_as_it_was():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    heads = hw.find_heads(model)
    x = torch.randn(2, 3, 8)
    before = model(x)
    blind = dataclasses.replace(heads.sites[1], output_projection=None, output=None)
    with pytest.raises(hw.errors.LayoutError, match="no output projection"):
        hw.ablate(dataclasses.replace(heads, sites=(heads.sites[0], blind)), 1)
    torch.testing.assert_close(model(x), before)


def test_heads_before_an_output_projection_of_two_attentions_are_left_alone():
    model = nn.Sequential(SeparateAttention(), SeparateAttention())
    model[1].o_proj = model[0].o_proj
    heads, x = hw.find_heads(model), torch.randn(2, 6, 12)
    told = r"^1 calls the same output projection as another attention.*of its own"
    for attach in (
        lambda: hw.ablate(heads.layer(1), 2),
        lambda: hw.drop_heads(heads.layer(1), 0.3),
        lambda: hw.importance(heads.layer(1), lambda: model(x).std()),
        lambda: hw.importance(heads.layer(1), lambda: model(x).std((1, 2)), method="first_order"),
    ):
        with pytest.raises(hw.errors.LayoutError, match=told):
            attach()
    assert not model[0].o_proj._forward_pre_hooks
