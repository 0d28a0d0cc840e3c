"""Scores become weights: softmax, and 0 where a query may attend to nothing."""

from __future__ import annotations

import math

import torch

from cases import cases
from headwise.nn.scores import normalize_scores

# the second query of the first sequence, and all of the second
MASK = torch.zeros(3, 1, 4, 5)
MASK[0, :, 1] = MASK[1] = -math.inf
MASK[2, :, :, 3:] = -math.inf
EMPTY = MASK.isneginf().all(-1)


def scores(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    drawn = torch.randn(3, 2, 4, 5, dtype=dtype, generator=torch.Generator().manual_seed(2))
    return drawn.requires_grad_()


@cases("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_weights_are_the_softmax_where_there_is_a_key_and_zero_elsewhere(dtype: torch.dtype):
    masked = scores(dtype) + MASK.to(dtype)
    weights = normalize_scores(masked)
    kept = ~EMPTY.expand(3, 2, 4)
    assert weights.dtype == dtype
    assert torch.equal(weights[kept], torch.softmax(masked, -1)[kept])
    assert torch.equal(weights[~kept], torch.zeros_like(weights[~kept]))
    wide = normalize_scores(masked, torch.float64)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide[kept].sum(-1), torch.ones(int(kept.sum()), dtype=torch.float64))
    wide.square().sum().backward()


def test_no_gradient_is_nan_and_that_of_a_query_without_keys_is_zero():
    drawn = scores()
    aim = torch.randn(3, 2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (slope,) = torch.autograd.grad((normalize_scores(drawn + MASK) * aim).sum(), drawn, create_graph=True)
    # the same from rows that have a key
    kept = ~EMPTY.expand(3, 2, 4)
    (expected,) = torch.autograd.grad((torch.softmax(drawn + MASK, -1)[kept] * aim[kept]).sum(), drawn)
    torch.testing.assert_close(slope, torch.where(kept[..., None], expected, 0.0))
    (second,) = torch.autograd.grad(slope.square().sum(), drawn)
    assert second.isfinite().all()
    assert torch.autograd.gradcheck(lambda one: normalize_scores(one + MASK), drawn)


def test_the_weights_are_kept_once_for_the_backward_pass():
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    masked = scores() + MASK
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        normalize_scores(masked)
    assert kept == [masked.numel()]
