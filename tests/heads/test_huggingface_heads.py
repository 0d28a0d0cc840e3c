"""Aggregators in the place of W_O, and heads removed, in every family."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import headwise as hw
from cases import cases
from heads.families import BY_NAME, FAMILIES, bed, sweep
from heads.family import Family
from heads.forwards import checkpoint_activations, results, same

REPLACEABLE = [family for family in FAMILIES if family.replaceable]
PROJECTED = [family for family in FAMILIES if all(attention.output for attention in family.attentions)]


def output_weight(site: hw.heads.Site) -> torch.Tensor:
    """W_O as [H * e, d], in whichever way its module stores it."""
    module = site.output_projection.module
    return module.weight if type(module).__name__ == "Conv1D" else module.weight.mT


@sweep(REPLACEABLE)
def test_an_aggregator_takes_the_place_of_every_output_projection_forward_and_backward(family: Family):
    model, inputs, heads = bed(family, padded=family.maskable)
    plain = results(model, inputs)
    # stock modules change class when their output projection is reached
    [site.expose() for site in heads.sites]
    whole = results(model, inputs)
    aggregation = hw.aggregate(heads, hw.routing.EMRouting(iterations=2))
    routed = results(model, inputs)
    assert [tensor.shape for tensor in routed] == [tensor.shape for tensor in plain]
    assert not torch.allclose(routed[0], plain[0])
    assert all(bool(tensor.isfinite().all()) for tensor in routed)
    sum(tensor.square().sum() for tensor in routed if tensor.is_floating_point()).backward()
    for site in heads.sites:
        for name, parameter in site.output_projection.module.named_parameters():
            assert parameter.grad is not None, (site.name, name)
            assert bool(parameter.grad.isfinite().all())
        assert bool((site.output_projection.module.votes.vote_weight.grad != 0).any())
    twin = copy.deepcopy(model)
    assert same(routed, results(twin, inputs))
    aggregation.remove()
    assert same(whole, results(model, inputs))
    assert same(routed, results(twin, inputs))


@sweep(PROJECTED)
def test_an_ablated_head_equals_zeroed_rows_of_the_output_projection(family: Family):
    model, inputs, heads = bed(family, padded=family.maskable)
    site = heads.sites[-1]
    one = hw.Heads(model, (site,), heads.projections, heads.found)
    site.expose()
    whole = results(model, inputs)
    with hw.ablate(one, 1):
        without = results(model, inputs)
    assert not same(whole, without)
    assert same(whole, results(model, inputs))
    with torch.no_grad():
        output_weight(site).unflatten(0, (site.num_heads, site.head_size))[1] = 0.0
    torch.testing.assert_close(without, results(model, inputs))


@cases("name", ["BitNet", "Kosmos-2"])
def test_a_norm_before_w_o_is_gated_and_not_replaced(name: str):
    model, inputs, heads = bed(BY_NAME[name])
    with pytest.raises(hw.errors.LayoutError, match=r"its heads pass a \w+Norm before W_O.*hw\.routing\.Residual"):
        hw.aggregate(heads, hw.routing.EMRouting())
    whole = results(model, inputs)
    gates = hw.aggregate(heads, hw.routing.Gate())
    gated = results(model, inputs)
    assert same(whole, gated)
    sum(tensor.square().sum() for tensor in gated if tensor.is_floating_point()).backward()
    for place in gates.replaced:
        assert all(bool((own.grad != 0).any()) for own in place.new.parameters() if own is not place.old.weight)


@cases("reentrant", [False, True])
def test_heads_are_not_removed_where_the_backward_would_compute_them_again(reentrant: bool):
    family = BY_NAME["BERT"]
    model, inputs = family.build().train(), family.inputs()
    heads = hw.find_heads(model)
    checkpoint_activations(model, reentrant=reentrant)
    ablation = hw.ablate(heads, 1)
    with pytest.raises(hw.errors.NotFired, match=r"encoder\.layer\.0.*removed for evaluation"):
        results(model, inputs)
    model.eval()
    results(model, inputs)
    ablation.check()
    ablation.remove()


@cases("shape", [(8,), (0, 5, 8), (3, 0, 8), (2, 3, 4, 8)])
@cases(
    "setting",
    [hw.routing.SimpleRouting(), hw.routing.EMRouting(capsules=4), hw.routing.Trunk(votes=hw.routing.PerHead())],
)
def test_one_token_and_no_token_are_aggregated(setting, shape: tuple[int, ...]):
    from headwise.routing.modules import build

    aggregator = build(setting, num_heads=2, head_size=4, width=12)
    x = torch.randn(shape, requires_grad=True)
    y = aggregator(x)
    assert y.shape == (*shape[:-1], 12)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert all(parameter.grad is not None for parameter in aggregator.parameters())
    if x.numel():
        torch.testing.assert_close(y.flatten(), aggregator(x.detach().reshape(-1, 8)).flatten())


def test_unbatched_attention_with_an_aggregator():
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    hw.aggregate(hw.find_heads(model), hw.routing.SimpleRouting())
    x = torch.randn(5, 8)
    torch.testing.assert_close(model(x, x, x)[0], model(x[None], x[None], x[None])[0][0])
