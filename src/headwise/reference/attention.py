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


def _softmax(scores: dict[int, float]) -> dict[int, float]:
    """The softmax of scores by key; nothing for a query without a key."""
    total = sum(math.exp(score) for score in scores.values())
    return {key: math.exp(score) / total for key, score in scores.items()}
