"""A particle rule attached to the user's own optimizer: `repel` and its handle.

With a `Target` the strength of a rule follows what the heads of each attention computed. Noise, of Langevin rules and
of `jitter`, is the same for the same seed on every process.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from headwise.errors import (
    LayoutError,
    NotFired,
    SettingError,
    require_choice,
    require_integer,
    require_positive,
    require_range,
)
from headwise.heads.capture import Capture
from headwise.heads.heads import PROJECTIONS, Heads, heads_first, require_heads, require_proved
from headwise.heads.method import Method, Stage, require_tuple
from headwise.heads.sharding import add_own_part, average_finite_over, is_distributed, write_own_part
from headwise.heads.taps import Taps, count_effective_heads, require_reachable
from headwise.heads.view import HeadView, gather_full, is_sharded
from headwise.kernels import require_nonzero
from headwise.nn.hooks import Handle
from headwise.repulsion.groups import Attachment, ForceNorms, ParticleGroup, divide_groups, find_groups
from headwise.repulsion.low_rank import DriveRoutes, ParameterSpace, list_carriers
from headwise.repulsion.optimizers import require_state, unwrap_optimizers
from headwise.repulsion.rules import AnyRule, Rule, Strength, acts_apart
from headwise.settings import Count
from headwise.strength import Control, Target, advance, read_controls, tell_saturated

# Calls of an attention that are looked at, where a step has more: the last of many micro-batches.
NEWEST = 64


class Steering(Handle):
    """Controllers of attentions, by name, advanced at every `every`-th step from the outputs of the step's forwards.

    Outputs are captured at those steps only. Where processes train together (torch.distributed is initialized), the
    measured numbers are averaged over all of them, so that every process has the same strength.

    Attributes:
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
        several = replace(heads, sites=tuple(self._sites.values()))
        self._taps = Taps(several, outputs=True, training_only=True, newest=NEWEST)
        self._removers.append(self._taps.remove)
        self._pauses = ExitStack()
        # the step of its optimizer at which each attachment acted
        self._acted: dict[int, int] = {}

    def find_strengths(self, actor: Attachment, strength: float) -> dict[str, float]:
        """Return `strength` times the ratio of each group that is about to be acted on, measured if it is time to.

        The first attachment whose optimizer has stepped since it last acted starts a new step; the others join it.
        Repeated closure calls and skipped steps do not count.
        """
        if not self._acted or self._acted.get(id(actor), actor.steps) != actor.steps:
            self._acted = {}
            captures = self._taps.read_called()
            if self.steps % self.every == 0:
                self._advance(captures)
            self.steps += 1
            self._pause()
        self._acted[id(actor)] = actor.steps
        sites = {group.name: self._names[id(group.parts[0].parameter)] for group in actor.groups}
        return {name: strength * self.controls.get(site, Control()).ratio for name, site in sites.items()}

    def _pause(self) -> None:
        """Capture what is computed for the next step if it is to be measured, and nothing else."""
        self._pauses.close()
        if self.steps % self.every:
            self._pauses.enter_context(self._taps.paused())

    def _advance(self, captures: Sequence[Capture]) -> None:
        """Advance each controller by the effective number of heads, NaN where no call of the attention was seen."""
        calls = {name: [call for call in captures if call.site.name == name] for name in self._sites}
        found = {name: count_effective_heads(own) for name, own in calls.items() if own}
        device = next((number.device for number in found.values()), torch.device("cpu"))
        unknown = torch.full((), math.nan, dtype=torch.float64, device=device)
        numbers = [found.get(name, unknown) for name in self._sites]
        if is_distributed():
            # every process takes part, also one whose batch did not use an attention
            numbers = average_finite_over(None, numbers)
        for (name, site), number in zip(self._sites.items(), numbers, strict=True):
            self.controls[name] = advance(self.controls[name], self.target, float(number), site.num_heads)
            tell_saturated(name, self.controls[name], self.target)

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


def jitter(heads: Heads, scale: float, *, seed: int = 0) -> None:
    """Separate equal heads: add N(0, (scale * r)^2) to every head's parameters, r their root mean square.

    Equal heads have zero repulsion and equal gradients, so no rule can separate them.

    Args:
        heads: Which heads.
        scale: Size of the noise relative to the parameters, above 0; 1e-3 is enough.
        seed: Seed of the noise, at least 0.

    Raises:
        SettingError: `scale` is not above 0, or `heads` is no selection of heads.
        LayoutError: The model was changed since its heads were found, or heads are under LoRA.
        HeadwiseError: A parameter is not finite. Nothing is changed then.

    Example:
        >>> import headwise as hw
        >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> jitter(hw.find_heads(model), 1e-3)
    """
    require_heads(heads)
    require_positive("scale", scale)
    require_integer("seed", seed)
    parts = [part for head_slice in heads.slices() for part in head_slice.parts]
    for part in parts:
        if part.lora is not None:
            raise LayoutError(
                f"{part.name} is the base of a LoRA layer, and noise in it would be saved with no adapter; call "
                "hw.repulsion.jitter before adding the adapter."
            )
        part.require_finite()
    with torch.no_grad():
        for head_slice in parts:
            sharded = is_sharded(head_slice.parameter)
            every = gather_full(head_slice.parameter)
            view = head_slice.of(every)
            size = view.float().square().mean().sqrt()
            noise = _draw_noise(view, seed, "jitter", head_slice)
            view.add_((noise * (scale * torch.where(size > 0, size, 1.0))).to(view.dtype))
            if sharded:
                write_own_part(head_slice.parameter, every)


