"""Disagreement terms: how alike the heads of one attention are, as scalars a user adds to a loss.

Li et al. 2021 maximize a disagreement D; here the similarity s = -D is returned, to be minimized. Terms average over
all H² ordered pairs of heads, a head with itself included, and are computed from the mean over heads, without forming
pairs. Means run over valid tokens only (`keep`, True = valid); padded positions may hold anything, NaN included, and
receive no gradient. Half precision is summed and returned in float32; float64 stays float64.

Every term also comes as `*_sum`, a sum over valid tokens and their number, to pool several calls token by token. With
no valid token the mean is 0: raising would require reading the mask's values in every step.
"""

import torch
from torch import Tensor

from headwise.similarity.mean_cosine import mean_cosine
from headwise.similarity.tokens import accumulation_dtype, autocast_off, require_floating, require_keep


def output_similarity(outputs: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean cosine between the outputs of two heads at one token.

    s = mean_t (1/H²) Σ_ij cos(O_ti, O_tj)  (Li et al. 2021, Eq. 7, s = -D), computed as
    |(1/H) Σ_h O_th/|O_th||². It is 1 when all heads agree and 1/H, not 0, when they are orthogonal: the H
    pairs of a head with itself count. Its minimum 0 is that of directions that cancel, such as a and -a. The paper
    does not define the vectors; as in its released code they are each head's output at one token, before the
    output projection.

    A vector shorter than 1e-12 has no direction: its cosines are 0 and it receives no gradient.

    Args:
        outputs: [..., H, e], for example [B, L, H, e].
        keep: [...], bool, True = valid token; None keeps all. With no valid token the result is 0.

    Returns:
        A scalar in [0, 1], float32 or float64.

    Raises:
        ShapeError: `outputs` is not floating or has fewer than two axes.
        MaskError: `keep` is not bool or not of the leading shape of `outputs`.

    >>> heads = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[1.0, 1.0], [3.0, 4.0]]])
    >>> output_similarity(heads, torch.tensor([True, False]))
    tensor(0.5000)
    """
    return _mean(output_similarity_sum(outputs, keep))


def output_similarity_sum(outputs: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`output_similarity` summed over valid tokens, and their number; same arguments and refusals.

    >>> output_similarity_sum(torch.eye(4).expand(3, 4, 4))
    (tensor(0.7500), tensor(3))
    """
    _require_vectors("outputs", outputs, keep)
    return _sum_and_count(mean_cosine(outputs, keep), keep)


