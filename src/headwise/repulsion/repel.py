"""A particle rule attached to the user's own optimizer.

Owns the verb, what happens before a step, and the handle. The hooks are in `attachments`, the two passes of a step in
`ensembles`, the equations in `particles` and `kernels`; which rows are a head is in `heads`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from headwise.errors import (
    NotFired,
    SettingError,
    require_boolean,
    require_choice,
    require_integer,
    require_range,
)
from headwise.heads.heads import Heads, require_heads
from headwise.nn.hooks import Handle
from headwise.repulsion.function_rule import FunctionSVGD
from headwise.repulsion.function_space import apply_function_rule, function_ensembles_of
from headwise.repulsion.groups import acts_apart, require_apart, require_several
from headwise.repulsion.optimizer_hooks import Attachment, assign, require_state, torch_optimizers
from headwise.repulsion.rules import Rule
from headwise.repulsion.step import Ensemble, ForceNorms, ensembles_of, langevin_rate, noise_key
from headwise.repulsion.step_sharded import apply_rule_everywhere


def repel(
    optimizer: Optimizer | Sequence[Optimizer],
    heads: Heads,
    rule: Rule,
    *,
    joint: bool = False,
    when: Literal["step", "manual"] = "step",
    noise: Literal["step", "apply"] = "step",
    seed: int = 0,
) -> Repulsion:
    """Make the heads repel one another at every step of an optimizer; returns the handle.

    Before each `optimizer.step()` the gradient g_i of every head's parameters theta_i becomes what the rule says, for
    SVGD g'_i = eps [ sum_j k_ij g_j - alpha R_i ] / M (An et al. 2020, Eq. 4 with the sign of a descent step). Nothing
    else changes: parameters outside the heads keep their gradients, and the loop stays as it was. Gradients are
    written in place, scaled gradients of a fused optimizer under GradScaler are respected, and a closure is wrapped.

    With `when="step"` this happens inside `optimizer.step()`, after any clipping in the loop. The papers clip after
    it: call `handle.apply()` before clipping, with `when="manual"` so that a forgotten call is an error. Langevin
    noise is added in `optimizer.step()` all the same unless `noise="apply"`.

    Args:
        optimizer: The optimizer that holds the heads' parameters, or several; wrappers (Accelerate) are unwrapped.
        heads: Which heads, for example `find_heads(model).layer(0)`; query, key and value separately.
        rule: `SVGD(...)`, `SPOS(...)`, `SGLD(...)`, one of the cosine family, or `FunctionSVGD(...)`, which acts on W_O
            too.
        joint: Whether query, key and value of a site make one particle instead of three.
        when: "step" or "manual".
        noise: "step" adds noise in `optimizer.step()`, "apply" together with the forces.
        seed: Seed of the noise, at least 0; noise depends on (seed, step, parameter name) and the kind of device. Two
            models with equal names draw apart under one optimizer; under two, give them seeds of their own.

    Raises:
        LayoutError: An optimizer lacks a parameter of the heads; a parameter is sharded, frozen or without values; the
            model was changed since its heads were found; or there is but one head wherever the rule would act.
        SettingError: These heads are repelled by this optimizer already, or held by two of those given, or a setting
            is out of range.
        HeadwiseError: All heads of an ensemble are equal: nothing would ever separate them. See `jitter`. Or they are
            not finite.
        ShapeError: A head is zero and the rule's kernel compares directions.

    Example:
        >>> import torch
        >>> import headwise as hw
        >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> repulsion = repel(optimizer, hw.find_heads(model), hw.SVGD(alpha=0.01))
        >>> model(torch.randn(3, 5, 8)).square().mean().backward()
        >>> optimizer.step()
        >>> repulsion.steps
        1
    """
    if isinstance(rule, type) or not isinstance(rule, Rule):
        raise SettingError(f"rule is {rule!r}; expected a particle rule such as hw.SVGD(alpha=0.01).")
    require_choice("when", when, ("step", "manual"))
    require_choice("noise", noise, ("step", "apply"))
    require_boolean("joint", joint)
    require_integer("seed", seed)
    optimizers = torch_optimizers(optimizer)
    require_heads(heads)
    if isinstance(rule, FunctionSVGD) and joint:
        raise SettingError("FunctionSVGD compares products of projections, which cannot be joined; leave joint out.")
    ensembles = function_ensembles_of(heads) if isinstance(rule, FunctionSVGD) else ensembles_of(heads, joint=joint)
    for ensemble in ensembles:
        ensemble.check()
    if not acts_apart(rule):
        require_several(ensembles, heads)
    for ensemble in ensembles:
        require_apart(ensemble)
        if rule.needs_inner:
            ensemble.require_nonzero()
    return Repulsion(heads, assign(optimizers, ensembles), rule, when=when, noise=noise, seed=seed)


class Repulsion(Handle):
    """The handle of `repel`: what it acts on, how strongly, and what it did last. A context manager.

    Attributes:
        heads: The heads it was made for.
        rule: The particle rule.
    """

    def __init__(
        self,
        heads: Heads,
        attachments: Sequence[Attachment],
        rule: Rule,
        *,
        when: Literal["step", "manual"],
        noise: Literal["step", "apply"],
        seed: int,
    ) -> None:
        super().__init__()
        self.heads, self.rule, self.when, self.noise, self.seed = heads, rule, when, noise, seed
        self._strength = 1.0
        self._attachments = tuple(attachments)
        for attachment in self._attachments:
            attachment.attach(self._before_step)
            self._removers.append(attachment.detach)

    @property
    def strength(self) -> float:
        """Multiplies the repulsion (not the drive), at least 0; assign between steps to schedule it. Starts at 1.

        Raises:
            SettingError: On assignment of anything else.
        """
        return self._strength

    @strength.setter
    def strength(self, value: float) -> None:
        require_range("strength", value, low=0.0)
        self._strength = float(value)

    @property
    def ensembles(self) -> tuple[Ensemble, ...]:
        """The ensembles of particles acted on."""
        return tuple(ensemble for attachment in self._attachments for ensemble in attachment.ensembles)

    @property
    def steps(self) -> int:
        """Number of optimizer steps acted on."""
        return max(attachment.steps for attachment in self._attachments)

    @property
    def last(self) -> ForceNorms:
        """Norms of drive, repulsion and particles of each ensemble at the last step.

        Raises:
            NotFired: No step was taken yet.
        """
        records = [attachment.last for attachment in self._attachments if attachment.last is not None]
        if not records:
            raise NotFired("no optimizer step has been taken since repel(); there are no forces to report.")
        return ForceNorms.joined(records)

    def apply(self) -> None:
        """Change the heads' gradients now, before clipping; the coming `optimizer.step()` will not do it again.

        Once a step, on gradients that are whole and unscaled: after the last micro-batch and `scaler.unscale_`. Where
        the step is then skipped, or raises, call `zero_grad()` as usual before going on.

        Raises:
            NotFired: No head has a gradient: call it after `backward()`. Or the handle was removed.
            LayoutError: A parameter was replaced, or left its optimizer.
        """
        for attachment in self._attachments:
            if not attachment.attached:
                raise NotFired("the repulsion is not attached to its optimizer any more; call hw.repel again.")
            if not attachment.applied:
                self._act(attachment, scale=None)
                attachment.mark()

    def verify(self, *optimizers: Optimizer) -> None:
        """Raise unless the repulsion is attached and has acted on all of its heads.

        Args:
            optimizers: Those that the loop steps now, wrapped or not; without them, those that were attached.

        Raises:
            NotFired: The hook is gone, no step was acted on, or heads never had a gradient.
            LayoutError: A parameter or the layer that held it was replaced or wrapped, or left its optimizer.
            HeadwiseError: All heads of an ensemble have become equal, or are not finite.
        """
        attached = [attachment.optimizer for attachment in self._attachments]
        strangers = [o for o in torch_optimizers(optimizers or attached) if not any(o is own for own in attached)]
        if strangers or not all(attachment.attached for attachment in self._attachments):
            raise NotFired(
                "the repulsion is not attached to the optimizer in use: it was removed, another optimizer was built, "
                "or the optimizer was copied or unpickled, which drops hooks. Call hw.repel on the optimizer in use."
            )
        require_heads(self.heads)
        for attachment in self._attachments:
            if attachment.steps == 0:
                raise NotFired(
                    f"the repulsion is attached to {type(attachment.optimizer).__name__} but no step() of it was seen; "
                    "is another optimizer stepping these parameters?"
                )
            attachment.require_current()
            if attachment.idle:
                raise NotFired(
                    f"{', '.join(sorted(attachment.idle))}: no gradient at any step since repel(); the loss does not "
                    "use these heads, or they are frozen. Select other heads."
                )
        for ensemble in self.ensembles:
            require_apart(ensemble)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on with the same noise and strength."""
        return {
            "steps": [attachment.steps for attachment in self._attachments],
            "turns": [attachment.turn for attachment in self._attachments],
            "strength": self.strength,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`.

        Raises:
            SettingError: It is no such state, or of a repulsion on another number of optimizers. Nothing is changed
                then.
        """
        require_state(state, len(self._attachments))
        self.strength = state["strength"]
        for attachment, step, turn in zip(self._attachments, state["steps"], state["turns"], strict=True):
            attachment.steps, attachment.turn = step, turn
            attachment.clear()

    def __str__(self) -> str:
        sizes = ", ".join(map(str, sorted({ensemble.particles for ensemble in self.ensembles})))
        steppers = " and ".join(type(attachment.optimizer).__name__ for attachment in self._attachments)
        single = [ensemble.name for ensemble in self.ensembles if ensemble.particles == 1]
        alone = f"; one head, so nothing repels it: {', '.join(single[:4])}" if single else ""
        alone += f" and {len(single) - 4} more" if len(single) > 4 else ""
        return f"{self.rule} on {len(self.ensembles)} ensembles of {sizes} heads, before each step of {steppers}{alone}"

    __repr__ = __str__

    def _before_step(self, attachment: Attachment, scale: Tensor | None) -> None:
        if not attachment.applied:
            if self.when == "manual":
                raise NotFired(
                    'repel(..., when="manual") was asked for but apply() was not called before optimizer.step(); '
                    'call handle.apply() after backward(), or use when="step".'
                )
            self._act(attachment, scale)
            attachment.mark()
        if self.noise == "step" and not attachment.noisy:
            self._add_noise(attachment, scale)
            attachment.noisy = True

    def _act(self, attachment: Attachment, scale: Tensor | None) -> None:
        attachment.require_current()
        if any(ensemble.gradients() is None for ensemble in attachment.ensembles):
            # none comes to a layer that was wrapped or replaced
            require_heads(self.heads)
        if isinstance(self.rule, FunctionSVGD):
            forces = apply_function_rule(self.rule, attachment.ensembles, strength=self.strength, scale=scale)
        else:
            forces = apply_rule_everywhere(self.rule, attachment.ensembles, strength=self.strength, scale=scale)
        if forces is None:
            raise NotFired(
                f"none of the {len(attachment.ensembles)} ensembles has a gradient; call backward() before the step, "
                "and zero_grad() only after it. Where all these heads are frozen for good, call .remove()."
            )
        attachment.record(forces)
        if self.noise == "apply":
            self._add_noise(attachment, scale)

    def _add_noise(self, attachment: Attachment, scale: Tensor | None) -> None:
        deviation = self.rule.noise_scale()
        if deviation == 0.0:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise SettingError(
                f"{self.rule} draws noise that depends on the step, and a CUDA graph would add that of one step again "
                "and again; leave optimizer.step() out of the graph, or take a rule without noise such as hw.SVGD()."
            )
        seed = self.seed if attachment.turn == 0 else noise_key(self.seed, "turn", attachment.turn)
        for ensemble in attachment.ensembles:
            rate = langevin_rate(attachment.optimizer, ensemble)
            ensemble.add_noise(deviation * rate, seed=seed, step=attachment.steps, scale=scale)
