from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equations.draws import draw
from headwise.kernels import (
    IMQ,
    RBF,
    Cosine,
    Fixed,
    Geometry,
    Kernel,
    Median,
    NormalizedRBF,
    ReleasedMedian,
    geometry,
)
from headwise.repulsion.rules import SGLD, SPOS, SVGD, CosinePenalty, CosineRepulsion, Mixing, Rule, blend, update
from headwise.strength import Relative
from reference import particles as reference

EPS = torch.finfo(torch.float64).eps
NOISY = (SPOS, SGLD)


def matrix(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def close(actual: Tensor, wanted: Tensor, *, terms: float = 1024) -> None:
    scale = max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(actual, wanted, rtol=0, atol=terms * EPS * scale)


def kappa_and_repulsion(kernel: Kernel, theta: Tensor) -> tuple[reference.Kappa, Tensor]:
    match kernel:
        case RBF(bandwidth=ReleasedMedian()):
            kappa = reference.rbf(reference.released_bandwidth(theta))
        case RBF():
            kappa = reference.rbf(reference.median_bandwidth(theta))
        case IMQ(bandwidth=Fixed(value=h)):
            kappa = reference.imq(h)
        case NormalizedRBF():
            units = theta / theta.norm(dim=1, keepdim=True)
            kappa = reference.directions(reference.rbf(reference.median_bandwidth(units)))
            return kappa, reference.tangential_repulsion(theta, kappa)
        case _:
            kappa = reference.cosine
    return kappa, reference.repulsion(theta, kappa)


kernels = st.sampled_from([RBF(), RBF(ReleasedMedian()), IMQ(Fixed(1.3)), Cosine(), NormalizedRBF()])
amounts = st.floats(0.2, 3.0)
RULES: list[Rule] = [
    SVGD(0.7, 0.3, IMQ(), prior_precision=0.4, data_size=2.5, inverse_temperature=1.7),
    SVGD(Relative(0.6), 0.3, smoothing=False),
    SVGD(0.7, 0.3, NormalizedRBF()),
    SPOS(0.7, 0.3, Cosine(), prior_precision=0.4, inverse_temperature=1.7),
    SPOS(Relative(0.6), 0.3, NormalizedRBF(), inverse_temperature=1.7),
    SGLD(1.7, 0.3, prior_precision=0.4),
    CosinePenalty(0.7, 0.3),
    CosineRepulsion(Relative(0.6), 0.3),
]


def test_svgd_under_the_papers_bandwidth_gives_the_golden_gradient():
    theta, g = matrix([[0, 0], [1, 0], [0, 2]]), matrix([[1, 0], [0, 1], [1, 1]])
    wanted = matrix([[0.05140082, 0.04254237], [0.02449531, 0.04641353], [0.04676324, 0.03103497]])
    step = update(SVGD(alpha=0.5, step_size=0.1), theta, g)
    torch.testing.assert_close(step.gradient, wanted, rtol=0, atol=1e-8)


def test_svgd_under_the_released_bandwidth_gives_the_golden_gradient():
    theta, g = matrix([[0, 0], [1, 0], [0, 2]]), matrix([[1, 0], [0, 1], [1, 1]])
    wanted = matrix([[0.04501599, 0.00882456], [-0.00323169, 0.03345614], [0.03350867, 0.03291462]])
    step = update(SVGD(alpha=0.5, step_size=0.1, kernel=RBF(ReleasedMedian())), theta, g)
    torch.testing.assert_close(step.gradient, wanted, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        (CosinePenalty(0.5, 0.1), [[0.1, 0.02845180], [0, 0.1], [0.11422589, 0.1]]),
        (
            CosineRepulsion(0.5, 0.1),
            [[0.08577411, 0.00589256], [-0.00589256, 0.08821489], [0.10589256, 0.07744078]],
        ),
        (
            SVGD(0.5, 0.1, Cosine()),
            [[0.01910744, 0.02946278], [0.04124790, 0.04511845], [0.03922589, 0.03434434]],
        ),
    ],
    ids=["penalty", "repulsion", "smoothed"],
)
def test_the_cosine_family_gives_the_golden_gradients(rule: Rule, wanted: list[list[float]]):
    theta, g = matrix([[1, 0], [1, 1], [0, 2]]), matrix([[1, 0], [0, 1], [1, 1]])
    torch.testing.assert_close(update(rule, theta, g).gradient, matrix(wanted), rtol=0, atol=1e-7)


