from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import cases
from equations.draws import close, draw
from headwise.kernels import (
    IMQ,
    RBF,
    Cosine,
    Fixed,
    Kernel,
    Median,
    NormalizedRBF,
    RadialRBF,
    ReleasedMedian,
    geometry,
)
from headwise.repulsion.rules import SGLD, SPOS, SVGD, CosinePenalty, CosineRepulsion, Rule, update
from headwise.strength import Relative

bandwidths = st.sampled_from([Median(), ReleasedMedian(), Fixed(1.3)])
kernels = st.one_of(
    st.builds(RBF, bandwidths), st.builds(IMQ, bandwidths), st.builds(NormalizedRBF, bandwidths), st.just(Cosine())
)
amounts = st.floats(0.2, 3.0)
strengths = st.one_of(amounts, st.builds(Relative, amounts))
target = {"prior_precision": amounts, "data_size": amounts}
rules = st.one_of(
    st.builds(SVGD, strengths, amounts, kernels, smoothing=st.booleans(), inverse_temperature=amounts, **target),
    st.builds(SPOS, strengths, amounts, kernels, smoothing=st.booleans(), inverse_temperature=amounts, **target),
    st.builds(SGLD, amounts, amounts, **target),
    st.builds(CosinePenalty, strengths, amounts),
    st.builds(CosineRepulsion, strengths, amounts),
)


def step(rule: Rule, theta: Tensor, g: Tensor, xi: Tensor) -> Tensor:
    return update(rule, theta, g, xi if rule.noise_scale() > 0 else None).gradient


def mean_cosine(theta: Tensor) -> float:
    units = theta / theta.norm(dim=1, keepdim=True)
    count = len(theta)
    return ((units @ units.T).sum().item() - count) / (count * (count - 1))


def gaussian_precision_run(rule: Rule, theta: Tensor, precision: float, steps: int, seed: int) -> list[Tensor]:
    """Particles after each step of `theta -= g'` under the loss precision * theta^2 / 2."""
    generator = torch.Generator().manual_seed(seed)
    states = []
    for _ in range(steps):
        xi = torch.randn(theta.shape, generator=generator, dtype=theta.dtype)
        theta = theta - step(rule, theta, precision * theta, xi)
        states.append(theta)
    return states


@settings(max_examples=50)
@given(rule=rules, count=st.integers(1, 8), width=st.integers(2, 5), seed=st.integers(0, 999), data=st.data())
def test_permuting_heads_permutes_updates(rule: Rule, count: int, width: int, seed: int, data: st.DataObject):
    order = torch.tensor(data.draw(st.permutations(range(count))))
    theta, g, xi = draw(count, width, seed=seed), draw(count, width, seed=seed + 1), draw(count, width, seed=seed + 2)
    close(step(rule, theta[order], g[order], xi[order]), step(rule, theta, g, xi)[order], terms=1e7)


