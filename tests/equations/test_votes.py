"""Votes of heads for capsules: their equations, their shapes, and how their weights start."""

from __future__ import annotations

import copy

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cases import cases
from equations.draws import EVERY, D, E, H, random, seeded, vote_settings
from headwise.routing.algorithms import DistinctCapsules, PerHead, SharedTrunk, Votes
from headwise.routing.modules import EMRouting, Residual, Trunk, build


@given(vote_settings, st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=25)
def test_votes_have_the_shape_of_their_setting_whatever_the_sizes(setting, heads, size, capsules, capsule):
    votes = Votes(setting, heads, size, capsules * capsule, capsules)
    assert votes(torch.randn(5, heads * size)).shape == (5, heads, capsules, capsule)


@cases("relu", [True, False])
def test_votes_of_the_shared_trunk_follow_their_equation(relu: bool):
    votes = Votes(SharedTrunk(relu=relu), H, E, D, 4).double()
    with torch.no_grad():
        for parameter in votes.parameters():
            parameter.copy_(random(*parameter.shape, seed=parameter.numel()))
    o = random(1, 8)[0]
    normed = (o - o.mean()) / (o.var(unbiased=False) + 1e-5).sqrt() * votes.norm_weight + votes.norm_bias
    hidden = votes.trunk_weight @ normed + votes.trunk_bias
    hidden = hidden.clamp_min(0) if relu else hidden
    for h in range(H):
        rows = slice(h * D, (h + 1) * D)
        expected = votes.vote_weight[rows] @ hidden + votes.vote_bias[rows]
        torch.testing.assert_close(votes(o[None])[0, h].flatten(), expected)


@cases("setting", [PerHead(), DistinctCapsules()])
def test_votes_of_their_own_heads_follow_their_equation(setting):
    votes = Votes(setting, H, E, D, 4).double()
    o = random(1, 8)[0]
    for h in range(H):
        rows = slice(h * E, (h + 1) * E)
        if isinstance(setting, PerHead):
            hidden = (votes.hidden_weight[h] @ o[rows] + votes.hidden_bias[h]).clamp_min(0)
            expected = votes.vote_weight[h] @ hidden + votes.vote_bias[h]
        else:
            expected = votes.vote_weight[h] @ (votes.capsule_weight[rows] @ o + votes.capsule_bias[rows]).clamp_min(0)
        torch.testing.assert_close(votes(o[None])[0, h].flatten(), expected)


def test_weights_start_as_those_of_linear_and_layer_norm_and_betas_normal():
    module = seeded(EMRouting(), heads=8, size=64, width=512)
    assert (module.votes.norm_weight == 1).all()
    assert (module.votes.norm_bias == 0).all()
    bound = nn.Linear(512, 512).weight.abs().max()
    for name in ("trunk_weight", "trunk_bias", "vote_weight", "vote_bias"):
        torch.testing.assert_close(module.votes.get_parameter(name).abs().max(), bound, rtol=0.05, atol=0)
    for beta in (module.beta_a, module.beta_mu):
        torch.testing.assert_close(beta.std() * 512**0.5, torch.tensor(1.0), rtol=0.15, atol=0)


def test_trunk_and_routing_start_from_the_same_votes():
    trunk, routed = seeded(Trunk(), seed=3), seeded(EMRouting(), seed=3)
    for name, parameter in trunk.named_parameters():
        assert torch.equal(parameter, routed.get_parameter(name))


@cases("setting", [*EVERY, Residual(EMRouting())])
def test_reset_parameters_draws_every_weight_as_the_constructor_did(setting):
    projection = nn.Linear(8, 8) if isinstance(setting, Residual) else None
    torch.manual_seed(5)
    module = build(setting, H, E, D, projection)
    started = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not name.startswith("projection"):
                parameter.fill_(9.0)
    torch.manual_seed(5)
    module.reset_parameters()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, started[name]), name
