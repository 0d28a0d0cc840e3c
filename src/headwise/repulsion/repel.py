"""A particle rule attached to the user's own optimizer: `repel` and its handle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from headwise.errors import (
    LayoutError,
    NotFired,
    SettingError,
    require_boolean,
    require_choice,
    require_integer,
    require_range,
)
from headwise.heads.heads import PROJECTIONS, Heads, require_heads
from headwise.heads.readings import require_proved
from headwise.nn.hooks import Handle
from headwise.repulsion.force_norms import ForceNorms
from headwise.repulsion.groups import Attachment, ParticleGroup, divide_groups, find_groups
from headwise.repulsion.low_rank import Evaluations, apply_low_rank
from headwise.repulsion.low_rank_drive import DriveRoutes
from headwise.repulsion.mixing import Strength
from headwise.repulsion.noise import add_noise, derive_seed, find_langevin_rates
from headwise.repulsion.optimizers import require_state, unwrap_optimizers
from headwise.repulsion.rules import Rule, acts_apart, require_rule
from headwise.repulsion.steering import Steering, make_steering
from headwise.repulsion.step import apply_rule


@runtime_checkable
class Space(Protocol):
    """What a rule's particles are: `FunctionSVGD` is its own space, other rules act on the heads' parameters."""

    def find_groups(self, heads: Heads, *, joint: bool) -> Sequence[ParticleGroup]:
        """Return the groups to act on."""
        ...

    def apply(self, groups: Sequence[ParticleGroup], *, strength: Strength, scale: Tensor | None) -> ForceNorms | None:
        """Replace the gradient of every group in place; None when none has a gradient."""
        ...

    def drive(self, group: ParticleGroup) -> Tensor:
        """Return the coefficients [M, M] of a group's driving term at its present parameters."""
        ...


@dataclass(frozen=True)
class ParameterSpace:
    """The space of rules whose particles are the heads' parameters: under LoRA, the heads of the effective weight."""

    rule: Rule
    evaluations: Evaluations

    def find_groups(self, heads: Heads, *, joint: bool) -> Sequence[ParticleGroup]:
        """Return one group per projection of each attention, or one per attention when `joint`."""
        return find_groups(heads, joint=joint)

    def apply(self, groups: Sequence[ParticleGroup], *, strength: Strength, scale: Tensor | None) -> ForceNorms | None:
        """Replace the gradient of every group in place; None when none has a gradient."""
        plain = apply_rule(self.rule, [group for group in groups if not group.adapted], strength=strength, scale=scale)
        adapted = [group for group in groups if group.adapted]
        carried = apply_low_rank(self.evaluations, adapted, strength=strength, scale=scale)
        records = [record for record in (plain, carried) if record is not None]
        return ForceNorms.join(records) if records else None

    def drive(self, group: ParticleGroup) -> Tensor:
        """Return the coefficients [M, M] of a group's driving term at its present parameters."""
        return self.evaluations.of(group).mixing.drive


