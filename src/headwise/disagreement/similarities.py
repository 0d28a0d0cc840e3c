"""The similarities that a penalty may lower: those of the papers, weighted sums, and the protocols for others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from headwise.disagreement.pooled import mean_over_heads, position_similarity_each, vector_similarity_each
from headwise.disagreement.terms import (
    frobenius_penalty_sum,
    output_similarity_sum,
    position_similarity_of_mean_sum,
    position_similarity_sum,
    position_squared_difference_sum,
    subspace_similarity_sum,
)
from headwise.errors import SettingError, require_boolean, require_range
from headwise.heads.heads import Site

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
        return vector_similarity_each(tensor, keep)


@dataclass(frozen=True)
class Subspace(Arithmetic):
    """Similarity of projected values: (1/H^2) sum_ij cos(V_i, V_j), minus Eq. 5 of Li et al. 2021; per key."""

    reads = "values"

    def sum_and_count(self, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return sum and number over valid keys."""
        return subspace_similarity_sum(tensor, keep)

    def sum_and_count_each(self, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the same of S attentions at once, [S, B, K, G, e] -> [S]."""
        return vector_similarity_each(tensor, keep)


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

    def __post_init__(self) -> None:
        require_boolean("Position.recompute", self.recompute)

    @property
    def reads(self) -> str:
        """The weights, or their mean over heads."""
        return "mean_weights" if self.recompute else "weights"

    def sum_and_count(self, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return sum and number over valid queries."""
        return (
            position_similarity_of_mean_sum(tensor, keep) if self.recompute else position_similarity_sum(tensor, keep)
        )

    def sum_and_count_each(self, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the same of S attentions at once, [S, B, H, Q, K] or means [S, B, Q, K] -> [S]."""
        return position_similarity_each(tensor if self.recompute else mean_over_heads(tensor), keep)

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
