"""Repulsion of what heads compute, and of subspaces: against autograd, and blind to the basis a head happens to use."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from cases import cases
from heads.attentions import SeparateAttention
from headwise.errors import LayoutError
from headwise.repulsion.function_space import FunctionSVGD, find_turns

HEADS, SIZE, WIDTH = 3, 4, 12


def attention(seed: int = 0) -> hw.nn.MultiheadAttention:
    torch.manual_seed(seed)
    return hw.nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True).double()


def stepped(model: nn.Module, rule: object, gradient: float = 0.0) -> dict[str, Tensor]:
    """The gradients that a rule leaves of one that is `gradient` everywhere."""
    heads = hw.find_heads(model)
    repulsion = hw.repel(heads, rule, torch.optim.SGD(model.parameters(), lr=0.1), when="manual")
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    repulsion.apply()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


KERNELS = {
    hw.kernels.RBF(hw.kernels.Fixed(5.0)): lambda distances: torch.exp(-distances / 5.0),
    hw.kernels.IMQ(hw.kernels.Fixed(2.0)): lambda distances: (1 + distances / 2.0) ** -0.5,
}


@cases("kernel", KERNELS)
def test_a_step_is_the_gradient_of_the_whole_models_kernel(kernel):
    model = attention()
    found = stepped(model, FunctionSVGD(alpha=0.7, step_size=0.3, kernel=kernel), gradient=0.25)
    packed = model.in_proj_weight.detach().clone().requires_grad_(True)
    output = model.out_proj.weight.detach().clone().requires_grad_(True)
    query, key, value = (part.view(HEADS, SIZE, WIDTH) for part in packed.chunk(3))
    out = output.view(WIDTH, HEADS, SIZE).permute(1, 0, 2)
    energy = torch.zeros((), dtype=torch.float64)
    for functions in (query.mT @ key, out @ value):
        flat = functions.flatten(1)
        # R_i = -sum_j grad_i k(F_i, F_j); each pair stands in the sum twice
        energy = energy - KERNELS[kernel]((flat[:, None] - flat).square().sum(-1)).sum() / 2
    pushes = torch.autograd.grad(energy, (packed, output))
    drive = 0.3 / HEADS * 0.25
    for name, push in zip(("in_proj_weight", "out_proj.weight"), pushes, strict=True):
        assert torch.allclose(found[name], drive - 0.7 * 0.3 / HEADS * push, rtol=1e-9, atol=1e-12), name


def test_a_change_of_basis_inside_a_head_changes_no_output_and_no_kernel_and_turns_the_force_with_it():
    model = attention()
    twin = copy.deepcopy(model)
    torch.manual_seed(2)
    basis = torch.randn(SIZE, SIZE, dtype=torch.float64) + 2 * torch.eye(SIZE, dtype=torch.float64)
    rows, columns = slice(SIZE, 2 * SIZE), slice(WIDTH + SIZE, WIDTH + 2 * SIZE)
    values = slice(2 * WIDTH + SIZE, 2 * WIDTH + 2 * SIZE)
    with torch.no_grad():
        # head 1: W_Q -> A W_Q, W_K -> A^-T W_K, and the like for W_V and W_O
        twin.in_proj_weight[rows] = basis @ model.in_proj_weight[rows]
        twin.in_proj_weight[columns] = torch.linalg.inv(basis).T @ model.in_proj_weight[columns]
        twin.in_proj_weight[values] = basis @ model.in_proj_weight[values]
        twin.out_proj.weight[:, rows] = model.out_proj.weight[:, rows] @ torch.linalg.inv(basis)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    assert torch.allclose(model(x, x, x)[0], twin(x, x, x)[0])
    rule = FunctionSVGD(alpha=0.7, step_size=0.3)
    one, other = stepped(model, rule), stepped(twin, rule)
    # heads 0 and 2 feel the same force; that on W_Q of head 1 turns with the basis, as a gradient does
    for name in ("in_proj_weight", "out_proj.weight"):
        axis = 0 if name == "in_proj_weight" else 1
        kept = [place for place in range(one[name].shape[axis]) if not SIZE <= place % WIDTH < 2 * SIZE]
        kept = torch.tensor(kept)
        assert torch.allclose(one[name].index_select(axis, kept), other[name].index_select(axis, kept), rtol=1e-8)
    turned = torch.linalg.inv(basis).T @ one["in_proj_weight"][rows]
    assert torch.allclose(turned, other["in_proj_weight"][rows], rtol=1e-8)
    assert not torch.allclose(one["in_proj_weight"][rows], other["in_proj_weight"][rows], rtol=1e-2)
    # repulsion of parameters sees the change
    plain = hw.SVGD(alpha=0.7, step_size=0.3)
    a, b = stepped(model, plain)["in_proj_weight"][:SIZE], stepped(twin, plain)["in_proj_weight"][:SIZE]
    assert not torch.allclose(a, b, rtol=1e-3)


def test_additive_heads_are_repelled_by_their_scores_where_tanh_is_linear():
    torch.manual_seed(3)
    model = hw.nn.AdditiveAttention(6, 4, 3).double()
    found = stepped(
        model, FunctionSVGD(alpha=0.7, step_size=0.3, kernel=hw.kernels.RBF(hw.kernels.Fixed(0.5))), gradient=0.5
    )
    score = model.score.weight.detach().clone().requires_grad_(True)
    functions = score @ model.hidden.weight.detach()
    distances = (functions[:, None] - functions).square().sum(-1)
    (push,) = torch.autograd.grad(-torch.exp(-distances / 0.5).sum() / 2, (score,))
    assert torch.allclose(found["score.weight"], 0.3 / 3 * 0.5 - 0.7 * 0.3 / 3 * push, rtol=1e-9)
    # the matrix that the heads share is left to the loss
    assert torch.equal(found["hidden.weight"], torch.full_like(found["hidden.weight"], 0.5))


def test_a_relative_strength_holds_in_each_space_and_strength_scales_it():
    model = attention()
    heads = hw.find_heads(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    repulsion = hw.repel(heads, FunctionSVGD(alpha=hw.Relative(0.4)), optimizer, when="manual")
    repulsion.strength = 0.5
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    model(x, x, x)[0].square().sum().backward()
    repulsion.apply()
    assert repulsion.last.names == ("query-key", "output-value")
    assert torch.allclose(repulsion.last.force_ratio, torch.tensor([0.2, 0.2], dtype=torch.float64))


@cases("dtype", [torch.float32, torch.float64])
def test_a_scaled_gradient_gives_the_same_step(dtype):
    model = attention().to(dtype)
    rule = FunctionSVGD(alpha=0.7, step_size=0.3)
    wanted = stepped(copy.deepcopy(model), rule, gradient=0.25)["in_proj_weight"]
    heads = hw.find_heads(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25 * 8)
    rule.apply(rule.find_groups(heads), strength=1.0, scale=torch.tensor(8.0))
    assert model.in_proj_weight.grad is not None
    assert torch.allclose(model.in_proj_weight.grad / 8, wanted, rtol=1e-4)


def test_a_gradient_that_is_not_finite_is_left_alone():
    model = attention()
    found = stepped(model, FunctionSVGD(alpha=0.7), gradient=float("inf"))
    assert all(bool(gradient.isinf().all()) for gradient in found.values())


def test_gpt2s_columns_give_the_force_of_rows():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=WIDTH, n_head=HEADS, n_layer=1, vocab_size=11, n_positions=8)
    model = transformers.GPT2Model(config).double()
    rows = attention()
    with torch.no_grad():
        rows.in_proj_weight.copy_(model.h[0].attn.c_attn.weight.T)
        rows.out_proj.weight.copy_(model.h[0].attn.c_proj.weight.T)
    rule = FunctionSVGD(alpha=0.7, step_size=0.3)
    wanted, found = stepped(rows, rule), stepped(model, rule)
    assert torch.allclose(wanted["in_proj_weight"].T, found["h.0.attn.c_attn.weight"])
    assert torch.allclose(wanted["out_proj.weight"].T, found["h.0.attn.c_proj.weight"])


def test_a_product_tied_between_layers_is_acted_on_once():
    first, other = attention(), attention(1)
    other.in_proj_weight, other.out_proj.weight = first.in_proj_weight, first.out_proj.weight
    rule = FunctionSVGD(alpha=0.0, step_size=0.3)
    # the driving term: eps / M of the gradient
    found = stepped(nn.ModuleList([first, other]), rule, gradient=0.5)
    torch.testing.assert_close(found["0.in_proj_weight"], torch.full_like(first.in_proj_weight, 0.5 * 0.3 / HEADS))
    other.out_proj.weight = nn.Parameter(first.out_proj.weight.detach().clone())
    with pytest.raises(
        hw.errors.SettingError, match=r"1 output-value shares one of its factors with an earlier attention"
    ):
        stepped(nn.ModuleList([first, other]), rule)
    # a product of factors that others have is another function
    one, two, three = (SeparateAttention(12, 3, 3) for _ in range(3))
    three.q_proj, three.k_proj = one.q_proj, two.k_proj
    with pytest.raises(
        hw.errors.SettingError, match=r"2 query-key shares one of its factors with an earlier attention"
    ):
        stepped(nn.ModuleList([one, two, three]), rule)


def test_products_are_those_of_the_projections_selected():
    heads = hw.find_heads(attention())
    assert [one.name for one in FunctionSVGD().find_groups(heads.projection("query", "key"))] == ["query-key"]
    assert [one.name for one in FunctionSVGD().find_groups(heads.projection("value"))] == ["output-value"]


def test_keys_of_another_size_than_queries_make_no_product():
    model = nn.Module()
    model.num_heads, model.v_head_dim = 2, 3
    model.q_proj, model.kv_b_proj, model.o_proj = nn.Linear(8, 12), nn.Linear(4, 16), nn.Linear(6, 8)
    heads = hw.find_heads(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        hw.errors.SettingError, match=r"a query head has 6 features and a key head 5 .*projection\('value'\)"
    ):
        hw.repel(heads, FunctionSVGD(), optimizer)
    hw.repel(heads.projection("value"), FunctionSVGD(), optimizer)


@cases("rule", [FunctionSVGD(), hw.repulsion.SpanSVGD()])
def test_heads_divided_over_processes_are_refused(rule, monkeypatch):
    monkeypatch.setattr("headwise.repulsion.groups.is_sharded", lambda tensor: tensor.dim() == 2)
    with pytest.raises(hw.errors.SettingError, match=r"query.* is divided over processes.*use SVGD there"):
        rule.find_groups(hw.find_heads(attention()))


def test_on_directions_of_functions_neither_factor_is_lengthened():
    model = attention(7)
    force = stepped(model, FunctionSVGD(alpha=0.7, kernel=hw.kernels.NormalizedRBF()))
    for head_slice in hw.find_heads(model).slices():
        name = head_slice.name.removeprefix("model.")
        rows, push = head_slice.of(head_slice.parameter), head_slice.of(force[name])
        assert push.norm() > 1e-6
        assert (rows * push).sum((1, 2)).abs().max() < 1e-12
    # a kernel on distances does lengthen them
    force = stepped(attention(7), FunctionSVGD(alpha=0.7))
    grown = [(s.of(s.parameter) * s.of(force[s.name])).sum((1, 2)) for s in hw.find_heads(model).slices()]
    assert torch.stack(grown).abs().max() > 1e-6


def test_the_force_has_no_part_along_a_change_of_basis_inside_a_head():
    """A -> G A, B -> G^-T B leaves F = A^T B as it is: no part along it exactly where R_A A^T = B R_B^T."""
    model = attention(8)
    force = stepped(model, FunctionSVGD(alpha=0.7))
    rows, pushes = {}, {}
    (site,) = hw.find_heads(model)
    for part in (*site.slices, site.output):
        views = part.of(part.parameter.detach()), part.of(force[part.name])
        rows[part.projection], pushes[part.projection] = (view.mT if part.transposed else view for view in views)
    for first, second in (("query", "key"), ("output", "value")):
        along = pushes[first] @ rows[first].mT - rows[second] @ pushes[second].mT
        assert pushes[first].norm() > 1e-4
        assert along.abs().max() < 1e-12
        # a force on one of the two factors has
        assert (pushes[first] @ rows[first].mT).abs().max() > 1e-4


# Spans


def squared_distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """e - tr(P_1 P_2) of the spans of the rows, from the projectors themselves."""
    projectors = [w.mT @ torch.linalg.inv(w @ w.mT) @ w for w in (one, other)]
    return len(one) - (projectors[0] @ projectors[1]).trace()


@cases("bandwidth", [hw.kernels.Median(), hw.kernels.Fixed(0.7)])
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


@cases(("make_optimizer", "rate"), [(torch.optim.SGD, 5.0), (torch.optim.AdamW, 0.02)])
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