@settings(max_examples=40)
@given(
    count=st.sampled_from([1, 2, 3, 4, 7]),
    width=st.integers(2, 5),
    seed=st.integers(0, 999),
    kernel=kernels,
    alpha=amounts,
    epsilon=amounts,
    tau=amounts,
    size=amounts,
    beta=amounts,
    smoothing=st.booleans(),
)
def test_svgd_and_spos_equal_the_loops(
    count: int,
    width: int,
    seed: int,
    kernel: Kernel,
    alpha: float,
    epsilon: float,
    tau: float,
    size: float,
    beta: float,
    smoothing: bool,
):
    theta, g, xi = draw(count, width, seed=seed), draw(count, width, seed=seed + 1), draw(count, width, seed=seed + 2)
    kappa, repulsion = kappa_and_repulsion(kernel, theta)
    svgd = SVGD(
        alpha,
        epsilon,
        kernel,
        smoothing=smoothing,
        prior_precision=tau,
        data_size=size,
        inverse_temperature=beta,
    )
    spos = SPOS(
        alpha,
        epsilon,
        kernel,
        smoothing=smoothing,
        prior_precision=tau,
        data_size=size,
        inverse_temperature=beta,
    )
    # Cosines near 1 cost a kernel on directions half its digits.
    terms = 1e6 if kernel.needs_inner else 1024
    close(
        update(svgd, theta, g).gradient,
        reference.svgd(
            theta, g, kappa, repulsion, alpha=alpha, epsilon=epsilon, tau=tau, N=size, beta=beta, smoothing=smoothing
        ),
        terms=terms,
    )
    close(
        update(spos, theta, g, xi).gradient,
        reference.spos(
            theta,
            g,
            kappa,
            repulsion,
            xi,
            alpha=alpha,
            epsilon=epsilon,
            tau=tau,
            N=size,
            beta=beta,
            smoothing=smoothing,
        ),
        terms=terms,
    )


@settings(max_examples=15)
@given(
    count=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 999),
    epsilon=amounts,
    tau=amounts,
    size=amounts,
    beta=amounts,
)
def test_sgld_equals_the_loop(count: int, seed: int, epsilon: float, tau: float, size: float, beta: float):
    theta, g, xi = draw(count, 3, seed=seed), draw(count, 3, seed=seed + 1), draw(count, 3, seed=seed + 2)
    rule = SGLD(beta, epsilon, prior_precision=tau, data_size=size)
    close(
        update(rule, theta, g, xi).gradient,
        reference.sgld(theta, g, xi, epsilon=epsilon, tau=tau, N=size, beta=beta),
    )


