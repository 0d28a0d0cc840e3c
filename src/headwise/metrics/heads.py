"""Measures of how different the heads of one attention are, on tensors already read from a model.

They are not losses, and no gradient flows through them (to lower a similarity, use `headwise.similarity`). Pairs are
unordered pairs of different heads, i < j. A mean over tokens is over valid tokens only (`keep`, True = valid) and needs
at least one; to pool batches, weight each by its number of valid tokens. None of them measures the quality of a model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headwise.errors import ShapeError, require_integer
from headwise.functional.tokens import require_floating
from headwise.metrics.pairs import average_pairs, require_particles, require_two_heads, select_outputs, select_some


class ParameterCosine(NamedTuple):
    """Mean of the cosines between particles over pairs i < j, signed and absolute.

    Attributes:
        mean: [*], in [-1/(M-1), 1].
        mean_absolute: [*], in [0, 1]; 0 only when all particles are orthogonal.
    """

    mean: Tensor
    mean_absolute: Tensor


@torch.no_grad()
def head_distance(outputs: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean Euclidean distance between the outputs of two heads.

    Dist = mean_t mean_{i<j} |z_ti - z_tj|  (An et al. 2020, "Dist" in Table 1). Not normalized: it grows with the
    norm of the outputs, so report `output_cosine` or `linear_cka` as well.

    Args:
        outputs: [..., H, e]; one item is an example ([N, H, e], the paper's sentence model) or a token.
        keep: [...], bool, True = valid item; None keeps all.

    Returns:
        A scalar of at least 0, in the unit of the outputs.

    Raises:
        ShapeError: Wrong shape or dtype, fewer than two heads, or no item.
        MaskError: `keep` is not bool, of another shape, or keeps no item.

    >>> head_distance(torch.tensor([[[0.0, 0.0], [3.0, 4.0]]]))
    tensor(5.)
    """
    items = select_outputs("outputs", outputs, keep)
    distances = torch.cdist(items, items, compute_mode="donot_use_mm_for_euclid_dist")
    return average_pairs(distances).mean()


