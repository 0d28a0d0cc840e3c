"""The metrics as plain float64 loops over tokens and pairs of heads.

No code is shared with `headwise.metrics`. Arguments are those of the fast forms with one batch axis, and `keep` must
keep at least one token.
"""

import math
import statistics

import torch
from torch import Tensor


def head_distance(outputs: Tensor, keep: Tensor) -> float:
    """Mean over valid t and i < j of |z_ti - z_tj|, Table 1 of An et al. 2020.

    >>> head_distance(torch.tensor([[[[0.0, 0.0], [3.0, 4.0]]]]), torch.tensor([[True]]))
    5.0
    """
    distances = []
    for token in _tokens(outputs, keep):
        for i, j in _pairs(len(token)):
            distances.append(math.dist(token[i], token[j]))
    return _mean(distances)


def output_cosine(outputs: Tensor, keep: Tensor) -> float:
    """Mean over valid t and i < j of cos(O_ti, O_tj); 0 where a vector is zero.

    >>> output_cosine(torch.tensor([[[[1.0, 0.0], [3.0, 4.0]]]]), torch.tensor([[True]]))
    0.6
    """
    cosines = []
    for token in _tokens(outputs, keep):
        for i, j in _pairs(len(token)):
            cosines.append(_cosine(token[i], token[j]))
    return _mean(cosines)


def parameter_cosine(particles: Tensor) -> tuple[float, float]:
    """Mean over i < j of cos(θ_i, θ_j), and of its absolute value, for particles [M, D].

    >>> parameter_cosine(torch.tensor([[1.0, 0.0], [-2.0, 0.0]]))
    (-1.0, 1.0)
    """
    theta = particles.double().tolist()
    cosines = [_cosine(theta[i], theta[j]) for i, j in _pairs(len(theta))]
    return _mean(cosines), _mean([abs(cosine) for cosine in cosines])


def particle_norms(particles: Tensor) -> list[float]:
    """|θ_i| of each particle, for particles [M, D].

    >>> particle_norms(torch.tensor([[3.0, 4.0]]))
    [5.0]
    """
    return [math.sqrt(_dot(theta, theta)) for theta in particles.double().tolist()]


def linear_cka(outputs: Tensor, keep: Tensor) -> float:
    """Mean over i < j of HSIC(X_i, X_j) / sqrt(HSIC(X_i, X_i) HSIC(X_j, X_j)), Kornblith et al. 2019.

    Computed from the Gram matrices between tokens, not the covariances between features: HSIC is the sum over pairs of
    tokens of the product of the two centered Gram matrices.

    >>> round(linear_cka(torch.eye(3).reshape(3, 1, 1, 3).repeat(1, 1, 2, 1), torch.ones(3, 1, dtype=bool)), 6)
    1.0
    """
    tokens = _tokens(outputs, keep)
    grams = []
    for h in range(len(tokens[0])):
        rows = [token[h] for token in tokens]
        means = [_mean([row[a] for row in rows]) for a in range(len(rows[0]))]
        centered = [[x - mean for x, mean in zip(row, means, strict=True)] for row in rows]
        grams.append([_dot(x, y) for x in centered for y in centered])
    alignments = []
    for i, j in _pairs(len(grams)):
        scale = math.sqrt(_dot(grams[i], grams[i]) * _dot(grams[j], grams[j]))
        alignments.append(_dot(grams[i], grams[j]) / scale if scale else 0.0)
    return _mean(alignments)


def debiased_cka(outputs: Tensor, keep: Tensor) -> float:
    """Mean over i < j of HSIC_1(K_i, K_j) / sqrt(HSIC_1(K_i, K_i) HSIC_1(K_j, K_j)), Song et al. 2012, Eq. 5.

    Computed from the uncentered Gram matrices between tokens, with zero diagonals, of at least four tokens.

    >>> heads = torch.tensor([[0.0], [1.0], [3.0], [-2.0], [5.0]]).reshape(5, 1, 1, 1).repeat(1, 1, 2, 1)
    >>> round(debiased_cka(heads, torch.ones(5, 1, dtype=bool)), 6)
    1.0
    """
    grams = _hollow_grams(_tokens(outputs, keep))
    return _mean([_alignment(grams[i], grams[j]) for i, j in _pairs(len(grams))])


def effective_heads(outputs: Tensor, keep: Tensor) -> float:
    """Exp of the entropy of the eigenvalues of K/H, K the debiased CKA of each pair clipped to [0, 1].

    >>> heads = torch.tensor([[0.0], [1.0], [3.0], [-2.0], [5.0]]).reshape(5, 1, 1, 1).repeat(1, 1, 2, 1)
    >>> round(effective_heads(heads, torch.ones(5, 1, dtype=bool)), 6)
    1.0
    """
    grams = _hollow_grams(_tokens(outputs, keep))
    heads = range(len(grams))
    kernel = [[1.0 if i == j else min(max(_alignment(grams[i], grams[j]), 0.0), 1.0) for j in heads] for i in heads]
    eigenvalues = [max(float(x), 0.0) for x in torch.linalg.eigvals(torch.tensor(kernel, dtype=torch.float64)).real]
    shares = [x / sum(eigenvalues) for x in eigenvalues]
    return math.exp(-sum(share * math.log(share) for share in shares if share > 0))


