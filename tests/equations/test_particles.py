from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import cases
from equations.draws import EPS, close, draw
from equations.test_kernels import kappa_and_repulsion
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

NOISY = (SPOS, SGLD)


def matrix(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


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


TRIANGLE = [[0, 0], [1, 0], [0, 2]]
CORNER = [[1, 0], [1, 1], [0, 2]]
GOLDEN = [
    (SVGD(0.5, 0.1), TRIANGLE, [[0.05140082, 0.04254237], [0.02449531, 0.04641353], [0.04676324, 0.03103497]]),
    (
        SVGD(0.5, 0.1, RBF(ReleasedMedian())),
        TRIANGLE,
        [[0.04501599, 0.00882456], [-0.00323169, 0.03345614], [0.03350867, 0.03291462]],
    ),
    (CosinePenalty(0.5, 0.1), CORNER, [[0.1, 0.02845180], [0, 0.1], [0.11422589, 0.1]]),
    (
        CosineRepulsion(0.5, 0.1),
        CORNER,
        [[0.08577411, 0.00589256], [-0.00589256, 0.08821489], [0.10589256, 0.07744078]],
    ),
    (SVGD(0.5, 0.1, Cosine()), CORNER, [[0.01910744, 0.02946278], [0.04124790, 0.04511845], [0.03922589, 0.03434434]]),
]


@cases(("rule", "theta", "wanted"), GOLDEN)
def test_rules_give_the_golden_gradients(rule: Rule, theta: list, wanted: list):
    g = matrix([[1, 0], [0, 1], [1, 1]])
    digits = 1e-7 if rule.needs_inner else 1e-8
    torch.testing.assert_close(update(rule, matrix(theta), g).gradient, matrix(wanted), rtol=0, atol=digits)


target = st.fixed_dictionaries({"prior_precision": amounts, "data_size": amounts, "inverse_temperature": amounts})
LETTERS = {"prior_precision": "tau", "data_size": "N", "inverse_temperature": "beta"}


@settings(max_examples=40)
@given(
    count=st.sampled_from([1, 2, 3, 4, 7]),
    width=st.integers(2, 5),
    seed=st.integers(0, 999),
    kernel=kernels,
    strength=st.tuples(amounts, amounts),
    target=target,
    smoothing=st.booleans(),
)
def test_svgd_and_spos_equal_the_loops(count, width, seed, kernel, strength, target, smoothing):
    theta, g, xi = (draw(count, width, seed=seed + one) for one in range(3))
    kappa, repulsion = kappa_and_repulsion(kernel, theta)
    letters = {LETTERS[name]: value for name, value in target.items()}
    letters |= {"alpha": strength[0], "epsilon": strength[1], "smoothing": smoothing}
    svgd, spos = (kind(*strength, kernel, smoothing=smoothing, **target) for kind in (SVGD, SPOS))
    # Cosines near 1 cost a kernel on directions half its digits.
    terms = 1e6 if kernel.needs_inner else 1024
    close(update(svgd, theta, g).gradient, reference.svgd(theta, g, kappa, repulsion, **letters), terms=terms)
    close(update(spos, theta, g, xi).gradient, reference.spos(theta, g, kappa, repulsion, xi, **letters), terms=terms)


@settings(max_examples=15)
@given(count=st.sampled_from([1, 2, 4]), seed=st.integers(0, 999), epsilon=amounts, target=target)
def test_sgld_equals_the_loop(count: int, seed: int, epsilon: float, target: dict):
    theta, g, xi = (draw(count, 3, seed=seed + one) for one in range(3))
    letters = {LETTERS[name]: value for name, value in target.items()}
    found = update(SGLD(step_size=epsilon, **target), theta, g, xi).gradient
    close(found, reference.sgld(theta, g, xi, epsilon=epsilon, **letters))


@settings(max_examples=15)
@given(count=st.sampled_from([1, 2, 4]), seed=st.integers(0, 999), alpha=amounts, epsilon=amounts)
def test_the_cosine_rules_equal_the_loops(count: int, seed: int, alpha: float, epsilon: float):
    theta, g = draw(count, 3, seed=seed), draw(count, 3, seed=seed + 1)
    penalty = update(CosinePenalty(alpha, epsilon), theta, g).gradient
    repulsion = update(CosineRepulsion(alpha, epsilon), theta, g).gradient
    close(penalty, reference.cosine_penalty(theta, g, alpha=alpha, epsilon=epsilon), terms=1e6)
    close(repulsion, reference.cosine_repulsion(theta, g, alpha=alpha, epsilon=epsilon), terms=1e6)


@cases("rule", RULES)
def test_many_groups_at_once_equal_each_group_alone(rule: Rule):
    theta, g = draw(3, 4, 5), draw(3, 4, 5, seed=1)
    drive, repulsion = blend(rule.mixing(geometry(theta, inner=rule.needs_inner)), theta, g)
    for i in range(3):
        alone = blend(rule.mixing(geometry(theta[i], inner=rule.needs_inner)), theta[i], g[i])
        close(drive[i], alone[0])
        close(repulsion[i], alone[1])


@cases("rule", RULES)
def test_drive_repulsion_and_noise_make_up_the_gradient(rule: Rule):
    noise = draw(4, 5, seed=2) if isinstance(rule, NOISY) else None
    forces = update(rule, draw(4, 5), draw(4, 5, seed=1), noise)
    close(forces.gradient, forces.driving - forces.repulsion - forces.noise)
    assert forces.noise.any() == (noise is not None)


@cases("rule", RULES)
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


@cases("ratio", [0.3, 2.5])
@cases(
    "rule",
    [
        lambda alpha: SVGD(alpha, 0.3, prior_precision=0.4),
        lambda alpha: SVGD(alpha, 0.3, NormalizedRBF(), smoothing=False),
        lambda alpha: SPOS(alpha, 0.3, IMQ(), prior_precision=0.4, inverse_temperature=1.7),
        lambda alpha: CosinePenalty(alpha, 0.3),
        lambda alpha: CosineRepulsion(alpha, 0.3),
    ],
)
def test_a_relative_strength_sets_the_norm_of_the_repulsion_and_keeps_its_direction(rule, ratio: float):
    theta, g = draw(4, 5), draw(4, 5, seed=1)
    inner = rule(0.7).needs_inner
    drive, repulsion = blend(rule(Relative(ratio)).mixing(geometry(theta, inner=inner)), theta, g)
    _, absolute = blend(rule(0.7).mixing(geometry(theta, inner=inner)), theta, g)
    assert (repulsion.norm() / drive.norm()).item() == pytest.approx(ratio, rel=64 * EPS)
    assert torch.cosine_similarity(repulsion.flatten(), absolute.flatten(), dim=0).item() == pytest.approx(1)


@cases("kernel", [RBF(), IMQ(), Cosine(), NormalizedRBF()])
@cases("alpha", [0.7, Relative(0.6)])
def test_equal_particles_get_a_drive_and_no_repulsion_at_all(kernel: Kernel, alpha: float | Relative):
    theta = draw(1, 257).float().repeat(8, 1)
    forces = update(SVGD(alpha, 0.3, kernel), theta, draw(8, 257, seed=1).float())
    assert forces.driving.isfinite().all()
    assert forces.driving.any()
    assert not forces.repulsion.any()


@cases("alpha", [0.7, Relative(0.6)])
def test_a_single_particle_gets_its_own_gradient_times_the_step_size(alpha: float | Relative):
    g = draw(1, 5, seed=1)
    forces = update(SVGD(alpha, 0.3), draw(1, 5), g)
    close(forces.gradient, 0.3 * g)
    assert not forces.repulsion.any()


@cases("kernel", [RBF(), IMQ(), Cosine(), NormalizedRBF()])
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
    read = [SVGD(kernel=Cosine()), SPOS(kernel=NormalizedRBF(), inverse_temperature=1.7), CosinePenalty()]
    assert [rule.needs_inner for rule in (*read, CosineRepulsion(), SVGD(), SGLD(1.7))] == [True] * 4 + [False] * 2


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
