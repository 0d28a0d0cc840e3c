"""Methods as values: what can be done to the heads of a model while it trains, and where."""

from dataclasses import dataclass

from headwise.disagreement.penalty import Similarity, Sum
from headwise.errors import SettingError, require_choice, require_integer, require_range
from headwise.heads.heads import PROJECTIONS
from headwise.lab.experiment.guided import Guided
from headwise.repulsion.rules import Rule
from headwise.routing.settings import EMRouting, SimpleRouting, Trunk

KINDS = ("self", "decoder", "cross")


@dataclass(frozen=True)
class Repel:
    """Repulsion between the parameters of heads.

    Attributes:
        rule: How heads repel each other.
        layers: Layers it acts on, from 0, in each kind of attention; None for all.
        kinds: Kinds of attention it acts on, of self, decoder and cross; None for all.
        projections: Projections it acts on, of query, key and value; None for all.
    """

    rule: Rule
    layers: tuple[int, ...] | None = None
    kinds: tuple[str, ...] | None = None
    projections: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _require_place(self.layers, self.kinds)
        for projection in self.projections or ():
            require_choice("projections", projection, PROJECTIONS)


@dataclass(frozen=True)
class Penalize:
    """A similarity of heads added to the loss.

    Attributes:
        term: The similarity.
        weight: Its weight, lambda of Li et al. 2021 (1 there).
        kind_weights: Weights of the term on self, decoder and cross attention; None for 1 each. The released code of
            Li et al. 2021 has 1, 0.5 and 0.5.
        layers: Layers it acts on, from 0, in each kind of attention; None for all.
        kinds: Kinds of attention it acts on; None for all.
    """

    term: Similarity | Sum
    weight: float = 1.0
    kind_weights: tuple[float, ...] | None = None
    layers: tuple[int, ...] | None = None
    kinds: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        require_range("penalty_weight", self.weight)
        if self.kind_weights is not None and len(self.kind_weights) != len(KINDS):
            raise SettingError(f"kind_weights is {self.kind_weights}; expected one number for each of {KINDS}.")
        for weight in self.kind_weights or ():
            require_range("kind_weights", weight)
        _require_place(self.layers, self.kinds)

    @property
    def weighted(self) -> tuple[tuple[float, Similarity], ...]:
        """The similarities, each with its whole weight."""
        parts = self.term.parts if isinstance(self.term, Sum) else ((1.0, self.term),)
        return tuple((weight * self.weight, similarity) for weight, similarity in parts)


@dataclass(frozen=True)
class Aggregate:
    """An aggregator instead of the output projection.

    Attributes:
        setting: Setting of the aggregator.
        layers: Layers whose output projection is replaced, from 0, in each kind of attention; None for all.
        kinds: Kinds of attention it acts on; None for all.
    """

    setting: SimpleRouting | EMRouting | Trunk
    layers: tuple[int, ...] | None = None
    kinds: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _require_place(self.layers, self.kinds, prefix="aggregation_")


@dataclass(frozen=True)
class DropHeads:
    """Whole heads zeroed at random while training (Zhou et al. 2020).

    Attributes:
        rate: Probability of zeroing a head, in [0, 1).
    """

    rate: float

    def __post_init__(self) -> None:
        require_range("drophead", self.rate, low=0.0, high=0.99)


@dataclass(frozen=True)
class OtherModel:
    """A model without attention instead of the task's; it combines with no other method.

    Attributes:
        model: Its name in the task.
    """

    model: str


# In the order in which an arm holds them.
Method = Repel | Penalize | Aggregate | DropHeads | Guided | OtherModel


def _require_place(layers: tuple[int, ...] | None, kinds: tuple[str, ...] | None, prefix: str = "") -> None:
    for layer in layers or ():
        require_integer(f"{prefix}layers", layer)
    for kind in kinds or ():
        require_choice(f"{prefix}kinds", kind, KINDS)
