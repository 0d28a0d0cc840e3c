from __future__ import annotations

import torch
from torch import Tensor

from cases import cases
from headwise.routing.algorithms import em_gradient, em_schedule, simple_gradient
from headwise.routing.modules import (
    EMRouting,
    SimpleRouting,
    em_routing,
    simple_routing,
    uniform_routing,
)
from reference.routing import em_routing_loop, simple_routing_loop

GOLDEN_TOLERANCE = 1e-6


def golden_votes(*heads: list[list[float]]) -> Tensor:
    return torch.tensor(heads, dtype=torch.float64).unsqueeze(0)


def random_votes(heads: int, capsules: int, size: int, seed: int, tokens: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, capsules, size, dtype=torch.float64, generator=generator)


V = golden_votes([[1, 0], [0, 1]], [[0.5, 0.5], [-1, 2]])
V3 = golden_votes([[1, 0], [0, 1]], [[0.5, 0.5], [-1, 2]], [[0.8, -0.1], [0.2, 0.9]])


def close_to_golden(tensor: Tensor, numbers: list[list[float]]) -> bool:
    return torch.allclose(tensor, torch.tensor(numbers, dtype=torch.float64), rtol=0, atol=GOLDEN_TOLERANCE)


def test_routing_gives_the_golden_numbers():
    simple = simple_routing(V, SimpleRouting())
    assert close_to_golden(simple.weights[0], [[0.35570214, 0.64429786], [0.06109773, 0.93890227]])
    assert close_to_golden(simple.capsules[0], [[0.46212118, 0.03654949], [-0.25918091, 0.69621814]])
    released = simple_routing(V, SimpleRouting(softmax_over="heads"))
    assert close_to_golden(released.capsules[0], [[0.38221498, 0.10704452], [-0.34197066, 0.73427195]])
    beta_a, beta_mu = torch.full((2,), 0.1, dtype=torch.float64), torch.full((2,), 0.2, dtype=torch.float64)
    active = em_routing(V3, EMRouting(floor=1e-9), beta_a, beta_mu)
    assert active.activations is not None
    assert close_to_golden(active.activations, [[0.32421629, 0.10517961]])
    assert close_to_golden(active.capsules[0], [[0.24119975, 0.0494617], [-0.01316483, 0.12139944]])
    plain = em_routing(V3, EMRouting(floor=1e-9, activation=False))
    assert close_to_golden(plain.capsules[0], [[0.74766686, 0.14856165], [-0.13061014, 1.15832744]])
    assert close_to_golden(uniform_routing(V).capsules[0], [[0.75, 0.25], [-0.5, 1.5]])
    assert em_schedule(5, 1.0, 3.0) == (1.0, 1.5, 2.0, 2.5, 3.0)
    assert em_schedule(1, 0.7, 3.0) == (0.7,)
    assert EMRouting(iterations=2).schedule == (1.0, 3.0)


@cases("iterations", [1, 2, 3, 4, 5])
@cases("size", [1, 4])
@cases("over", ["capsules", "heads"])
def test_simple_routing_equals_the_loop(iterations: int, size: int, over):
    votes = random_votes(3, 5, size, seed=iterations)
    routed = simple_routing(votes, SimpleRouting(iterations=iterations, softmax_over=over, floor=1e-5))
    for token in range(len(votes)):
        capsules, weights = simple_routing_loop(votes[token].tolist(), iterations, over, 1e-5)
        torch.testing.assert_close(routed.capsules[token].tolist(), capsules)
        torch.testing.assert_close(routed.weights[token].tolist(), weights)


