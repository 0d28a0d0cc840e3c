"""The strength of a rule with a `Target`: each attention's controller, fed with what its heads computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from headwise.errors import LayoutError, NotFired, require_integer
from headwise.heads.capture import Capture
from headwise.heads.effective import count_effective_heads, require_reachable
from headwise.heads.heads import Heads
from headwise.heads.sharding import average_finite_over, is_distributed
from headwise.heads.taps import Taps
from headwise.nn.hooks import Handle
from headwise.repulsion.groups import Attachment, ParticleGroup
from headwise.strength import Control, Target, advance, read_controls, tell_saturated

# Calls of an attention that are looked at, where a step has more: the last of many micro-batches.
NEWEST = 64


class Steering(Handle):
    """Controllers of attentions, by name, advanced at every `every`-th step from the outputs of the step's forwards.

    Outputs are captured at those steps only. Where processes train together (torch.distributed is initialized), the
    measured numbers are averaged over all of them, so that every process has the same strength.

    Attributes:
        target: What is aimed at.
        every: Number of steps from one measurement to the next.
        steps: Number of steps so far, of one or several optimizers.
        controls: The controller of each attention with several heads.

    Raises:
        SettingError: An attention has fewer heads than the target asks for.
        LayoutError: No attention has several heads, or the outputs of one cannot be read.
    """

    def __init__(self, heads: Heads, target: Target, every: int) -> None:
        super().__init__()
        require_reachable(target, heads)
        self.target, self.every, self.steps = target, every, 0
        self._sites = {site.name: site for site in heads if site.num_heads > 1}
        if not self._sites:
            raise LayoutError(f"{target} counts heads, and no attention has more than one; select others.")
        self.controls = {name: Control() for name in self._sites}
        self._names = {
            id(part.parameter): site.name
            for site in heads
            for part in (*site.parts, *(site.output.parts if site.output is not None else ()))
        }
        self._taps = Taps(
            replace(heads, sites=tuple(self._sites.values())), outputs=True, training_only=True, newest=NEWEST
        )
        self._removers.append(self._taps.remove)
        self._pauses = ExitStack()
        # the step of its optimizer at which each attachment acted
        self._acted: dict[int, int] = {}

    def find_strengths(self, actor: Attachment, strength: float) -> dict[str, float]:
        """Return the factor on the repulsion of each group by its name, measured first if it is time to.

        Args:
            actor: What is about to act. One whose optimizer has stepped since it acted has come to the next step;
                others follow it in the same. A closure that is called again, and a step that was left out, are none.
            strength: Factor on the repulsion of all of its groups.
        """
        if not self._acted or self._acted.get(id(actor), actor.steps) != actor.steps:
            self._acted = {}
            self._measure()
        self._acted[id(actor)] = actor.steps
        return {group.name: strength * self._find_control(group).ratio for group in actor.groups}

    def _measure(self) -> None:
        captures = self._taps.read_called()
        if self.steps % self.every == 0:
            for name, number in self._count(captures).items():
                heads = self._sites[name].num_heads
                self.controls[name] = advance(self.controls[name], self.target, float(number), heads)
                tell_saturated(name, self.controls[name], self.target)
        self.steps += 1
        self._pause()

    def _pause(self) -> None:
        """Capture what is computed for the next step if it is to be measured, and nothing else."""
        self._pauses.close()
        if self.steps % self.every:
            self._pauses.enter_context(self._taps.paused())

    def _count(self, captures: Sequence[Capture]) -> dict[str, Tensor]:
        """Return the effective number of heads of each attention; NaN where its calls, if any, tell nothing."""
        calls = {name: [call for call in captures if call.site.name == name] for name in self._sites}
        found = {name: count_effective_heads(own) for name, own in calls.items() if own}
        device = next((number.device for number in found.values()), torch.device("cpu"))
        unknown = torch.full((), math.nan, dtype=torch.float64, device=device)
        numbers = [found.get(name, unknown) for name in self._sites]
        if is_distributed():
            # every process takes part, also one whose batch did not use an attention
            numbers = average_finite_over(None, numbers)
        return dict(zip(self._sites, numbers, strict=True))

    def require_measured(self) -> None:
        """Raise `NotFired` where nothing was ever measured, so that no strength was set."""
        silent = [name for name, control in self.controls.items() if control.effective_heads is None]
        if silent:
            raise NotFired(
                f"{', '.join(silent[:4])}: the effective number of heads was never measured, so nothing repels them; "
                "the model must be called in training mode before each step, with at least four tokens."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the controllers and the number of steps as plain numbers."""
        controls = {name: asdict(control) for name, control in self.controls.items()}
        return {"controls": controls, "control_steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a repulsion's state, which holds what `state_dict` returned.

        Raises:
            SettingError: It holds no such state, or one of other attentions. Nothing is changed.
        """
        # states that were saved before held the steps of the optimizers alone
        steps = state.get("control_steps", max(state["steps"]))
        require_integer("control_steps", steps)
        self.controls = read_controls(state.get("controls"), self.controls)
        self.steps, self._acted = steps, {}
        # what was computed before is of no step to come
        self._taps.read_called()
        self._pause()

    def _find_control(self, group: ParticleGroup) -> Control:
        return self.controls.get(self._names[id(group.parts[0].parameter)], Control())


def make_steering(heads: Heads, rule: object, every: int) -> Steering | None:
    """Return the controllers of a rule whose strength is a `Target`, else None."""
    target = getattr(rule, "alpha", None)
    return Steering(heads, target, every) if isinstance(target, Target) else None
