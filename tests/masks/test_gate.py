"""The gate over heads: neutral at first, what its equation says afterwards, and saved with the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.routing.modules import GatedProjection


def test_a_new_gate_changes_nothing_and_a_learned_one_weighs_the_heads():
    attention = hw.nn.MultiheadAttention(12, 3, batch_first=True).double()
    x = torch.randn(2, 5, 12).double()
    heads = hw.find_heads(attention)
    plain = attention(x, x, x)[0]
    with hw.Taps(heads, outputs=True) as taps:
        attention(x, x, x)
        outputs = taps.read()[0].outputs
    old = attention.out_proj
    handle = hw.aggregate(heads, hw.routing.Gate())
    torch.testing.assert_close(attention(x, x, x)[0], plain)
    with torch.no_grad():
        attention.out_proj.gate.copy_(torch.tensor([0.3, -1.2, 0.8]))
    exponentials = torch.tensor([0.3, -1.2, 0.8]).double().exp()
    weights = 3 * exponentials / exponentials.sum()
    expected = old((outputs * weights[:, None]).flatten(2))
    found = attention(x, x, x)[0]
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    assert bool((attention.out_proj.gate.grad.abs() > 0).all())
    handle.remove()
    torch.testing.assert_close(attention(x, x, x)[0], plain)
    assert attention.out_proj is old


def test_the_gate_has_the_precision_of_float64():
    torch.manual_seed(0)
    gated = GatedProjection(hw.routing.Gate(), nn.Linear(6, 4), 3, 2, 4).double()
    with torch.no_grad():
        gated.gate.copy_(torch.tensor([0.3, -0.7, 1.1]))
    assert torch.equal(gated.weights(), 3 * gated.gate.softmax(0))
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)

    def call(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(gated, {"gate": gate}, x)

    assert torch.autograd.gradcheck(call, (x, gated.gate.detach().clone().requires_grad_()))
    assert gated.bfloat16().weights().dtype == torch.float32


def test_a_gated_model_is_guided_and_comes_back_from_its_folder(tmp_path: Path):
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.TransformerEncoderLayer(12, 3, 16, batch_first=True).eval()

    model, x = build(), torch.randn(2, 5, 12)
    heads = hw.find_heads(model)
    hw.aggregate(heads, hw.routing.Gate())
    with torch.no_grad():
        model.self_attn.out_proj.gate.copy_(torch.tensor([0.5, -0.4, 0.1]))
    mask = hw.roles.Roles(hw.roles.Window(1))([hw.roles.WordTable(list("abcde"))] * 2, num_heads=3)
    hw.save(model, tmp_path)
    again = hw.load(tmp_path, build())
    with hw.guide(heads, mask), hw.guide(hw.find_heads(again), mask):
        assert torch.equal(again(x), model(x))
    assert again.self_attn.out_proj.setting == hw.routing.Gate()


def test_heads_of_another_width_are_refused():
    with pytest.raises(hw.errors.ShapeError, match="expected 3 heads of 2 numbers"):
        GatedProjection(hw.routing.Gate(), nn.Linear(6, 4), 3, 2, 4)(torch.randn(5, 8))
