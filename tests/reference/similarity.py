"""Similarities of heads that penalties lower, as loops over tokens, heads and features in float64."""

import math

from torch import Tensor

Rows = list[list[float]]


def squared_cosine(outputs: Tensor, keep: Tensor) -> float:
    """Mean over valid tokens and pairs i < j of cos(O_ti, O_tj)^2."""
    values = [
        _cosine(token[i], token[j]) ** 2 for token in _tokens(outputs, keep) for i, j in _pairs(outputs.shape[-2])
    ]
    return sum(values) / len(values)


def cross_correlation(outputs: Tensor, keep: Tensor, *, matched: bool) -> float:
    """Mean over i < j of (1/e) sum_ab (C^ij_ab)^2 over all pairs of features, or the matched ones (a = b)."""
    tokens = _tokens(outputs, keep)
    width = outputs.shape[-1]
    values: list[float] = []
    for i, j in _pairs(outputs.shape[-2]):
        places = [(a, b) for a in range(width) for b in ([a] if matched else range(width))]
        values += [_correlation([t[i][a] for t in tokens], [t[j][b] for t in tokens]) ** 2 / width for a, b in places]
    return sum(values) / len(_pairs(outputs.shape[-2]))


def unbiased_hsic(outputs: Tensor, keep: Tensor) -> float:
    """Mean over i < j of the mean of K_ab L_ab + K_ab L_cd - 2 K_ab L_ac over distinct tokens a, b, c, d."""
    tokens = _tokens(outputs, keep)
    grams = [[[_dot(s[h], t[h]) for t in tokens] for s in tokens] for h in range(outputs.shape[-2])]
    places = range(len(tokens))
    values = []
    for i, j in _pairs(len(grams)):
        k, m = grams[i], grams[j]
        terms = [
            k[a][b] * m[a][b] + k[a][b] * m[c][d] - 2 * k[a][b] * m[a][c]
            for a in places
            for b in places
            for c in places
            for d in places
            if len({a, b, c, d}) == 4
        ]
        values.append(sum(terms) / len(terms))
    return sum(values) / len(values)


def log_determinant(kernel: Rows, epsilon: float) -> float:
    """-(1/H) log det((K + epsilon I) / (1 + epsilon)), the determinant by cofactors."""
    heads = range(len(kernel))
    scaled = [[(kernel[i][j] + epsilon * (i == j)) / (1 + epsilon) for j in heads] for i in heads]
    return -math.log(_determinant(scaled)) / len(kernel)


def span_overlap(factors: Tensor) -> float:
    """Mean over i < j of tr(P_i P_j) / e, P the sum of q q^T over a basis of the columns (Gram and Schmidt)."""
    bases = [_orthonormalize(head.T.tolist()) for head in factors.double()]
    width = factors.shape[-1]
    values = [sum(_dot(q, r) ** 2 for q in bases[i] for r in bases[j]) / width for i, j in _pairs(len(bases))]
    return sum(values) / len(values)


def squared_map_cosine(first: Tensor, second: Tensor) -> float:
    """Mean over i < j of <M_i, M_j>^2 / (|M_i|^2 |M_j|^2), M = A B of [d, e] and [e, d']."""
    maps = []
    for a, b in zip(first.double().tolist(), second.double().tolist(), strict=True):
        maps.append([_dot(row, list(column)) for row in a for column in zip(*b, strict=True)])
    values = [_cosine(maps[i], maps[j]) ** 2 for i, j in _pairs(len(maps))]
    return sum(values) / len(values)


def _tokens(outputs: Tensor, keep: Tensor) -> list[Rows]:
    return [token.tolist() for token in outputs.double()[keep]]


def _pairs(heads: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(heads) for j in range(i + 1, heads)]


def _dot(x: list[float], y: list[float]) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True))


def _cosine(x: list[float], y: list[float]) -> float:
    return _dot(x, y) / math.sqrt(_dot(x, x) * _dot(y, y))


def _correlation(x: list[float], y: list[float]) -> float:
    first, second = sum(x) / len(x), sum(y) / len(y)
    return _cosine([a - first for a in x], [b - second for b in y])


def _determinant(matrix: Rows) -> float:
    if not matrix:
        return 1.0
    minors = [[row[:column] + row[column + 1 :] for row in matrix[1:]] for column in range(len(matrix))]
    return sum((-1) ** column * matrix[0][column] * _determinant(minors[column]) for column in range(len(matrix)))


def _orthonormalize(columns: Rows) -> Rows:
    basis: Rows = []
    for column in columns:
        rest = column
        for q in basis:
            along = _dot(q, column)
            rest = [a - along * b for a, b in zip(rest, q, strict=True)]
        length = math.sqrt(_dot(rest, rest))
        basis.append([a / length for a in rest])
    return basis
