"""Disagreement terms: how alike the heads of one attention are, as scalars a user adds to a loss.

Li et al. 2021 maximize a disagreement D; here the similarity s = -D is returned, to be minimized. Terms average over
all H² ordered pairs of heads, a head with itself included, and are computed from the mean over heads, without forming
pairs. Means run over valid tokens only (`keep`, True = valid); padded positions may hold anything, NaN included, and
receive no gradient. Half precision is summed and returned in float32; float64 stays float64.

Every term also comes as `*_sum`, a sum over valid tokens and their number, to pool several calls token by token. With
no valid token the mean is 0: raising would require reading the mask's values in every step.

Small tensors of attentions of one shape are copied into one stack and measured at once, as a launch costs more than the
copy. Larger ones are measured one attention after another.

The similarities of the papers as values that a penalty lowers, weighted sums, the protocols for others, and terms on
the query heads of grouped attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from headwise.errors import SettingError, require_range
from headwise.functional.cosine import mean_cosine
from headwise.functional.tokens import accumulation_dtype, autocast_off, require_floating, require_keep
from headwise.heads.heads import Site, group_features
from headwise.settings import check_fields


def output_similarity(outputs: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean cosine between the outputs of two heads at one token.

    s = mean_t (1/H²) Σ_ij cos(O_ti, O_tj)  (Li et al. 2021, Eq. 7, s = -D), computed as
    |(1/H) Σ_h O_th/|O_th||². It is 1 when all heads agree and 1/H, not 0, when they are orthogonal: the H
    pairs of a head with itself count. Its minimum 0 is that of directions that cancel, such as a and -a. As in the
    paper's released code, the vectors are each head's output at one token, before the output projection.

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
    """`output_similarity` summed over valid tokens, and their number; same arguments and refusals."""
    _require_vectors("outputs", outputs, keep)
    return _add_up(mean_cosine(outputs, keep), keep)


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
    """`subspace_similarity` summed over valid positions, and their number; same arguments and refusals."""
    _require_vectors("values", values, keep)
    return _add_up(mean_cosine(values, keep), keep)


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

    >>> position_similarity(torch.full((1, 8, 5, 64), 1 / 64))
    tensor(0.0156)
    """
    return _mean(position_similarity_sum(weights, keep))


