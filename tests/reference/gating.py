"""Gates on heads as plain float64 loops, in the letters of their papers; one token at a time."""

# The papers' letters include capitals.
# ruff: noqa: N803, N806

import math

Vector = list[float]
Grid = list[list[float]]


def sigmoid_gates_loop(x: Vector, W: Grid, b: Vector, scale: float) -> Vector:
    """Return scale sigma(W x + b) (Qiu et al. 2025, where scale is 1)."""
    return [scale / (1.0 + math.exp(-(_dot(row, x) + offset))) for row, offset in zip(W, b, strict=True)]


def mixture_gates_loop(x: Vector, W_r: Grid, W_s: Grid, W_h: Grid, K: int, R: Grid | None = None) -> Vector:
    """Return the gates of shared heads and then of routed ones (Jin et al. 2024, code); R chooses instead of W_r."""
    p = _softmax([_dot(row, x) for row in W_r])
    scores = [_dot(row, x) for row in (W_r if R is None else R)]
    chosen: list[int] = []
    for _ in range(K):
        best = max((score for i, score in enumerate(scores) if i not in chosen), default=0.0)
        chosen.append(next(i for i, score in enumerate(scores) if score == best and i not in chosen))
    total = sum(p[i] for i in chosen)
    routed = [K * p[i] / total if i in chosen else 0.0 for i in range(len(p))]
    if not W_h:
        return routed
    alpha = _softmax([_dot(row, x) for row in W_h])
    shared = _softmax([_dot(row, x) for row in W_s])
    S = len(W_s)
    return [2.0 * alpha[0] * S * share for share in shared] + [2.0 * alpha[1] * gate for gate in routed]


def balance_loop(p: Grid, chosen: list[list[bool]], valid: list[bool]) -> float:
    """Return mean_i(f_i P_i) n^2 over the valid tokens (Jin et al. 2024, code, where all tokens are)."""
    tokens = [t for t in range(len(p)) if valid[t]]
    n = len(p[0])
    products = []
    for i in range(n):
        f = sum(1.0 for t in tokens if chosen[t][i]) / len(tokens)
        P = sum(p[t][i] for t in tokens) / len(tokens)
        products.append(f * P)
    return sum(products) / n * n * n


def _dot(row: Vector, x: Vector) -> float:
    return sum(one * other for one, other in zip(row, x, strict=True))


def _softmax(values: Vector) -> Vector:
    top = max(values)
    powers = [math.exp(value - top) for value in values]
    return [power / sum(powers) for power in powers]