def repel(
    optimizer: Optimizer | Sequence[Optimizer],
    heads: Heads,
    rule: Rule,
    *,
    joint: bool = False,
    when: Literal["step", "manual"] = "step",
    noise: Literal["step", "apply"] = "step",
    seed: int = 0,
    every: int = 20,
) -> Repulsion:
    """Make the heads repel one another at every step of an optimizer; returns the handle.

    Before each `optimizer.step()` the rule replaces the gradient g_i of every head's parameters theta_i, for SVGD by
    g'_i = eps [ sum_j k_ij g_j - alpha R_i ] / M (An et al. 2020, Eq. 4 with the sign of a descent step). Parameters
    outside the heads keep their gradients, and the training loop does not change. Gradients are written in place,
    scaled gradients of a fused optimizer under GradScaler are respected, and a closure is wrapped.

    With `when="step"` this happens inside `optimizer.step()`, after any clipping in the loop. The papers clip after
    it: call `handle.apply()` before clipping, with `when="manual"` so that a forgotten call is an error. Langevin
    noise is still added in `optimizer.step()` unless `noise="apply"`.

    Args:
        optimizer: The optimizer that holds the heads' parameters, or several; wrappers (Accelerate) are unwrapped.
        heads: Which heads, for example `find_heads(model).layer(0)`; query, key and value separately.
        rule: `SVGD(...)`, `SPOS(...)`, `SGLD(...)`, one of the cosine family, or `FunctionSVGD(...)`, which acts on W_O
            too.
        joint: Whether query, key and value of an attention make one particle instead of three.
        when: "step" or "manual".
        noise: "step" adds noise in `optimizer.step()`, "apply" together with the forces.
        seed: Seed of the noise, at least 0; noise depends on (seed, step, parameter name) and the kind of device. Two
            models with equal names get different noise under one optimizer; under two, give them different seeds.
        every: Where the rule's alpha is a `Target`, number of steps from one count of the effective heads to the next.

    Raises:
        LayoutError: An optimizer lacks a parameter of the heads; a parameter is sharded, frozen or without values; the
            model was changed since its heads were found; or there is only one head wherever the rule would act.
        SettingError: These heads are already repelled under this optimizer, or held by two of those given, a setting
            is out of range, or an attention has fewer heads than a target asks for.
        HeadwiseError: All heads of a group are equal, so that nothing would ever separate them (see `jitter`), or they
            are not finite.
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
    require_rule(rule)
    require_choice("when", when, ("step", "manual"))
    require_choice("noise", noise, ("step", "apply"))
    require_boolean("joint", joint)
    require_integer("seed", seed)
    require_integer("every", every, low=1)
    optimizers = unwrap_optimizers(optimizer)
    require_heads(heads)
    require_proved(heads)
    space = rule if isinstance(rule, Space) else ParameterSpace(rule, Evaluations(rule))
    groups = space.find_groups(heads, joint=joint)
    _require_particles(groups, heads, rule)
    attachments = divide_groups(optimizers, groups)
    steering = make_steering(heads, rule, every)
    return Repulsion(heads, attachments, rule, space, steering, when=when, noise=noise, seed=seed)


class Repulsion(Handle):
    """The handle of `repel`: what it acts on, how strongly, and what it did last. A context manager.

    Attributes:
        heads: The heads it was made for.
        rule: The particle rule.
        steering: The controllers of a `Target`; None for another strength.
    """

    def __init__(
        self,
        heads: Heads,
        attachments: Sequence[Attachment],
        rule: Rule,
        space: Space,
        steering: Steering | None,
        *,
        when: Literal["step", "manual"],
        noise: Literal["step", "apply"],
        seed: int,
    ) -> None:
        super().__init__()
        self.heads, self.rule, self.when, self.noise, self.seed = heads, rule, when, noise, seed
        self.steering, self._space, self._strength = steering, space, 1.0
        if steering is not None:
            self._removers.append(steering.remove)
        self._attachments = tuple(attachments)
        for attachment in self._attachments:
            attachment.attach(self._before_step)
            self._removers.append(attachment.detach)
        self._routes = DriveRoutes(self.groups, space.drive)
        self._removers.append(self._routes.remove)
        if self._routes.routes:
            for attachment in self._attachments:
                hook = attachment.optimizer.register_step_post_hook(self._routes.refresh_after)
                self._removers.append(hook.remove)

    @property
    def strength(self) -> float:
        """Factor on the repulsion (not on the driving term), at least 0; assign between steps to schedule it.

        It is 1 at first.

        Raises:
            SettingError: On assignment of anything else.
        """
        return self._strength

    @strength.setter
    def strength(self, value: float) -> None:
        require_range("strength", value, low=0.0)
        self._strength = float(value)

    @property
    def groups(self) -> tuple[ParticleGroup, ...]:
        """The particle groups acted on."""
        return tuple(group for attachment in self._attachments for group in attachment.groups)

    @property
    def ensembles(self) -> tuple[ParticleGroup, ...]:
        """`groups`, under its name in version 0.1."""
        return self.groups

    @property
    def steps(self) -> int:
        """Number of optimizer steps acted on."""
        return max(attachment.steps for attachment in self._attachments)

    @property
    def last(self) -> ForceNorms:
        """Norms of driving term, repulsion and particles of each group at the last step.

        Raises:
            NotFired: No step was taken yet.
        """
        records = [attachment.last for attachment in self._attachments if attachment.last is not None]
        if not records:
            raise NotFired("no optimizer step has been taken since repel(); there are no forces to report.")
        return ForceNorms.join(records)

    def apply(self) -> None:
        """Change the heads' gradients now, before clipping; the next `optimizer.step()` will not do it again.

        Call it once per step, on complete and unscaled gradients: after the last micro-batch and `scaler.unscale_`.
        Where the step is then skipped, or raises, call `zero_grad()` as usual before continuing.

        Raises:
            NotFired: No head has a gradient: call it after `backward()`. Or the handle was removed.
            LayoutError: A parameter was replaced, or left its optimizer.
        """
        for attachment in self._attachments:
            if not attachment.attached:
                raise NotFired("the repulsion is not attached to its optimizer anymore; call hw.repel again.")
            if not attachment.applied:
                self._act(attachment, scale=None)
                attachment.mark()

    def verify(self, *optimizers: Optimizer) -> None:
        """Raise unless the repulsion is attached and has acted on all of its heads.

        Args:
            optimizers: Those that the loop steps now, wrapped or not; by default those that were attached.

        Raises:
            NotFired: The hook is gone, no step was acted on, or heads never had a gradient.
            LayoutError: A parameter or the layer that held it was replaced or wrapped, or left its optimizer.
            HeadwiseError: All heads of a group have become equal, or are not finite.
        """
        attached = [attachment.optimizer for attachment in self._attachments]
        strangers = [o for o in unwrap_optimizers(optimizers or attached) if not any(o is own for own in attached)]
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
        if self.steering is not None:
            self.steering.require_measured()
        for group in self.groups:
            group.require_apart()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to continue with the same noise and strength, as plain numbers."""
        controls = {} if self.steering is None else self.steering.state_dict()
        return {
            "steps": [attachment.steps for attachment in self._attachments],
            "turns": [attachment.turn for attachment in self._attachments],
            "strength": self.strength,
        } | controls

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that `state_dict` returned.

        Raises:
            SettingError: It is no such state, or of a repulsion on a different number of optimizers. Nothing is changed
                then.
        """
        require_state(state, len(self._attachments))
        if self.steering is not None:
            self.steering.load_state_dict(state)
        self.strength = state["strength"]
        for attachment, step, turn in zip(self._attachments, state["steps"], state["turns"], strict=True):
            attachment.steps, attachment.turn = step, turn
            attachment.clear()

    def __str__(self) -> str:
        sizes = ", ".join(map(str, sorted({group.particles for group in self.groups})))
        steppers = " and ".join(type(attachment.optimizer).__name__ for attachment in self._attachments)
        single = [group.name for group in self.groups if group.particles == 1]
        alone = f"; one head, so nothing repels it: {', '.join(single[:4])}" if single else ""
        alone += f" and {len(single) - 4} more" if len(single) > 4 else ""
        return (
            f"{self.rule} on {len(self.groups)} particle groups of {sizes} heads, before each step of {steppers}{alone}"
        )

    __repr__ = __str__

    def _before_step(self, attachment: Attachment, scale: Tensor | None) -> None:
        if not attachment.applied:
            if self.when == "manual":
                raise NotFired(
                    'repel(..., when="manual") was given but apply() was not called before optimizer.step(); '
                    'call handle.apply() after backward(), or use when="step".'
                )
            self._act(attachment, scale)
            attachment.mark()
        if self.noise == "step" and not attachment.noisy:
            self._add_noise(attachment, scale)
            attachment.noisy = True

    def _act(self, attachment: Attachment, scale: Tensor | None) -> None:
        attachment.require_current()
        self._routes.require_taken()
        if any(group.gradients() is None for group in attachment.groups):
            # a layer that was wrapped or replaced gets no gradient
            require_heads(self.heads)
        strength: Strength = self.strength
        if self.steering is not None:
            strength = self.steering.find_strengths(attachment, strength)
        forces = self._space.apply(attachment.groups, strength=strength, scale=scale)
        if forces is None:
            raise NotFired(
                f"none of the {len(attachment.groups)} particle groups has a gradient; call backward() before the "
                "step, and zero_grad() only after it. If all these heads are frozen for good, call .remove()."
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
                "and again; leave optimizer.step() out of the graph, or use a rule without noise such as hw.SVGD()."
            )
        seed = self.seed if attachment.turn == 0 else derive_seed(self.seed, "turn", attachment.turn)
        rates, drawn = find_langevin_rates(attachment.optimizer), set[int]()
        for group in attachment.groups:
            add_noise(group, deviation, rates, seed=seed, step=attachment.steps, scale=scale, drawn=drawn)


def _require_particles(groups: Sequence[ParticleGroup], heads: Heads, rule: Rule) -> None:
    """Raise unless a rule can act on the groups: trainable, several heads where it compares them, finite, not equal."""
    for group in groups:
        for part in group.parts:
            part.require_trainable()
        if any(len({id(part.lora) for part in head_slice.parts}) > 1 for head_slice in group.slices):
            raise LayoutError(
                f"{group.name}: each head is a layer of its own with its own LoRA adapter, and the gradients of one "
                "adapter cannot be mixed with another's; merge the adapters, or put LoRA on other layers."
            )
    if not acts_apart(rule) and all(group.particles == 1 for group in groups):
        _refuse_single(groups, heads)
    for group in groups:
        group.require_apart()
        if rule.needs_inner:
            group.require_nonzero()


def _refuse_single(groups: Sequence[ParticleGroup], heads: Heads) -> NoReturn:
    """Raise `LayoutError` that lists the projections with more than one particle."""
    several = {
        head_slice.projection: head_slice.heads for site in heads for head_slice in site.slices if head_slice.heads > 1
    }
    choose = " or ".join(f"heads.projection({name!r})" for name in PROJECTIONS if name in several)
    listed = ", ".join(f"{group.name}: {group.particles}" for group in groups[:4])
    raise LayoutError(
        f"no particle group has more than one particle ({listed}{', ...' if len(groups) > 4 else ''}), and one head "
        "has nothing to be repelled from; "
        + (
            f"choose {choose}, with {max(several.values())} heads per layer."
            if several
            else "select an attention with more heads."
        )
    )
