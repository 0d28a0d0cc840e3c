"""Attention whose maps are not one softmax a head, as plain float64 loops over sequences, heads, queries and keys.

No code is shared with what they check. Queries, keys and values are [B, H, L, e]; `allowed` is True where a query may
attend to a key, [B, H, Q, K].
"""

import math

import torch
from torch import Tensor


def talking_heads(
    queries: Tensor, keys: Tensor, values: Tensor, allowed: Tensor, logits: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """W and O of talking heads with P_l and P_w [H, H], masks after P_l (Shazeer et al. 2020).

    >>> one = torch.ones(1, 2, 1, 1)
    >>> talking_heads(one, one, one, one > 0, torch.eye(2), torch.tensor([[1.0, 0.0], [0.5, 1.0]]))[1].flatten()
    tensor([1.5000, 1.0000], dtype=torch.float64)
    """
    q, k, v, first, second = (tensor.detach().double() for tensor in (queries, keys, values, logits, weights))
    batch, heads, length, size = q.shape
    maps = torch.zeros(batch, heads, length, k.shape[2], dtype=torch.float64)
    outputs = torch.zeros(batch, heads, length, v.shape[3], dtype=torch.float64)
    for b in range(batch):
        for i in range(length):
            for g in range(heads):
                scores = {}
                for j in range(k.shape[2]):
                    if allowed[b, g, i, j]:
                        products = [float(q[b, h, i] @ k[b, h, j]) / math.sqrt(size) for h in range(heads)]
                        scores[j] = sum(float(first[h, g]) * products[h] for h in range(heads))
                for j, share in _softmax(scores).items():
                    maps[b, g, i, j] = share
            for g in range(heads):
                for j in range(k.shape[2]):
                    mixed = sum(float(second[h, g]) * float(maps[b, h, i, j]) for h in range(heads))
                    outputs[b, g, i] += mixed * v[b, g, j]
    return maps, outputs


def differential_heads(
    queries: Tensor, keys: Tensor, values: Tensor, allowed: Tensor, vectors: Tensor, gain: Tensor, layer: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A1, A1 - lambda A2 and O of differential attention (Ye et al. 2024, released code); layer from 1.

    Each head has queries [Q1; Q2] and keys [K1; K2] on the last axis; vectors are l_q1, l_k1, l_q2, l_k2.

    >>> one = torch.ones(1, 1, 1, 2)
    >>> vectors, allowed = torch.zeros(4, 1), torch.ones(1, 1, 1, 1) > 0
    >>> first, difference, _ = differential_heads(one, one, one, allowed, vectors, torch.ones(2), layer=1)
    >>> first.item(), round(difference.item(), 6)
    (1.0, 0.8)
    """
    q, k, v, ell, g = (tensor.detach().double() for tensor in (queries, keys, values, vectors, gain))
    batch, heads, length, width = q.shape
    size = width // 2
    start = 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))
    weight = math.exp(float(ell[0] @ ell[1])) - math.exp(float(ell[2] @ ell[3])) + start
    first = torch.zeros(batch, heads, length, k.shape[2], dtype=torch.float64)
    difference, outputs = torch.zeros_like(first), torch.zeros(batch, heads, length, width, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                for sign, offset in ((1.0, 0), (-weight, size)):
                    part = slice(offset, offset + size)
                    scores = {
                        j: float(q[b, h, i, part] @ k[b, h, j, part]) / math.sqrt(size)
                        for j in range(k.shape[2])
                        if allowed[b, h, i, j]
                    }
                    for j, share in _softmax(scores).items():
                        first[b, h, i, j] += share if sign == 1.0 else 0.0
                        difference[b, h, i, j] += sign * share
                summed = sum(
                    (float(difference[b, h, i, j]) * v[b, h, j] for j in range(k.shape[2])), torch.zeros(width)
                )
                norm = math.sqrt(float((summed * summed).sum()) / width + 1e-5)
                outputs[b, h, i] = (1.0 - start) * g * summed / norm
    return first, difference, outputs


def _softmax(scores: dict[int, float]) -> dict[int, float]:
    """The softmax of scores by key; nothing for a query without a key."""
    total = sum(math.exp(score) for score in scores.values())
    return {key: math.exp(score) / total for key, score in scores.items()}
