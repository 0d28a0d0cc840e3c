"""Repulsion of subspaces: against autograd, what the force leaves alone, and steps in a model."""

from __future__ import annotations

import pytest
import torch

import headwise as hw
from headwise.errors import LayoutError
from headwise.repulsion.function_space import find_turns


def squared_distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """e - tr(P_1 P_2) of the spans of the rows, from the projectors themselves."""
    projectors = [w.mT @ torch.linalg.inv(w @ w.mT) @ w for w in (one, other)]
    return len(one) - (projectors[0] @ projectors[1]).trace()


@pytest.mark.parametrize("bandwidth", [hw.kernels.Median(), hw.kernels.Fixed(0.7)])
def test_the_force_is_that_of_autograd(bandwidth):
    torch.manual_seed(0)
    heads = torch.randn(4, 3, 9, dtype=torch.float64)
    rule = hw.repulsion.SpanSVGD(alpha=0.3, step_size=0.2, bandwidth=bandwidth)
    mixing, push, geometry = find_turns(rule, heads)
    distances = torch.stack([torch.stack([squared_distance(a, b) for b in heads]) for a in heads])
    h = bandwidth.resolve(distances)
    for i in range(4):
        own = heads[i].clone().requires_grad_()
        energy = sum(torch.exp(-distances[i, j] / h) / h * squared_distance(own, heads[j]) for j in range(4) if j != i)
        (expected,) = torch.autograd.grad(energy, own)
        torch.testing.assert_close(push[i], 0.2 / 4 * 0.3 * expected, rtol=1e-8, atol=1e-12)
    assert geometry.squared_distances[0, 1] > 0
    torch.testing.assert_close(mixing.drive, 0.05 * torch.eye(4, dtype=torch.float64))


def test_the_force_has_no_part_inside_a_span():
    torch.manual_seed(1)
    heads = torch.randn(4, 3, 9, dtype=torch.float64)
    rule = hw.repulsion.SpanSVGD(alpha=0.3)
    _, push, _ = find_turns(rule, heads)
    assert push.norm() > 1e-3
    assert (push @ heads.mT).abs().max() < 1e-6
    mix = torch.randn(4, 3, 3, dtype=torch.float64)
    _, other, _ = find_turns(rule, mix @ heads)
    # W -> A W turns the force with the basis: W^T R, which says how the span moves, is the same
    torch.testing.assert_close(other.mT @ (mix @ heads), push.mT @ heads, rtol=1e-6, atol=1e-9)


def test_equal_spans_do_not_part_and_are_reported():
    torch.manual_seed(2)
    head = torch.randn(3, 9, dtype=torch.float64)
    mix = torch.randn(4, 3, 3, dtype=torch.float64)
    _, push, geometry = find_turns(hw.repulsion.SpanSVGD(), mix @ head)
    assert not geometry.squared_distances.any()
    assert push.abs().max() < 1e-4


@pytest.mark.parametrize(("make_optimizer", "rate"), [(torch.optim.SGD, 5.0), (torch.optim.AdamW, 0.02)])
def test_steps_part_the_spans_of_a_model(make_optimizer, rate: float):
    torch.manual_seed(3)
    model = torch.nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True)
    heads = hw.find_heads(model)
    overlap = hw.Disagreement(heads, hw.similarity.SpanOverlap("query") + hw.similarity.SpanOverlap("value"))
    before, x = overlap().item(), torch.randn(2, 5, 12)
    optimizer = make_optimizer(model.parameters(), lr=rate)
    repulsion = hw.repel(heads, hw.repulsion.SpanSVGD(alpha=hw.Relative(5.0)), optimizer)
    for _ in range(20):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert overlap().item() < before - 0.02
    torch.testing.assert_close(repulsion.last.force_ratio, torch.full((3,), 5.0), rtol=1e-4, atol=0)


def test_norms_grow_only_at_second_order():
    torch.manual_seed(4)
    heads = torch.randn(4, 3, 9, dtype=torch.float64)
    _, push, _ = find_turns(hw.repulsion.SpanSVGD(alpha=1.0), heads)
    grown = [((heads + rate * push).norm() - heads.norm()).item() for rate in (1e-3, 1e-4)]
    assert grown[0] / grown[1] == pytest.approx(100, rel=0.05)


def test_a_penalty_on_spans_refuses_heads_wider_than_their_input():
    heads = hw.find_heads(torch.nn.MultiheadAttention(16, 2, kdim=3, vdim=8))
    with pytest.raises(LayoutError, match="its key heads have 8 features of 3 inputs"):
        hw.Disagreement(heads, hw.similarity.SpanOverlap("key"))
    hw.Disagreement(heads, hw.similarity.SpanOverlap("value"))


def test_forces_that_half_precision_cannot_hold_are_told_and_leave_the_gradient():
    torch.manual_seed(5)
    model = torch.nn.MultiheadAttention(8, 2).half()
    weight = model.in_proj_weight
    weight.grad = torch.randn_like(weight)
    weight.grad[8:16] = 4e4
    before = weight.grad.clone()
    repulsion = hw.repel(hw.find_heads(model), hw.repulsion.SpanSVGD(step_size=4.0), torch.optim.SGD([weight], lr=0.1))
    repulsion.apply()
    assert repulsion.last.finite.tolist() == [True, False, True]
    assert torch.equal(weight.grad[8:16], before[8:16])
    assert not torch.allclose(weight.grad[:8], before[:8])
