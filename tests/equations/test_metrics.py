"""Each metric against the loop over pairs of heads, numbers by hand, padding, precision and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import cases
from equations.draws import public_names, rows, vectors
from headwise import metrics
from headwise.errors import MaskError, ShapeError
from headwise.metrics import heads, moments
from reference import metrics as loops

torch.set_num_threads(1)

EXACT = 1e3 * torch.finfo(torch.float64).eps


class Metric(NamedTuple):
    fast: Callable[..., Tensor]
    loop: Callable[[Tensor, Tensor], float | list[float]]
    draw: Callable[[int, int, int, int], Tensor]

    @property
    def token_axis(self) -> int:
        return 1 if self.draw is vectors else 2


DRAWN = {
    **dict.fromkeys(("head_distance", "output_cosine", "linear_cka", "rbf_hsic", "prediction_disagreement"), vectors),
    **dict.fromkeys(("attention_jensen_shannon", "generalized_jensen_shannon", "attention_entropy"), rows),
}
METRICS = {name: Metric(getattr(metrics, name), getattr(loops, name), draw) for name, draw in DRAWN.items()}
each_metric = cases("metric", METRICS.values())


@each_metric
@settings(max_examples=15)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(2, 4), st.integers(2, 5), st.integers(1, 6)),
    padded=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_value_equals_that_of_the_loop(
    metric: Metric, sizes: tuple[int, int, int, int], padded: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    tensor = metric.draw(*sizes)
    keep = torch.rand(sizes[:2]) > 0.4 if padded else torch.ones(sizes[:2], dtype=torch.bool)
    keep[0, :2] = True
    value = metric.fast(tensor, keep if padded else None)
    assert value.tolist() == pytest.approx(metric.loop(tensor, keep), rel=EXACT, abs=EXACT)


@settings(max_examples=25)
@given(particles=st.integers(2, 6), length=st.integers(1, 20), seed=st.integers(0, 2**31))
def test_parameter_cosine_and_norms_equal_those_of_the_loop(particles: int, length: int, seed: int) -> None:
    torch.manual_seed(seed)
    theta = torch.randn(particles, length, dtype=torch.float64) * 2.3 + 0.4
    assert [x.item() for x in metrics.parameter_cosine(theta)] == pytest.approx(
        loops.parameter_cosine(theta), rel=EXACT, abs=EXACT
    )
    assert metrics.particle_norms(theta).tolist() == pytest.approx(loops.particle_norms(theta))


def test_parameter_metrics_take_any_leading_axes() -> None:
    torch.manual_seed(1)
    theta = torch.randn(2, 3, 4, 7)
    mean, mean_absolute = metrics.parameter_cosine(theta)
    assert mean.shape == mean_absolute.shape == (2, 3)
    assert metrics.particle_norms(theta).shape == (2, 3, 4)
    assert mean[1, 2].item() == pytest.approx(loops.parameter_cosine(theta[1, 2])[0])
    assert mean_absolute[0, 1].item() == pytest.approx(loops.parameter_cosine(theta[0, 1])[1])


@each_metric
def test_padding_of_any_content_equals_cropping(metric: Metric) -> None:
    torch.manual_seed(2)
    clean = metric.draw(3, 5, 4, 6)
    keep = torch.zeros(3, 5, dtype=torch.bool)
    keep[:2, :3] = True
    shape = [3, 1, 1, 1]
    shape[metric.token_axis] = 5
    dirty = clean.masked_fill(~keep.reshape(shape), math.nan)
    torch.testing.assert_close(metric.fast(dirty, keep), metric.fast(clean[:2].narrow(metric.token_axis, 0, 3)))


@each_metric
@cases("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lower_precision_is_accumulated_in_float32_or_better_also_under_autocast(
    metric: Metric, dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    tensor = metric.draw(3, 4, 5, 16).to(dtype)
    expected = metric.fast(tensor.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = metric.fast(tensor)
    assert value.dtype in (torch.float32, torch.float64)
    limit = 4 * torch.finfo(torch.float32).eps * math.sqrt(tensor.numel())
    torch.testing.assert_close(value.double(), expected, rtol=limit, atol=limit)


@each_metric
def test_no_gradient_flows(metric: Metric) -> None:
    assert not metric.fast(metric.draw(2, 3, 4, 5).requires_grad_()).requires_grad


def test_golden_distance_cosine_and_cosines_of_parameters() -> None:
    tokens = torch.tensor([[[1, 0], [0, 2]], [[1, 1], [3, 4]]], dtype=torch.float64)
    assert metrics.head_distance(tokens).item() == pytest.approx((math.sqrt(5) + math.sqrt(13)) / 2)
    # Twice the golden similarity over all four pairs, less one for the heads with themselves.
    assert metrics.output_cosine(tokens).item() == pytest.approx(2 * 0.74748737 - 1, abs=1e-6)
    theta = torch.tensor([[1.0, 0], [1, 1], [-1, 1]])
    mean, mean_absolute = metrics.parameter_cosine(theta)
    assert mean.item() == pytest.approx(0, abs=1e-12)
    assert mean_absolute.item() == pytest.approx(math.sqrt(2) / 3)
    assert metrics.particle_norms(theta).tolist() == pytest.approx([1, math.sqrt(2), math.sqrt(2)])


def test_golden_hsic_with_the_mean_of_the_two_middle_distances() -> None:
    tokens = [
        ((1, 0), (0, 1), (1, 1)),
        ((0, 1), (1, 2), (-1, 1)),
        ((2, -1), (1, 0), (0, 3)),
        ((9, 9), (9, 9), (9, 9)),
        ((-1, 2), (0, -1), (2, 1)),
        ((1, 3), (-2, 1), (1, -2)),
    ]
    outputs = torch.tensor([tokens], dtype=torch.float64)
    keep = torch.tensor([[True, True, True, False, True, True]])
    assert metrics.rbf_hsic(outputs, keep).item() == pytest.approx(0.04913930, abs=6e-9)
    assert loops.rbf_hsic(outputs, keep) == pytest.approx(0.04913930, abs=6e-9)
    assert metrics.rbf_hsic(outputs, tokens=2) == metrics.rbf_hsic(outputs[:, [0, -1]])


def test_attention_metrics_by_hand() -> None:
    weights = torch.tensor([[[0.5, 0.5, 0]], [[0.2, 0.3, 0.5]]], dtype=torch.float64)
    entropy = [math.log(2), -0.2 * math.log(0.2) - 0.3 * math.log(0.3) - 0.5 * math.log(0.5)]
    middle = -sum(p * math.log(p) for p in (0.35, 0.4, 0.25))
    assert metrics.attention_entropy(weights).tolist() == pytest.approx(entropy)
    by_hand = middle - sum(entropy) / 2
    assert metrics.attention_jensen_shannon(weights).item() == pytest.approx(by_hand)
    assert metrics.generalized_jensen_shannon(weights).item() == pytest.approx(by_hand)


def test_cka_of_two_one_dimensional_heads_is_their_squared_correlation() -> None:
    x, y = torch.tensor([1.0, 2, 4, 7]).double(), torch.tensor([3.0, 1, 5, 6]).double()
    correlation = torch.corrcoef(torch.stack([x, y]))[0, 1].item()
    outputs = torch.stack([x, y], dim=-1).unsqueeze(-1)
    assert metrics.linear_cka(outputs).item() == pytest.approx(correlation**2)


def test_cka_matrix_has_ones_on_the_diagonal_and_zeros_for_a_constant_head() -> None:
    torch.manual_seed(4)
    outputs = torch.randn(20, 4, 3)
    outputs[:, 1] = 0.1
    matrix = metrics.output_moments(outputs).linear_cka_matrix()
    assert matrix.diagonal().tolist() == pytest.approx([1, 0, 1, 1])
    assert matrix[1].tolist() == [0, 0, 0, 0]
    torch.testing.assert_close(matrix, matrix.mT)


def test_cka_of_many_tokens_tells_independent_heads_from_dependent_ones() -> None:
    torch.manual_seed(5)
    independent = torch.randn(4000, 2, 4)
    assert metrics.linear_cka(independent) < 0.01
    independent[:, 1] = independent[:, 0].flip(-1)
    assert metrics.linear_cka(independent) > 0.99


def test_distance_of_nearly_equal_heads_is_not_lost_to_rounding() -> None:
    outputs = torch.full((50, 2, 64), 30.0)
    outputs[:, 1, 0] += 1e-3
    expected = (outputs[0, 1, 0].double() - 30.0).item()
    assert metrics.head_distance(outputs).item() == pytest.approx(expected, rel=1e-6)


def test_zero_vectors_and_particles_have_cosine_zero() -> None:
    outputs = torch.tensor([[[0.0, 0.0], [1.0, 2.0], [2.0, 4.0]]])
    assert metrics.output_cosine(outputs).item() == pytest.approx(1 / 3)
    assert metrics.parameter_cosine(outputs[0]).mean.item() == pytest.approx(1 / 3)


@each_metric
def test_wrong_input_is_refused_with_shape_and_expectation(metric: Metric) -> None:
    tensor = metric.draw(2, 3, 4, 5)
    for wrong, message in (
        ((torch.rand(5),), r"has shape \(5,\); expected"),
        ((tensor.long(),), "expected a floating dtype"),
        ((tensor[:0],), "there is no valid token"),
        ((tensor, torch.zeros(2, 3, dtype=torch.bool)), "there is no valid token"),
        ((tensor, torch.ones(2, 3, dtype=torch.int64)), "keep is torch.int64; expected a bool tensor"),
        ((tensor, torch.ones(2, 4, dtype=torch.bool)), r"keep has shape \(2, 4\); expected \(2, 3\)"),
    ):
        with pytest.raises(ShapeError if len(wrong) == 1 else MaskError, match=message):
            metric.fast(*wrong)


@settings(max_examples=15)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(4, 6), st.integers(2, 4), st.integers(1, 5)),
    seed=st.integers(0, 2**31),
)
def test_debiased_cka_and_effective_heads_equal_those_of_the_loop(sizes: tuple[int, int, int, int], seed: int) -> None:
    torch.manual_seed(seed)
    tensor, keep = vectors(*sizes), torch.rand(sizes[:2]) > 0.4
    keep[0, :4] = True
    # the rounding of HSIC_1(i, i), which may be next to nothing at four tokens, is divided by
    assert float(metrics.debiased_cka(tensor, keep)) == pytest.approx(loops.debiased_cka(tensor, keep), abs=1e-8)
    found = metrics.effective_heads(tensor, keep)
    assert found.number == pytest.approx(loops.effective_heads(tensor, keep), abs=1e-7)
    assert found.tokens == int(keep.sum())


def test_moments_of_batches_about_different_means_add_up() -> None:
    torch.manual_seed(1)
    tensor = vectors(4, 9, 3, 5) + torch.arange(4.0).view(4, 1, 1, 1) * torch.randn(3, 5)
    weights = torch.randn(3, 7, 5, dtype=torch.float64)
    whole = metrics.output_moments(tensor, output_weights=weights)
    parts = [metrics.output_moments(part, output_weights=weights) for part in tensor]
    added = parts[0] + parts[1] + parts[2] + parts[3]
    for name in ("mean", "scatter", "thirds", "lengths"):
        torch.testing.assert_close(getattr(added, name), getattr(whole, name))
    assert added.effective_heads() == pytest.approx(whole.effective_heads())
    formed = torch.einsum("bthe,hde->bthd", tensor, weights)
    assert metrics.effective_heads(formed) == pytest.approx(whole.effective_heads())
    torch.testing.assert_close(metrics.linear_cka(formed), whole.linear_cka())


@cases("dtype", [torch.float32, torch.bfloat16])
def test_debiased_cka_of_low_precision_is_that_of_its_numbers(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    tensor = (vectors(2, 30, 4, 6) + 100).to(dtype)
    torch.testing.assert_close(metrics.debiased_cka(tensor), metrics.debiased_cka(tensor.double()), atol=1e-5, rtol=0)


def test_every_metric_has_a_loop() -> None:
    composed = {"EffectiveHeads", "OutputMoments", "ParameterCosine", "output_moments"}
    assert public_names(loops) == (public_names(heads) | public_names(moments)) - composed
