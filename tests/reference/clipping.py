"""QK-Clip (Kimi K2, arXiv 2507.20534) as loops over sequences, heads, queries, keys and features, in float64."""

from __future__ import annotations

import math

from torch import Tensor


def largest_score(query: Tensor, key: Tensor, allowed: Tensor, scale: float) -> float:
    """Return the largest scale q_i . k_j of one head and sequence, [Q, e] and [K, e], where query i may attend to j."""
    largest = -math.inf
    for i in range(len(query)):
        for j in range(len(key)):
            if allowed[i, j]:
                products = [float(query[i, f]) * float(key[j, f]) for f in range(query.shape[1])]
                largest = max(largest, scale * math.fsum(products))
    return largest


def length_bound(query: Tensor, key: Tensor, scale: float) -> float:
    """Return the largest |q_i| times the largest |k_j| of one head and sequence, times the scale."""
    longest = [max(math.sqrt(math.fsum(float(x) ** 2 for x in row)) for row in rows) for rows in (query, key)]
    return abs(scale) * longest[0] * longest[1]


def clip_rows(
    query: Tensor, key: Tensor, largest: float, limit: float, *, grouped: bool, shared: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the rows [e, d] of W_Q and W_K of one head (or their biases [e]) after the clip.

    Grouped queries scale W_Q alone. The last `shared` features of a latent query are compared with a key that all heads
    share.
    """
    gamma = min(1.0, limit / largest) if largest > 0 else 1.0
    query, key = query.clone(), key.clone()
    for f in range(len(query)):
        whole = grouped or f >= len(query) - shared
        query[f] *= gamma if whole else math.sqrt(gamma)
    for f in range(len(key)):
        key[f] *= 1.0 if grouped else math.sqrt(gamma)
    return query, key
