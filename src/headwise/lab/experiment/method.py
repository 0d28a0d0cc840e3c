"""Methods of an arm: those of `headwise.integrations`, and those of the laboratory alone."""

from dataclasses import dataclass

from headwise.errors import SettingError, require_range
from headwise.integrations.methods import Aggregate, Penalize, Repel
from headwise.lab.experiment.guided import Guided


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
class OtherModel:
    """A model without attention instead of the task's; it combines with no other method.

    Attributes:
        model: Its name in the task.
    """

    model: str


# In the order in which an arm holds them.
Method = Repel | Penalize | Aggregate | Talk | DropHeads | Orthogonalize | Guided | OtherModel