@cases("iterations", [1, 2, 3, 4, 5])
@cases("size", [1, 4])
@cases("activation", [True, False])
def test_em_routing_equals_the_loop(iterations: int, size: int, activation: bool):
    votes = random_votes(3, 6, size, seed=iterations)
    setting = EMRouting(iterations=iterations, activation=activation, inverse_temperature=(0.7, 2.3), floor=1e-5)
    betas = (random_votes(1, 1, 6, seed=8)[0, 0, 0], random_votes(1, 1, 6, seed=9)[0, 0, 0]) if activation else ()
    routed = em_routing(votes, setting, *betas)
    listed = [beta.tolist() for beta in betas] or [None, None]
    for token in range(len(votes)):
        capsules, weights, activations = em_routing_loop(
            votes[token].tolist(), iterations, *listed, list(setting.schedule), 1e-5
        )
        torch.testing.assert_close(routed.capsules[token].tolist(), capsules)
        torch.testing.assert_close(routed.weights[token].tolist(), weights)
        if activations is None:
            assert routed.activations is None
        else:
            assert routed.activations is not None
            torch.testing.assert_close(routed.activations[token].tolist(), activations)


def test_both_floors_of_em_routing_are_those_of_the_loop():
    votes = random_votes(3, 4, 2, seed=3)
    votes[:, :, 0] = 0.3  # no variance
    votes[:, :, 1] *= 40.0  # so far from the others that hardly any weight reaches it
    betas = (random_votes(1, 1, 4, seed=8)[0, 0, 0], random_votes(1, 1, 4, seed=9)[0, 0, 0])
    setting = EMRouting(iterations=4, floor=1e-4)
    routed = em_routing(votes, setting, *betas)
    assert routed.weights.sum(1).min() < setting.floor
    capsules, _, _ = em_routing_loop(
        votes[0].tolist(), 4, betas[0].tolist(), betas[1].tolist(), list(setting.schedule), 1e-4
    )
    torch.testing.assert_close(routed.capsules[0].tolist(), capsules)


@cases("iterations", [1, 2, 3, 4, 5])
@cases("size", [1, 4])
@cases("activation", [True, False])
@cases("squeeze", [1.0, 1e-4])
def test_the_written_gradient_of_em_routing_is_that_of_autograd(iterations, size, activation, squeeze):
    votes = random_votes(3, 6, size, seed=iterations)
    votes[:, :, 0] *= squeeze  # below the floor of the variance when squeezed
    votes[:, :, 1] *= 1.0 / squeeze**0.5  # below the floor of the weights
    votes.requires_grad_()
    setting = EMRouting(iterations=iterations, activation=activation, inverse_temperature=(0.7, 2.3), floor=1e-4)
    betas = [random_votes(1, 1, 6, seed=s)[0, 0, 0].requires_grad_() for s in (8, 9)] if activation else []
    capsules = em_routing(votes, setting, *betas).capsules
    grad = random_votes(1, 6, size, seed=7)[:, 0].expand_as(capsules)
    expected = torch.autograd.grad(capsules, [votes, *betas], grad)
    given = [beta.detach() for beta in betas] or [None, None]
    written = em_gradient(votes.detach(), *given, grad, setting.schedule, setting.floor)
    for ours, theirs in zip([part for part in written if part is not None], expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@cases("iterations", [1, 2, 3, 4, 5])
@cases("size", [1, 4])
@cases("over", ["capsules", "heads"])
@cases("scale", [1.0, 5.0])
def test_the_written_gradient_of_simple_routing_is_that_of_autograd(iterations, size, over, scale):
    votes = (scale * random_votes(3, 6, size, seed=iterations)).requires_grad_()
    setting = SimpleRouting(iterations=iterations, softmax_over=over, floor=1e-4)
    capsules = simple_routing(votes, setting).capsules
    grad = random_votes(1, 6, size, seed=7)[:, 0].expand_as(capsules)
    (expected,) = torch.autograd.grad(capsules, votes, grad)
    written = simple_gradient(votes.detach(), grad, iterations, over == "capsules", 1e-4)
    torch.testing.assert_close(written, expected)


@cases("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_votes_are_routed_in_float32(dtype: torch.dtype):
    votes = random_votes(3, 6, 2, seed=1).to(dtype)
    routed = em_routing(votes, EMRouting(activation=False))
    assert routed.capsules.dtype == torch.float32
    assert torch.equal(routed.capsules, em_routing(votes.float(), EMRouting(activation=False)).capsules)