@settings(max_examples=50)
@given(rule=rules, count=st.integers(1, 8), seed=st.integers(0, 999))
def test_every_update_is_finite_also_at_collapse(rule: Rule, count: int, seed: int):
    g, xi = draw(count, 3, seed=seed + 1), draw(count, 3, seed=seed + 2)
    equal = draw(1, 3, seed=seed).expand(count, 3)
    halves = equal.clone()
    halves[: count // 2] = draw(1, 3, seed=seed + 3)
    for theta in (equal, halves, equal + 1e-7 * draw(count, 3, seed=seed + 4), 1e-12 * equal):
        assert step(rule, theta, g, xi).isfinite().all()


@cases("bandwidth", [Median(), ReleasedMedian(), Fixed(1.3)])
@cases("kernel", [RBF, IMQ])
def test_shifting_all_heads_leaves_the_repulsion_of_a_kernel_on_distances(kernel, bandwidth):
    theta, g, shift = draw(6, 4), draw(6, 4, seed=1), 3 * draw(1, 4, seed=2)
    rule = SVGD(0.7, 0.3, kernel(bandwidth))
    close(update(rule, theta + shift, g).repulsion, update(rule, theta, g).repulsion)
    close(update(rule, theta + shift, g).driving, update(rule, theta, g).driving)


@settings(max_examples=25)
@given(kernel=st.one_of(st.builds(RBF, bandwidths), st.builds(IMQ, bandwidths)), count=st.integers(1, 8))
def test_rows_and_columns_of_a_distance_kernels_repulsion_sum_to_zero(kernel: Kernel, count: int):
    repulsion = kernel.matrices(geometry(draw(count, 4, seed=count), inner=False)).repulsion
    close(repulsion.sum(0), torch.zeros(count, dtype=torch.float64))
    close(repulsion.sum(1), torch.zeros(count, dtype=torch.float64))


@cases("kernel", [RBF(), IMQ(), Cosine(), NormalizedRBF()])
def test_without_repulsion_svgd_is_smoothing_alone(kernel: Kernel):
    theta, g = draw(5, 4), draw(5, 4, seed=1)
    values = kernel.matrices(geometry(theta, inner=kernel.needs_inner)).values
    forces = update(SVGD(0.0, 0.3, kernel), theta, g)
    close(forces.gradient, 0.3 / 5 * values @ g)
    assert not forces.repulsion.any()


def test_a_huge_bandwidth_gives_the_mean_gradient_and_a_tiny_one_each_heads_own():
    theta, g, huge = draw(5, 4), draw(5, 4, seed=1), 1e14
    for large, tiny in ((RBF(Fixed(huge)), RBF(Fixed(1e-6))), (IMQ(Fixed(huge)), IMQ(Fixed(1e-26)))):
        gradient = update(SVGD(0.7, 0.3, large), theta, g).gradient
        torch.testing.assert_close(gradient, 0.3 * g.mean(0).expand_as(g), rtol=0, atol=1e3 / huge)
        driving = update(SVGD(0.0, 0.3, tiny), theta, g).driving
        torch.testing.assert_close(driving, 0.3 / 5 * g, rtol=0, atol=1e-12)
    assert not update(SVGD(0.7, 0.3, RBF(Fixed(1e-6))), theta, g).repulsion.any()


@cases("count", [3, 4, 8, 30])
@cases(("bandwidth", "extra"), [(Median(), 0), (ReleasedMedian(), 1)])
def test_at_equal_distances_the_kernel_off_its_diagonal_is_one_over_the_number_of_heads(count: int, bandwidth, extra):
    simplex = 1.7 * torch.eye(count, dtype=torch.float64)
    values = RBF(bandwidth).matrices(geometry(simplex, inner=False)).values
    off_diagonal = values[~torch.eye(count, dtype=torch.bool)]
    close(off_diagonal, torch.full_like(off_diagonal, 1 / (count + extra)))


def test_random_heads_see_each_other_by_about_one_over_their_number():
    values = RBF().matrices(geometry(draw(8, 4096), inner=False)).values
    off_diagonal = values[~torch.eye(8, dtype=torch.bool)]
    # Squared distances in D dimensions vary by sqrt(8 / D) of their mean 2, and k moves by log M times that share.
    share = 5 * math.sqrt(2 / 4096) * math.log(8)
    assert (off_diagonal * 8 - 1).abs().max() < share


@cases("kernel", [RBF(), RBF(ReleasedMedian()), IMQ()])
def test_repulsion_drives_heads_apart(kernel: Kernel):
    theta = draw(6, 4)
    moved = theta - update(SVGD(0.7, 0.01, kernel), theta, torch.zeros_like(theta)).gradient
    assert torch.pdist(moved).mean() > torch.pdist(theta).mean()


@cases("rule", [SVGD(0.7, 0.05, NormalizedRBF()), CosinePenalty(0.7, 0.05)])
def test_a_tangential_repulsion_turns_heads_apart_and_does_not_lengthen_them(rule: Rule):
    theta = draw(6, 40) + 2
    repulsion = update(rule, theta, torch.zeros_like(theta)).repulsion
    radial = (repulsion * theta).sum(1) / (repulsion.norm(dim=1) * theta.norm(dim=1))
    close(radial, torch.zeros_like(radial))
    start = theta
    for _ in range(20):
        theta = theta - update(rule, theta, torch.zeros_like(theta)).gradient
    assert mean_cosine(theta) < mean_cosine(start)
    # Each step is orthogonal to its head, so norms grow by squares of steps alone.
    assert (theta.norm(dim=1) / start.norm(dim=1) - 1).abs().max() < 1e-3


def test_a_radial_repulsion_lengthens_heads_and_turns_none():
    theta = draw(6, 40)
    step = update(SVGD(0.7, 0.05, RadialRBF()), theta, torch.zeros_like(theta))
    moved = theta - step.gradient
    assert (moved.norm(dim=1) > theta.norm(dim=1)).all()
    close(torch.cosine_similarity(moved, theta), torch.ones(6, dtype=torch.float64))
    whole = update(SVGD(0.7, 0.05), theta, torch.zeros_like(theta)).repulsion
    # what it is a part of turns heads too
    assert (torch.cosine_similarity(whole, theta) < 0.99).all()


@cases("kernel", [NormalizedRBF(), Cosine()])
def test_a_kernel_on_directions_does_not_see_the_length_of_a_head(kernel: Kernel):
    theta = draw(5, 4)
    lengths = torch.tensor([0.3, 2.0, 1.0, 7.0, 0.9], dtype=torch.float64)[:, None]
    values = kernel.matrices(geometry(theta, inner=True)).values
    close(kernel.matrices(geometry(lengths * theta, inner=True)).values, values)


@cases(("count", "variance"), [(8, 0.75), (50, 0.94)])
def test_svgd_recovers_a_gaussian_up_to_the_known_shrinkage(count: int, variance: float):
    theta = torch.linspace(-2, 3, count, dtype=torch.float64)[:, None]
    rule = SVGD(alpha=1.0, step_size=0.9)
    final = gaussian_precision_run(rule, theta, 1.0, 1500, seed=0)[-1]
    assert final.mean().item() == pytest.approx(0.0, abs=1e-6)
    # The figure is known to two digits.
    assert final.var(correction=0).item() == pytest.approx(variance, abs=0.005)


@pytest.mark.full
def test_svgd_scales_with_the_precision_that_data_temperature_and_prior_add_up_to():
    rule = SVGD(1.0, 0.3, data_size=2.5, inverse_temperature=1.6, prior_precision=0.5)
    theta = torch.linspace(-1, 1, 50, dtype=torch.float64)[:, None]
    final = gaussian_precision_run(rule, theta, 0.8, 1500, seed=0)[-1]
    precision = 1.6 * 2.5 * 0.8 + 0.5
    assert final.var(correction=0).item() * precision == pytest.approx(0.94, abs=0.005)


def test_sgld_samples_a_gaussian_at_its_temperature():
    beta, epsilon, precision = 1.7, 0.05, 0.5 * 3.0 + 0.7
    rule = SGLD(beta, epsilon, prior_precision=0.7, data_size=3.0)
    final = gaussian_precision_run(rule, draw(8, 4000), 0.5, 150, seed=1)[-1]
    # The exact variance of the discretized chain; 32000 independent chains leave a relative error of sqrt(2 / 32000).
    wanted = 1 / (beta * precision * (1 - epsilon * precision / 2))
    assert final.var().item() == pytest.approx(wanted, rel=4 * math.sqrt(2 / 32000))


def test_spos_of_one_particle_is_langevin_with_its_own_gradient_added():
    beta, epsilon, precision = 1.7, 0.05, 0.5 * 3.0 + 0.7
    rule = SPOS(0.7, epsilon, prior_precision=0.7, data_size=3.0, inverse_temperature=beta)
    final = gaussian_precision_run(rule, draw(1, 32000), 0.5, 150, seed=1)[-1]
    decay = 1 - epsilon * precision * (1 + 1 / beta)
    wanted = 2 * epsilon / beta / (1 - decay**2)
    assert final.var().item() == pytest.approx(wanted, rel=4 * math.sqrt(2 / 32000))


@pytest.mark.full
@cases("beta", [0.5, 4.0])
def test_spos_of_many_particles_samples_the_target_whatever_its_temperature(beta: float):
    rule = SPOS(1.0, 0.02, inverse_temperature=beta)
    states = gaussian_precision_run(rule, draw(50, 1), 1.0, 3000, seed=1)
    variance = torch.stack(states[500:]).var().item()
    # Between SVGD's .94 at M = 50 and 1, give or take the mean over 50 particles and 2500 correlated steps
    # (the slowest mode, the mean, relaxes in 1 / epsilon = 50 steps: 50 samples of 50 particles).
    assert 0.94 - 4 * math.sqrt(2 / 2500) < variance < 1 + 4 * math.sqrt(2 / 2500)
