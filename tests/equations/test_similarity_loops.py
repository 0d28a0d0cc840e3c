"""What penalties lower, against loops over tokens, heads and features: values, and gradients by their differences."""

import pytest
import torch
from torch import Tensor

from headwise.functional.alignment import cross_correlation, log_determinant, multiply_features
from headwise.functional.cosine import squared_cosine_sum
from headwise.functional.subspaces import map_cosine, span_similarity
from reference import similarity as loops

SIZES = [(2, 5, 3, 2), (1, 7, 4, 3)]


def average(matrix: Tensor) -> Tensor:
    heads = len(matrix)
    return matrix.triu(1).sum() / (heads * (heads - 1) / 2)


def squared_cosine(outputs: Tensor, keep: Tensor) -> Tensor:
    total, count = squared_cosine_sum(outputs, keep)
    return total / count


# the epsilon on variances costs digits of a correlation
TERMS = {
    "squared cosine": (squared_cosine, loops.squared_cosine, 1e-10),
    "HSIC": (lambda x, keep: average(multiply_features(x, keep).unbiased_hsic()), loops.unbiased_hsic, 1e-10),
    "cross-correlation": (
        lambda x, keep: average(cross_correlation(x, keep)),
        lambda x, keep: loops.cross_correlation(x, keep, matched=False),
        1e-4,
    ),
    "cross-correlation, matched": (
        lambda x, keep: average(cross_correlation(x, keep, matched=True)),
        lambda x, keep: loops.cross_correlation(x, keep, matched=True),
        1e-4,
    ),
}


def draw(sizes: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(sum(sizes))
    outputs = torch.randn(sizes, dtype=torch.float64) * 3 + 1
    keep = torch.ones(sizes[:2], dtype=torch.bool)
    keep[0, -2:] = False
    return outputs.masked_fill(~keep[..., None, None], torch.nan), keep


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", TERMS)
def test_a_term_is_that_of_the_loop(name: str, sizes: tuple[int, int, int, int]):
    term, loop, close = TERMS[name]
    outputs, keep = draw(sizes)
    assert float(term(outputs, keep)) == pytest.approx(loop(outputs, keep), rel=close)


@pytest.mark.parametrize("name", TERMS)
def test_its_gradient_is_the_difference_of_loops_and_0_at_padding(name: str):
    term, loop, close = TERMS[name]
    outputs, keep = draw(SIZES[0])
    outputs.requires_grad_()
    (gradient,) = torch.autograd.grad(term(outputs, keep), outputs)
    assert not gradient[~keep].any()
    step = 1e-5
    for place in ((0, 0, 0, 0), (1, 3, 2, 1)):
        ends = []
        for sign in (1, -1):
            moved = outputs.detach().clone()
            moved[place] += sign * step
            ends.append(loop(moved, keep))
        expected = (ends[0] - ends[1]) / (2 * step)
        assert float(gradient[place]) == pytest.approx(expected, rel=10 * close, abs=max(close, 1e-7))


@pytest.mark.parametrize("epsilon", [0.02, 0.5])
def test_the_determinant_is_that_by_cofactors(epsilon: float):
    outputs, keep = draw(SIZES[1])
    kernel = multiply_features(outputs, keep).linear_cka()
    assert float(log_determinant(kernel, epsilon)) == pytest.approx(loops.log_determinant(kernel.tolist(), epsilon))


def test_spans_and_maps_are_those_of_bases_and_matrices_written_out():
    torch.manual_seed(3)
    values, out = torch.randn(4, 7, 2, dtype=torch.float64), torch.randn(4, 2, 5, dtype=torch.float64)
    assert float(average(span_similarity(values))) == pytest.approx(loops.span_overlap(values), rel=1e-9)
    assert float(average(map_cosine(values, out).square())) == pytest.approx(loops.squared_map_cosine(values, out))
