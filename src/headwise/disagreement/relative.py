"""The weight of a penalty at each attention, from the gradients of penalty and loss there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import LayoutError, NotFired, SettingError, require_integer, require_range
from headwise.heads.capture import Capture
from headwise.heads.effective import count_effective_heads, require_reachable
from headwise.heads.head_slice import is_sharded
from headwise.heads.heads import Heads, Site
from headwise.heads.sharding import average_finite_over, average_over, is_distributed
from headwise.strength import Control, Relative, Target, advance, read_controls, tell_saturated

# How much of the logarithm of a weight is kept at each measurement.
KEPT = 0.9
# A weight stays below this multiple of its first value: at the least similarity its gradient vanishes.
MOST = 100.0
# A gradient below this share of the loss's tells nothing of the strength.
LEAST = 1e-12
# Gradients through half precision, where small ones vanish, are measured at this scale, halved where they overflow.
SCALE = 2.0**16
# What is kept is in single precision.
HIGHEST = torch.finfo(torch.float32).max


class RelativeWeights:
    """Weights w of penalties s, one for each attention, with |grad(w s)| = ratio |grad L| on its parameters.

    At each measurement w = ratio |grad L| / |grad s|, averaged over measurements in its logarithm, and constant in the
    step, as the adaptive weights of GradNorm (Chen et al. 2018) and VQGAN (Esser et al. 2021) are. Until the first one
    that tells anything, a weight is 0. The ratio is that of a `Relative`, or what the controllers of a `Target` say,
    times the weight of the attention's kind.

    Attributes:
        strength: The ratio, or the target.
        every: Number of steps from one measurement to the next.
        steps: Number of steps so far.
        shares: Last measured |grad(w s)| / |grad L| of each attention by name, with the weight of the step.
        controls: The controller of each attention with several heads, by name; none for a `Relative`.
    """

    def __init__(
        self, heads: Heads, strength: Relative | Target, every: int, kind_weights: Mapping[str, float]
    ) -> None:
        require_integer("every", every, low=1)
        self.strength, self.every, self.steps = strength, every, 0
        self.shares: dict[str, Tensor] = {}
        self.controls: dict[str, Control] = {}
        if isinstance(strength, Target):
            require_reachable(strength, heads)
            self.controls = {site.name: Control() for site in heads if site.num_heads > 1}
        self._sites = {site.name: site for site in heads}
        # the sign of a weight is in the penalty
        self._factors = {site.name: abs(kind_weights[site.kind]) for site in heads}
        for site in heads:
            _list_parameters(site)
        # of the weight at a ratio of 1
        self._logarithms: dict[str, Tensor] = {}
        self._first: dict[str, Tensor] = {}

    def weigh(
        self,
        loss: Tensor,
        values: Sequence[tuple[Site, Tensor]],
        across: Any,
        captures: Sequence[Capture] = (),
        keep: Tensor | None = None,
    ) -> Tensor:
        """Return the sum over attentions of w s, and measure the weights before if it is time to.

        Args:
            loss: The loss without the penalty, a scalar in the graph.
            values: Each attention's penalty.
            across: A process group over which gradients are averaged; None for one process.
            captures: The calls of the step: with outputs, which a `Target` needs, and in the model's precision.
            keep: As for a call of `Disagreement`.
        """
        if self.steps % self.every == 0:
            if awaits_static_graph(loss):
                return loss.new_zeros(())
            half = any(one is not None and one.dtype == torch.float16 for call in captures for one in call.read)
            self._measure(loss, values, across, SCALE if half else 1.0)
            self._control(captures, across, keep)
        self.steps += 1
        total = loss.new_zeros(())
        for site, value in values:
            logarithm = self._logarithms.get(site.name)
            ratio = self._ratio(site.name)
            if logarithm is not None and ratio:
                total = total + ratio * logarithm.exp().to(value) * value.to(total.device)
        return total

    def _ratio(self, name: str) -> float:
        source = self.strength if isinstance(self.strength, Relative) else self.controls.get(name, Control())
        return self._factors[name] * source.ratio

    def _measure(self, loss: Tensor, values: Sequence[tuple[Site, Tensor]], across: Any, scale: float) -> None:
        names = [site.name for site, _ in values]
        # parameters may have been replaced, or frozen
        owned = {name: _list_parameters(self._sites[name]) for name in names}
        every = [parameter for name in names for parameter in owned[name]]
        found, used = _differentiate(loss, every, scale)
        gradients = iter(found)
        squares = []
        for name, (_, value) in zip(names, values, strict=True):
            own = owned[name]
            squares.append(_add_squares([next(gradients) for _ in own], loss) / used**2)
            pushed, factor = _differentiate(value, own, scale) if value.requires_grad else ((), scale)
            squares.append(_add_squares(pushed, loss) / factor**2)
        if across is not None:
            squares = average_over(across, squares)
        for name, of_loss, of_value in zip(names, squares[::2], squares[1::2], strict=True):
            self._update(name, of_loss.sqrt(), of_value.sqrt())

    def _update(self, name: str, of_loss: Tensor, of_value: Tensor) -> None:
        """Average the logarithm of a weight; norms that are not finite, or tell nothing, change nothing."""
        if not bool((of_value > LEAST * of_loss) & of_value.isfinite() & of_loss.isfinite() & (of_loss > 0)):
            return
        wanted = (of_loss / of_value).log()
        before = self._logarithms.get(name)
        if before is None:
            self._first[name] = wanted
        kept = wanted if before is None else KEPT * before + (1 - KEPT) * wanted
        self._logarithms[name] = torch.minimum(kept, self._first[name] + math.log(MOST))
        self.shares[name] = self._ratio(name) * self._logarithms[name].exp() * of_value / of_loss

    def _control(self, captures: Sequence[Capture], across: Any, keep: Tensor | None) -> None:
        """Advance the controllers by the effective number of heads of this step, the mean over processes that know."""
        if not isinstance(self.strength, Target) or not self.controls:
            return
        calls = {name: [call for call in captures if call.site.name == name] for name in self.controls}
        numbers = {call.site.name: call.site.num_heads for call in captures}
        measured = [count_effective_heads(own, keep) for own in calls.values()]
        if across is not None:
            measured = average_finite_over(across, measured)
        for name, number in zip(calls, measured, strict=True):
            self.controls[name] = advance(self.controls[name], self.strength, float(number), numbers[name])
            tell_saturated(name, self.controls[name], self.strength)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs for the same weights, as plain numbers."""
        return {
            "steps": self.steps,
            "logarithms": {name: float(value) for name, value in self._logarithms.items()},
            "first": {name: float(value) for name, value in self._first.items()},
            "shares": {name: float(value) for name, value in self.shares.items()},
            "controls": {name: asdict(control) for name, control in self.controls.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            SettingError: It is no such state, or names an attention that is not among the heads. Nothing is changed.
        """
        keys = ("steps", "logarithms", "first", "shares", "controls")
        if not isinstance(state, Mapping) or any(key not in state for key in keys):
            raise SettingError(f"the state of the penalty is {state!r}; expected a mapping with {', '.join(keys)}.")
        require_integer("steps", state["steps"])
        logarithms, first, shares = (self._read_numbers(key, state[key]) for key in keys[1:4])
        if logarithms.keys() != first.keys():
            raise SettingError(f"the state of the penalty has other attentions in {keys[1]} than in {keys[2]}.")
        self.controls = read_controls(state["controls"], self.controls)
        self.steps = state["steps"]
        self._logarithms, self._first, self.shares = logarithms, first, shares

    def _read_numbers(self, key: str, numbers: Any) -> dict[str, Tensor]:
        if not isinstance(numbers, Mapping):
            raise SettingError(f"the state of the penalty has {key}={numbers!r}; expected a number by attention.")
        for name, number in numbers.items():
            if name not in self._sites:
                raise SettingError(f"the state of the penalty names {name!r}, which is not among its attentions.")
            require_range(f"{key} of {name}", number, low=-HIGHEST, high=HIGHEST)
        return {name: torch.tensor(float(number), dtype=torch.float32) for name, number in numbers.items()}


def awaits_static_graph(loss: Tensor) -> bool:
    """Return whether DistributedDataParallel(static_graph=True) has yet to see its first backward pass.

    It begins to average gradients at the end of that pass: one of a measurement before it would end this for good.
    """
    if not is_distributed():
        return False
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        wrapper: Any = getattr(node, "ddp_weakref", None)
        module = None if wrapper is None else wrapper()
        if module is not None and module.static_graph and not module._static_graph_delay_allreduce_enqueued:
            return True
        waiting += [other for other, _ in node.next_functions]
    return False


def _list_parameters(site: Site) -> list[nn.Parameter]:
    """Return the trainable parameters of an attention's projections, W_O's included."""
    found: dict[int, nn.Parameter] = {}
    for part in (*site.slices, *([site.output] if site.output is not None else [])):
        held = [own.owner._parameters.get(own.attribute) for own in part.parts]
        own = [parameter for parameter in held if parameter is not None and parameter.requires_grad]
        if not own and part.module is not None:
            # a frozen weight below adapters
            own = [parameter for parameter in part.module.parameters() if parameter.requires_grad]
        found |= {id(parameter): parameter for parameter in own}
    for parameter in found.values():
        if is_sharded(parameter):
            raise LayoutError(
                f"{site.label} is sharded over processes, where gradients of one attention cannot be measured alone; "
                "give the penalty a weight instead of a relative strength."
            )
    if not found:
        raise NotFired(f"{site.label}: no parameter of its heads is trainable; unfreeze them or select other heads.")
    return list(found.values())


def _differentiate(scalar: Tensor, parameters: Sequence[Tensor], scale: float) -> tuple[Sequence[Tensor | None], float]:
    """Return the gradients of a scalar times a scale, and the scale: the one given, halved until they are finite."""
    while True:
        factor = torch.full_like(scalar, scale)
        gradients = torch.autograd.grad(scalar, parameters, factor, retain_graph=True, allow_unused=True)
        # in single precision a gradient that is not finite stays so
        if scale <= 1.0 or all(bool(own.isfinite().all()) for own in gradients if own is not None):
            return gradients, scale
        scale /= 2


def _add_squares(gradients: Sequence[Tensor | None], like: Tensor) -> Tensor:
    total = torch.zeros((), device=like.device)
    for gradient in gradients:
        if gradient is not None:
            total = total + gradient.float().square().sum().to(like.device)
    return total
