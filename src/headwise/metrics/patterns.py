"""Where the heads of causal models look: at what came after the same token before, and at the first token."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.errors import ShapeError, require_integer
from headwise.functional.tokens import require_floating


@torch.no_grad()
def weights_back(weights: Tensor, distance: int, first: int, last: int | None = None) -> Tensor:
    """Return the weight from each query q, first <= q < last, to the key q - distance: [..., K, K] -> [..., queries].

    `ShapeError` where the weights are not square, or there is no such query.

    >>> weights_back(torch.tensor([[1.0, 0.0, 0.0], [0.4, 0.6, 0.0], [0.2, 0.7, 0.1]]), 1, 1)
    tensor([0.4000, 0.7000])
    """
    require_floating("weights", weights, 2, "[..., K, K]")
    size = weights.shape[-1]
    last = size if last is None else last
    if weights.shape[-2] != size or not distance <= first < last <= size:
        raise ShapeError(
            f"weights have shape {tuple(weights.shape)}; expected as many queries as keys, and queries {first} to "
            f"{last - 1} with a key {distance} before them."
        )
    return weights.diagonal(-distance, -2, -1)[..., first - distance : last - distance]


def induction_weights(weights: Tensor, period: int, start: int = 1) -> Tensor:
    """Return the weight of each head from the second r_j to the first r_{j+1}: [B, H, K, K] -> [B, H, P - 1].

    The sequence is r_1 .. r_P r_1 .. r_P after `start` other tokens, and j < P (Olsson et al. 2022, "prefix matching").
    The mean over batch and tokens is the induction score. Raises as `weights_back`.

    >>> weights = torch.zeros(1, 1, 5, 5)
    >>> weights[0, 0, 3, 2] = 1.0
    >>> induction_weights(weights, 2)
    tensor([[[1.]]])
    """
    require_integer("period", period, low=2)
    return weights_back(weights, period - 1, start + period, start + 2 * period - 1)


@torch.no_grad()
def sum_first_weights(weights: Tensor, firsts: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention of each head on the first token of a text, summed over queries [H], and their number.

    The mean over queries is the sink share (Gu et al. 2025). A query that gives it a weight of exactly 0 in all heads
    does not see it, as where a window ends before, and is not counted.

    Args:
        weights: [B, H, Q, K], attention weights.
        firsts: [B, Q], int64, the first key of each query's text.
        counted: [B, Q], 1 or True for the queries to count.

    >>> sum_first_weights(torch.tensor([[[[1.0, 0.0], [0.3, 0.7]]]]), torch.zeros(1, 2).long(), torch.ones(1, 2))
    (tensor([1.3000], dtype=torch.float64), tensor(2., dtype=torch.float64))
    """
    require_floating("weights", weights, 4, "[B, H, Q, K]")
    index = firsts.to(weights.device)[:, None, :, None].expand(-1, weights.shape[1], -1, -1)
    chosen = weights.gather(3, index).squeeze(3).double()
    seen = counted.to(chosen) * (chosen != 0).any(dim=1)
    return (chosen * seen[:, None]).sum(dim=(0, 2)), seen.sum()