def find_langevin_rates(optimizer: Optimizer) -> dict[int, float | Tensor]:
    """Return the factor on Langevin noise that gives it the right temperature, for each parameter by its id.

    theta <- theta - lr (eps grad U - a xi) samples at the temperature 1 / beta when a = sqrt(2 eps / beta) / sqrt(lr):
    the noise is divided by sqrt(lr) under plain SGD. Under any other optimizer no such factor exists: the noise is
    gradient noise and not Langevin, and the factor is 1.
    """
    factors: dict[int, float | Tensor] = {}
    for options in optimizer.param_groups:
        factor: float | Tensor = 1.0
        if type(optimizer) is SGD and options["momentum"] == 0:
            rate = options["lr"]
            # a rate of zero moves nothing, whatever the noise
            if isinstance(rate, Tensor):
                factor = torch.where(rate > 0, rate.clamp_min(torch.finfo(rate.dtype).tiny).rsqrt(), 1.0)
            elif rate > 0.0:
                factor = rate**-0.5
        factors |= dict.fromkeys(map(id, options["params"]), factor)
    return factors


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends only on the parts, the same on every machine and in every process."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _draw_noise(view: Tensor, seed: int, purpose: object, part: HeadView, *names: str) -> Tensor:
    generator = torch.Generator(view.device)
    run = (part.run,) if part.run else ()
    generator.manual_seed(derive_seed(seed, purpose, part.name, part.projection, *run, *names))
    return torch.randn(view.shape, generator=generator, device=view.device)


@runtime_checkable
class Space(Rule, Protocol):
    """A rule that is its own space of particles, such as `FunctionSVGD`; other rules act on the heads' parameters."""

    def find_groups(self, heads: Heads, *, joint: bool) -> Sequence[ParticleGroup]:
        """Return the groups to act on."""
        ...

    def apply(self, groups: Sequence[ParticleGroup], *, strength: Strength, scale: Tensor | None) -> ForceNorms | None:
        """Replace the gradient of every group in place; None if no group has a gradient."""
        ...

    def drive(self, group: ParticleGroup) -> Tensor:
        """Return the coefficients [M, M] of a group's driving term at its present parameters."""
        ...


@dataclass(frozen=True)
class Repel(Method):
    """Repulsion between the parameters of heads: `repel`, as a value.

    Attributes:
        rule, joint, when, noise, every: As for `repel`.
        projections: Projections it acts on, of query, key and value; None for all.
        grouping: Under grouped queries, "within" for query heads that repel those of their group, "across" for groups
            that repel one another; None for all query heads. See `Heads.grouped`.

    Raises:
        SettingError: A setting is of the wrong type or out of range.

    Example:
        >>> import headwise as hw
        >>> Repel(hw.SVGD(alpha=0.01), layers=(0,)).layers
        (0,)
    """

    rule: AnyRule
    projections: tuple[str, ...] | None = None
    grouping: Literal["within", "across"] | None = None
    joint: bool = False
    when: Literal["step", "manual"] = "step"
    noise: Literal["step", "apply"] = "step"
    every: Count = 20
    stage: ClassVar[Stage] = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_tuple("projections", self.projections, "('query', 'key')")
        for projection in self.projections or ():
            require_choice("projections", projection, PROJECTIONS)

    def attach(self, heads: Heads, optimizers: Optimizer | Sequence[Optimizer] = (), seed: int = 0) -> Repulsion:
        """Attach the rule to the optimizers of a model whose heads these are; errors as of `repel`."""
        require_integer("seed", seed)
        unwrapped = unwrap_optimizers(optimizers)
        require_heads(heads)
        chosen = self.select(heads)
        if self.projections is not None:
            chosen = chosen.projection(*self.projections)
        if self.grouping is not None:
            chosen = chosen.grouped(self.grouping)
        require_proved(chosen)
        if isinstance(self.rule, Space):
            groups = self.rule.find_groups(chosen, joint=self.joint)
        else:
            groups = find_groups(chosen, joint=self.joint)
        _require_particles(groups, chosen, self.rule)
        return Repulsion(chosen, divide_groups(unwrapped, groups), self, seed)


