"""Methods of an arm: those of `headwise.integrations`, and those of the laboratory alone."""

from dataclasses import dataclass

from headwise.errors import SettingError, require_boolean, require_integer, require_positive, require_range
from headwise.gating.settings import GateSetting, require_gate
from headwise.integrations.methods import Aggregate, Penalize, Repel
from headwise.lab.experiment.guided import Guided


@dataclass(frozen=True)
class DropHeads:
    """Whole heads zeroed at random while training (Zhou et al. 2020).

    With a `start` the rate falls linearly from there to 0 while the learning rate warms up, and then rises linearly to
    `rate` at the end of training: "scheduled DropHead". Without a warmup it only rises.

    Attributes:
        rate: Probability of zeroing a head, in [0, 1).
        start: Probability at the first step, in [0, 1); None keeps `rate` throughout.
    """

    rate: float
    start: float | None = None

    def __post_init__(self) -> None:
        require_range("drophead", self.rate, low=0.0, high=0.99)
        if self.start is not None:
            require_range("start", self.start, low=0.0, high=0.99)

    def rate_at(self, step: int, steps: int, warmup: int) -> float:
        """Return the rate of a step, counted from 0, of a training of `steps` steps of which `warmup` warm up.

        >>> schedule = DropHeads(0.2, start=0.4)
        >>> [round(schedule.rate_at(step, 101, 20), 6) for step in (0, 10, 20, 60, 100)]
        [0.4, 0.2, 0.0, 0.1, 0.2]
        """
        if self.start is None:
            return self.rate
        if step < warmup:
            return self.start * (1.0 - step / warmup)
        return self.rate * (step - warmup) / max(1, steps - 1 - warmup)


@dataclass(frozen=True)
class Talk:
    """Talking heads in every attention: `hw.mix_heads`.

    Attributes:
        logits: Whether scores are mixed, before the masks.
        weights: Whether weights are mixed, before dropout.
    """

    logits: bool = True
    weights: bool = True

    def __post_init__(self) -> None:
        if not (self.logits or self.weights):
            raise SettingError("talking has logits=false and weights=false; expected one of them to be true.")


@dataclass(frozen=True)
class GateHeads:
    """Gates on the heads of every attention: `hw.gate_heads`. A balance term is added to the loss of training alone.

    Attributes:
        gate: What the gates are.
    """

    gate: GateSetting

    def __post_init__(self) -> None:
        require_gate(self.gate)


@dataclass(frozen=True)
class PairHeads:
    """Half as many heads, twice as wide, whose second map is subtracted from the first: `hw.nn.pair_heads`.

    Attributes:
        second: Whether there is a second map; without it the heads are as wide, and are normalized likewise.
    """

    second: bool

    def __post_init__(self) -> None:
        require_boolean("second", self.second)


@dataclass(frozen=True)
class Widen:
    """More hidden units in the feed-forward layers beside the attentions: as many parameters as a rival has.

    A unit has 2d + 1 parameters, 2d + 2 with a slope of its own, or 3d in the gated layers of Llama. Gates on features
    have (d + 1) d for each attention, those on heads (d + 1) H.

    Attributes:
        units: Number of further units of each layer; None for about as many parameters as gates on features have, half
            the width or a third.
    """

    units: int | None = None

    def __post_init__(self) -> None:
        if self.units is not None:
            require_integer("units", self.units, low=1)


@dataclass(frozen=True)
class Orthogonalize:
    """Muon on W_Q, W_K, W_V and W_O of every attention (Jordan et al. 2024), the optimizer of the recipe on the rest.

    The root mean square of every update is that of AdamW at the same rate (`adjust_lr_fn="match_rms_adamw"`), so that
    the rate and the weight decay of the recipe hold for both.

    Attributes:
        per_head: Whether the matrix of each head is orthogonalized alone (`hw.head_blocks`), or that of all heads.
        momentum: Muon's momentum, in [0, 1).
    """

    per_head: bool
    momentum: float = 0.95

    def __post_init__(self) -> None:
        require_range("momentum", self.momentum, low=0.0, high=0.9999)


@dataclass(frozen=True)
class LengthenQueries:
    """Longer queries without repulsion: attention that is sharper from the start, or sharpens sooner.

    Repulsion lengthens heads beside turning them; this control lengthens them alone.

    Attributes:
        drawn: Factor on the query parameters that a run begins with, above 0.
        rate: Factor on their learning rate, above 0.
    """

    drawn: float = 1.0
    rate: float = 1.0

    def __post_init__(self) -> None:
        require_positive("drawn", self.drawn)
        require_positive("rate", self.rate)


@dataclass(frozen=True)
class OtherModel:
    """A model without attention instead of the task's; it combines with no other method.

    Attributes:
        model: Its name in the task.
    """

    model: str


# In the order in which an arm holds them.
Method = (
    Repel
    | Penalize
    | Aggregate
    | Talk
    | GateHeads
    | PairHeads
    | Widen
    | DropHeads
    | Orthogonalize
    | LengthenQueries
    | Guided
    | OtherModel
)
# Methods that a trained model still has; the others act on gradients, or during training only.
LASTING = (Aggregate, Guided, OtherModel, Talk, GateHeads, PairHeads, Widen)
