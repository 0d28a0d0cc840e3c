from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import cases
from equations.draws import EPS, close, draw
from headwise.kernels import (
    CPU_CHUNK,
    IMQ,
    RBF,
    Bandwidth,
    Cosine,
    Fixed,
    Kernel,
    Median,
    NormalizedRBF,
    RadialRBF,
    ReleasedMedian,
    cosine_gradient,
    find_collapsed,
    geometry,
    geometry_from_grams,
    plain_gram,
    shifted_gram,
)
from reference import particles as reference

TRIANGLE = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
BANDWIDTHS = [Median(), ReleasedMedian(), Fixed(2.3)]
KERNELS = [kernel(bandwidth) for kernel in (RBF, IMQ, NormalizedRBF, RadialRBF) for bandwidth in BANDWIDTHS] + [
    Cosine()
]


def exact_distances(particles: Tensor) -> Tensor:
    wide = particles.double()
    return (wide[..., :, None, :] - wide[..., None, :, :]).square().sum(-1)


def expected_bandwidth(bandwidth: Bandwidth, theta: Tensor) -> float:
    if isinstance(bandwidth, Fixed):
        return bandwidth.value
    rule = reference.median_bandwidth if isinstance(bandwidth, Median) else reference.released_bandwidth
    return rule(theta)


def kappa_and_repulsion(kernel: Kernel, theta: Tensor) -> tuple[reference.Kappa, Tensor]:
    """A kernel as a function of two particles, and its repulsion by loops."""
    units = theta / theta.norm(dim=1, keepdim=True)
    match kernel:
        case RBF(bandwidth=bandwidth) | RadialRBF(bandwidth=bandwidth):
            kappa = reference.rbf(expected_bandwidth(bandwidth, theta))
        case IMQ(bandwidth=bandwidth):
            kappa = reference.imq(expected_bandwidth(bandwidth, theta))
        case NormalizedRBF(bandwidth=bandwidth):
            kappa = reference.directions(reference.rbf(expected_bandwidth(bandwidth, units)))
            return kappa, reference.tangential_repulsion(theta, kappa)
        case _:
            kappa = reference.cosine
    repulsion = reference.repulsion(theta, kappa)
    if isinstance(kernel, RadialRBF):
        repulsion = torch.stack([(force @ unit) * unit for force, unit in zip(repulsion, units, strict=True)])
    return kappa, repulsion


def condition(theta: Tensor) -> float:
    """How much rounding a difference of near particles magnifies: |theta|^2 over the smallest squared distance."""
    squared = (theta[:, None] - theta[None]).square().sum(-1)
    apart = squared[squared > 0]
    return max(1.0, float(theta.square().sum(-1).max() / apart.min())) if apart.numel() else 1.0


def test_three_particles_give_the_golden_numbers():
    triangle = geometry(TRIANGLE, inner=False)
    assert Median().resolve(triangle.squared_distances).item() == pytest.approx(3.64095691, abs=1e-8)
    released = RBF(ReleasedMedian()).matrices(triangle)
    for values, wanted in (
        (RBF(Median()).matrices(triangle).values, [0.75983569, 0.33333333, 0.25327856]),
        (released.values, [0.25, 0.00390625, 0.00097656]),
    ):
        assert [values[0, 1], values[0, 2], values[1, 2]] == pytest.approx(wanted, abs=1e-8)
    wanted = [[-0.69314718, -0.02166085], [0.69585479, -0.00541521], [-0.00270761, 0.02707606]]
    found = released.repulsion @ TRIANGLE
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-8)
    # two particles under the released bandwidth see each other by one ninth
    values = RBF(ReleasedMedian()).matrices(geometry(draw(2, 7), inner=False)).values
    assert values[0, 1].item() == pytest.approx(1 / 9, abs=1e-14)


def test_an_even_number_of_distances_averages_the_two_middle_distances_before_squaring():
    theta = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0], [4.0, 1.0]], dtype=torch.float64)
    h = Median().resolve(exact_distances(theta)).item()
    assert h == pytest.approx(5.2554, abs=5e-5)
    assert h == pytest.approx(((5**0.5 + 10**0.5) / 2) ** 2 / math.log(4), abs=1e-12)