@settings(max_examples=15)
@given(count=st.sampled_from([1, 2, 4]), seed=st.integers(0, 999), alpha=amounts, epsilon=amounts)
def test_the_cosine_rules_equal_the_loops(count: int, seed: int, alpha: float, epsilon: float):
    theta, g = draw(count, 3, seed=seed), draw(count, 3, seed=seed + 1)
    penalty = update(CosinePenalty(alpha, epsilon), theta, g).gradient
    repulsion = update(CosineRepulsion(alpha, epsilon), theta, g).gradient
    close(penalty, reference.cosine_penalty(theta, g, alpha=alpha, epsilon=epsilon), terms=1e6)
    close(repulsion, reference.cosine_repulsion(theta, g, alpha=alpha, epsilon=epsilon), terms=1e6)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_many_groups_at_once_equal_each_group_alone(rule: Rule):
    theta, g = draw(3, 4, 5), draw(3, 4, 5, seed=1)
    drive, repulsion = blend(rule.mixing(geometry(theta, inner=rule.needs_inner)), theta, g)
    for i in range(3):
        alone = blend(rule.mixing(geometry(theta[i], inner=rule.needs_inner)), theta[i], g[i])
        close(drive[i], alone[0])
        close(repulsion[i], alone[1])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_drive_repulsion_and_noise_make_up_the_gradient(rule: Rule):
    noise = draw(4, 5, seed=2) if isinstance(rule, NOISY) else None
    forces = update(rule, draw(4, 5), draw(4, 5, seed=1), noise)
    close(forces.gradient, forces.driving - forces.repulsion - forces.noise)
    assert forces.noise.any() == (noise is not None)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_mixing_is_written_out_in_plain_matrices(rule: Rule):
    theta, g = draw(4, 5), draw(4, 5, seed=1)
    mixing = rule.mixing(geometry(theta, inner=rule.needs_inner))
    drive = mixing.drive @ g + (0 if mixing.prior is None else mixing.prior @ theta)
    repulsion = mixing.repulsion @ theta
    if mixing.relative is not None:
        repulsion = repulsion * mixing.relative * drive.norm() / repulsion.norm()
    blended = blend(mixing, theta, g)
    close(blended[0], drive)
    close(blended[1], repulsion)


@pytest.mark.parametrize("ratio", [0.3, 2.5])
@pytest.mark.parametrize(
    "rule",
    [
        lambda alpha: SVGD(alpha, 0.3, prior_precision=0.4),
        lambda alpha: SVGD(alpha, 0.3, NormalizedRBF(), smoothing=False),
        lambda alpha: SPOS(alpha, 0.3, IMQ(), prior_precision=0.4, inverse_temperature=1.7),
        lambda alpha: CosinePenalty(alpha, 0.3),
        lambda alpha: CosineRepulsion(alpha, 0.3),
    ],
    ids=["svgd", "normalized", "spos", "penalty", "repulsion"],
)
def test_a_relative_strength_sets_the_norm_of_the_repulsion_and_keeps_its_direction(rule, ratio: float):
    theta, g = draw(4, 5), draw(4, 5, seed=1)
    inner = rule(0.7).needs_inner
    drive, repulsion = blend(rule(Relative(ratio)).mixing(geometry(theta, inner=inner)), theta, g)
    _, absolute = blend(rule(0.7).mixing(geometry(theta, inner=inner)), theta, g)
    assert (repulsion.norm() / drive.norm()).item() == pytest.approx(ratio, rel=64 * EPS)
    assert torch.cosine_similarity(repulsion.flatten(), absolute.flatten(), dim=0).item() == pytest.approx(1)


@pytest.mark.parametrize("kernel", [RBF(), IMQ(), Cosine(), NormalizedRBF()], ids=str)
@pytest.mark.parametrize("alpha", [0.7, Relative(0.6)], ids=str)
def test_equal_particles_get_a_drive_and_no_repulsion_at_all(kernel: Kernel, alpha: float | Relative):
    theta = draw(1, 257).float().repeat(8, 1)
    forces = update(SVGD(alpha, 0.3, kernel), theta, draw(8, 257, seed=1).float())
    assert forces.driving.isfinite().all()
    assert forces.driving.any()
    assert not forces.repulsion.any()


@pytest.mark.parametrize("alpha", [0.7, Relative(0.6)], ids=str)
def test_a_single_particle_gets_its_own_gradient_times_the_step_size(alpha: float | Relative):
    g = draw(1, 5, seed=1)
    forces = update(SVGD(alpha, 0.3), draw(1, 5), g)
    close(forces.gradient, 0.3 * g)
    assert not forces.repulsion.any()


