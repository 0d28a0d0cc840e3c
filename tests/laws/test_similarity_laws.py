"""What must hold of any measure of how alike heads are: permutation, scale, collapse, orthogonality."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import cases
from headwise import metrics, similarity

torch.set_num_threads(1)

OF_VECTORS: dict[str, Callable[..., Tensor]] = {
    "output_similarity": similarity.output_similarity,
    "subspace_similarity": similarity.subspace_similarity,
    "output_cosine": metrics.output_cosine,
    "head_distance": metrics.head_distance,
    "linear_cka": metrics.linear_cka,
}
OF_WEIGHTS: dict[str, Callable[..., Tensor]] = {
    "position_similarity": similarity.position_similarity,
    "position_squared_difference": similarity.position_squared_difference,
    "normalized_position_similarity": similarity.normalized_position_similarity,
    "attention_jensen_shannon": metrics.attention_jensen_shannon,
    "generalized_jensen_shannon": metrics.generalized_jensen_shannon,
}
COSINES = ["output_similarity", "subspace_similarity", "output_cosine"]

SIZES = st.tuples(st.integers(1, 3), st.integers(2, 5), st.integers(2, 6), st.integers(1, 7))
SEEDS = st.integers(0, 2**31)
EXACT = 1e3 * torch.finfo(torch.float64).eps
law = settings(max_examples=20)


def draw_vectors(sizes: tuple[int, int, int, int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=generator, dtype=torch.float64) * 2.5 + 0.3


def draw_weights(sizes: tuple[int, int, int, int], seed: int) -> Tensor:
    batch, length, heads, keys = sizes
    return draw_vectors((batch, heads, length, keys), seed).softmax(-1)


def draw_keep(sizes: tuple[int, int, int, int], seed: int) -> Tensor:
    keep = torch.rand(sizes[:2], generator=torch.Generator().manual_seed(seed + 1)) > 0.4
    keep[0, :2] = True
    return keep


def draw_rotation(width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0]


@cases("name", OF_VECTORS)
@law
@given(sizes=SIZES, seed=SEEDS)
def test_permuting_heads_changes_nothing(name: str, sizes: tuple[int, int, int, int], seed: int) -> None:
    outputs, keep = draw_vectors(sizes, seed), draw_keep(sizes, seed)
    order = torch.randperm(sizes[2], generator=torch.Generator().manual_seed(seed))
    score = OF_VECTORS[name]
    assert score(outputs[:, :, order], keep).item() == pytest.approx(score(outputs, keep).item(), rel=EXACT, abs=EXACT)


@cases("name", OF_WEIGHTS)
@law
@given(sizes=SIZES, seed=SEEDS)
def test_permuting_heads_or_keys_changes_nothing(name: str, sizes: tuple[int, int, int, int], seed: int) -> None:
    weights, keep = draw_weights(sizes, seed), draw_keep(sizes, seed)
    generator = torch.Generator().manual_seed(seed)
    heads, keys = torch.randperm(sizes[2], generator=generator), torch.randperm(sizes[3], generator=generator)
    score = OF_WEIGHTS[name]
    permuted = score(weights[:, heads][..., keys], keep)
    assert permuted.item() == pytest.approx(score(weights, keep).item(), rel=EXACT, abs=EXACT)


@law
@given(sizes=SIZES, seed=SEEDS)
def test_permuting_heads_permutes_the_gradient(sizes: tuple[int, int, int, int], seed: int) -> None:
    outputs = draw_vectors(sizes, seed).requires_grad_()
    order = torch.randperm(sizes[2], generator=torch.Generator().manual_seed(seed))
    permuted = outputs.detach()[:, :, order].requires_grad_()
    (gradient,) = torch.autograd.grad(similarity.output_similarity(outputs), outputs)
    (other,) = torch.autograd.grad(similarity.output_similarity(permuted), permuted)
    torch.testing.assert_close(other, gradient[:, :, order])


@cases("name", COSINES)
@law
@given(sizes=SIZES, seed=SEEDS, scale=st.floats(1e-3, 1e3))
def test_scaling_one_head_leaves_a_cosine(name: str, sizes: tuple[int, int, int, int], seed: int, scale: float) -> None:
    outputs, keep = draw_vectors(sizes, seed), draw_keep(sizes, seed)
    scaled = outputs.clone()
    scaled[:, :, 1] *= scale
    score = OF_VECTORS[name]
    assert score(scaled, keep).item() == pytest.approx(score(outputs, keep).item(), rel=EXACT, abs=EXACT)


@law
@given(sizes=SIZES, seed=SEEDS)
def test_the_gradient_of_a_cosine_is_tangential(sizes: tuple[int, int, int, int], seed: int) -> None:
    outputs = draw_vectors(sizes, seed).requires_grad_()
    (gradient,) = torch.autograd.grad(similarity.output_similarity(outputs), outputs)
    radial = (gradient * outputs.detach()).sum(-1)
    torch.testing.assert_close(radial, torch.zeros_like(radial), rtol=0, atol=EXACT)


@law
@given(heads=st.integers(2, 8), extra=st.integers(0, 4), seed=SEEDS)
def test_orthogonal_heads_are_one_over_h_alike(heads: int, extra: int, seed: int) -> None:
    directions = draw_rotation(heads + extra, seed)[:heads]
    lengths = torch.rand(2, 3, heads, 1, dtype=torch.float64) + 0.2
    outputs = directions * lengths
    assert similarity.output_similarity(outputs).item() == pytest.approx(1 / heads)
    assert similarity.subspace_similarity(outputs).item() == pytest.approx(1 / heads)
    assert metrics.output_cosine(outputs).item() == pytest.approx(0, abs=EXACT)
    mean, mean_absolute = metrics.parameter_cosine(directions)
    assert mean.item() == pytest.approx(0, abs=EXACT)
    assert mean_absolute.item() == pytest.approx(0, abs=EXACT)


@law
@given(sizes=SIZES, seed=SEEDS)
def test_heads_that_cancel_score_least_and_are_functions_of_one_another(
    sizes: tuple[int, int, int, int], seed: int
) -> None:
    batch, length, heads, _ = sizes
    outputs = draw_vectors((batch, length, heads, 3), seed)
    pairs = torch.cat([outputs, -outputs], dim=2)
    for score in (similarity.output_similarity, similarity.subspace_similarity):
        assert score(outputs).item() >= 0.0
        assert score(pairs).item() == pytest.approx(0.0, abs=EXACT)
    # below orthogonal heads, and no more diverse than one
    one = draw_vectors((20, 5, 1, 3), seed)
    assert similarity.output_similarity(torch.cat([one, -one], dim=2)).item() < 1 / 2
    assert metrics.linear_cka(torch.cat([one, -one], dim=2)).item() == pytest.approx(1.0)


@law
@given(sizes=SIZES, seed=SEEDS)
def test_collapsed_heads_are_wholly_alike(sizes: tuple[int, int, int, int], seed: int) -> None:
    outputs = draw_vectors(sizes, seed)[:, :, :1].expand(sizes)
    weights = draw_weights(sizes, seed)[:, :1].expand(-1, sizes[2], -1, -1)
    for score in (similarity.output_similarity, metrics.output_cosine, metrics.linear_cka):
        assert score(outputs).item() == pytest.approx(1)
    assert metrics.head_distance(outputs).item() == 0
    assert similarity.normalized_position_similarity(weights).item() == pytest.approx(1)
    assert similarity.position_squared_difference(weights).item() == pytest.approx(0, abs=EXACT)
    assert metrics.attention_jensen_shannon(weights).item() == pytest.approx(0, abs=EXACT)
    assert metrics.generalized_jensen_shannon(weights).item() == pytest.approx(0, abs=EXACT)


@law
@given(heads=st.integers(2, 6), block=st.integers(1, 4), seed=SEEDS)
def test_heads_that_share_no_key_are_as_far_apart_as_can_be(heads: int, block: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, heads, 3, block, generator=generator, dtype=torch.float64)
    weights = torch.zeros(2, heads, 3, heads * block, dtype=torch.float64)
    for head in range(heads):
        weights[:, head, :, head * block : (head + 1) * block] = scores[:, head].softmax(-1)
    assert metrics.attention_jensen_shannon(weights).item() == pytest.approx(math.log(2))
    assert metrics.generalized_jensen_shannon(weights).item() == pytest.approx(math.log(heads))
    assert similarity.normalized_position_similarity(weights).item() == pytest.approx(1 / heads)


@law
@given(sizes=SIZES, seed=SEEDS)
def test_scores_stay_in_their_range(sizes: tuple[int, int, int, int], seed: int) -> None:
    _, _, heads, keys = sizes
    outputs, weights, keep = draw_vectors(sizes, seed), draw_weights(sizes, seed), draw_keep(sizes, seed)
    ranges = {
        similarity.output_similarity(outputs, keep): (0, 1),
        metrics.output_cosine(outputs, keep): (-1 / (heads - 1), 1),
        metrics.linear_cka(outputs, keep): (0, 1),
        similarity.position_similarity(weights, keep): (1 / keys, 1),
        similarity.position_squared_difference(weights, keep): (-2 * (1 - 1 / heads), 0),
        similarity.normalized_position_similarity(weights, keep): (1 / heads, 1),
        metrics.attention_jensen_shannon(weights, keep): (0, math.log(2)),
        metrics.generalized_jensen_shannon(weights, keep): (0, math.log(heads)),
    }
    for score, (low, high) in ranges.items():
        assert low - EXACT <= score.item() <= high + EXACT
    entropies = metrics.attention_entropy(weights, keep)
    assert entropies.shape == (heads,)
    assert (entropies >= -EXACT).all()
    assert (entropies <= math.log(keys) + EXACT).all()


@law
@given(
    tokens=st.integers(3, 9),
    heads=st.integers(2, 4),
    width=st.integers(1, 5),
    scale=st.floats(0.01, 100),
    seed=SEEDS,
)
def test_cka_does_not_see_rotation_scale_or_shift(tokens: int, heads: int, width: int, scale: float, seed: int) -> None:
    outputs = draw_vectors((1, tokens, heads, width), seed)
    moved = outputs.clone()
    moved[:, :, 1] = scale * outputs[:, :, 1] @ draw_rotation(width, seed) + 3.7
    expected = metrics.linear_cka(outputs).item()
    assert metrics.linear_cka(moved).item() == pytest.approx(expected, rel=1e4 * EXACT)


@law
@given(sizes=SIZES, seed=SEEDS, splits=st.integers(2, 4))
def test_cka_of_streamed_tokens_is_that_of_all_tokens(sizes: tuple[int, int, int, int], seed: int, splits: int) -> None:
    outputs = draw_vectors(sizes, seed).flatten(0, 1) + 40.0
    parts = [metrics.output_moments(part) for part in outputs.chunk(splits)]
    together = parts[0]
    for part in parts[1:]:
        together = together + part
    whole = metrics.output_moments(outputs)
    assert together.count == whole.count == len(outputs)
    torch.testing.assert_close(together.mean, whole.mean)
    torch.testing.assert_close(together.scatter, whole.scatter, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(together.linear_cka_matrix(), whole.linear_cka_matrix(), rtol=1e-9, atol=1e-9)


@law
@given(particles=st.integers(2, 6), length=st.integers(1, 8), scale=st.floats(1e-3, 1e3), seed=SEEDS)
def test_parameter_cosine_sees_neither_order_nor_scale_and_norms_do(
    particles: int, length: int, scale: float, seed: int
) -> None:
    theta = draw_vectors((1, 1, particles, length), seed)[0, 0]
    order = torch.randperm(particles, generator=torch.Generator().manual_seed(seed))
    scaled = theta[order].clone()
    scaled[0] *= scale
    for one, other in zip(metrics.parameter_cosine(theta), metrics.parameter_cosine(scaled), strict=True):
        assert other.item() == pytest.approx(one.item(), rel=EXACT, abs=EXACT)
    torch.testing.assert_close(metrics.particle_norms(theta[order])[1:], metrics.particle_norms(scaled)[1:])
    torch.testing.assert_close(metrics.particle_norms(scaled * 3.0), 3.0 * metrics.particle_norms(scaled))


def test_frobenius_penalty_is_zero_for_disjoint_one_hot_heads_and_grows_with_collapse() -> None:
    disjoint = torch.eye(4, 7, dtype=torch.float64).expand(2, 4, 7)
    assert similarity.frobenius_penalty(disjoint).item() == 0
    one_hot_collapse = torch.eye(1, 7, dtype=torch.float64).expand(2, 4, 7)
    assert similarity.frobenius_penalty(one_hot_collapse).item() == pytest.approx(4 * 3)


def test_a_step_down_the_gradient_makes_heads_less_alike() -> None:
    torch.manual_seed(2)
    outputs = (torch.randn(2, 3, 1, 8) + 0.2 * torch.randn(2, 3, 4, 8)).requires_grad_()
    before = similarity.output_similarity(outputs)
    (gradient,) = torch.autograd.grad(before, outputs)
    after = similarity.output_similarity(outputs - 0.5 * gradient)
    assert after < before
    assert metrics.output_cosine(outputs - 0.5 * gradient) < metrics.output_cosine(outputs)
