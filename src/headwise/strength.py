"""The strength of a method relative to what it is added to: a share of the loss's gradient, or a number of heads."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any

from headwise.errors import SettingError, require_range
from headwise.settings import Natural, NonNegative, Positive, Rate, Real, check_fields

_logger = logging.getLogger(__name__)
# How many measurements in a row a controller may stand at its highest ratio before it counts as saturated.
SATURATED = 50


@dataclass(frozen=True)
class Relative:
    """Strength as a share of the loss's own gradient on the heads; ours, not in the papers.

    For repulsion ||repulsion|| = ratio * ||driving term|| in every group at every step, Frobenius norms over the group.
    For a penalty ||gradient of the penalty|| = ratio * ||gradient of the loss|| on the parameters of each attention,
    measured now and then (see `Disagreement.loss`). Use it instead of a search over `alpha` or a weight, whose effect
    depends on the loss, the width and the similarity.

    Args:
        ratio: norm of the method's gradient over that of the loss's, above 0.
    """

    ratio: Positive

    __post_init__ = check_fields


# The strength of a method that was given none: a tenth of the loss's gradient.
DEFAULT = Relative(0.1)


@dataclass(frozen=True)
class Target:
    """Strength that a controller sets, so that heads reach an effective number and are left alone beyond; ours.

    Each attention has its own. At every measurement with at least four tokens, of H heads whose effective number is E
    (`metrics.effective_heads`, of their contributions to the output), the ratio of a `Relative` strength becomes

    e <- decay e + (1 - decay) E,  error = (effective_heads - e) / H,  raw = proportional error + I,
    ratio = clip(raw, 0, highest),  I <- I + integral error + back (ratio - raw).

    This is proportional-integral control with back-calculation against windup (Astrom and Rundqwist 1989). The ratio
    never falls below 0: heads that are more diverse than asked for are not pulled together. A target that a batch of
    few tokens or a narrow output cannot show is never reached: the ratio then stays at `highest`.

    Args:
        effective_heads: the effective number of heads to reach, in [1, H].
        highest: the ratio never exceeds this, above 0; the weight of a penalty's kind multiplies it afterwards.
        proportional, integral, back: gains, at least 0.
        decay: share of the average that a new measurement keeps, in [0, 1).
    """

    effective_heads: Annotated[float, partial(require_range, low=1.0)]
    highest: Positive = 1.0
    proportional: NonNegative = 1.0
    integral: NonNegative = 0.1
    back: NonNegative = 0.1
    decay: Rate = 0.7

    __post_init__ = check_fields


def require_strength(name: str, value: float | Relative | Target, low: float = -math.inf) -> None:
    """Raise `SettingError` unless a strength is a `Relative`, a `Target`, or a finite number of at least `low`."""
    if not isinstance(value, Relative | Target):
        require_range(name, value, low=low)


@dataclass(frozen=True)
class Control:
    """Where the controller of one attention stands.

    Attributes:
        ratio: The ratio now; 0 until the first measurement.
        effective_heads: Average of the measured effective numbers; None until the first.
        integral: I of `Target`.
        at_highest: Number of measurements in a row with the ratio at its highest.
    """

    ratio: NonNegative = 0.0
    effective_heads: Real | None = None
    integral: Real = 0.0
    at_highest: Natural = 0

    @property
    def saturated(self) -> bool:
        """Whether the ratio has been at its highest for long, so that the target is likely out of reach."""
        return self.at_highest >= SATURATED


def advance(control: Control, target: Target, measured: float, num_heads: int) -> Control:
    """Return a controller after a measurement; one that is not finite changes nothing.

    >>> advance(Control(), Target(6.0), measured=2.0, num_heads=8).ratio
    0.5
    """
    if not math.isfinite(measured):
        return control
    before = control.effective_heads
    average = measured if before is None else target.decay * before + (1 - target.decay) * measured
    error = (target.effective_heads - average) / num_heads
    raw = target.proportional * error + control.integral
    ratio = min(max(raw, 0.0), target.highest)
    return replace(
        control,
        ratio=ratio,
        effective_heads=average,
        integral=control.integral + target.integral * error + target.back * (ratio - raw),
        at_highest=control.at_highest + 1 if ratio == target.highest else 0,
    )


def tell_saturated(name: str, control: Control, target: Target) -> None:
    """Log a warning at the measurement at which a controller becomes saturated."""
    if control.at_highest == SATURATED:
        _logger.warning(
            "%s has %.2f effective heads, and %s has pushed at its highest ratio, %g, for %d measurements: the target "
            "is likely out of reach.",
            name or "the model",
            control.effective_heads or math.nan,
            target,
            target.highest,
            SATURATED,
        )


def read_controls(state: Any, names: Iterable[str]) -> dict[str, Control]:
    """Return the controllers of attentions from what `dataclasses.asdict` made of them, by name.

    Raises:
        SettingError: They are of other attentions than `names`, or are no controllers.

    Example:
        >>> read_controls({"layer.0": asdict(Control(ratio=0.5))}, ["layer.0"])["layer.0"].ratio
        0.5
    """
    expected = list(names)
    if not isinstance(state, Mapping) or state.keys() != set(expected):
        held = f"controllers of {', '.join(map(str, state)) or 'nothing'}" if isinstance(state, Mapping) else "none"
        raise SettingError(
            f"the state holds {held}; expected those of {', '.join(expected) or 'nothing'}: resume with the strength "
            "it was saved with."
        )
    fields, controls = asdict(Control()), {}
    for name, own in state.items():
        if not isinstance(own, Mapping) or own.keys() != fields.keys():
            raise SettingError(f"the controller of {name} is {own!r}; expected a mapping with {', '.join(fields)}.")
        controls[name] = Control(**own)
        try:
            check_fields(controls[name])
        except SettingError as error:
            raise SettingError(f"the controller of {name}: {error}") from None
    return controls