@cases("kernel", KERNELS)
@settings(max_examples=10)
@given(count=st.integers(1, 6), width=st.integers(1, 4), seed=st.integers(0, 99), scale=st.sampled_from([0.2, 1.7]))
@example(count=3, width=1, seed=33, scale=0.2)
def test_values_and_repulsion_equal_the_loops(kernel: Kernel, count: int, width: int, seed: int, scale: float):
    theta = scale * (draw(count, width, seed=seed) + 0.5)
    matrices = kernel.matrices(geometry(theta, inner=kernel.needs_inner))
    kappa, repulsion = kappa_and_repulsion(kernel, theta)
    values = torch.stack([torch.stack([kappa(x, y) for y in theta]) for x in theta])
    # One-dimensional directions coincide, where only the matrix form is exact; elsewhere cosines near 1 cost digits.
    terms = 1e6 if kernel.needs_inner else 256 * condition(theta)
    close(matrices.values, values, terms=terms)
    close(matrices.repulsion @ theta, repulsion, terms=terms)


def test_the_gradient_of_the_cosine_in_the_particle_itself_equals_the_loop():
    theta = draw(4, 3) + 0.5
    matrix = cosine_gradient(geometry(theta, inner=True))
    close(matrix @ theta, -reference.tangential_repulsion(theta, reference.cosine))


@cases("kernel", KERNELS)
def test_many_groups_at_once_equal_each_group_alone(kernel: Kernel):
    theta = draw(2, 3, 4, 5)
    together = kernel.matrices(geometry(theta, inner=kernel.needs_inner))
    for i in range(2):
        for j in range(3):
            alone = kernel.matrices(geometry(theta[i, j], inner=kernel.needs_inner))
            close(together.values[i, j], alone.values)
            close(together.repulsion[i, j], alone.repulsion)


@cases("kernel", KERNELS)
@cases("count", [1, 2, 4, 8])
def test_equal_particles_repel_each_other_by_exactly_zero(kernel: Kernel, count: int):
    theta = draw(1, 999, dtype=torch.float32).expand(count, -1)
    matrices = kernel.matrices(geometry(theta, inner=kernel.needs_inner))
    close(matrices.values, torch.ones(count, count, dtype=torch.float64))
    assert not matrices.repulsion.any()


@cases("kernel", KERNELS)
def test_differences_too_small_to_square_leave_everything_finite(kernel: Kernel):
    theta = draw(4, 16) * 1e-20
    matrices = kernel.matrices(geometry(theta, inner=kernel.needs_inner))
    assert matrices.values.float().isfinite().all()
    assert matrices.repulsion.float().isfinite().all()


@cases("spread", [1e-1, 1e-3, 1e-5])
@cases("far", range(8))
def test_one_far_and_seven_near_particles_keep_their_distances_in_single_precision(far: int, spread: float):
    near = draw(1, 2048) + spread * draw(8, 2048, seed=1)
    near[far] = 100 * draw(2048, seed=2)
    particles = near.float()
    wanted = exact_distances(particles)
    measured = geometry_from_grams(shifted_gram(particles.view(8, 32, 64)), None).squared_distances
    # Float64 sums of the far head's squared norm against the near pairs' squared distance.
    bound = 64 * EPS * 100**2 / spread**2
    torch.testing.assert_close(measured, wanted, rtol=bound, atol=0)
    torch.testing.assert_close(geometry(particles, inner=False).squared_distances, wanted, rtol=bound, atol=0)


@cases("spread", [1e-1, 1e-3, 1e-5])
@cases("first", [[0, 1, 2, 3], [1, 4, 6, 7], [0]])
def test_two_collapsed_groups_keep_their_distances_in_single_precision(first: list[int], spread: float):
    centers = draw(2, 2048)
    group = torch.ones(8, dtype=torch.long).index_fill(0, torch.tensor(first), 0)
    particles = (centers[group] + spread * draw(8, 2048, seed=1)).float()
    measured = geometry_from_grams(shifted_gram(particles), None).squared_distances
    torch.testing.assert_close(measured, exact_distances(particles), rtol=64 * EPS / spread**2, atol=0)


@cases("spread", [1e-2, 1e-4, 1e-6])
def test_nearly_equal_particles_far_from_the_origin_keep_all_digits_of_their_distances(spread: float):
    particles = (10 + draw(1, 4096) + spread * draw(8, 4096, seed=1)).double()
    measured = geometry_from_grams(shifted_gram(particles), None).squared_distances
    torch.testing.assert_close(measured, exact_distances(particles), rtol=64 * EPS, atol=0)
    pure = geometry(particles, inner=False).squared_distances
    torch.testing.assert_close(pure, exact_distances(particles), rtol=64 * EPS, atol=0)


@cases("rounding", [-8 * EPS, -EPS, EPS, 8 * EPS])
def test_distances_made_of_rounding_alone_are_zero(rounding: float):
    shifted = torch.tensor([[0, 0, 0], [0, 1, 1 + rounding], [0, 1 + rounding, 1]], dtype=torch.float64)
    assert geometry_from_grams(shifted, None).squared_distances.tolist() == [[0, 1, 1], [1, 0, 0], [1, 0, 0]]