def subspace_similarity(values: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean cosine between the values of two heads at one key position.

    s = mean_t (1/H²) Σ_ij cos(V_ti, V_tj)  (Li et al. 2021, Eq. 5, s = -D). The same function and refusals as
    `output_similarity`, on projected values [..., H, e]; `keep` marks valid key positions. Under grouped-query
    attention it compares the G key/value heads instead of the H heads.

    >>> subspace_similarity(torch.eye(2).expand(3, 5, 2, 2))
    tensor(0.5000)
    """
    return _mean(subspace_similarity_sum(values, keep))


def subspace_similarity_sum(values: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`subspace_similarity` summed over valid positions, and their number; same arguments and refusals.

    >>> subspace_similarity_sum(torch.eye(4).expand(3, 4, 4))
    (tensor(0.7500), tensor(3))
    """
    _require_vectors("values", values, keep)
    return _sum_and_count(mean_cosine(values, keep), keep)


def position_similarity(weights: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean over queries of the overlap of the attention rows of two heads.

    s = mean_q (1/H²) Σ_ij Σ_k A_iqk A_jqk  (Li et al. 2021, Eq. 6, s = -D), computed as
    |(1/H) Σ_h A_hq|². Summed over keys and averaged over queries, so that length does not scale it.

    This is a loss, not a measure of diversity: rows are not normalized, and its minimum is all heads uniform
    (1/K), below disjoint one-hot heads (1/H) when K > H. `normalized_position_similarity` is the measure.

    Args:
        weights: [..., H, Q, K], attention weights, before dropout; padded keys carry zero weight.
        keep: [..., Q], bool, True = valid query; None keeps all. With no valid query the result is 0.

    Returns:
        A scalar in [1/K, 1] for rows that sum to one, float32 or float64; a row of zeros, that of a query without
        keys, adds 0.

    Raises:
        ShapeError: `weights` is not floating or has fewer than three axes.
        MaskError: `keep` is not bool or not of shape [..., Q].

    >>> uniform = torch.full((1, 8, 5, 64), 1 / 64)
    >>> position_similarity(uniform)
    tensor(0.0156)
    """
    return _mean(position_similarity_sum(weights, keep))


def position_similarity_sum(weights: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`position_similarity` summed over valid queries, and their number; same arguments and refusals.

    >>> position_similarity_sum(torch.tensor([[[0.5, 0.5, 0.0]], [[0.2, 0.3, 0.5]]]))
    (tensor(0.3450), tensor(1))
    """
    _require_weights(weights, keep)
    return position_similarity_of_mean_sum(weights.mean(-3, dtype=accumulation_dtype(weights)), keep)


def position_similarity_of_mean_sum(mean: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`position_similarity_sum` from the mean of the weights over the heads, [..., Q, K]; see `mean_weights`.

    >>> position_similarity_of_mean_sum(torch.tensor([[0.35, 0.4, 0.25]]))
    (tensor(0.3450), tensor(1))
    """
    require_floating("mean", mean, 2, "[..., Q, K]")
    if keep is not None:
        require_keep(keep, mean.shape[:-1])
        # Filled before the square: what follows neither sees a padded NaN nor sends a gradient to it.
        mean = mean.masked_fill(~keep.unsqueeze(-1), 0.0)
    mean = mean.to(accumulation_dtype(mean))
    return _sum_and_count(mean.square().sum(-1), keep)


def position_squared_difference(weights: Tensor, keep: Tensor | None = None) -> Tensor:
    """Minus the mean squared difference of the attention rows of two heads, so that it is minimized.

    s = -mean_q (1/H²) Σ_ij Σ_k (A_iqk - A_jqk)²  (Li et al. 2021, footnote 3), computed as
    -2 Σ_k Var_h(A_hqk), that is -2 (mean_h |A_h|² - |mean_h A_h|²). It is 0 when all heads
    attend alike; unlike `position_similarity` it does not favor heads that all become uniform.

    Args:
        weights: [..., H, Q, K], attention weights, before dropout.
        keep: [..., Q], bool, True = valid query; None keeps all. With no valid query the result is 0.

    Returns:
        A scalar in [-2 (1 - 1/H), 0] for rows that sum to one, float32 or float64.

    Raises:
        ShapeError: `weights` is not floating or has fewer than three axes.
        MaskError: `keep` is not bool or not of shape [..., Q].

    >>> position_squared_difference(torch.eye(4).reshape(1, 4, 1, 4))
    tensor(-1.5000)
    """
    return _mean(position_squared_difference_sum(weights, keep))


def position_squared_difference_sum(weights: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`position_squared_difference` summed over valid queries, and their number; same arguments and refusals.

    >>> position_squared_difference_sum(torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]]]))
    (tensor(-1.), tensor(1))
    """
    _require_weights(weights, keep)
    wide = weights.to(accumulation_dtype(weights))
    if keep is not None:
        wide = wide.masked_fill(~keep.unsqueeze(-2).unsqueeze(-1), 0.0)
    mean_square = wide.square().sum(-1).mean(-2)
    return _sum_and_count(-2 * (mean_square - wide.mean(-3).square().sum(-1)), keep)


def normalized_position_similarity(weights: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean cosine between the attention rows of two heads at one query.

    s = mean_q (1/H²) Σ_ij cos(A_iq, A_jq). Not in Li et al. 2021: their position term with the rows
    brought to unit length, so that sharp and flat heads compare. 1 when all heads attend alike, 1/H when no key
    is shared.

    Args:
        weights: [..., H, Q, K], attention weights, before dropout.
        keep: [..., Q], bool, True = valid query; None keeps all. With no valid query the result is 0.

    Returns:
        A scalar in [1/H, 1], float32 or float64; lower where rows are all zero, which count as in
        `output_similarity`.

    Raises:
        ShapeError: `weights` is not floating or has fewer than three axes.
        MaskError: `keep` is not bool or not of shape [..., Q].

    >>> normalized_position_similarity(torch.full((1, 8, 5, 64), 1 / 64))
    tensor(1.)
    """
    return _mean(normalized_position_similarity_sum(weights, keep))


def normalized_position_similarity_sum(weights: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`normalized_position_similarity` summed over valid queries, and their number.

    >>> normalized_position_similarity_sum(torch.tensor([[[3.0, 4.0]], [[0.0, 1.0]]]))
    (tensor(0.9000), tensor(1))
    """
    _require_weights(weights, keep)
    return _sum_and_count(mean_cosine(weights.movedim(-3, -2), keep), keep)


def frobenius_penalty(weights: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean squared Frobenius distance of the overlap of attention rows from the identity.

    P = mean_b ‖A_b A_bᵀ - I‖²_F  (Lin et al. 2017, the penalty that An et al. 2020 compare with), over the
    H x H overlaps of the heads. Its minimum 0 requires one-hot rows on different tokens. Squared, as in the
    paper; the released codes take the norm unsquared, or of the T x T matrix.

    Args:
        weights: [..., H, T], one attention row per head; padded tokens carry zero weight. For the weights
            [B, H, Q, K] of multi-head attention pass `weights.transpose(1, 2)`.
        keep: [...], bool, True = valid example; None keeps all. With no valid example the result is 0.

    Returns:
        A scalar of at least 0, float32 or float64.

    Raises:
        ShapeError: `weights` is not floating or has fewer than two axes.
        MaskError: `keep` is not bool or not of the leading shape of `weights`.

    >>> frobenius_penalty(torch.tensor([[[0.5, 0.5], [0.0, 1.0]]]))
    tensor(0.7500)
    """
    return _mean(frobenius_penalty_sum(weights, keep))


def frobenius_penalty_sum(weights: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`frobenius_penalty` summed over valid examples, and their number; same arguments and refusals.

    >>> frobenius_penalty_sum(torch.full((2, 1, 4), 0.5))
    (tensor(0.), tensor(2))
    """
    _require_vectors("weights", weights, keep)
    wide = weights.to(accumulation_dtype(weights))
    if keep is not None:
        wide = wide.masked_fill(~keep[..., None, None], 0.0)
    with autocast_off(wide):
        overlap = wide @ wide.mT
    excess = overlap - torch.eye(wide.shape[-2], dtype=wide.dtype, device=wide.device)
    penalty = excess.square().sum((-2, -1))
    return _sum_and_count(penalty if keep is None else penalty.masked_fill(~keep, 0.0), keep)


def _sum_and_count(per_token: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum of a term that is already 0 where not kept, and the number of valid tokens."""
    if keep is None:
        count = torch.full((), per_token.numel(), dtype=torch.int64, device=per_token.device)
        return per_token.sum(), count
    return per_token.sum(), keep.sum()


def _mean(sum_and_count: tuple[Tensor, Tensor]) -> Tensor:
    total, count = sum_and_count
    return total / count.clamp_min(1)


def _require_vectors(name: str, vectors: Tensor, keep: Tensor | None) -> None:
    require_floating(name, vectors, 2, "[..., H, e]")
    if keep is not None:
        require_keep(keep, vectors.shape[:-2])


def _require_weights(weights: Tensor, keep: Tensor | None) -> None:
    require_floating("weights", weights, 3, "[..., H, Q, K]")
    if keep is not None:
        require_keep(keep, (*weights.shape[:-3], weights.shape[-2]))