@pytest.mark.parametrize("kernel", [RBF(), IMQ(), Cosine(), NormalizedRBF()], ids=str)
def test_repulsion_between_nearly_equal_particles_keeps_the_digits_of_single_precision(kernel: Kernel):
    theta = (draw(1, 4096) + 1e-4 * draw(8, 4096, seed=1)).float()
    g = draw(8, 4096, seed=2).float()
    single = update(SVGD(0.7, 0.3, kernel), theta, g).repulsion
    double = update(SVGD(0.7, 0.3, kernel), theta.double(), g.double()).repulsion
    # The radial part of the cosine kernels' repulsion is a small difference and costs them some digits.
    terms = 256 if kernel.needs_inner else 16
    assert (single - double).norm() < terms * torch.finfo(torch.float32).eps * double.norm()


def test_half_precision_is_computed_in_single_and_double_stays_double():
    theta, g = draw(4, 64), draw(4, 64, seed=1)
    for dtype, wanted in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32)):
        narrow = update(SVGD(0.7, 0.3), theta.to(dtype), g.to(dtype)).gradient
        wide = update(SVGD(0.7, 0.3), theta.to(dtype).double(), g.to(dtype).double()).gradient
        assert narrow.dtype == wanted
        torch.testing.assert_close(narrow, wide.float())
        assert wide.dtype == torch.float64


def test_update_changes_neither_its_arguments_nor_their_graph():
    theta, g, xi = draw(4, 5).requires_grad_(), draw(4, 5, seed=1), draw(4, 5, seed=2)
    before = [tensor.detach().clone() for tensor in (theta, g, xi)]
    forces = update(SPOS(0.7, 0.3, inverse_temperature=1.7), theta, g, xi)
    assert all(torch.equal(now, then) for now, then in zip((theta, g, xi), before, strict=True))
    assert not forces.gradient.requires_grad


def test_the_noise_has_the_papers_scale():
    assert SPOS(step_size=0.3, inverse_temperature=1.7).noise_scale() == pytest.approx(math.sqrt(2 * 0.3 / 1.7))
    assert SGLD(1.7, 0.3).noise_scale() == pytest.approx(math.sqrt(2 * 0.3 / 1.7))
    assert [rule.noise_scale() for rule in (SVGD(), CosinePenalty(), CosineRepulsion())] == [0.0, 0.0, 0.0]


def test_rules_say_which_geometry_they_read():
    assert not SVGD().needs_inner
    assert not SGLD(1.7).needs_inner
    assert SVGD(kernel=Cosine()).needs_inner
    assert SPOS(kernel=NormalizedRBF(), inverse_temperature=1.7).needs_inner
    assert CosinePenalty().needs_inner
    assert CosineRepulsion().needs_inner


def test_a_flat_prior_costs_nothing():
    shape = geometry(draw(4, 5), inner=False)
    assert SVGD().mixing(shape).prior is None
    assert SVGD(prior_precision=0.4).mixing(shape).prior is not None


def test_printing_a_rule_is_its_record_and_a_rule_is_frozen():
    rule = SVGD(alpha=Relative(0.5), kernel=IMQ(Median()))
    assert repr(rule) == (
        "SVGD(alpha=Relative(ratio=0.5), step_size=0.1, kernel=IMQ(bandwidth=Median()), smoothing=True, "
        "prior_precision=0.0, data_size=1.0, inverse_temperature=1.0)"
    )
    with pytest.raises(FrozenInstanceError):
        rule.alpha = 0.1


def test_a_users_own_rule_needs_no_base_class():
    @dataclass(frozen=True)
    class Halved:
        needs_inner: bool = False

        def noise_scale(self) -> float:
            return 0.0

        def mixing(self, geometry: Geometry) -> Mixing:
            own = torch.eye(geometry.squared_distances.shape[-1], dtype=torch.float64)
            return Mixing(0.5 * own, None, torch.zeros_like(own), None)

    g = draw(4, 5, seed=1)
    assert isinstance(Halved(), Rule)
    close(update(Halved(), draw(4, 5), g).gradient, 0.5 * g)