@cases("far", range(8))
def test_seven_equal_particles_and_a_far_one_get_bandwidth_one_and_finite_repulsion(far: int):
    particles = draw(1, 4096, dtype=torch.float32).repeat(8, 1)
    particles[far] = draw(4096, seed=1, dtype=torch.float32)
    shape = geometry(particles, inner=False)
    near = [i for i in range(8) if i != far]
    assert not shape.squared_distances[near][:, near].any()
    assert Median().resolve(shape.squared_distances).item() == 1.0
    assert RBF().matrices(shape).repulsion.float().isfinite().all()


def test_grams_of_slices_add_up_to_the_joint_particles():
    first, second = draw(4, 3, 5), draw(4, 2, 7, seed=1)
    joint = geometry(torch.cat([first.flatten(1), second.flatten(1)], dim=1), inner=True)
    summed = geometry_from_grams(shifted_gram(first) + shifted_gram(second), plain_gram(first) + plain_gram(second))
    close(summed.squared_distances, joint.squared_distances)
    assert joint.inner is not None
    assert summed.inner is not None
    close(summed.inner, joint.inner)


@cases("count", [1, 2, 4])
def test_grams_accumulate_over_more_columns_than_one_chunk(count: int):
    view = draw(count, CPU_CHUNK + 3)
    shifted = view - view[:1]
    for actual, wanted in ((plain_gram(view), view @ view.T), (shifted_gram(view), shifted @ shifted.T)):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=64 * EPS * view.shape[1])


@cases("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_grams_read_strided_views_and_change_nothing(dtype: torch.dtype):
    weight = draw(6, 20, dtype=dtype).requires_grad_()
    before = weight.detach().clone()
    view = weight.view(6, 4, 5).transpose(0, 1)
    rows = before.view(6, 4, 5).transpose(0, 1).flatten(1).double()
    close(plain_gram(view), rows @ rows.T)
    close(shifted_gram(view), (rows - rows[:1]) @ (rows - rows[:1]).T)
    assert torch.equal(weight.detach(), before)
    assert not shifted_gram(view).requires_grad
    assert not geometry(view.flatten(1), inner=False).squared_distances.requires_grad


@cases("kernel", [Cosine(), NormalizedRBF()])
def test_a_zero_particle_inside_a_step_is_orthogonal_to_all_and_neither_pushes_nor_is_pushed(kernel: Kernel):
    theta = draw(4, 3)
    theta[2] = 0
    shape = geometry(theta, inner=True)
    matrices = kernel.matrices(shape)
    assert matrices.values.isfinite().all()
    assert matrices.values[2, 2] == 1
    assert not matrices.repulsion[2].any()
    assert not matrices.repulsion[:, 2].any()
    orthogonal = torch.cat([theta, torch.zeros(4, 1, dtype=torch.float64)], dim=1)
    orthogonal[2, 3] = 1
    close(matrices.values, kernel.matrices(geometry(orthogonal, inner=True)).values)
    if isinstance(kernel, Cosine):
        others = kernel.matrices(geometry(theta[[0, 1, 3]], inner=True))
        close(matrices.repulsion[[0, 1, 3]][:, [0, 1, 3]], others.repulsion)


def test_a_zero_particle_has_no_radius_along_which_it_could_be_pushed():
    theta = draw(4, 3)
    theta[2] = 0
    matrices = RadialRBF().matrices(geometry(theta, inner=True))
    close(matrices.values, RBF().matrices(geometry(theta, inner=False)).values)
    assert matrices.repulsion.diagonal().bool().tolist() == [True, True, False, True]
    assert not (matrices.repulsion - matrices.repulsion.diag().diag()).any()


def test_groups_of_equal_particles_are_collapsed_and_groups_of_one_or_of_nan_are_not():
    assert find_collapsed(geometry(torch.zeros(3, 1, 4), inner=False)).tolist() == [False] * 3
    theta = torch.ones(3, 3, 4)
    theta[1, 2, 0] = torch.nan
    theta[2] = draw(3, 4)
    spoilt = geometry(theta, inner=False)
    assert find_collapsed(spoilt).tolist() == [True, False, False]
    assert spoilt.squared_distances[1].isnan().tolist() == [[i == 2 or j == 2 for j in range(3)] for i in range(3)]


def test_printing_a_kernel_is_its_record():
    assert repr(RBF()) == "RBF(bandwidth=Median())"
    assert repr(NormalizedRBF(Fixed(0.5))) == "NormalizedRBF(bandwidth=Fixed(value=0.5))"
