"""The mean of attention weights over heads, some heads at a time: [B, Q, K] without [B, H, Q, K].

The position term of Li et al. 2021 needs only this mean. Fused attention returns no weights, so they are recomputed
from queries and keys in both passes: of all heads at once where that is few numbers, of one head after another in long
sequences. Only queries, keys and the mask are kept in between.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.errors import HeadwiseError, MaskError, ShapeError
from headwise.nn.scores import normalize_scores

# Weights that are held at a time, in numbers: those of one head at least.
MOST_ON_CPU, MOST_ON_ACCELERATOR = 2**18, 2**24


def mean_weights(
    queries: Tensor,
    keys: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """(1/H) sum_h A_h with A_h = softmax(scale * Q_h K_h^T + mask_h), in single precision at least.

    A query that may attend to nothing has weights 0, as in torch's scaled dot product attention. Differentiable once,
    in queries, keys and an additive mask.

    Scores are computed once more in the forward pass and twice more in the backward pass than if the weights were kept.
    Inside a transform of torch.func (grad, vmap) the weights are kept.

    Args:
        queries: [B, H, Q, e], floating.
        keys: [B, G, K, e] with G dividing H: query head h belongs to key head h // (H / G).
        mask: Broadcastable to [B, H, Q, K]: boolean, True = may attend, or additive. None for none.
        scale: Multiplies the scores; 1/sqrt(e) when None.
        causal: Whether query i sees keys 0 to i only, in addition to the mask.

    Returns:
        [B, Q, K].

    Raises:
        ShapeError: Queries and keys do not fit one another.
        MaskError: The mask is neither boolean nor floating, or does not fit.

    >>> queries, keys = torch.zeros(1, 8, 2, 4), torch.zeros(1, 2, 5, 4)
    >>> mean_weights(queries, keys, causal=True)
    tensor([[[1.0000, 0.0000, 0.0000, 0.0000, 0.0000],
             [0.5000, 0.5000, 0.0000, 0.0000, 0.0000]]])
    """
    _require_fitting(queries, keys, mask)
    device = queries.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        # scores of an explicit attention would be products in this dtype
        queries, keys = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (queries, keys))
    factor: float = queries.shape[-1] ** -0.5 if scale is None else scale
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        # by operations that these transform, at the cost of keeping all weights
        parts = (_compute_scores(queries, keys, mask, factor, causal, part) for part in _divide_heads(queries, keys))
        return sum((normalize_scores(scores).sum(1) for scores in parts), torch.zeros(())) / queries.shape[1]
    mean: Tensor = _MeanWeights.apply(queries, keys, mask, factor, causal)
    return mean


def mean_of(weights: Tensor) -> Tensor:
    """The same mean from given weights [B, H, Q, K]."""
    return weights.mean(1, dtype=torch.promote_types(weights.dtype, torch.float32))


class _MeanWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
        ctx.save_for_backward(queries, keys, mask)
        ctx.scale, ctx.causal = scale, causal
        batch, heads, length, _ = queries.shape
        dtype = torch.promote_types(queries.dtype, torch.float32)
        mean = torch.zeros(batch, length, keys.shape[2], dtype=dtype, device=queries.device)
        for part in _divide_heads(queries, keys):
            mean += _compute_weights(queries, keys, mask, scale, causal, part).sum(1)
        return mean.div_(heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        if torch.is_grad_enabled():
            raise HeadwiseError(
                "a gradient through the mean of attention weights was requested with create_graph=True; it is "
                "differentiable once. Use Position() without recompute."
            )
        # dS = A (G - sum_k A G), with G/H the gradient of each head's weights
        queries, keys, mask = ctx.saved_tensors
        towards = grads[0].unsqueeze(1) / queries.shape[1]
        to_queries, to_keys = torch.empty_like(queries), torch.zeros_like(keys, dtype=grads[0].dtype)
        to_mask = None
        if mask is not None and ctx.needs_input_grad[2]:
            to_mask = torch.zeros_like(mask, dtype=grads[0].dtype)
        with torch.autocast(queries.device.type, enabled=False):
            for part in _divide_heads(queries, keys):
                weights = _compute_weights(queries, keys, mask, ctx.scale, ctx.causal, part)
                product = weights * towards
                scores = product.sub_(weights * product.sum(-1, keepdim=True))
                if to_mask is not None:
                    own = _select_heads(to_mask, part)
                    own += scores.sum_to_size(own.shape)
                scores = part.fold((scores * ctx.scale).to(queries.dtype))
                query, key = part.fold(queries[:, part.heads]), keys[:, part.keys]
                to_queries[:, part.heads] = (scores @ key).view(query.shape[0], -1, *queries.shape[2:])
                to_keys[:, part.keys] += scores.mT @ query
        return to_queries, to_keys.to(keys.dtype), to_mask, None, None


class _Part(NamedTuple):
    """Some query heads, and the key heads that they share."""

    heads: slice
    keys: slice

    def fold(self, tensor: Tensor) -> Tensor:
        """Return what query heads hold, [B, n, Q, x], with the queries of those that share a key head in one row."""
        count = self.keys.stop - self.keys.start
        batch, heads, queries, width = tensor.shape
        return tensor.reshape(batch, count, heads // count * queries, width)


def _divide_heads(queries: Tensor, keys: Tensor) -> Iterator[_Part]:
    """Yield parts of the heads whose weights are held at a time."""
    batch, heads, length, _ = queries.shape
    share = heads // keys.shape[1]
    most = MOST_ON_CPU if queries.device.type == "cpu" else MOST_ON_ACCELERATOR
    size = max(1, most // max(1, batch * length * keys.shape[2]))
    if size < share:
        for head in range(heads):
            yield _Part(slice(head, head + 1), slice(head // share, head // share + 1))
        return
    for first in range(0, keys.shape[1], size // share):
        last = min(first + size // share, keys.shape[1])
        yield _Part(slice(first * share, last * share), slice(first, last))


def _compute_weights(
    queries: Tensor, keys: Tensor, mask: Tensor | None, scale: float, causal: bool, part: _Part
) -> Tensor:
    """The weights of some heads, [B, n, Q, K], in single precision at least; rows without a key are 0."""
    scores = _compute_scores(queries, keys, mask, scale, causal, part)
    empty = None if mask is None else scores.amax(-1, keepdim=True) == -math.inf
    weights = torch.softmax(scores, dim=-1)
    return weights if empty is None else weights.masked_fill_(empty, 0.0)


def _compute_scores(
    queries: Tensor, keys: Tensor, mask: Tensor | None, scale: float, causal: bool, part: _Part
) -> Tensor:
    """The masked scores of some heads, [B, n, Q, K], in single precision at least."""
    with torch.autocast(queries.device.type, enabled=False):
        scores = part.fold(queries[:, part.heads] * scale) @ keys[:, part.keys].mT
    scores = scores.view(len(queries), part.heads.stop - part.heads.start, queries.shape[2], keys.shape[2])
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is not None:
        own = _select_heads(mask, part)
        scores = scores.masked_fill_(~own, -math.inf) if own.dtype == torch.bool else scores.add_(own)
    if causal:
        rows, columns = (torch.arange(size, device=scores.device) for size in scores.shape[-2:])
        scores = scores.masked_fill_(columns > rows[:, None], -math.inf)
    return scores


def _select_heads(mask: Tensor, part: _Part) -> Tensor:
    """The view of a mask for some heads, broadcastable to [B, n, Q, K]; a head axis of 1 is that of all."""
    return mask if mask.dim() < 3 or mask.shape[-3] == 1 else mask[..., part.heads, :, :]


def _require_fitting(queries: Tensor, keys: Tensor, mask: Tensor | None) -> None:
    q, k = tuple(queries.shape), tuple(keys.shape)
    if len(q) != 4 or len(k) != 4 or q[0] != k[0] or q[3] != k[3] or k[1] == 0 or q[1] % k[1] or q[1] == 0:
        raise ShapeError(
            f"queries and keys have shapes {q} and {k}; expected [B, H, Q, e] and [B, G, K, e] with G dividing H."
        )
    if not queries.is_floating_point() or queries.dtype != keys.dtype:
        raise ShapeError(f"queries are {queries.dtype} and keys {keys.dtype}; expected one floating dtype.")
    if mask is None:
        return
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise MaskError(f"the mask is {mask.dtype}; expected bool, True = may attend, or an additive floating mask.")
    full = (q[0], q[1], q[2], k[2])
    sizes = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if mask.dim() > 4 or any(size not in (1, whole) for size, whole in zip(sizes, full, strict=True)):
        raise MaskError(f"the mask has shape {tuple(mask.shape)}; expected one that broadcasts to {full}.")
