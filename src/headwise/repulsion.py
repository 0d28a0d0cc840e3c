"""A particle rule attached to the user's own optimizer.

Owns the hook, the grouping of slabs into ensembles of particles, the two passes of a step (all Gram matrices, then the
mixing on views) and the handle. The equations are in `particles` and `kernels`; which rows are a head is in `heads`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from headwise.checks import (
    HeadwiseError,
    LayoutError,
    NotFired,
    SettingError,
    require_choice,
    require_integer,
    require_positive,
)
from headwise.ensembles import Ensemble, ForceNorms, apply_rule, ensembles_of, langevin_rate, noise_key, spread
from headwise.heads import Heads
from headwise.particles import Rule

__all__ = ["Repulsion", "jitter", "repel"]

_claims: weakref.WeakKeyDictionary[Optimizer, set[tuple[int, int]]] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class _Attachment:
    """One optimizer, the ensembles whose parameters it holds, and where it stands in the current step."""

    optimizer: Optimizer
    ensembles: tuple[Ensemble, ...]
    steps: int = 0
    applied_to: tuple[weakref.ref[Tensor], ...] = ()
    last: ForceNorms | None = None
    handle: RemovableHandle | None = field(default=None, repr=False)

    @property
    def applied(self) -> bool:
        """Whether the gradients there are now were acted on; fresh ones, after a step that was skipped, were not."""
        present = self._gradients()
        return (
            bool(self.applied_to)
            and len(present) == len(self.applied_to)
            and all(was() is now for was, now in zip(self.applied_to, present, strict=True))
        )

    def mark(self) -> None:
        """Remember that the gradients there are now were acted on."""
        self.applied_to = tuple(weakref.ref(gradient) for gradient in self._gradients())

    def clear(self) -> None:
        """Forget it: the step was taken."""
        self.applied_to = ()

    def _gradients(self) -> list[Tensor]:
        parameters = [slab.parameter for ensemble in self.ensembles for slab in ensemble.slabs]
        return [parameter.grad for parameter in parameters if parameter.grad is not None]


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
        rule: `SVGD(...)`, `SPOS(...)`, `SGLD(...)`, or one of the cosine family.
        joint: Whether query, key and value of a site make one particle instead of three.
        when: "step" or "manual".
        noise: "step" adds noise in `optimizer.step()`, "apply" together with the forces.
        seed: Seed of the noise, at least 0; noise depends on (seed, step, parameter) and the kind of device.

    Raises:
        LayoutError: An optimizer lacks a parameter of the heads, or a parameter is sharded.
        SettingError: These heads are repelled by this optimizer already, or a setting is out of range.
        HeadwiseError: All heads of an ensemble are equal: nothing would ever separate them. See `jitter`.
        ShapeError: A head is zero and the rule's kernel compares directions.

    Example:
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
    require_integer("seed", seed)
    optimizers = [
        _innermost(o) for o in ([optimizer] if isinstance(optimizer, Optimizer) else list(_listed(optimizer)))
    ]
    ensembles = ensembles_of(heads, joint=joint)
    for ensemble in ensembles:
        ensemble.check()
        if ensemble.particles > 1 and spread(ensemble) == 0.0:
            raise HeadwiseError(
                f"{ensemble.name}: all {ensemble.particles} heads are equal, so their repulsion is zero and stays so. "
                "Separate them first with hw.jitter(heads, scale), for example scale=1e-3."
            )
        if rule.needs_inner:
            ensemble.require_nonzero()
    return Repulsion(_assign(optimizers, ensembles), rule, when=when, noise=noise, seed=seed)


class Repulsion:
    """The handle of `repel`: what it acts on, how strongly, and what it did last. A context manager.

    Attributes:
        rule: The particle rule.
        strength: Multiplies the repulsion (not the drive); change it between steps to schedule it. Starts at 1.
    """

    def __init__(
        self,
        attachments: Sequence[_Attachment],
        rule: Rule,
        *,
        when: Literal["step", "manual"],
        noise: Literal["step", "apply"],
        seed: int,
    ) -> None:
        self.rule, self.when, self.noise, self.seed = rule, when, noise, seed
        self.strength: float = 1.0
        self._attachments = tuple(attachments)
        for attachment in self._attachments:
            claimed = _claims.setdefault(attachment.optimizer, set())
            wanted = {key: name for ensemble in attachment.ensembles for key, name in ensemble.keys.items()}
            taken = sorted(name for key, name in wanted.items() if key in claimed)
            if taken:
                raise SettingError(
                    f"the {taken[0]} are repelled by this optimizer already; "
                    "call .remove() on the earlier handle first."
                )
        for attachment in self._attachments:
            _claims[attachment.optimizer] |= {key for ensemble in attachment.ensembles for key in ensemble.keys}
            hook = self._hook(attachment)
            attachment.handle = attachment.optimizer.register_step_pre_hook(hook)

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
        the step is then skipped, call `zero_grad()` as usual (`set_to_none=True`, torch's default) before going on.

        Raises:
            NotFired: No head has a gradient: call it after `backward()`.
        """
        for attachment in self._attachments:
            if not attachment.applied:
                self._act(attachment, scale=None)
                attachment.mark()

    def remove(self) -> None:
        """Detach from the optimizer."""
        for attachment in self._attachments:
            if attachment.handle is not None:
                attachment.handle.remove()
                attachment.handle = None
                keys = {key for ensemble in attachment.ensembles for key in ensemble.keys}
                _claims.get(attachment.optimizer, set()).difference_update(keys)

    def verify(self) -> None:
        """Raise unless the repulsion is attached and has acted.

        Raises:
            NotFired: The hook is gone, or no step was acted on.
            HeadwiseError: All heads of an ensemble have become equal.
        """
        for attachment in self._attachments:
            hooks = attachment.optimizer._optimizer_step_pre_hooks
            if attachment.handle is None or attachment.handle.id not in hooks:
                raise NotFired(
                    "the repulsion is not attached to its optimizer: it was removed, or the optimizer was copied or "
                    "unpickled, which drops hooks. Call hw.repel on the optimizer in use."
                )
            if attachment.steps == 0:
                raise NotFired(
                    f"the repulsion is attached to {type(attachment.optimizer).__name__} but no step() of it was seen; "
                    "is another optimizer stepping these parameters?"
                )
        for ensemble in self.ensembles:
            if ensemble.particles > 1 and spread(ensemble) == 0.0:
                raise HeadwiseError(
                    f"{ensemble.name}: all {ensemble.particles} heads are equal and do not repel; "
                    "separate them with hw.jitter(heads, scale)."
                )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on with the same noise and strength."""
        return {"steps": [attachment.steps for attachment in self._attachments], "strength": self.strength}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`.

        Raises:
            SettingError: The state is of a repulsion on another number of optimizers.
        """
        steps = state.get("steps")
        if not isinstance(steps, list) or len(steps) != len(self._attachments):
            raise SettingError(
                f"the state holds steps={steps!r}; expected a list of {len(self._attachments)}, one an optimizer."
            )
        for attachment, count in zip(self._attachments, steps, strict=True):
            require_integer("steps", count)
            attachment.steps = count
            attachment.clear()
        self.strength = float(state["strength"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __str__(self) -> str:
        counts = sorted({ensemble.particles for ensemble in self.ensembles})
        return f"{self.rule} on {len(self.ensembles)} ensembles of {', '.join(map(str, counts))} heads"

    def _hook(self, attachment: _Attachment) -> Callable[..., tuple[tuple, dict] | None]:
        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[tuple, dict] | None:
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if closure is None:
                self._before_step(attachment, scale=getattr(optimizer, "grad_scale", None))
                return None

            def wrapped() -> Any:
                attachment.clear()
                loss = closure()
                self._before_step(attachment, scale=None, counted=False)
                return loss

            attachment.steps += 1
            if "closure" in kwargs:
                return args, {**kwargs, "closure": wrapped}
            return (args[0], wrapped, *args[2:]), kwargs

        return before_step

    def _before_step(self, attachment: _Attachment, scale: Tensor | None, *, counted: bool = True) -> None:
        if not attachment.applied:
            if self.when == "manual":
                raise NotFired(
                    'repel(..., when="manual") was asked for but apply() was not called before optimizer.step(); '
                    'call handle.apply() after backward(), or use when="step".'
                )
            self._act(attachment, scale)
        if self.noise == "step":
            self._add_noise(attachment, scale)
        attachment.clear()
        if counted:
            attachment.steps += 1

    def _act(self, attachment: _Attachment, scale: Tensor | None) -> None:
        forces = apply_rule(self.rule, attachment.ensembles, strength=self.strength, scale=scale)
        if forces is None:
            raise NotFired(
                f"none of the {len(attachment.ensembles)} ensembles has a gradient; "
                "call backward() before the step, and zero_grad() only after it."
            )
        attachment.last = forces
        if self.noise == "apply":
            self._add_noise(attachment, scale)

    def _add_noise(self, attachment: _Attachment, scale: Tensor | None) -> None:
        deviation = self.rule.noise_scale()
        if deviation == 0.0:
            return
        for ensemble in attachment.ensembles:
            rate = langevin_rate(attachment.optimizer, ensemble)
            ensemble.add_noise(deviation * rate, seed=self.seed, step=attachment.steps, scale=scale)


def jitter(heads: Heads, scale: float, *, seed: int = 0) -> None:
    """Separate equal heads: add N(0, (scale * r)^2) to every head's parameters, r their root mean square.

    Equal heads have zero repulsion and equal gradients, so no rule can separate them.

    Args:
        heads: Which heads.
        scale: Size of the noise relative to the parameters, above 0; 1e-3 is enough.
        seed: Seed of the noise, at least 0.

    Raises:
        SettingError: `scale` is not above 0.

    Example:
        >>> import headwise as hw
        >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> jitter(hw.find_heads(model), 1e-3)
    """
    require_positive("scale", scale)
    require_integer("seed", seed)
    with torch.no_grad():
        for slab in heads.slabs():
            view = slab.view(slab.parameter)
            size = view.float().square().mean().sqrt()
            generator = torch.Generator(view.device).manual_seed(noise_key(seed, "jitter", slab.name, slab.projection))
            noise = torch.randn(view.shape, generator=generator, device=view.device)
            view.add_((noise * (scale * torch.where(size > 0, size, 1.0))).to(view.dtype))


def _listed(optimizers: Sequence[Optimizer]) -> Sequence[Optimizer]:
    if not isinstance(optimizers, list | tuple) or not optimizers:
        raise SettingError(
            f"optimizer is {type(optimizers).__name__}; expected a torch.optim.Optimizer or a list of them."
        )
    return optimizers


def _innermost(optimizer: object) -> Optimizer:
    inner = optimizer
    for _ in range(8):
        wrapped = getattr(inner, "optimizer", None) or getattr(inner, "original_optimizer", None)
        if wrapped is None:
            break
        inner = wrapped
    if not isinstance(inner, Optimizer):
        raise SettingError(f"optimizer is {type(optimizer).__name__}; expected a torch.optim.Optimizer.")
    return inner


def _assign(optimizers: Sequence[Optimizer], ensembles: Sequence[Ensemble]) -> list[_Attachment]:
    if any(group.get("maximize", False) for optimizer in optimizers for group in optimizer.param_groups):
        raise SettingError(
            "the optimizer has maximize=True, under which heads would attract; minimize minus the score."
        )
    held = [{id(p) for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
    assigned: list[list[Ensemble]] = [[] for _ in optimizers]
    for ensemble in ensembles:
        wanted = {id(slab.parameter) for slab in ensemble.slabs}
        owner = next((i for i, parameters in enumerate(held) if wanted <= parameters), None)
        if owner is None:
            raise LayoutError(
                f"{ensemble.name}: its parameters are not held by "
                f"{'the optimizer' if len(optimizers) == 1 else f'any one of the {len(optimizers)} optimizers'}; "
                "pass the optimizer (or all of them, in a list) that updates these heads, or select other heads."
            )
        assigned[owner].append(ensemble)
    return [_Attachment(o, tuple(e)) for o, e in zip(optimizers, assigned, strict=True) if e]
