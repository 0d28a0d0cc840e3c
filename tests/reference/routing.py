"""Routing by agreement as plain float64 loops, in the letters of Li et al. 2021.

One token at a time. V[h][n] is a vote of c numbers.
"""

# The paper's letters include capitals.
# ruff: noqa: N803, N806

import math

Vector = list[float]
Grid = list[list[float]]


def simple_routing_loop(
    V: list[list[Vector]],
    T: int,
    over: str,
    eps: float,
) -> tuple[list[Vector], Grid]:
    """Return X [N][c] and the C [H][N] that made it (Algorithm 1, Eqs. 10-11), softmax over "capsules" or "heads"."""
    H, N, c = len(V), len(V[0]), len(V[0][0])
    B = [[0.0] * N for _ in range(H)]
    X: list[Vector] = []
    C: Grid = []
    for _ in range(T):
        if over == "capsules":
            C = [_softmax(row) for row in B]
        else:
            columns = [_softmax([B[h][n] for h in range(H)]) for n in range(N)]
            C = [[columns[n][h] for n in range(N)] for h in range(H)]
        X = []
        for n in range(N):
            divisor = max(sum(C[h][n] for h in range(H)), eps)
            s = [sum(C[h][n] * V[h][n][i] for h in range(H)) / divisor for i in range(c)]
            square = sum(value * value for value in s)
            X.append([value * square / ((1.0 + square) * math.sqrt(square + eps)) for value in s])
        for h in range(H):
            for n in range(N):
                B[h][n] += sum(X[n][i] * V[h][n][i] for i in range(c))
    return X, C


def em_routing_loop(
    V: list[list[Vector]],
    T: int,
    beta_A: Vector | None,
    beta_mu: Vector | None,
    temperatures: list[float],
    floor: float,
) -> tuple[list[Vector], Grid, Vector | None]:
    """Return X [N][c], C [H][N] and A [N] (Algorithm 2, Eqs. 12-15; variances, densities multiplied over i)."""
    H, N, c = len(V), len(V[0]), len(V[0][0])
    C = [[1.0 / N] * N for _ in range(H)]
    mu: list[Vector] = []
    A: Vector | None = None
    for t in range(T):
        mu, variance = [], []
        for n in range(N):
            divisor = max(sum(C[h][n] for h in range(H)), floor)
            mu.append([sum(C[h][n] * V[h][n][i] for h in range(H)) / divisor for i in range(c)])
            spread = [sum(C[h][n] * (V[h][n][i] - mu[n][i]) ** 2 for h in range(H)) / divisor for i in range(c)]
            variance.append([max(value, floor) for value in spread])
        if beta_A is not None and beta_mu is not None:
            A = []
            for n in range(N):
                assigned = sum(C[h][n] for h in range(H))
                chi = assigned * sum(
                    0.5 * math.log(value) + (1.0 + math.log(2.0 * math.pi)) / 2.0 for value in variance[n]
                )
                A.append(_logistic(temperatures[t] * (beta_A[n] - beta_mu[n] * assigned - chi)))
        if t == T - 1:
            break
        log_A = [0.0] * N if A is None else [math.log(value) for value in A]
        C = [_softmax([log_A[n] + _log_density(V[h][n], mu[n], variance[n]) for n in range(N)]) for h in range(H)]
    X = mu if A is None else [[A[n] * value for value in mu[n]] for n in range(N)]
    return X, C, A


def _log_density(x: Vector, mean: Vector, variance: Vector) -> float:
    return sum(
        -((a - m) ** 2) / (2.0 * v) - 0.5 * math.log(2.0 * math.pi * v)
        for a, m, v in zip(x, mean, variance, strict=True)
    )


def _logistic(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def _softmax(logits: Vector) -> Vector:
    top = max(logits)
    exponentials = [math.exp(value - top) for value in logits]
    return [value / sum(exponentials) for value in exponentials]