def position_similarity_sum(weights: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`position_similarity` summed over valid queries, and their number; same arguments and refusals."""
    _require_weights(weights, keep)
    return _add_up(_overlap(_average_heads(weights), keep), keep)


def position_similarity_of_mean_sum(mean: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`position_similarity_sum` from the mean of the weights over the heads, [..., Q, K]; see `mean_weights`.

    >>> position_similarity_of_mean_sum(torch.tensor([[0.35, 0.4, 0.25]]))
    (tensor(0.3450), tensor(1))
    """
    require_floating("mean", mean, 2, "[..., Q, K]")
    if keep is not None:
        require_keep(keep, mean.shape[:-1])
    return _add_up(_overlap(mean, keep), keep)


def position_squared_difference(weights: Tensor, keep: Tensor | None = None) -> Tensor:
    """Minus the mean squared difference of the attention rows of two heads, so that it is minimized.

    s = -mean_q (1/H²) Σ_ij Σ_k (A_iqk - A_jqk)²  (Li et al. 2021, footnote 3), computed as
    -2 Σ_k Var_h(A_hqk), that is -2 (mean_h |A_h|² - |mean_h A_h|²). It is 0 when all heads
    attend alike; unlike `position_similarity` it does not favor heads that all become uniform.

    Args and raises are those of `position_similarity`; the result is in [-2 (1 - 1/H), 0] for rows that sum to one.

    >>> position_squared_difference(torch.eye(4).reshape(1, 4, 1, 4))
    tensor(-1.5000)
    """
    return _mean(position_squared_difference_sum(weights, keep))


def position_squared_difference_sum(weights: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`position_squared_difference` summed over valid queries, and their number; same arguments and refusals."""
    _require_weights(weights, keep)
    wide = weights.to(accumulation_dtype(weights))
    if keep is not None:
        wide = wide.masked_fill(~keep.unsqueeze(-2).unsqueeze(-1), 0.0)
    mean_square = wide.square().sum(-1).mean(-2)
    return _add_up(-2 * (mean_square - wide.mean(-3).square().sum(-1)), keep)


def normalized_position_similarity(weights: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean cosine between the attention rows of two heads at one query.

    s = mean_q (1/H²) Σ_ij cos(A_iq, A_jq). Not in Li et al. 2021: their position term with the rows
    brought to unit length, so that sharp and flat heads compare. 1 when all heads attend alike, 1/H when no key
    is shared, lower where rows are all zero, which count as in `output_similarity`.

    Args and raises are those of `position_similarity`.

    >>> normalized_position_similarity(torch.full((1, 8, 5, 64), 1 / 64))
    tensor(1.)
    """
    return _mean(normalized_position_similarity_sum(weights, keep))


def normalized_position_similarity_sum(weights: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`normalized_position_similarity` summed over valid queries, and their number; same arguments and refusals."""
    _require_weights(weights, keep)
    return _add_up(mean_cosine(weights.movedim(-3, -2), keep), keep)


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
    """`frobenius_penalty` summed over valid examples, and their number; same arguments and refusals."""
    _require_vectors("weights", weights, keep)
    wide = weights.to(accumulation_dtype(weights))
    if keep is not None:
        wide = wide.masked_fill(~keep[..., None, None], 0.0)
    with autocast_off(wide):
        overlap = wide @ wide.mT
    excess = overlap - torch.eye(wide.shape[-2], dtype=wide.dtype, device=wide.device)
    penalty = excess.square().sum((-2, -1))
    return _add_up(penalty if keep is None else penalty.masked_fill(~keep, 0.0), keep)


def _average_heads(weights: Tensor) -> Tensor:
    return weights.mean(-3, dtype=accumulation_dtype(weights))


def _overlap(mean: Tensor, keep: Tensor | None) -> Tensor:
    """Return |mean_h A_hq|^2 of each query, [..., Q, K] -> [..., Q]; 0 where not kept."""
    if keep is not None:
        # filled before the square, which then neither sees a padded NaN nor sends a gradient to it
        mean = mean.masked_fill(~keep.unsqueeze(-1), 0.0)
    return mean.to(accumulation_dtype(mean)).square().sum(-1)


def _add_up(per_token: Tensor, keep: Tensor | None, *, each: bool = False) -> tuple[Tensor, Tensor]:
    """Return the sum of a term that is 0 where not kept, and the number of valid tokens; [S] of `each` of S."""
    if each:
        per_token, keep = per_token.flatten(1), None if keep is None else keep.flatten(1)
    axis = 1 if each else None
    if keep is not None:
        return per_token.sum(axis), keep.sum(axis)
    total = per_token.sum(axis)
    return total, torch.full_like(total, per_token.numel() // max(total.numel(), 1), dtype=torch.int64)


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


# Largest tensors of one attention that are stacked, in numbers: on a CPU copying soon costs more than calls do.
MOST_ON_CPU, MOST_ON_ACCELERATOR = 2**16, 2**22


@runtime_checkable
class Poolable(Protocol):
    """A similarity that is computed for several attentions at once."""

    def sum_and_count_each(self, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what `sum_and_count` does for each of S attentions, [S], given a stack of what it reads, [S, ...]."""
        ...


def measure_together(
    similarity: object, tensors: list[Tensor], keeps: list[Tensor | None]
) -> tuple[Tensor, Tensor] | None:
    """Return sums and numbers of several attentions, each [S], or None where they are measured one by one."""
    first = tensors[0]
    most = MOST_ON_CPU if first.device.type == "cpu" else MOST_ON_ACCELERATOR
    if len(tensors) < 2 or not isinstance(similarity, Poolable) or first.numel() > most:
        return None
    given = [own for own in keeps if own is not None]
    if len({(own.shape, own.dtype, own.device) for own in tensors}) > 1 or len({own.shape for own in given}) > 1:
        return None
    if given and len(given) < len(keeps):
        return None
    return similarity.sum_and_count_each(torch.stack(tensors), torch.stack(given) if given else None)


# What a similarity may read: a field of a capture, or the parameters of the attention.
PARAMETERS = "parameters"
READABLE = ("outputs", "values", "weights", "mean_weights", PARAMETERS)


@runtime_checkable
class Similarity(Protocol):
    """A similarity of heads; anything with these two attributes can be added to the built-in ones."""

    @property
    def reads(self) -> str:
        """The field of a capture it is computed from: "outputs", "values", "weights" or "mean_weights"."""
        ...

    def sum_and_count(self, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sum over valid tokens and their number, given the field named by `reads`."""
        ...


@runtime_checkable
class SiteSimilarity(Protocol):
    """A similarity of heads that reads parameters of the attention, with what it computed or alone."""

    @property
    def reads(self) -> str:
        """As for `Similarity`, or "parameters" where no call of the model is needed."""
        ...

    def sum_and_count_at(self, site: Site, tensor: Tensor | None, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return sum and number, given the field named by `reads`; None for "parameters"."""
        ...


class Arithmetic:
    """`+` between terms and `*` with a number."""

    def __add__(self, other: Similarity | SiteSimilarity | Sum) -> Sum:
        return Sum((*list_parts(self), *list_parts(other)))

    def __mul__(self, weight: float) -> Sum:
        require_range("weight of a term", weight)
        return Sum(tuple((weight * own, similarity) for own, similarity in list_parts(self)))

    __rmul__ = __mul__


@dataclass(frozen=True)
class Sum(Arithmetic):
    """A weighted sum of similarities, made by `+` and `*`: `Output() + 0.5 * Position()`."""

    parts: tuple[tuple[float, Similarity | SiteSimilarity], ...]

    def __str__(self) -> str:
        return " + ".join(f"{weight:g} * {similarity}" for weight, similarity in self.parts)


@dataclass(frozen=True)
class Output(Arithmetic):
    """Similarity of head outputs: (1/H^2) sum_ij cos(O_i, O_j), minus Eq. 7 of Li et al. 2021; per query.

    1 for heads that agree, 1/H for orthogonal ones, and least, 0, where directions cancel, as those of a and -a do.
    """

    reads = "outputs"

    def sum_and_count(self, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return sum and number over valid queries."""
        return output_similarity_sum(tensor, keep)

    def sum_and_count_each(self, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the same of S attentions at once, [S, B, Q, H, e] -> [S]."""
        return _add_up(mean_cosine(tensor, keep), keep, each=True)


@dataclass(frozen=True)
class Subspace(Arithmetic):
    """Similarity of projected values: (1/H^2) sum_ij cos(V_i, V_j), minus Eq. 5 of Li et al. 2021; per key."""

    reads = "values"

    def sum_and_count(self, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return sum and number over valid keys."""
        return subspace_similarity_sum(tensor, keep)

    def sum_and_count_each(self, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the same of S attentions at once, [S, B, K, G, e] -> [S]."""
        return _add_up(mean_cosine(tensor, keep), keep, each=True)


@dataclass(frozen=True, repr=False)
class Position(Arithmetic):
    """Overlap of attended positions: (1/H^2) sum_ij sum_k A_ik A_jk, minus Eq. 6 of Li et al. 2021; per query.

    Its minimum is not diversity but collapse to uniform attention; monitor a normalized similarity as well.

    Args:
        recompute: False computes attention explicitly and keeps the weights of all heads for the backward pass. True
            leaves attention to the fused kernel and computes the weights a second time, of some heads at a time, in
            both passes: for long sequences, whose H Q K weights do not fit in memory. The value is the same. It is
            never chosen by size or device: a fused kernel draws dropout differently, so the same seed would give a
            different run.
    """

    recompute: bool = False

    __post_init__ = check_fields

    @property
    def reads(self) -> str:
        """The weights, or their mean over heads."""
        return "mean_weights" if self.recompute else "weights"

    def sum_and_count(self, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return sum and number over valid queries."""
        measure = position_similarity_of_mean_sum if self.recompute else position_similarity_sum
        return measure(tensor, keep)

    def sum_and_count_each(self, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the same of S attentions at once, [S, B, H, Q, K] or means [S, B, Q, K] -> [S]."""
        return _add_up(_overlap(tensor if self.recompute else _average_heads(tensor), keep), keep, each=True)

    def __repr__(self) -> str:
        # as in records of runs made before this option existed
        return "Position(recompute=True)" if self.recompute else "Position()"


@dataclass(frozen=True)
class PositionSquaredDifference(Arithmetic):
    """Minus the mean squared difference of attention rows, the variant of footnote 3 of Li et al. 2021."""

    reads = "weights"

    def sum_and_count(self, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return sum and number over valid queries."""
        return position_squared_difference_sum(tensor, keep)


@dataclass(frozen=True)
class Frobenius(Arithmetic):
    """||A_q A_q^T - I||_F^2 over the attention rows A_q [H, K] of one query (Lin et al. 2017); per query.

    Squared, as in the paper. Not a mean over pairs: it grows with H^2, up to H (H - 1) for heads that all attend to
    one token, and its minimum 0 requires one-hot rows on different tokens.
    """

    reads = "weights"

    def sum_and_count(self, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return sum and number over valid queries."""
        return frobenius_penalty_sum(tensor.transpose(1, 2), keep)


def list_parts(term: object) -> tuple[tuple[float, Similarity | SiteSimilarity], ...]:
    """Return the similarities of a term with their weights.

    Raises:
        SettingError: It is no term.
    """
    if isinstance(term, Sum):
        return term.parts
    if isinstance(term, Similarity | SiteSimilarity) and not isinstance(term, type):
        return ((1.0, term),)
    raise SettingError(
        f"term is {term!r}; expected CKA(), Output(), Subspace(), Position(), Frobenius() or a weighted sum of such."
    )


# Axis of the heads in what a term reads.
AXES = {"outputs": 2, "weights": 1}


@dataclass(frozen=True)
class GroupedQueries(Arithmetic):
    """A term on the query heads of one group, or on groups, under grouped queries.

    With H query heads, G key/value heads and groups g of H / G query heads that share one,

        within: (1/G) sum_g s(heads of g)        across: s(g_1, ..., g_G)

    where a group as a whole puts out the outputs of its heads one after another, and attends with the mean of their
    weights (`Position` across is therefore `Position`, an overlap of means). Terms on values compare the G key/value
    heads as they are, without this.

    Args:
        term: A term on outputs or weights: `CKA()`, `Output()`, `Position()`, ...
        grouping: "within" or "across".

    Raises:
        SettingError: The term reads something else, or contributions, or there is no such grouping.

    Example:
        >>> import headwise as hw
        >>> GroupedQueries(hw.similarity.CKA(), "within") + 0.5 * GroupedQueries(hw.similarity.CKA(), "across")
        Sum(parts=((1.0, GroupedQueries(term=CKA(debiased=True, of='outputs', sketch=0), grouping='within')), (0.5, \
GroupedQueries(term=CKA(debiased=True, of='outputs', sketch=0), grouping='across'))))
    """

    term: Similarity | SiteSimilarity
    grouping: Literal["within", "across"] = "within"

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(self.term, Similarity | SiteSimilarity) or self.term.reads not in AXES:
            raise SettingError(
                f"term is {self.term!r}; expected one on the outputs or the weights of heads, such as CKA() or "
                "Position()."
            )
        if getattr(self.term, "of", "outputs") != "outputs":
            raise SettingError(f"term is {self.term!r}; groups are compared by outputs: leave out of='contributions'.")

    @property
    def reads(self) -> str:
        """What the term reads."""
        return self.term.reads

    def count_heads(self, site: Site) -> int:
        """Return how many heads of a group, or how many groups, are compared."""
        return site.key_value_heads if self.grouping == "across" else site.num_heads // site.key_value_heads

    def sum_and_count_at(self, site: Site, tensor: Tensor | None, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return sum and number over valid tokens, or over calls, as the term does.

        Raises:
            LayoutError: The site has no grouped queries.
        """
        assert tensor is not None  # captured, as `reads` asks
        found = group_features(tensor, site, self.grouping, AXES[self.reads])
        parts = [
            sum_and_count(self.term, site, part, keep) for part in (found if self.grouping == "within" else found[None])
        ]
        own, count = (torch.stack(column) for column in zip(*parts, strict=True))
        return own.mean(), count.to(own.dtype).mean()


def sum_and_count(
    similarity: Similarity | SiteSimilarity, site: Site, tensor: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the sum and number of a term on what one call of an attention computed."""
    if isinstance(similarity, SiteSimilarity):
        return similarity.sum_and_count_at(site, tensor, keep)
    return similarity.sum_and_count(tensor, keep)
