"""Each disagreement term against the loop over pairs of heads, its golden numbers, padding and precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import cases
from equations.draws import public_names, rows, vectors
from headwise.errors import MaskError, ShapeError
from headwise.functional import cosine
from headwise.similarity import terms as disagreement
from reference import disagreement as loops

torch.set_num_threads(1)


class Term(NamedTuple):
    fast: Callable[..., Tensor]
    summed: Callable[..., tuple[Tensor, Tensor]]
    loop: Callable[[Tensor, Tensor], Tensor]
    draw: Callable[[int, int, int, int], Tensor]
    tokens: tuple[int, ...]


def sentences(batch: int, length: int, heads: int, width: int) -> Tensor:
    return rows(batch, length, heads, width)[:, :, 0]


DRAWN = {
    "subspace_similarity": (vectors, (0, 1)),
    "output_similarity": (vectors, (0, 1)),
    "position_similarity": (rows, (0, 2)),
    "position_squared_difference": (rows, (0, 2)),
    "normalized_position_similarity": (rows, (0, 2)),
    "frobenius_penalty": (sentences, (0,)),
}
TERMS = {
    name: Term(getattr(disagreement, name), getattr(disagreement, f"{name}_sum"), getattr(loops, name), *drawn)
    for name, drawn in DRAWN.items()
}
each_term = cases("term", TERMS.values())


def token_shape(term: Term, tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape[axis] for axis in term.tokens)


def draw_keep(term: Term, tensor: Tensor) -> Tensor:
    keep = torch.rand(token_shape(term, tensor)) > 0.4
    keep.view(-1)[0] = True
    return keep


def spread(term: Term, keep: Tensor, tensor: Tensor) -> Tensor:
    """`keep` in the shape of `tensor`."""
    shape = [tensor.shape[axis] if axis in term.tokens else 1 for axis in range(tensor.dim())]
    return keep.reshape(shape).expand_as(tensor)


def tolerance(dtype: torch.dtype, terms: int, size: float = 1.0) -> float:
    return 4 * torch.finfo(dtype).eps * math.sqrt(terms) * max(size, 1.0)


@each_term
@settings(max_examples=15)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(1, 6)),
    padded=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(sizes=(1, 1, 1, 1), padded=False, seed=50812563)
def test_value_and_gradient_equal_those_of_the_loop(
    term: Term, sizes: tuple[int, int, int, int], padded: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    fast = term.draw(*sizes).requires_grad_()
    slow = fast.detach().clone().requires_grad_()
    keep = draw_keep(term, fast) if padded else torch.ones(token_shape(term, fast), dtype=torch.bool)
    value = term.fast(fast, keep if padded else None)
    expected = term.loop(slow, keep)
    # A factor other than one, so that a gradient which ignores the incoming one is seen.
    (gradient,) = torch.autograd.grad(1.3 * value, fast)
    (slow_gradient,) = torch.autograd.grad(1.3 * expected, slow, allow_unused=True, materialize_grads=True)
    # The gradient of a cosine is a difference of terms of size 1/|x|, and so is its rounding, on either side; where the
    # vector has one number it is zero, and rounding is all there is.
    size = max(slow_gradient.abs().max().item(), 1 / slow.detach().norm(dim=-1).min().item())
    assert value.dtype == torch.float64
    assert value.item() == pytest.approx(expected.item(), abs=tolerance(torch.float64, fast.numel(), expected.item()))
    assert torch.allclose(gradient, slow_gradient, rtol=0, atol=2 * tolerance(torch.float64, fast.numel(), size))


@each_term
def test_first_and_second_derivatives_pass_gradcheck(term: Term) -> None:
    torch.manual_seed(3)
    tensor = term.draw(2, 2, 3, 4).requires_grad_()
    keep = draw_keep(term, tensor)
    assert torch.autograd.gradcheck(lambda x: term.fast(x, keep), tensor)
    assert torch.autograd.gradgradcheck(lambda x: term.fast(x, keep), tensor)
    assert torch.autograd.gradcheck(term.fast, tensor)


@each_term
def test_padding_of_any_content_equals_cropping_and_gets_no_gradient(term: Term) -> None:
    torch.manual_seed(4)
    clean = term.draw(3, 5, 4, 6).float()
    keep = torch.zeros(token_shape(term, clean), dtype=torch.bool)
    keep[(slice(2), slice(3))[: keep.dim()]] = True
    dirty = clean.masked_fill(~spread(term, keep, clean), math.nan).requires_grad_()
    crop = clean[:2] if keep.dim() == 1 else clean[:2].narrow(term.tokens[1], 0, 3)
    crop = crop.clone().requires_grad_()
    value, expected = term.fast(dirty, keep), term.fast(crop)
    (gradient,) = torch.autograd.grad(value, dirty)
    (crop_gradient,) = torch.autograd.grad(expected, crop)
    kept = spread(term, keep, clean)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient[kept], crop_gradient.flatten())
    assert (gradient[~kept] == 0).all()


@each_term
def test_sums_of_two_calls_pool_token_by_token(term: Term) -> None:
    torch.manual_seed(5)
    first, second = term.draw(2, 3, 4, 5), term.draw(3, 3, 4, 5)
    keep = draw_keep(term, second)
    (a, n), (b, m) = term.summed(first), term.summed(second, keep)
    assert (n.item(), m.item()) == (math.prod(token_shape(term, first)), keep.sum().item())
    everything = torch.cat([torch.ones(token_shape(term, first), dtype=torch.bool), keep])
    torch.testing.assert_close((a + b) / (n + m), term.fast(torch.cat([first, second]), everything))


@each_term
def test_no_valid_token_gives_zero_and_zero_gradient(term: Term) -> None:
    tensor = term.draw(2, 3, 4, 5).requires_grad_()
    value = term.fast(tensor, torch.zeros(token_shape(term, tensor), dtype=torch.bool))
    value.backward()
    assert value.item() == 0
    assert tensor.grad is not None
    assert (tensor.grad == 0).all()


@each_term
def test_zero_vectors_give_a_finite_value_and_finite_gradient(term: Term) -> None:
    torch.manual_seed(6)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        tensor = term.draw(2, 3, 4, 5).to(dtype)
        head = 2 if term.draw is vectors else 1
        tensor.select(head, 1).zero_()
        tensor[0] = 0
        tensor.requires_grad_()
        value = term.fast(tensor)
        value.backward()
        assert value.isfinite()
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
        keep = torch.ones(token_shape(term, tensor), dtype=torch.bool)
        expected = term.loop(tensor.detach(), keep).item()
        assert value.item() == pytest.approx(expected, abs=tolerance(value.dtype, 20, expected))


def test_a_zero_vector_has_no_direction_and_gets_no_gradient() -> None:
    heads = torch.tensor([[[0.0, 0.0], [0.0, 2.0], [1.0, 0.0]]], requires_grad=True)
    value = disagreement.output_similarity(heads)
    value.backward()
    assert value.item() == pytest.approx(2 / 9)
    assert heads.grad is not None
    assert (heads.grad[0, 0] == 0).all()


@cases("dtype", [torch.float64, torch.bfloat16])
def test_a_gradient_taken_in_parts_is_that_of_the_whole(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(3, 7, 4, 5, generator=generator, dtype=torch.float64).to(dtype)
    keep = torch.rand(3, 7, generator=generator) > 0.4
    vectors[~keep] = math.nan
    found = []
    # numbers of 21 tokens of 20, of 4 and of less than one
    for size in (cosine.CPU_PART, 80, 8):
        monkeypatch.setattr(cosine, "CPU_PART", size)
        leaf = vectors.clone().requires_grad_()
        disagreement.output_similarity(leaf, keep).backward()
        assert leaf.grad is not None
        found.append(leaf.grad)
    whole, *parts = found
    assert whole.any()
    assert not whole[~keep].any()
    for part in parts:
        torch.testing.assert_close(part, whole, rtol=1e-12 if dtype == torch.float64 else 0, atol=0)


@each_term
@cases("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_accumulated_in_float32_also_under_autocast(term: Term, dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    half = term.draw(3, 4, 5, 64).to(dtype).requires_grad_()
    exact = half.detach().double().requires_grad_()
    keep = draw_keep(term, exact)
    single = half.detach().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, again = term.fast(half, keep), term.fast(single, keep)
    expected = term.fast(exact, keep)
    (gradient,) = torch.autograd.grad(value, half)
    (exact_gradient,) = torch.autograd.grad(expected, exact)
    limit = tolerance(torch.float32, exact.numel(), expected.abs().item())
    assert value.dtype == again.dtype == torch.float32
    assert value.item() == pytest.approx(expected.item(), abs=limit)
    assert again.item() == pytest.approx(expected.item(), abs=limit)
    assert gradient.dtype == dtype
    assert (gradient - exact_gradient).abs().max() <= torch.finfo(dtype).eps * exact_gradient.abs().max()


def test_a_backward_inside_autocast_keeps_the_gradient_of_the_cosine_in_float32() -> None:
    torch.manual_seed(8)
    single = vectors(3, 4, 5, 64).float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (inside,) = torch.autograd.grad(disagreement.output_similarity(single), single)
    (outside,) = torch.autograd.grad(disagreement.output_similarity(single), single)
    assert torch.equal(inside, outside)


TOKENS = torch.tensor([[[1, 0], [0, 2]], [[1, 1], [3, 4]], [[7, 7], [7, 7]]], dtype=torch.float64)
QUERIES = torch.tensor([[[0.5, 0.5, 0], [0, 1, 0]], [[0.2, 0.3, 0.5], [0.2, 0.3, 0.5]]], dtype=torch.float64)
SENTENCE = torch.tensor([[[0.5, 0.5, 0], [0.2, 0.3, 0.5]]], dtype=torch.float64)
# the position term prefers collapse
UNIFORM = torch.full((1, 8, 3, 64), 1 / 64, dtype=torch.float64)
DISJOINT = torch.eye(8, 64, dtype=torch.float64).reshape(1, 8, 1, 64)


@cases(
    ("name", "given_tensor", "keep", "expected"),
    [
        *((name, TOKENS[:1], None, 0.5) for name in ("output_similarity", "subspace_similarity")),
        *((name, TOKENS[1:2], None, 0.99497475) for name in ("output_similarity", "subspace_similarity")),
        *((name, TOKENS, (True, True, False), 0.74748737) for name in ("output_similarity", "subspace_similarity")),
        ("position_similarity", QUERIES, (True, False), 0.345),
        ("position_similarity", QUERIES, (False, True), 0.495),
        ("position_similarity", UNIFORM, None, 0.015625),
        ("position_similarity", DISJOINT, None, 0.125),
        ("normalized_position_similarity", UNIFORM, None, 1.0),
        ("normalized_position_similarity", DISJOINT, None, 0.125),
        ("position_squared_difference", UNIFORM, None, 0.0),
        ("position_squared_difference", DISJOINT, None, -1.75),
        ("frobenius_penalty", SENTENCE, None, (0.5 - 1) ** 2 + 2 * 0.25**2 + (0.38 - 1) ** 2),
    ],
)
def test_golden_numbers(name: str, given_tensor: Tensor, keep: tuple[bool, ...] | None, expected: float) -> None:
    mask = None if keep is None else torch.tensor(keep)
    assert TERMS[name].fast(given_tensor, mask).item() == pytest.approx(expected, abs=1e-8)


def test_layout_in_memory_does_not_matter() -> None:
    torch.manual_seed(8)
    outputs = vectors(3, 4, 5, 6).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    copy = outputs.detach().contiguous().requires_grad_()
    strided, plain = disagreement.output_similarity(outputs), disagreement.output_similarity(copy)
    torch.testing.assert_close(strided, plain)
    torch.testing.assert_close(torch.autograd.grad(strided, outputs), torch.autograd.grad(plain, copy))


def test_the_hand_written_gradient_works_under_torch_func() -> None:
    torch.manual_seed(9)
    outputs, keep = vectors(3, 4, 5, 6), torch.rand(3, 4) > 0.3
    keep[:, 0] = True
    gradients = torch.func.vmap(torch.func.grad(disagreement.output_similarity))(outputs, keep)
    for gradient, own, valid in zip(gradients, outputs, keep, strict=True):
        own.requires_grad_()
        (expected,) = torch.autograd.grad(disagreement.output_similarity(own, valid), own)
        torch.testing.assert_close(gradient, expected)


@each_term
def test_wrong_input_is_refused_with_shape_and_expectation(term: Term) -> None:
    tensor = term.draw(2, 3, 4, 5)
    keep = torch.ones(token_shape(term, tensor), dtype=torch.bool)
    for wrong, message in (
        ((torch.rand(5),), r"has shape \(5,\); expected"),
        ((tensor[..., :0],), "none of these axes empty"),
        ((tensor.long(),), "is torch.int64; expected a floating dtype"),
        ((tensor.tolist(),), "is a list; expected a torch.Tensor"),
        ((tensor, keep.float()), "keep is torch.float32; expected a bool tensor"),
        ((tensor, keep.tolist()), "keep is list; expected a bool tensor"),
        ((tensor, keep.unsqueeze(-1)), "keep has shape .*; expected"),
        ((tensor, keep[:1]), "keep has shape .*; expected"),
    ):
        with pytest.raises(ShapeError if len(wrong) == 1 else MaskError, match=message):
            term.fast(*wrong)


def test_every_fast_term_has_a_loop() -> None:
    fast = public_names(disagreement)
    assert public_names(loops) == {name for name in fast if f"{name}_sum" in fast}
