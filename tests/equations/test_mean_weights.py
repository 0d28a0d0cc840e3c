"""The mean of attention weights over heads, some heads at a time, against the weights themselves."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import headwise as hw
from cases import cases
from headwise.nn import average_weights
from headwise.nn.average_weights import mean_of, mean_weights

BATCH, HEADS, GROUPS, QUERIES, KEYS, SIZE = 2, 6, 3, 5, 7, 4


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def padded() -> Tensor:
    keep = torch.ones(BATCH, 1, 1, KEYS, dtype=torch.bool)
    keep[1, ..., 4:] = False
    return keep


def per_head() -> Tensor:
    mask = drawn(BATCH, HEADS, QUERIES, KEYS, seed=5) > 0.2
    # queries without a key, in one head and in all
    mask[0, 2, 3] = False
    mask[1, :, 1] = False
    return mask


MASKS: dict[str, Callable[[], Tensor | None]] = {
    "none": lambda: None,
    "padding": padded,
    "per head": per_head,
    "additive of all heads": lambda: drawn(1, 1, QUERIES, KEYS, seed=6),
    "additive per head": lambda: drawn(HEADS, 1, KEYS, seed=6),
    "additive with empty rows": lambda: drawn(BATCH, HEADS, QUERIES, KEYS, seed=6).masked_fill(~per_head(), -math.inf),
    "of keys alone": lambda: drawn(KEYS, seed=6),
}


def explicit(queries: Tensor, keys: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """The mean of the softmax of all heads at once, by autograd."""
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    scores = scale * queries @ keys.mT
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0).mean(1)


@cases("causal", [False, True])
@cases("groups", [HEADS, GROUPS, 1])
@cases("mask", MASKS.values())
def test_it_is_the_mean_of_the_weights_with_its_gradients(mask, groups, causal):
    results = []
    for form in (mean_weights, explicit):
        queries, keys, added = drawn(BATCH, HEADS, QUERIES, SIZE), drawn(BATCH, groups, KEYS, SIZE, seed=1), mask()
        leaves = [queries, keys] + ([] if added is None or added.dtype == torch.bool else [added])
        for leaf in leaves:
            leaf.requires_grad_()
        mean = form(queries, keys, added, scale=0.7, causal=causal)
        (mean * drawn(*mean.shape, seed=2)).sum().backward()
        results.append([mean, *(leaf.grad for leaf in leaves)])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-13)
    assert results[0][1].abs().max() > 0.01


def test_the_similarity_is_that_of_the_weights_over_valid_queries():
    queries, keys = drawn(BATCH, HEADS, QUERIES, SIZE), drawn(BATCH, HEADS, KEYS, SIZE, seed=1)
    keep = torch.tensor([[True] * QUERIES, [True, True, False, False, False]])
    weights = (SIZE**-0.5 * queries @ keys.mT).softmax(-1)
    found = [
        term.sum_and_count(tensor, keep)
        for term, tensor in (
            (hw.similarity.Position(recompute=True), mean_weights(queries, keys)),
            (hw.similarity.Position(recompute=True), mean_of(weights)),
            (hw.similarity.Position(), weights),
        )
    ]
    for one in found[:2]:
        torch.testing.assert_close(one, found[2], rtol=1e-12, atol=0.0)


def test_half_precision_is_multiplied_as_it_is_and_summed_in_float32():
    queries, keys = (drawn(BATCH, HEADS, n, SIZE, seed=n).bfloat16().requires_grad_() for n in (QUERIES, KEYS))
    mean = mean_weights(queries, keys)
    mean.square().sum().backward()
    assert mean.dtype == torch.float32
    assert queries.grad.dtype == keys.grad.dtype == torch.bfloat16
    torch.testing.assert_close(mean, (queries.float() @ keys.float().mT / 2).softmax(-1).mean(1), rtol=0.05, atol=0.01)
    with torch.autocast("cpu", torch.bfloat16):
        again = mean_weights(queries.float(), keys.float())
    torch.testing.assert_close(again, mean, rtol=0, atol=0)


def test_nothing_of_the_size_of_all_weights_is_kept_or_made():
    queries, keys = (drawn(BATCH, HEADS, 40, SIZE, seed=s).requires_grad_() for s in (1, 2))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        mean_weights(queries, keys, causal=True).square().sum().backward()
    sizes = sorted({tensor.numel() for tensor in kept})
    assert sizes == [queries.numel(), BATCH * 40 * 40]


def test_the_gradient_of_an_additive_mask_in_half_precision_has_its_dtype():
    queries, keys = (drawn(BATCH, HEADS, n, SIZE, seed=n).bfloat16() for n in (QUERIES, KEYS))
    mask = drawn(HEADS, 1, KEYS, seed=6).bfloat16().requires_grad_()
    mean_weights(queries, keys, mask).square().sum().backward()
    assert mask.grad.dtype == torch.bfloat16
    assert mask.grad.abs().max() > 0.01


@cases("key_heads", [1, 2, 6])
@cases("held", [0, 1, 2, 4, 5])
def test_weights_of_some_heads_at_a_time_give_the_same_mean_and_gradients(
    key_heads: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one head after another, of several that share a key head or not, and of all."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 6, 4, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    keys = torch.randn(2, key_heads, 5, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    mask = torch.randn(2, 6, 4, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    found = []
    for most in (2**18, held * 2 * 4 * 5):
        monkeypatch.setattr(average_weights, "MOST_ON_CPU", most)
        mean = average_weights.mean_weights(queries, keys, mask, causal=True)
        found.append([mean, *torch.autograd.grad(mean.square().sum(), (queries, keys, mask))])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)


@cases(("batch", "length"), [(0, QUERIES), (BATCH, 0)])
def test_nothing_has_weights_of_no_numbers(batch: int, length: int):
    queries, keys = torch.randn(batch, HEADS, length, SIZE), torch.randn(batch, GROUPS, KEYS, SIZE)
    assert mean_weights(queries, keys, scale=0.5).shape == (batch, length, KEYS)
