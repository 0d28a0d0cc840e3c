"""Methods as values: what can be done to the heads of a model while it trains, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from headwise.disagreement.penalty import Disagreement
from headwise.disagreement.terms import GroupedQueries, Similarity, SiteSimilarity, Sum, list_parts
from headwise.errors import SettingError, require_choice, require_integer, require_range
from headwise.heads.heads import GROUPINGS, KINDS, PROJECTIONS, Heads
from headwise.repulsion.repel import Repulsion, repel
from headwise.repulsion.rules import Rule, require_rule
from headwise.routing.aggregate import Aggregation, aggregate
from headwise.routing.modules import Setting, require_setting
from headwise.strength import DEFAULT, Relative, Target

# Kinds of attention that a term has a weight for, in the order of `Penalize.kind_weights`.
WEIGHTED_KINDS = KINDS[:3]


@dataclass(frozen=True)
class Repel:
    """Repulsion between the parameters of heads: `hw.repel`, as a setting.

    Attributes:
        rule: How heads repel each other.
        layers: Layers it acts on, from 0, in each kind of attention; None for all.
        kinds: Kinds of attention it acts on, of self, decoder, cross and pooling; None for all.
        projections: Projections it acts on, of query, key and value; None for all.
        grouping: Under grouped queries, "within" for query heads that repel those of their group, "across" for groups
            that repel one another; None for all query heads. See `Heads.grouped`.

    Raises:
        SettingError: `rule` is something else, a layer is no integer from 0, or a kind, a projection or a grouping is
            unknown.

    Example:
        >>> import headwise as hw
        >>> Repel(hw.SVGD(alpha=0.01), layers=(0,)).layers
        (0,)
    """

    rule: Rule
    layers: tuple[int, ...] | None = None
    kinds: tuple[str, ...] | None = None
    projections: tuple[str, ...] | None = None
    grouping: Literal["within", "across"] | None = None

    def __post_init__(self) -> None:
        require_rule(self.rule)
        if self.grouping is not None:
            require_choice("grouping", self.grouping, GROUPINGS)
        _require_place(self.layers, self.kinds)
        _require_tuple("projections", self.projections, "('query', 'key')")
        for projection in self.projections or ():
            require_choice("projections", projection, PROJECTIONS)

    def attach(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        heads: Heads,
        *,
        when: Literal["step", "manual"] = "step",
        seed: int = 0,
    ) -> Repulsion:
        """Attach the rule to the optimizer of a model whose heads these are; arguments and errors as of `hw.repel`."""
        chosen = select_heads(heads, self.layers, self.kinds)
        if self.projections is not None:
            chosen = chosen.projection(*self.projections)
        if self.grouping is not None:
            chosen = chosen.grouped(self.grouping)
        return repel(optimizer, chosen, self.rule, when=when, seed=seed)


@dataclass(frozen=True)
class Penalize:
    """A similarity of heads added to the loss: `hw.Disagreement`, as a setting.

    Attributes:
        term: The similarity.
        weight: Its strength: a `Relative` or a `Target`, measured against the loss; or a number, the weight lambda of
            Li et al. 2021 (1 there). With 0 the similarity is measured and not added.
        kind_weights: Weights of the term on self, decoder and cross attention; None for 1 each. The released code of
            Li et al. 2021 has 1, 0.5 and 0.5.
        layers: Layers it acts on, from 0, in each kind of attention; None for all.
        kinds: Kinds of attention it acts on; None for all.
        grouping: Under grouped queries, "within" for the query heads of each group, "across" for groups; None for all
            query heads. See `GroupedQueries`, whose terms read outputs or weights.

    Raises:
        SettingError: `term` is something else, a weight is not finite, `kind_weights` are not three, a layer is no
            integer from 0, a kind or a grouping is unknown, or a term cannot be grouped.

    Example:
        >>> import headwise as hw
        >>> Penalize(hw.Output() + 0.5 * hw.Subspace(), weight=0.1).weighted
        ((0.1, Output()), (0.05, Subspace()))
    """

    term: Similarity | SiteSimilarity | Sum
    weight: float | Relative | Target = DEFAULT
    kind_weights: tuple[float, ...] | None = None
    layers: tuple[int, ...] | None = None
    kinds: tuple[str, ...] | None = None
    grouping: Literal["within", "across"] | None = None

    def __post_init__(self) -> None:
        self._list_grouped()
        if not isinstance(self.weight, Relative | Target):
            require_range("penalty_weight", self.weight)
        if self.kind_weights is not None and len(self.kind_weights) != len(WEIGHTED_KINDS):
            raise SettingError(
                f"kind_weights is {self.kind_weights}; expected one number for each of {WEIGHTED_KINDS}."
            )
        for weight in self.kind_weights or ():
            require_range("kind_weights", weight)
        _require_place(self.layers, self.kinds)

    @property
    def weighted(self) -> tuple[tuple[float, Similarity | SiteSimilarity], ...]:
        """The similarities, each with its whole weight, or with its share of a strength that is no weight."""
        factor = 1.0 if isinstance(self.weight, Relative | Target) else self.weight
        return tuple((factor * weight, similarity) for weight, similarity in self._list_grouped())

    @property
    def strength(self) -> Relative | Target | None:
        """The strength that is measured against the loss; None for a weight."""
        return self.weight if isinstance(self.weight, Relative | Target) else None

    def attach(self, heads: Heads, *, across: Any = None, training_only: bool = False) -> Disagreement:
        """Return the penalty on the heads of a model, for `add`; arguments and errors as of `Disagreement`."""
        chosen = select_heads(heads, self.layers, self.kinds)
        there = {site.kind for site in chosen}
        given = zip(WEIGHTED_KINDS, self.kind_weights or (), strict=False)
        weights = {kind: weight for kind, weight in given if kind in there}
        term = self.term if self.grouping is None else Sum(self._list_grouped())
        return Disagreement(
            chosen, term, weights=weights, across=across, training_only=training_only, strength=self.strength
        )

    def _list_grouped(self) -> tuple[tuple[float, Similarity | SiteSimilarity], ...]:
        parts = tuple(list_parts(self.term))
        if self.grouping is None:
            return parts
        return tuple((weight, GroupedQueries(similarity, self.grouping)) for weight, similarity in parts)

    def add(self, penalty: Disagreement, loss: Tensor, *, share: float = 1.0, task: Tensor | None = None) -> Tensor:
        """Return the loss with what `attach` returned added to it; errors as of `Disagreement.add_to`.

        Args:
            penalty: What `attach` returned.
            loss: The loss, a scalar.
            share: Factor on a weight; a strength that is measured against the loss needs none.
            task: The loss of the task, where other terms were added to `loss` already: a strength is measured against
                it alone. None where there are none.
        """
        if isinstance(self.weight, Relative | Target):
            if task is None or task is loss:
                return penalty.add_to(loss)
            return loss + (penalty.add_to(task) - task)
        value = penalty()
        return loss + share * self.weight * value.to(loss.device) if self.weight else loss


@dataclass(frozen=True)
class Aggregate:
    """An aggregator instead of the output projection: `hw.aggregate`, as a setting.

    Attributes:
        setting: Setting of the aggregator.
        layers: Layers whose output projection is replaced, from 0, in each kind of attention; None for all.
        kinds: Kinds of attention it acts on; None for all.

    Raises:
        SettingError: `setting` is something else, a layer is no integer from 0, or a kind is unknown.

    Example:
        >>> import headwise as hw
        >>> Aggregate(hw.EMRouting(iterations=2), layers=(0, 1)).setting.iterations
        2
    """

    setting: Setting
    layers: tuple[int, ...] | None = None
    kinds: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        require_setting(self.setting)
        _require_place(self.layers, self.kinds, prefix="aggregation_")

    def attach(self, heads: Heads) -> Aggregation:
        """Put the aggregators into the model whose heads these are; errors as of `hw.aggregate`."""
        return aggregate(select_heads(heads, self.layers, self.kinds), self.setting)


def select_heads(heads: Heads, layers: tuple[int, ...] | None, kinds: tuple[str, ...] | None) -> Heads:
    """Return the heads of some kinds of attention, in some layers of each kind; None for all.

    Raises:
        LayoutError: There is no attention of that kind or in that layer.

    >>> import headwise as hw
    >>> from torch import nn
    >>> heads = hw.find_heads(nn.Transformer(8, 2, 2, 2, 16, batch_first=True))
    >>> [site.name for site in select_heads(heads, (0,), ("self", "cross"))]
    ['encoder.layers.0.self_attn', 'decoder.layers.0.multihead_attn']
    """
    if kinds is not None:
        heads = heads.kind(*kinds)
    if layers is None:
        return heads
    # the layers of each stack and kind are counted from 0
    every = dict.fromkeys(site.kind for site in heads)
    return replace(heads, sites=tuple(site for kind in every for site in heads.kind(kind).layers(*layers)))


def _require_place(layers: tuple[int, ...] | None, kinds: tuple[str, ...] | None, prefix: str = "") -> None:
    _require_tuple(f"{prefix}layers", layers, "(0, 1)")
    _require_tuple(f"{prefix}kinds", kinds, "('self',)")
    for layer in layers or ():
        require_integer(f"{prefix}layers", layer)
    for kind in kinds or ():
        require_choice(f"{prefix}kinds", kind, KINDS)


def _require_tuple(name: str, value: object, example: str) -> None:
    if value is not None and not isinstance(value, tuple):
        raise SettingError(f"{name} is {value!r}; expected a tuple such as {example}, or None for all.")