@torch.no_grad()
def output_cosine(outputs: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean cosine between the outputs of two heads at one token.

    mean_t mean_{i<j} cos(O_ti, O_tj). For nonzero vectors this is (H s - 1)/(H - 1), where s is the
    `output_similarity` of the loss, which includes pairs of a head with itself; here orthogonal heads give 0. The
    cosine of a zero vector is 0.

    Args and raises as for `head_distance`.

    Returns:
        A scalar in [-1/(H-1), 1], invariant to the scale of each head.

    >>> output_cosine(torch.tensor([[[1.0, 0.0], [3.0, 4.0]]]))
    tensor(0.6000)
    """
    units = torch.nn.functional.normalize(select_outputs("outputs", outputs, keep), dim=-1)
    pairs = units.sum(-2).square().sum(-1) - units.square().sum((-2, -1))
    heads = units.shape[-2]
    return pairs.mean() / (heads * (heads - 1))


@torch.no_grad()
def parameter_cosine(particles: Tensor) -> ParameterCosine:
    """Mean cosine, and mean absolute cosine, between the parameters of two heads.

    mean_{i<j} cos(θ_i, θ_j) and mean_{i<j} |cos(θ_i, θ_j)|. Only the first can be near 0 when heads are parallel and
    antiparallel. The cosine of a zero particle is 0.

    Args:
        particles: [*, M, D], one flattened head per row.

    Returns:
        `ParameterCosine(mean [*], mean_absolute [*])`, float64.

    Raises:
        ShapeError: Wrong shape or dtype, or fewer than two particles.

    >>> parameter_cosine(torch.tensor([[1.0, 0.0], [-2.0, 0.0], [0.0, 1.0]]))
    ParameterCosine(mean=tensor(-0.3333, dtype=torch.float64), mean_absolute=tensor(0.3333, dtype=torch.float64))
    """
    require_particles("particles", particles, "[*, M, D]")
    units = torch.nn.functional.normalize(particles.double(), dim=-1)
    cosines = units @ units.mT
    return ParameterCosine(average_pairs(cosines), average_pairs(cosines.abs()))


@torch.no_grad()
def particle_norms(particles: Tensor) -> Tensor:
    """Euclidean norm of the parameters of each head, |θ_i|: [*, M, D] -> [*, M], float64.

    Growing norms raise every Euclidean distance without making heads more different. `ShapeError` for another shape or
    dtype.

    >>> particle_norms(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    tensor([5., 1.], dtype=torch.float64)
    """
    require_floating("particles", particles, 2, "[*, M, D]")
    return torch.linalg.vector_norm(particles.double(), dim=-1)


@torch.no_grad()
def attention_jensen_shannon(weights: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean Jensen-Shannon divergence between the attention rows of two heads, in nats.

    mean_q mean_{i<j} [ S((A_iq + A_jq)/2) - (S(A_iq) + S(A_jq))/2 ], where S is the entropy (Lin 1991): 0 if heads
    attend alike, log 2 if they share no key.

    Args:
        weights: [..., H, Q, K], attention weights, before dropout; each row sums to one.
        keep: [..., Q], bool, True = valid query; None keeps all.

    Returns:
        A scalar in [0, log 2].

    Raises:
        ShapeError: Wrong shape or dtype, fewer than two heads, or no query.
        MaskError: `keep` is not bool, of another shape, or keeps no query.

    >>> attention_jensen_shannon(torch.eye(4).reshape(1, 4, 1, 4))
    tensor(0.6931)
    """
    rows = _select_rows(weights, keep)
    require_two_heads("weights", rows.shape[-2])
    heads = rows.shape[-2]
    entropy = _entropy(rows)
    total = rows.new_zeros(())
    for offset in range(1, heads):
        first, second = rows[:, :-offset], rows[:, offset:]
        separate = (entropy[:, :-offset] + entropy[:, offset:]) / 2
        total = total + (_entropy((first + second) / 2) - separate).clamp_min(0).sum()
    return total / (len(rows) * heads * (heads - 1) / 2)


@torch.no_grad()
def generalized_jensen_shannon(weights: Tensor, keep: Tensor | None = None) -> Tensor:
    """Jensen-Shannon divergence between the attention rows of all heads, in nats.

    mean_q [ S(mean_h A_hq) - mean_h S(A_hq) ], where S is the entropy (Lin 1991, with equal weights): the mutual
    information of the head and the attended key. It takes one pass over heads; `attention_jensen_shannon` takes pairs.

    Args and raises as for `attention_jensen_shannon`.

    Returns:
        A scalar in [0, log H]: 0 if heads attend alike, log H if no two share a key.

    >>> generalized_jensen_shannon(torch.eye(4).reshape(1, 4, 1, 4)).exp()
    tensor(4.)
    """
    rows = _select_rows(weights, keep)
    require_two_heads("weights", rows.shape[-2])
    return (_entropy(rows.mean(1)) - _entropy(rows).mean(1)).clamp_min(0).mean()


@torch.no_grad()
def attention_entropy(weights: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean entropy of each head's attention rows, in nats.

    mean_q [ -Σ_k A_hqk log A_hqk ]: 0 for a head that attends to one key, log K for a uniform one.

    Args and raises as for `attention_jensen_shannon`.

    Returns:
        [H], in [0, log K].

    >>> attention_entropy(torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]]]))
    tensor([0.0000, 0.6931])
    """
    return _entropy(_select_rows(weights, keep)).mean(0)


def _entropy(rows: Tensor) -> Tensor:
    return torch.special.entr(rows).sum(-1)


def _select_rows(weights: Tensor, keep: Tensor | None) -> Tensor:
    """Return the attention rows of the valid queries, [T, H, K]."""
    require_floating("weights", weights, 3, "[..., H, Q, K]")
    return select_some(weights.movedim(-3, -2), keep)


@torch.no_grad()
def prediction_disagreement(logits: Tensor, keep: Tensor | None = None) -> Tensor:
    """Share of tokens at which two heads, each read by itself, predict another class.

    mean_t mean_{i<j} [argmax_c l_tic != argmax_c l_tjc] (Kuncheva and Whitaker 2003), where l_ti is what the model's
    reading makes of one head's contribution alone. Report it at the last layer, or with a fitted probe: at other layers
    the reading is not the model's. A sign or a common offset changes it although the heads say the same.

    Args and raises as for `head_distance`, with logits [..., H, C] as outputs.

    Returns:
        A float64 scalar in [0, 1].

    >>> prediction_disagreement(torch.tensor([[[2.0, 0.0], [0.0, 1.0], [3.0, 1.0]]]))
    tensor(0.6667, dtype=torch.float64)
    """
    classes = select_outputs("logits", logits, keep).argmax(-1)
    return average_pairs((classes.unsqueeze(-1) != classes.unsqueeze(-2)).double()).mean()


@torch.no_grad()
def rbf_hsic(outputs: Tensor, keep: Tensor | None = None, *, tokens: int = 512) -> Tensor:
    """Mean Hilbert-Schmidt independence criterion between two heads with Gaussian kernels.

    HSIC_0 = tr(K J L J) / (N - 1)^2 (Gretton et al. 2005) with k(x, y) = exp(-|x - y|^2 / 2 sigma^2), sigma the median
    distance between tokens of each head, which makes it indifferent to scale. It sees copies that no linear kernel
    does, such as |z| of z, weakly where heads are wide. Its value for a copy is not fixed.

    Args and raises as for `head_distance`, and:
        tokens: The most tokens compared, at least 2, spread evenly over those given: the cost grows with their square.

    Returns:
        A float64 scalar of at least 0; a head that is constant over tokens is independent of every other.

    Raises:
        SettingError: `tokens` is no such number.
        ShapeError: There are fewer than two tokens.

    >>> rbf_hsic(torch.tensor([[[0.0], [0.0]], [[1.0], [2.0]], [[3.0], [6.0]]]))
    tensor(0.1301, dtype=torch.float64)
    """
    require_integer("tokens", tokens, low=2)
    items = select_outputs("outputs", outputs, keep).double()
    if len(items) < 2:
        raise ShapeError(f"there is {len(items)} token; HSIC needs at least 2.")
    if len(items) > tokens:
        items = items[torch.linspace(0, len(items) - 1, tokens).round().long()]
    kernels = []
    for head in items.unbind(1):
        distances = torch.cdist(head, head, compute_mode="donot_use_mm_for_euclid_dist")
        apart = distances[distances > 0]
        # torch's median is the lower of two middle values, and of the negatives the upper one
        median = (apart.median() - (-apart).median()) / 2 if len(apart) else 1.0
        kernel = (-0.5 * (distances / median).square()).exp()
        rows = kernel.mean(0)
        kernels.append((kernel - rows - rows[:, None] + rows.mean()).flatten())
    stacked = torch.stack(kernels)
    return average_pairs(stacked @ stacked.mT / (len(items) - 1) ** 2)
