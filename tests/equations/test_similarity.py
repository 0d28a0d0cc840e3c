"""Similarities of heads: golden numbers, loops, gradients, what each is indifferent to, padding, and precision."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cases import cases
from headwise.functional.alignment import (
    cross_correlation,
    effective_number,
    log_determinant,
    multiply_features,
    square_products,
)
from headwise.functional.cosine import squared_cosine_sum
from headwise.functional.subspaces import map_cosine, span_similarity
from reference import metrics as metric_loops
from reference import similarity as loops

NAN = float("nan")
# computed by hand and by loops over tokens; token 3 is padding
OUTPUTS = torch.tensor(
    [
        [[1, 0], [0, 1], [1, 1]],
        [[0, 1], [1, 2], [-1, 1]],
        [[2, -1], [1, 0], [0, 3]],
        [[NAN, NAN]] * 3,
        [[-1, 2], [0, -1], [2, 1]],
        [[1, 3], [-2, 1], [1, -2]],
    ],
    dtype=torch.float64,
)
KEEP = torch.tensor([True, True, True, False, True, True])
VALUES = torch.tensor(
    [[[1, 0], [0, 1], [1, 1], [0, 0]], [[1, 1], [0, 2], [0, 0], [1, 0]], [[0, 1], [1, 0], [2, 0], [0, 1]]],
    dtype=torch.float64,
)
OUT = torch.tensor(
    [[[1, 0, 2, 0], [0, 1, 0, 1]], [[0, 1, 1, 0], [1, 0, 0, -1]], [[1, 1, 0, 0], [0, 0, 1, 2]]], dtype=torch.float64
)


def mean(matrix):
    heads = len(matrix)
    return matrix.triu(1).sum() / (heads * (heads - 1) / 2)


def squared_cosine(x, keep=None):
    total, count = squared_cosine_sum(x, keep)
    return total / count


# each penalty's core on [T, H, e], and whether it ignores scale, rotation inside a head, and offset
TERMS = {
    "squared cosine": (squared_cosine, (True, False, False)),
    "linear CKA": (lambda x, k=None: mean(multiply_features(x, k).linear_cka()), (True, True, True)),
    "unbiased HSIC": (lambda x, k=None: mean(multiply_features(x, k).unbiased_hsic()), (False, True, True)),
    "debiased CKA": (lambda x, k=None: mean(multiply_features(x, k).debiased_cka()), (True, True, True)),
    "correlation": (lambda x, k=None: mean(cross_correlation(x, k)), (True, False, True)),
    "determinant": (lambda x, k=None: log_determinant(multiply_features(x, k).linear_cka()), (True, True, True)),
}


@cases("with_metric", [False, True])
@cases("tokens", [1, 9, 11, 40])
def test_products_of_tokens_and_of_features_are_the_same_with_their_gradients(tokens, with_metric):
    # with three heads of six features, up to ten tokens are multiplied with one another, and from eleven on features
    generator = torch.Generator().manual_seed(tokens)
    vectors = torch.randn(tokens, 3, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    factors = torch.randn(3, 6, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    inputs = (vectors, factors) if with_metric else (vectors,)

    def fast(x, w=None):
        return square_products(x, None if w is None else w @ w.mT)

    contributions = torch.einsum("the,hed->thd", vectors, factors) if with_metric else vectors
    expected = torch.einsum("tia,tjb->iajb", contributions, contributions).square().sum((1, 3))
    torch.testing.assert_close(fast(*inputs), expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(3, 3, dtype=torch.float64, generator=generator)
    found = torch.autograd.grad((fast(*inputs) * weights).sum(), inputs)
    slow = torch.autograd.grad((expected * weights).sum(), inputs)
    torch.testing.assert_close(found, slow, rtol=1e-11, atol=1e-11)
    # it draws the gradients that it is given from torch's own generator, and a few of them cost digits
    torch.manual_seed(0)
    assert torch.autograd.gradgradcheck(fast, inputs) if tokens == 9 else True


@cases(("tokens", "largest"), [(10, 3 * 10 * 10), (11, (3 * 6) ** 2)])
def test_the_smaller_of_both_products_is_formed(tokens, largest):
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend([out.numel()] if isinstance(out, torch.Tensor) else [])
            return out

    with Sizes():
        square_products(torch.randn(tokens, 3, 6))
    assert max(sizes) == largest


def test_golden_numbers():
    products = multiply_features(OUTPUTS, KEEP)
    contributions = multiply_features(OUTPUTS, KEEP, OUT @ OUT.mT)
    found = {
        "squared cosine": (squared_cosine(OUTPUTS, KEEP), 0.37066667),
        "HSIC_1": (mean(products.unbiased_hsic()), 1.0),
        "CKA": (mean(products.linear_cka()), 0.61295552),
        "debiased CKA": (mean(products.debiased_cka()), 0.23658673),
        "CKA of contributions": (mean(contributions.linear_cka()), 0.49546904),
        "debiased CKA of contributions": (mean(contributions.debiased_cka()), 0.03396513),
        "E, CKA": (effective_number(products.linear_cka()), 1.95753476),
        "E, contributions": (effective_number(contributions.debiased_cka()), 2.51369410),
        "E, energy-weighted": (effective_number(contributions.debiased_cka(), contributions.sizes), 2.34641713),
        "log determinant": (log_determinant(products.linear_cka()), 0.59843335),
        "map cosine": (mean(map_cosine(VALUES, OUT).square()), 0.06479592),
    }
    for name, (value, expected) in found.items():
        assert math.isclose(float(value), expected, rel_tol=0, abs_tol=6e-9), name
    pairs = [products.debiased_cka()[i, j] for i, j in ((0, 1), (0, 2), (1, 2))]
    assert torch.allclose(torch.stack(pairs), torch.tensor([-0.24494897, 0.26425821, 0.69045096]).double(), atol=6e-9)
    assert math.isclose(float(mean(span_similarity(VALUES))), 0.54320988, abs_tol=6e-9)
    assert math.isclose(float(mean(span_similarity(OUT.mT))), 0.485, abs_tol=6e-9)
    # the epsilon on variances costs digits
    assert math.isclose(float(mean(cross_correlation(OUTPUTS, KEEP))), 0.58470373, abs_tol=2e-5)
    assert math.isclose(float(mean(cross_correlation(OUTPUTS, KEEP, matched=True))), 0.21267875, abs_tol=2e-5)


@cases("name", TERMS)
def test_gradients_to_second_order(name: str):
    torch.manual_seed(3)
    outputs = torch.randn(2, 4, 3, 2, dtype=torch.float64, requires_grad=True)
    keep = torch.rand(2, 4) < 0.8
    assert torch.autograd.gradcheck(TERMS[name][0], (outputs, keep), fast_mode=True)
    assert torch.autograd.gradgradcheck(TERMS[name][0], (outputs, keep), fast_mode=True)


def test_gradients_of_weights():
    torch.manual_seed(4)
    values = torch.randn(3, 7, 2, dtype=torch.float64, requires_grad=True)
    out = torch.randn(3, 2, 7, dtype=torch.float64, requires_grad=True)
    outputs = torch.randn(9, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(span_similarity, (values,))
    assert torch.autograd.gradcheck(map_cosine, (values, out))
    assert torch.autograd.gradcheck(lambda x, w: multiply_features(x, None, w @ w.mT).debiased_cka(), (outputs, out))


@cases("name", TERMS)
def test_indifference_of_a_gradient(name: str):
    """A function ignores a change exactly when its gradient has no part along it."""
    term, (scale, rotation, offset) = TERMS[name]
    torch.manual_seed(5)
    x = torch.randn(12, 3, 2, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(term(x), x)
    radial = (gradient * x).sum((0, 2)).abs().max()
    turn = torch.einsum("tha,thb->hab", x, gradient)
    turning = (turn - turn.mT).abs().max()
    shift = gradient.sum(0).abs().max()
    for found, ignored in ((radial, scale), (turning, rotation), (shift, offset)):
        # the epsilon on the variances of the correlation leaves a part of a hundred thousandth
        assert found < (1e-5 if name == "correlation" else 1e-12) if ignored else found > 1e-3


def test_a_span_is_only_turned():
    torch.manual_seed(6)
    values = torch.randn(3, 7, 2, dtype=torch.float64, requires_grad=True)
    out = torch.randn(3, 2, 7, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(mean(span_similarity(values)), values)
    assert (values.mT @ gradient).abs().max() < 1e-6 < gradient.abs().max()
    value, output = torch.autograd.grad(mean(map_cosine(values, out).square()), (values, out))
    # mixing the basis inside a head, A M and M^-1 B, changes nothing
    assert torch.allclose(values.mT @ value, output @ out.mT)


@cases("dtype", [torch.float32, torch.float64])
@cases("size", [1e-25, 1.0, 1e25])
def test_a_head_of_lower_rank_spans_less_and_one_of_zeros_nothing(dtype: torch.dtype, size: float):
    torch.manual_seed(8)
    full = torch.randn(40, 16, dtype=dtype)
    low = torch.randn(40, 2, dtype=dtype) @ torch.randn(2, 16, dtype=dtype)
    factors = (size * torch.stack([full, low, torch.zeros_like(full)])).requires_grad_()
    overlaps = span_similarity(factors)
    assert torch.allclose(overlaps.diagonal(), torch.tensor([1.0, 2 / 16, 0.0], dtype=dtype), atol=3e-5)
    onto, within = (torch.linalg.svd(part.double())[0][:, :rank] for part, rank in ((full, 16), (low, 2)))
    assert math.isclose(float(overlaps[0, 1].detach()), float((onto.mT @ within).square().sum() / 16), rel_tol=1e-4)
    overlaps.sum().backward()
    assert factors.grad is not None
    assert factors.grad.isfinite().all()


def test_equal_spans_have_a_similarity_of_1_also_where_heads_are_wider_than_their_input():
    torch.manual_seed(9)
    overlaps = span_similarity(torch.randn(3, 5, 8, dtype=torch.float64))
    torch.testing.assert_close(overlaps, torch.ones_like(overlaps), rtol=0.0, atol=1e-6)


def test_unbiased_hsic_of_batches_has_the_mean_of_all():
    torch.manual_seed(8)
    x = torch.randn(400, 2, 3, dtype=torch.float64)
    x[:, 1] += 0.5 * x[:, 0]
    batches = [multiply_features(x[torch.randperm(400)[:8]]).unbiased_hsic()[0, 1] for _ in range(1000)]
    draws = torch.stack(batches)
    assert abs(draws.mean() - multiply_features(x).unbiased_hsic()[0, 1]) < 4 * draws.std() / 1000**0.5
    biased = torch.stack([multiply_features(x[torch.randperm(400)[:8]]).linear_cka()[0, 1] for _ in range(200)])
    assert biased.mean() > multiply_features(x).linear_cka()[0, 1] + 0.1


@cases("offset", [0.0, 100.0, 1e4])
def test_an_offset_costs_no_digits_in_float32(offset: float):
    torch.manual_seed(9)
    x = torch.randn(200, 4, 8, dtype=torch.float64)
    shifted = (x + offset).float()
    # what the offset itself rounded away is not the function's doing
    expected = multiply_features(shifted.double()).debiased_cka()
    assert torch.allclose(multiply_features(shifted).debiased_cka().double(), expected, atol=2e-5)


@cases("scale", [1e-12, 1e12])
def test_fourth_powers_neither_vanish_nor_overflow(scale: float):
    torch.manual_seed(10)
    x = torch.randn(50, 3, 4)
    scaled = x * torch.tensor([1.0, scale, 1 / scale])[:, None]
    assert torch.allclose(multiply_features(scaled).debiased_cka(), multiply_features(x).debiased_cka(), atol=1e-5)


def test_a_constant_head_is_like_no_other():
    torch.manual_seed(11)
    x = torch.randn(20, 3, 4, requires_grad=True)
    constant = torch.where(torch.tensor([True, False, True])[:, None], x, 7.3)
    for kernel in (multiply_features(constant).linear_cka(), multiply_features(constant).debiased_cka()):
        assert kernel[1].abs().max() == 0
        assert kernel[0, 0] > 0.999
        (gradient,) = torch.autograd.grad(kernel.sum(), x, retain_graph=True)
        assert gradient.isfinite().all()


@cases("dtype", [torch.float32, torch.float64])
@cases("tokens", [7, 333])
@cases("size", [None, 1e-3, 1e3])
def test_rounding_errors_of_constant_heads_are_like_no_other_and_get_no_gradient(dtype, tokens: int, size):
    torch.manual_seed(12)
    x = torch.randn(tokens, 4, 8, dtype=dtype)
    # what attention puts out for one value: weights whose sum is 1 but for their rounding
    rounded = 1 + torch.finfo(dtype).eps * torch.randint(-2, 3, (tokens, 2, 1))
    x[:, :2] = torch.randn(2, 8, dtype=dtype) * rounded.to(dtype)
    factors = torch.randn(4, 8, 5, dtype=dtype)
    metric = None if size is None else size**2 * factors @ factors.mT
    kept = multiply_features(x[:, 2:], metric=None if metric is None else metric[2:])
    for name in ("linear_cka", "debiased_cka", "unbiased_hsic"):
        given = x.clone().requires_grad_()
        kernel = getattr(multiply_features(given, metric=metric), name)()
        assert not kernel[:2].any()
        torch.testing.assert_close(kernel[2:, 2:], getattr(kept, name)())
        (gradient,) = torch.autograd.grad(kernel.sum(), given)
        assert not gradient[:, :2].any()
        assert gradient[:, 2:].any()


@cases("matched", [False, True])
def test_rounding_errors_of_constant_heads_do_not_correlate(matched: bool):
    torch.manual_seed(13)
    x = torch.randn(50, 4, 8)
    x[:, :2] = torch.randn(2, 8)
    x.requires_grad_()
    kernel = cross_correlation(x, matched=matched)
    assert not kernel[:2].any()
    assert (kernel[2:, 2:] > 0).all()
    (gradient,) = torch.autograd.grad(kernel.sum(), x)
    assert not gradient[:, :2].any()


def test_a_small_spread_around_a_large_offset_is_read():
    torch.manual_seed(14)
    x = 1e-3 * torch.randn(300, 3, 8, dtype=torch.float64)
    x[:, 1] += x[:, 0]
    shifted = (x + 100).float()
    for read in (lambda own: multiply_features(own).debiased_cka(), cross_correlation):
        found = read(shifted)[0, 1]
        assert found > 0.1
        assert math.isclose(float(found), float(read(shifted.double())[0, 1]), rel_tol=1e-3)


@cases("tokens", range(4))
def test_fewer_than_four_tokens_say_nothing(tokens: int):
    x = torch.randn(6, 3, 4, requires_grad=True)
    keep = torch.arange(6) < tokens
    kernel = multiply_features(x, keep).debiased_cka()
    (gradient,) = torch.autograd.grad(kernel.sum(), x)
    assert not kernel.any()
    assert not gradient.any()


def test_effective_number_of_groups_and_dead_heads():
    groups = torch.block_diag(*[torch.ones(n, n) for n in (2, 2, 2)])
    assert math.isclose(float(effective_number(groups)), 3.0)
    torch.manual_seed(3)
    x = torch.randn(512, 8, 16, dtype=torch.float64)
    x[:, 1:] *= 1e-3
    products = multiply_features(x)
    kernel = products.debiased_cka()
    assert effective_number(kernel) > 7.9
    assert effective_number(kernel, products.sizes) < 1.01
    assert math.isclose(float(log_determinant(torch.ones(8, 8))), (7 * math.log(1e3) - math.log(8)) / 8, abs_tol=2e-3)


@cases("number", [math.nan, math.inf, 1e30])
def test_heads_that_diverged_have_a_similarity_of_nan_and_others_keep_theirs(number: float):
    kernel = torch.eye(3).repeat(2, 1, 1)
    kernel[1, 0, 1] = kernel[1, 1, 0] = number
    expected = torch.tensor([0.0, math.nan], dtype=torch.float64)
    torch.testing.assert_close(log_determinant(kernel), expected, equal_nan=True, atol=1e-6, rtol=0.0)
    if not math.isfinite(number):
        # a cosine beyond 1 is taken for 1
        kernel[1, 0, 1] = kernel[1, 1, 0] = math.nan
        torch.testing.assert_close(effective_number(kernel), expected + 3, equal_nan=True)
    factors = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    wide = torch.where(torch.arange(3)[:, None, None] == 1, number * factors, factors)
    overlaps = span_similarity(wide)
    assert overlaps[0, 2].isfinite()
    assert overlaps[0, 1].isnan() == (not math.isfinite(number))
    overlaps.sum().backward()


SIZES = [(2, 5, 3, 2), (1, 7, 4, 3)]


# the epsilon on variances costs digits of a correlation
# each with its loop over tokens, heads and features
LOOPS = {
    "squared cosine": (squared_cosine, loops.squared_cosine, 1e-10),
    "linear CKA": (TERMS["linear CKA"][0], metric_loops.linear_cka, 1e-9),
    "debiased CKA": (TERMS["debiased CKA"][0], metric_loops.debiased_cka, 1e-9),
    "HSIC": (lambda x, keep: mean(multiply_features(x, keep).unbiased_hsic()), loops.unbiased_hsic, 1e-10),
    "cross-correlation": (
        lambda x, keep: mean(cross_correlation(x, keep)),
        lambda x, keep: loops.cross_correlation(x, keep, matched=False),
        1e-4,
    ),
    "cross-correlation, matched": (
        lambda x, keep: mean(cross_correlation(x, keep, matched=True)),
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


@cases("sizes", SIZES)
@cases("name", LOOPS)
def test_a_term_is_that_of_the_loop(name: str, sizes: tuple[int, int, int, int]):
    term, loop, close = LOOPS[name]
    outputs, keep = draw(sizes)
    assert float(term(outputs, keep)) == pytest.approx(loop(outputs, keep), rel=close)


@cases("name", LOOPS)
def test_its_gradient_is_the_difference_of_loops_and_0_at_padding(name: str):
    term, loop, close = LOOPS[name]
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


@cases("epsilon", [0.02, 0.5])
def test_the_determinant_is_that_by_cofactors(epsilon: float):
    outputs, keep = draw(SIZES[1])
    kernel = multiply_features(outputs, keep).linear_cka()
    assert float(log_determinant(kernel, epsilon)) == pytest.approx(loops.log_determinant(kernel.tolist(), epsilon))


def test_spans_and_maps_are_those_of_bases_and_matrices_written_out():
    torch.manual_seed(3)
    values, out = torch.randn(4, 7, 2, dtype=torch.float64), torch.randn(4, 2, 5, dtype=torch.float64)
    assert float(mean(span_similarity(values))) == pytest.approx(loops.span_overlap(values), rel=1e-9)
    assert float(mean(map_cosine(values, out).square())) == pytest.approx(loops.squared_map_cosine(values, out))