def rbf_hsic(outputs: Tensor, keep: Tensor) -> float:
    """Mean over i < j of (1/(N-1)^2) sum_st K_st L~_st, K~ the centered kernel matrix, sigma the median distance.

    >>> heads = torch.tensor([[0.0, 0.0], [1.0, 2.0], [3.0, 6.0]]).reshape(3, 1, 2, 1)
    >>> round(rbf_hsic(heads, torch.ones(3, 1, dtype=bool)), 4)
    0.1301
    """
    tokens = _tokens(outputs, keep)
    count = range(len(tokens))
    kernels = []
    for head in range(len(tokens[0])):
        distances = [[math.dist(tokens[s][head], tokens[t][head]) for t in count] for s in count]
        apart = [x for row in distances for x in row if x > 0]
        median = statistics.median(apart) if apart else 1.0
        kernel = [[math.exp(-(x * x) / (2 * median**2)) for x in row] for row in distances]
        rows = [_mean(row) for row in kernel]
        kernels.append([[kernel[s][t] - rows[s] - rows[t] + _mean(rows) for t in count] for s in count])
    scale = (len(tokens) - 1) ** 2
    return _mean(
        [
            sum(_dot(one, other) for one, other in zip(kernels[i], kernels[j], strict=True)) / scale
            for i, j in _pairs(len(kernels))
        ]
    )


def prediction_disagreement(logits: Tensor, keep: Tensor) -> float:
    """Mean over valid t and i < j of [argmax l_i != argmax l_j], for logits [B, L, H, C].

    >>> prediction_disagreement(torch.tensor([[[[2.0, 0.0], [0.0, 1.0]]]]), torch.tensor([[True]]))
    1.0
    """
    found = []
    for rows in _tokens(logits, keep):
        classes = [row.index(max(row)) for row in rows]
        found += [float(classes[i] != classes[j]) for i, j in _pairs(len(classes))]
    return _mean(found)


def attention_jensen_shannon(weights: Tensor, keep: Tensor) -> float:
    """Mean over valid q and i < j of ½ KL(A_i | M) + ½ KL(A_j | M), M the mean of the two rows, in nats.

    >>> round(attention_jensen_shannon(torch.eye(2).reshape(1, 2, 1, 2), torch.tensor([[True]])), 6)
    0.693147
    """
    divergences = []
    for rows in _tokens(weights.transpose(1, 2), keep):
        for i, j in _pairs(len(rows)):
            middle = [(p + q) / 2 for p, q in zip(rows[i], rows[j], strict=True)]
            divergences.append((_divergence(rows[i], middle) + _divergence(rows[j], middle)) / 2)
    return _mean(divergences)


def generalized_jensen_shannon(weights: Tensor, keep: Tensor) -> float:
    """Mean over valid q of (1/H) Σ_h KL(A_h | M), M the mean row of all heads, in nats.

    >>> round(generalized_jensen_shannon(torch.eye(4).reshape(1, 4, 1, 4), torch.tensor([[True]])), 6)
    1.386294
    """
    divergences = []
    for rows in _tokens(weights.transpose(1, 2), keep):
        middle = [_mean([row[k] for row in rows]) for k in range(len(rows[0]))]
        divergences.append(_mean([_divergence(row, middle) for row in rows]))
    return _mean(divergences)


def attention_entropy(weights: Tensor, keep: Tensor) -> list[float]:
    """Mean over valid q of -Σ_k A_hqk log A_hqk for each head h, in nats.

    >>> attention_entropy(torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[True]]))
    [0.0]
    """
    queries = _tokens(weights.transpose(1, 2), keep)
    heads = range(len(queries[0]))
    return [_mean([-sum(p * math.log(p) for p in rows[h] if p > 0) for rows in queries]) + 0.0 for h in heads]


def _tokens(vectors: Tensor, keep: Tensor) -> list[list[list[float]]]:
    return [vectors[b, t].to(torch.float64).tolist() for b, t in keep.nonzero().tolist()]


def _pairs(heads: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(heads) for j in range(i + 1, heads)]


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _dot(x: list[float], y: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(x, y, strict=True))


def _cosine(x: list[float], y: list[float]) -> float:
    scale = math.sqrt(_dot(x, x) * _dot(y, y))
    return _dot(x, y) / scale if scale else 0.0


def _divergence(p: list[float], q: list[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def _hollow_grams(tokens: list[list[list[float]]]) -> list[list[list[float]]]:
    """Return for each head the Gram matrix of its tokens with a zero diagonal."""
    count = range(len(tokens))
    return [
        [[0.0 if s == t else _dot(tokens[s][head], tokens[t][head]) for t in count] for s in count]
        for head in range(len(tokens[0]))
    ]


def _alignment(k: list[list[float]], m: list[list[float]]) -> float:
    own = _unbiased_hsic(k, k) * _unbiased_hsic(m, m)
    return _unbiased_hsic(k, m) / math.sqrt(own) if own > 0 else 0.0


def _unbiased_hsic(k: list[list[float]], m: list[list[float]]) -> float:
    n = len(k)
    product = sum(_dot(row, other) for row, other in zip(k, m, strict=True))
    rows, others = [sum(row) for row in k], [sum(row) for row in m]
    means = sum(rows) * sum(others) / ((n - 1) * (n - 2))
    return (product + means - 2 / (n - 2) * _dot(rows, others)) / (n * (n - 3))
