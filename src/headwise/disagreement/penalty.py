"""A differentiable penalty on the similarity of heads, from what they computed in the last forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from headwise.disagreement.terms import (
    frobenius_penalty_sum,
    output_similarity_sum,
    position_similarity_of_mean_sum,
    position_similarity_sum,
    position_squared_difference_sum,
    subspace_similarity_sum,
)
from headwise.errors import (
    LayoutError,
    NotFired,
    SettingError,
    ShapeError,
    require_boolean,
    require_choice,
    require_range,
)
from headwise.heads.capture import Capture
from headwise.heads.heads import Heads, Site, require_heads
from headwise.heads.taps import Taps
from headwise.nn.hooks import Handle
from headwise.parallel import average_over

# The fields of a capture that a similarity may read.
READABLE = ("outputs", "values", "weights", "mean_weights")


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


class _Arithmetic:
    """`+` between terms and `*` with a number."""

    def __add__(self, other: Similarity | Sum) -> Sum:
        return Sum((*_list_parts(self), *_list_parts(other)))

    def __mul__(self, weight: float) -> Sum:
        require_range("weight of a term", weight)
        return Sum(tuple((weight * own, similarity) for own, similarity in _list_parts(self)))

    __rmul__ = __mul__


@dataclass(frozen=True)
class Sum(_Arithmetic):
    """A weighted sum of similarities, made by `+` and `*`: `Output() + 0.5 * Position()`."""

    parts: tuple[tuple[float, Similarity], ...]

    def __str__(self) -> str:
        return " + ".join(f"{weight:g} * {similarity}" for weight, similarity in self.parts)


@dataclass(frozen=True)
class Output(_Arithmetic):
    """Similarity of head outputs: (1/H^2) sum_ij cos(O_i, O_j), minus Eq. 7 of Li et al. 2021; per query."""

    reads = "outputs"

    def sum_and_count(self, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return sum and number over valid queries."""
        return output_similarity_sum(tensor, keep)


