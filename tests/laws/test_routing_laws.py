from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import cases
from headwise.routing.algorithms import em_gradient, simple_gradient
from headwise.routing.modules import EMRouting, Routed, SimpleRouting, em_routing, simple_routing

drawn = settings(max_examples=25)
sizes = st.tuples(st.integers(0, 4), st.integers(1, 6), st.integers(1, 8), st.integers(1, 4))
em_settings = st.builds(
    EMRouting,
    iterations=st.integers(1, 5),
    activation=st.booleans(),
    inverse_temperature=st.tuples(st.floats(0.1, 3.0), st.floats(0.1, 3.0)),
    floor=st.sampled_from([1e-9, 1e-6, 1e-4]),
)
simple_settings = st.builds(
    SimpleRouting,
    iterations=st.integers(1, 5),
    softmax_over=st.sampled_from(["capsules", "heads"]),
    floor=st.sampled_from([1e-9, 1e-6, 1e-4]),
)


def random_votes(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def routed_by(setting: EMRouting | SimpleRouting, votes: Tensor) -> Routed:
    if isinstance(setting, SimpleRouting):
        return simple_routing(votes, setting)
    betas = betas_for(votes) if setting.activation else ()
    return em_routing(votes, setting, *betas)


def betas_for(votes: Tensor) -> tuple[Tensor, Tensor]:
    capsules = votes.shape[2]
    return random_votes((capsules,), 11, votes.dtype), random_votes((capsules,), 12, votes.dtype)


def gradient_by(setting: EMRouting | SimpleRouting, votes: Tensor) -> Tensor:
    grad = torch.ones_like(votes[:, 0])
    if isinstance(setting, SimpleRouting):
        over_capsules = setting.softmax_over == "capsules"
        return simple_gradient(votes, grad, setting.iterations, over_capsules, setting.floor)
    betas = betas_for(votes) if setting.activation else (None, None)
    return em_gradient(votes, *betas, grad, setting.schedule, setting.floor).votes


@given(sizes, em_settings | simple_settings, st.integers(0, 99))
@drawn
def test_weights_sum_to_one(shape, setting, seed):
    routed = routed_by(setting, random_votes(shape, seed))
    axis = 1 if isinstance(setting, SimpleRouting) and setting.softmax_over == "heads" else 2
    sums = routed.weights.sum(axis)
    torch.testing.assert_close(sums, torch.ones_like(sums))
    assert routed.capsules.shape == (shape[0], shape[2], shape[3])


@given(sizes, em_settings | simple_settings, st.integers(0, 99))
@drawn
def test_permuting_the_heads_leaves_the_capsules(shape, setting, seed):
    votes = random_votes(shape, seed)
    order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(seed))
    here, there = routed_by(setting, votes), routed_by(setting, votes[:, order])
    torch.testing.assert_close(there.capsules, here.capsules, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(there.weights, here.weights[:, order], rtol=1e-6, atol=1e-8)


@given(sizes, em_settings | simple_settings, st.integers(0, 99))
@drawn
def test_tokens_do_not_see_each_other(shape, setting, seed):
    votes = random_votes((3, *shape[1:]), seed)
    alone = routed_by(setting, votes[1:2])
    torch.testing.assert_close(routed_by(setting, votes).capsules[1:2], alone.capsules)


@given(sizes, em_settings, st.integers(0, 99))
@drawn
def test_capsules_that_received_the_same_votes_are_alike(shape, setting, seed):
    votes = random_votes((shape[0], shape[1], 1, shape[3]), seed).expand(-1, -1, shape[2], -1)
    beta = torch.full((shape[2],), 0.3, dtype=torch.float64)
    routed = em_routing(votes, setting, *((beta, beta) if setting.activation else ()))
    torch.testing.assert_close(routed.weights, torch.full_like(routed.weights, 1.0 / shape[2]))
    torch.testing.assert_close(routed.capsules, routed.capsules[:, :1].expand_as(routed.capsules))
    if not setting.activation:
        torch.testing.assert_close(routed.capsules, votes.mean(1))


def test_moving_all_votes_moves_the_means_of_em():
    votes = random_votes((4, 5, 6, 2), 3)
    setting = EMRouting(activation=False)
    moved = em_routing(votes + 7.5, setting)
    torch.testing.assert_close(moved.capsules, em_routing(votes, setting).capsules + 7.5)


def test_a_single_head_is_its_own_mean():
    votes = random_votes((4, 1, 6, 2), 3)
    routed = em_routing(votes, EMRouting(activation=False))
    torch.testing.assert_close(routed.capsules, votes[:, 0])


@cases("setting", [EMRouting(), EMRouting(activation=False), SimpleRouting()])
@cases("scale", [0.0, 1e-20, 1.0, 1e6, 1e15])
def test_identical_votes_give_finite_capsules_and_gradients(setting, scale: float):
    votes = scale * torch.ones(2, 4, 6, 2)
    assert routed_by(setting, votes).capsules.isfinite().all()
    assert gradient_by(setting, votes).isfinite().all()


@cases("setting", [EMRouting(), EMRouting(activation=False), SimpleRouting(), SimpleRouting(softmax_over="heads")])
@cases("scale", [1e3, 1e9, 1e15])
@cases("size", [1, 4])
def test_huge_votes_give_finite_capsules_and_gradients(setting, scale: float, size: int):
    votes = scale * random_votes((8, 4, 6, size), 5, torch.float32)
    assert routed_by(setting, votes).capsules.isfinite().all()
    assert gradient_by(setting, votes).isfinite().all()


def test_votes_far_from_every_capsule_do_not_underflow_to_nothing():
    votes = random_votes((4, 8, 32, 8), 5, torch.float32)
    votes[:, 0] += 300.0
    routed = em_routing(votes, EMRouting(iterations=5), *betas_for(votes))
    torch.testing.assert_close(routed.weights.sum(2), torch.ones(4, 8))