@heads_first("optimizer")
def repel(
    heads: Heads,
    rule: Rule,
    optimizer: Optimizer | Sequence[Optimizer],
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
        heads: Which heads, for example `find_heads(model).layer(0)`; query, key and value separately.
        rule: `SVGD(...)`, `SPOS(...)`, `SGLD(...)`, one of the cosine family, or `FunctionSVGD(...)`, which acts on W_O
            too.
        optimizer: The optimizer that holds the heads' parameters, or several; wrappers (Accelerate) are unwrapped.
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
        >>> repulsion = repel(hw.find_heads(model), hw.SVGD(alpha=0.01), optimizer)
        >>> model(torch.randn(3, 5, 8)).square().mean().backward()
        >>> optimizer.step()
        >>> repulsion.steps
        1
    """
    return Repel(rule, joint=joint, when=when, noise=noise, every=every).attach(heads, optimizer, seed)


class Repulsion(Handle):
    """The handle of `repel`: what it acts on, how strongly, and what it did last. A context manager.

    Attributes:
        heads: The heads it was made for.
        rule: The particle rule.
        steering: The controllers of a `Target`; None for another strength.
    """

    def __init__(self, heads: Heads, attachments: Sequence[Attachment], method: Repel, seed: int) -> None:
        super().__init__()
        rule = method.rule
        self.heads, self.rule, self.when, self.noise, self.seed = heads, rule, method.when, method.noise, seed
        self._space = rule if isinstance(rule, Space) else ParameterSpace(rule)
        self._strength = 1.0
        self.steering: Steering | None = None
        target = getattr(rule, "alpha", None)
        if isinstance(target, Target):
            self.steering = Steering(heads, target, method.every)
            self._removers.append(self.steering.remove)
        self._attachments = tuple(attachments)
        for attachment in self._attachments:
            attachment.attach(self._before_step)
            self._removers.append(attachment.detach)
        self._routes = DriveRoutes(self.groups, self._space.drive)
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
    def steps(self) -> int:
        """Number of optimizer steps acted on."""
        return max(attachment.steps for attachment in self._attachments)

    @property
    def last(self) -> ForceNorms:
        """Norms of driving term, repulsion and particles of each group at the last step.

        Raises:
            NotFired: No step was taken yet.
        """
        joined = ForceNorms.join(attachment.last for attachment in self._attachments)
        if joined is None:
            raise NotFired("no optimizer step has been taken since repel(); there are no forces to report.")
        return joined

    def stats(self) -> dict[str, Tensor]:
        """Return "force_ratio" of the last step, if any: norm of all repulsion over norm of all driving terms."""
        last = ForceNorms.join(attachment.last for attachment in self._attachments)
        if last is None:
            return {}
        driving = last.driving_norm.norm()
        return {"force_ratio": last.repulsion_norm.norm() / driving.clamp_min(torch.finfo(driving.dtype).tiny)}

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

    def check(self, *optimizers: Optimizer) -> None:
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
        """Add N(0, (deviation rate)^2) to the gradients of the heads, the same for the same (seed, step, parameter).

        A process that holds a part of a gradient adds what a single process would have added to that part. Under LoRA
        the noise is on the parameters trained, A and B; A, which several groups may share, gets it once.
        """
        deviation, drawn = self.rule.noise_scale(), set[int]()
        if deviation == 0.0:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise SettingError(
                f"{self.rule} draws noise that depends on the step, and a CUDA graph would add that of one step again "
                "and again; leave optimizer.step() out of the graph, or use a rule without noise such as hw.SVGD()."
            )
        seed = self.seed if attachment.turn == 0 else derive_seed(self.seed, "turn", attachment.turn)
        rates = find_langevin_rates(attachment.optimizer)

        def add(gradient: Tensor, parameter: Tensor, part: HeadView, *names: str) -> None:
            noise = _draw_noise(gradient, seed, attachment.steps, part, *names) * (deviation * rates[id(parameter)])
            gradient.add_((noise if scale is None else noise * scale).to(gradient.dtype))

        with torch.no_grad():
            ready = [group for group in attachment.groups if group.gradients() is not None]
            for part in (part for group in ready for part in group.parts):
                gradient = part.parameter.grad
                if gradient is not None and is_sharded(gradient):
                    every = torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)
                    add(part.of(every), part.parameter, part)
                    add_own_part(gradient, every)
                    continue
                for carrier in list_carriers(part):
                    own, common = carrier.factors or (part.parameter, part.parameter)
                    names = () if carrier.adapter is None else (carrier.adapter.name,)
                    add(carrier.own, own, part, *names)
                    shared = carrier.shared
                    if shared is not None and id(shared) not in drawn:
                        drawn.add(id(shared))
                        add(shared, common, part, *names, "shared")


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
        sizes = {own.projection: own.heads for site in heads for own in site.slices if own.heads > 1}
        choose = " or ".join(f"heads.projection({name!r})" for name in PROJECTIONS if name in sizes)
        listed = ", ".join(f"{group.name}: {group.particles}" for group in groups[:4])
        raise LayoutError(
            f"no particle group has more than one particle ({listed}{', ...' if len(groups) > 4 else ''}), and one "
            "head has nothing to be repelled from; "
            + (
                f"choose {choose}, with {max(sizes.values())} heads per layer."
                if sizes
                else "select an attention with more heads."
            )
        )
    for group in groups:
        group.require_apart()
        if rule.needs_inner:
            require_nonzero(f"{group.name}: heads", group.whole_views())