@dataclass(frozen=True)
class Subspace(_Arithmetic):
    """Similarity of projected values: (1/H^2) sum_ij cos(V_i, V_j), minus Eq. 5 of Li et al. 2021; per key."""

    reads = "values"

    def sum_and_count(self, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return sum and number over valid keys."""
        return subspace_similarity_sum(tensor, keep)


@dataclass(frozen=True, repr=False)
class Position(_Arithmetic):
    """Overlap of attended positions: (1/H^2) sum_ij sum_k A_ik A_jk, minus Eq. 6 of Li et al. 2021; per query.

    Its minimum is not diversity but collapse to uniform attention; monitor a normalized similarity as well.

    Args:
        recompute: False computes attention explicitly and keeps the weights of all heads for the backward pass. True
            leaves attention to the fused kernel and computes the weights a second time, one head after another, in
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

    def __repr__(self) -> str:
        # as in records of runs made before this option existed
        return "Position(recompute=True)" if self.recompute else "Position()"


@dataclass(frozen=True)
class PositionSquaredDifference(_Arithmetic):
    """Minus the mean squared difference of attention rows, the variant of footnote 3 of Li et al. 2021."""

    reads = "weights"

    def sum_and_count(self, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return sum and number over valid queries."""
        return position_squared_difference_sum(tensor, keep)


@dataclass(frozen=True)
class Frobenius(_Arithmetic):
    """||A_q A_q^T - I||_F^2 over the attention rows A_q [H, K] of one query (Lin et al. 2017); per query.

    Squared, as in the paper. Not a mean over pairs: it grows with H^2, up to H (H - 1) for heads that all attend to
    one token, and its minimum 0 requires one-hot rows on different tokens.
    """

    reads = "weights"

    def sum_and_count(self, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return sum and number over valid queries."""
        return frobenius_penalty_sum(tensor.transpose(1, 2), keep)


class Disagreement(Handle):
    """A penalty that makes heads disagree: add it to the loss.

    loss = task loss + lambda * sum_kind w_kind * mean_site s(site), with s the chosen similarity averaged over the
    valid tokens of all calls since the last reading (Li et al. 2021, section 3.1, where lambda is 1). The similarity
    counts all H^2 pairs including i = j, so orthogonal heads score 1/H. Attach before `torch.compile`.

    Args:
        heads: The heads to act on.
        term: `Output()`, `Subspace()`, `Position()`, `PositionSquaredDifference()`, `Frobenius()`, or a weighted sum
            of them.
        weights: Weight of each kind of attention ("self", "decoder", "cross"); 1 where absent. The released code's
            are {"decoder": 0.5, "cross": 0.5}.
        across: The process group over which each batch is divided, if lengths differ between processes and gradients
            are averaged (DistributedDataParallel, FSDP2): the mean is then over the tokens of all processes, so that
            the penalty averaged over processes is that of the whole batch. None averages over this process's tokens.

    The similarity of an attention with one head (for values: one key/value head) is constant. It still counts in the
    mean over several, and printing the penalty lists it.

    Raises:
        LayoutError: An attention cannot be read that way, the model was changed since its heads were found, or no
            attention has more than one head of what a term reads.
        SettingError: `heads` or `term` has the wrong type, a weight names an unknown kind or one that `heads` does not
            contain, or a custom term reads a field that captures do not have.

    Example:
        >>> import headwise as hw
        >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> penalty = Disagreement(hw.find_heads(model), Output() + 0.5 * Subspace())
        >>> loss = model(torch.randn(3, 5, 8)).square().mean() + penalty()
        >>> loss.backward()
    """

    def __init__(
        self,
        heads: Heads,
        term: Similarity | Sum,
        *,
        weights: Mapping[str, float] | None = None,
        across: Any = None,
    ) -> None:
        super().__init__()
        self.across = across
        require_heads(heads)
        self._parts = _list_parts(term)
        for _, similarity in self._parts:
            require_choice(f"what {similarity} reads", similarity.reads, READABLE)
            _require_several(similarity, heads)
        if weights is not None and not isinstance(weights, Mapping):
            raise SettingError(f"weights is {weights!r}; expected a mapping such as {{'cross': 0.5}}.")
        kinds = sorted({site.kind for site in heads.sites})
        for kind, weight in (weights or {}).items():
            require_choice("kind of attention", kind, kinds)
            require_range(f"weight of {kind}", weight)
        self.heads, self.term = heads, term
        self.weights = {kind: float((weights or {}).get(kind, 1.0)) for kind in kinds}
        needed = {similarity.reads for _, similarity in self._parts}
        self.taps = Taps(
            heads,
            outputs="outputs" in needed,
            values="values" in needed,
            weights="weights" in needed,
            mean_weights="mean_weights" in needed,
        )
        self._removers.append(self.taps.remove)
        self.last: Tensor | None = None

    def __call__(self, keep: Tensor | None = None) -> Tensor:
        """Return the penalty of the forward passes since the last call, a scalar in the graph.

        Args:
            keep: True where a token is real, [B, L]; overrides the padding mask that each attention received. Use it
                if the attention received none.

        Raises:
            NotFired: An attention was not called, or did not compute what is read (values from a cache); the captures
                carry no gradient while the model trains; or the penalty is no longer attached.
            ShapeError: `keep` does not fit what an attention computed.
        """
        captures = self.taps.read()
        model = self.heads.model
        if model.training and torch.is_grad_enabled():
            _require_gradient(captures)
        weights, sums, counts = [], [], []
        for kind, weight in self.weights.items():
            sites = [site for site in self.heads.sites if site.kind == kind]
            for scale, similarity in self._parts:
                for site in sites:
                    calls = [_measure(similarity, c, keep) for c in captures if c.site is site]
                    own, number = (torch.stack(parts).sum() for parts in zip(*calls, strict=True))
                    weights.append(weight * scale / len(sites))
                    sums.append(own)
                    counts.append(number)
        if self.across is not None:
            counts = average_over(self.across, counts)
        total = None
        for weight, own, number in zip(weights, sums, counts, strict=True):
            value = own / number.clamp_min(torch.finfo(own.dtype).tiny if self.across else 1) * weight
            total = value if total is None else total + value.to(total.device)
        assert total is not None  # every kind has a site and every term a part
        self.last = total.detach()
        return total

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {weight:g}" for kind, weight in self.weights.items())
        alone = {
            site.name or "(model)": None
            for _, similarity in self._parts
            for site in self.heads
            if _count_heads(similarity, site) == 1
        }
        names = f"; with one head: {', '.join(list(alone)[:4])}{', ...' if len(alone) > 4 else ''}" if alone else ""
        return f"{self.term} on {len(self.heads)} sites ({kinds}){names}"

    __repr__ = __str__


def _count_heads(similarity: Similarity, site: Site) -> int:
    return site.key_value_heads if similarity.reads == "values" else site.num_heads


def _require_several(similarity: Similarity, heads: Heads) -> None:
    if all(_count_heads(similarity, site) == 1 for site in heads):
        what = "key/value head" if similarity.reads == "values" else "head"
        grouped = what != "head" and any(site.num_heads > 1 for site in heads)
        raise LayoutError(
            f"{similarity} compares the {similarity.reads} of heads, and each of the {len(heads)} sites has one "
            f"{what}, which has nothing to disagree with; "
            + ("use a term on outputs, such as hw.Output()." if grouped else "select sites with more heads.")
        )


def _list_parts(term: object) -> tuple[tuple[float, Similarity], ...]:
    if isinstance(term, Sum):
        return term.parts
    if isinstance(term, Similarity) and not isinstance(term, type):
        return ((1.0, term),)
    raise SettingError(
        f"term is {term!r}; expected Output(), Subspace(), Position(), Frobenius() or a weighted sum of them."
    )


def _measure(similarity: Similarity, capture: Capture, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    name = capture.site.label
    tensor: Tensor | None = getattr(capture, similarity.reads)
    assert tensor is not None  # taps refuse a call that did not compute it
    if keep is None:
        keep = capture.key_keep if similarity.reads == "values" else capture.query_keep
    expected = (tensor.shape[0], tensor.shape[2 if similarity.reads == "weights" else 1])
    if keep is not None and not isinstance(keep, Tensor):
        raise ShapeError(f"{name}: keep is a {type(keep).__name__}; expected a torch.bool tensor of shape {expected}.")
    if keep is not None and (keep.dtype != torch.bool or tuple(keep.shape) != expected):
        raise ShapeError(
            f"{name}: keep is {keep.dtype} of shape {tuple(keep.shape)}; expected torch.bool of shape {expected}. "
            "One keep cannot serve calls of different lengths: leave it out if the attention receives a padding "
            "mask."
        )
    return similarity.sum_and_count(tensor, keep)


def _require_gradient(captures: list[Capture]) -> None:
    for capture in captures:
        read = [tensor for tensor in capture.read if tensor is not None]
        if read and not any(tensor.requires_grad for tensor in read):
            raise NotFired(
                f"{capture.site.label}: what its heads computed carries no gradient although the model "
                "is training; reentrant activation checkpointing does that (use use_reentrant=False), and so do a "
                "frozen model and a forward without gradients before the penalty was read."
            )
