"""Particle groups: the heads that repel one another, the optimizers that hold them, and what a step did to each."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from headwise.errors import HeadwiseError, LayoutError, SettingError
from headwise.heads.heads import Heads, Site, group_slices
from headwise.heads.view import HeadView, gather_full, is_sharded
from headwise.kernels import Geometry, find_collapsed, geometry_from_grams, shifted_gram
from headwise.repulsion.optimizers import Watch, find_holder, has_gradient, is_within_step, list_held


@dataclass(frozen=True)
class ForceNorms:
    """What a step did to each particle group; tensors stay on the parameters' device until they are read.

    Attributes:
        names: Names of the groups acted on.
        driving_norm: Norm of the driving term (loss and prior) handed to the optimizer, [G].
        repulsion_norm: Norm of the repulsion handed to the optimizer, [G].
        particle_norm: Mean norm of the particles before the step, [G].
        finite: False where gradient or particles were not finite, or float16 could not hold the forces, and the
            gradient was left unchanged, [G].
        equal: True where several heads are all equal, so that they do not repel, [G].
        particles: Number of particles M of each group; a single one is repelled by nothing.
        skipped: Names of groups without a gradient.
    """

    names: tuple[str, ...]
    driving_norm: Tensor
    repulsion_norm: Tensor
    particle_norm: Tensor
    finite: Tensor
    equal: Tensor
    particles: tuple[int, ...]
    skipped: tuple[str, ...] = ()

    @property
    def force_ratio(self) -> Tensor:
        """Norm of the repulsion over norm of the driving term, [G]: its strength, comparable across runs."""
        return self.repulsion_norm / self.driving_norm

    @staticmethod
    def of(
        groups: Sequence[ParticleGroup],
        driving: Tensor,
        push: Tensor,
        sizes: Tensor,
        finite: Tensor,
        geometry: Geometry,
        scale: Tensor | None,
    ) -> ForceNorms:
        """Return the record of groups from tensors [G], or numbers of one group; `scale` multiplies the gradients."""
        unscale = 1.0 if scale is None else scale.reciprocal()
        return ForceNorms(
            tuple(group.name for group in groups),
            (driving * unscale).view(-1),
            (push.to(driving.dtype) * unscale).view(-1),
            sizes.to(driving.dtype).view(-1),
            finite.view(-1),
            find_collapsed(geometry).view(-1),
            tuple(group.particles for group in groups),
        )

    @staticmethod
    def join(given: Iterable[ForceNorms | None]) -> ForceNorms | None:
        """Return the records of several optimizers, or of groups of several sizes, as one; None if there is no record.

        >>> ForceNorms.join([None]) is None
        True
        """
        records = [record for record in given if record is not None]
        if len(records) < 2:
            return records[0] if records else None
        device = records[0].driving_norm.device
        joined: dict[str, Any] = {}
        for entry in fields(ForceNorms):
            parts = [getattr(record, entry.name) for record in records]
            whole = isinstance(parts[0], tuple)
            joined[entry.name] = tuple(chain(*parts)) if whole else torch.cat([part.to(device) for part in parts])
        return ForceNorms(**joined)

    def __str__(self) -> str:
        lines = [f"{'particle group':<40} {'driving':>9} {'repulsion':>9} {'ratio':>9} {'particle':>9}"]
        columns = (self.driving_norm, self.repulsion_norm, self.force_ratio, self.particle_norm)
        for index, name in enumerate(self.names):
            notes = "  equal heads: hw.repulsion.jitter separates them" if self.equal[index] else ""
            notes += "  one head: nothing repels it" if self.particles[index] == 1 else ""
            source = "forces" if (self.driving_norm[index] + self.repulsion_norm[index]).isfinite() else "gradient"
            source = source if self.particle_norm[index].isfinite() else "heads"
            notes += "" if self.finite[index] else f"  {source} not finite, gradient unchanged"
            lines.append(f"{name:<40} " + " ".join(f"{float(c[index]):9.3g}" for c in columns) + notes)
        lines += [f"{name:<40} no gradient" for name in self.skipped]
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class ParticleGroup:
    """M particles: the heads of one projection of one attention, or of all its projections joined.

    Attributes:
        name: For example "layers.0.self_attn query".
        slices: The parts of parameters that make up the particles; particle i is head i of every slice.
    """

    name: str
    slices: tuple[HeadView, ...]

    @property
    def particles(self) -> int:
        """Number of particles M."""
        return self.slices[0].heads

    @property
    def parts(self) -> tuple[HeadView, ...]:
        """The slices of single parameters: `slices`, or one for each head where each is a parameter of its own."""
        return tuple(part for head_slice in self.slices for part in head_slice.parts)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameter of each part."""
        return [part.parameter for part in self.parts]

    @property
    def trained(self) -> dict[str, Tensor]:
        """The parameters through which the particles are trained, by name: these, or A and B under LoRA."""
        return {name: tensor for part in self.parts for name, tensor in part.trained.items()}

    @property
    def adapted(self) -> bool:
        """Whether adapters of LoRA add to some of its parameters."""
        return any(part.lora is not None for part in self.parts)

    @property
    def keys(self) -> dict[tuple[int, int], str]:
        """Parameter and first row of each part, which identify it, and its name for messages."""
        return {(id(part.parameter), part.start): f"{part.projection} heads of {part.name}" for part in self.parts}

    @property
    def sharded(self) -> bool:
        """Whether some of its parameters are divided over processes."""
        return any(is_sharded(parameter) for parameter in self.parameters)

    def views(self, tensors: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return the heads of its parameters, or of tensors shaped like them, as [M, a, b], one for each slice.

        These are views, and copies where each head is a parameter of its own: see `write`.
        """
        given = iter(self.parameters if tensors is None else tensors)
        return [head_slice.of(*(next(given) for _ in head_slice.parts)) for head_slice in self.slices]

    def write(self, views: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Put what was written to `views(tensors)` into the tensors, where those views are copies."""
        into = iter(tensors)
        for head_slice, view in zip(self.slices, views, strict=True):
            own = [next(into) for _ in head_slice.parts]
            if head_slice.pieces:
                head_slice.write(view, *own)

    def whole_views(self) -> list[Tensor]:
        """Return `views()` of the whole parameters, gathered from the processes that hold them, with their adapters."""
        if self.adapted:
            return [head_slice.read() for head_slice in self.slices]
        return self.views([gather_full(parameter) for parameter in self.parameters])

    def gradients(self) -> list[Tensor] | None:
        """Return the gradient of each trained parameter, or None unless every one has a gradient and is trainable."""
        gradients = []
        for part in self.parts:
            # of two adapters one may be frozen
            trained = {name: tensor for name, tensor in part.trained.items() if tensor.requires_grad}
            # a parameter frozen in mid-training may keep a gradient of zeros, which repulsion would move
            if not trained:
                return None
            for name, tensor in trained.items():
                if tensor.grad is None:
                    return None
                if tensor.grad.is_sparse:
                    raise LayoutError(f"{name} has a sparse gradient; repulsion needs a dense one.")
                gradients.append(tensor.grad)
        return gradients

    def require_apart(self) -> None:
        """Raise `HeadwiseError` where heads are not finite, or all of them equal; `LayoutError` on the meta device."""
        for part in self.parts:
            part.require_finite()
        if self.particles > 1 and self.measure_spread() == 0.0:
            raise HeadwiseError(
                f"{self.name}: all {self.particles} heads are equal, so their repulsion is zero and stays so. "
                "Separate them with hw.repulsion.jitter(heads, scale), for example scale=1e-3."
            )

    @torch.no_grad()
    def measure_spread(self) -> float:
        """Return the largest distance between two particles."""
        gram = sum((shifted_gram(view) for view in self.whole_views()), torch.zeros(()))
        return math.sqrt(float(geometry_from_grams(gram, None).squared_distances.max()))


BeforeStep = Callable[["Attachment", Tensor | None], None]


class Attachment:
    """One optimizer, the particle groups whose parameters it holds, and its progress through the current step.

    Attributes:
        optimizer: The innermost torch optimizer.
        groups: What is acted on before its steps.
        steps: Number of its steps since the attachment.
        turn: 0, or the number of earlier attachments with the same parameter names (two models may have equal names),
            so that each gets different noise.
        last: What the last step did.
        idle: Names of the groups that never had a gradient.
        noisy: Whether the gradients that were acted on have their noise.
    """

    def __init__(self, optimizer: Optimizer, groups: tuple[ParticleGroup, ...]) -> None:
        self.optimizer, self.groups, self.idle = optimizer, groups, {group.name for group in groups}
        self.steps, self.turn, self.noisy = 0, 0, False
        self.last: ForceNorms | None = None
        self._trained = self._list_trained()
        self._parameters = [tensor for tensor in self._trained.values() if tensor.requires_grad]
        self._applied_to: tuple[weakref.ref[Tensor], ...] = ()
        self._before: BeforeStep | None = None
        self._handles: tuple[RemovableHandle, ...] = ()
        self._watch = Watch()

    @property
    def keys(self) -> dict[tuple[int, int], str]:
        """Parameter and first row of everything acted on, and its name for messages."""
        return {key: name for group in self.groups for key, name in group.keys.items()}

    @property
    def attached(self) -> bool:
        """Whether the optimizer still calls the hooks, which a copied or unpickled optimizer has lost."""
        return any(own is self for own in find_attachments(self.optimizer))

    @property
    def applied(self) -> bool:
        """Whether the present gradients were acted on; new tensors were not, nor what a later backward added."""
        present, before = self._gradients(), [was() for was in self._applied_to]
        return bool(before) and list(map(id, before)) == list(map(id, present))

    def attach(self, before: BeforeStep) -> None:
        """Call `before(self, scale)` once per step, when gradients are complete; `scale` is what multiplies them."""
        others = find_attachments(self.optimizer)
        names = set(self.keys.values())
        taken = {other.turn for other in others if names & set(other.keys.values())}
        self.turn = min(set(range(len(others) + 1)) - taken)
        self._before = before
        # hooks on parameters keep neither the attachment nor its optimizer alive
        own = weakref.ref(self)

        def clear(_parameter: Tensor) -> None:
            attachment = own()
            if attachment is not None:
                attachment.clear()

        self._handles = (
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
            *(parameter.register_post_accumulate_grad_hook(clear) for parameter in self._parameters),
        )
        self._watch.start(self.optimizer, self._parameters)

    def detach(self) -> None:
        """Remove the hooks from the optimizer and its parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = ()
        self._watch.remove()

    def mark(self) -> None:
        """Remember that the present gradients were acted on."""
        self._applied_to = tuple(weakref.ref(gradient) for gradient in self._gradients())

    def clear(self) -> None:
        """Forget it: the step was taken, or there are new gradients."""
        self._applied_to, self.noisy = (), False

    def record(self, forces: ForceNorms) -> None:
        """Keep what a step did, and which groups had no gradient."""
        acted = set(forces.names)
        skipped = tuple(group.name for group in self.groups if group.name not in acted)
        self.last = replace(forces, skipped=skipped)
        self.idle.intersection_update(skipped)

    def require_current(self) -> None:
        """Raise `LayoutError` unless model and optimizer still hold the very parameters that were attached."""
        held, present = list_held(self.optimizer), self._list_trained()
        for name, parameter in self._trained.items():
            if present.get(name) is not parameter:
                raise LayoutError(
                    f"{name} is another tensor than when hw.repel was called: something replaced the parameter "
                    "(load_state_dict(assign=True) does), or another adapter became active. Build the optimizer from "
                    "the model as it is now, and call hw.repel on it."
                )
            if id(parameter) not in held and any(parameter is own for own in self._parameters):
                raise LayoutError(
                    f"{name} is no longer held by {type(self.optimizer).__name__}: its param_groups changed after "
                    "hw.repel was called. Call .remove() on the handle and hw.repel on the optimizer in use."
                )

    def _list_trained(self) -> dict[str, Tensor]:
        return {name: tensor for group in self.groups for name, tensor in group.trained.items()}

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[tuple, dict] | None:
        # a step() that calls its parent's fires once for each of them; a step that raised has not reached its end
        if self._watch.stepping and (torch.compiler.is_compiling() or is_within_step(optimizer, sys._getframe(1))):
            return None
        before = self._before
        assert before is not None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._watch.stepping = False
        if closure is None:
            before(self, getattr(optimizer, "grad_scale", None))
            self._watch.stepping = True
            return None

        def closure_then_act() -> Any:
            self.clear()
            # nothing steps if the closure raises
            self._watch.stepping = False
            loss = closure()
            if loss is None and not has_gradient(optimizer):
                # Lightning's closure, where training_step left the batch out: nothing moves
                return None
            before(self, None)
            self._watch.stepping = True
            return loss

        self._watch.stepping = True
        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure_then_act}
        return (args[0], closure_then_act, *args[2:]), kwargs

    def _after_step(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._watch.stepping:
            self._watch.stepping = False
            self.steps += 1
            self._watch.steps += 1
        self.clear()


def find_attachments(optimizer: Optimizer) -> list[Attachment]:
    """Return what is attached to an optimizer now, in order."""
    owners = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values())
    return [owner for owner in owners if isinstance(owner, Attachment)]


def find_groups(heads: Heads, *, joint: bool = False) -> tuple[ParticleGroup, ...]:
    """Return one group per projection of each attention, or one per attention when `joint`.

    Of heads that are `grouped`, queries make one group for each key/value head ("within"), or one of as many particles
    as there are key/value heads ("across").

    Raises:
        SettingError: `joint` for an attention that has fewer key/value heads than query particles.
    """
    groups: list[ParticleGroup] = []
    taken: set[tuple[int, int]] = set()
    for site in heads.sites:
        every = site.slices
        if heads.grouping:
            every = (*group_slices(site, heads.grouping), *(own for own in every if own.projection != "query"))
        # a parameter tied between layers is one set of particles, acted on once per step
        slices = tuple(
            head_slice
            for head_slice in every
            if head_slice.projection in heads.projections
            and not any((id(part.parameter), part.start) in taken for part in head_slice.parts)
        )
        taken.update((id(part.parameter), part.start) for head_slice in slices for part in head_slice.parts)
        if joint and (heads.grouping == "within" or len({head_slice.heads for head_slice in slices}) > 1):
            raise SettingError(
                f"{site.name}: {site.num_heads} query heads and {site.key_value_heads} key/value heads cannot be "
                "joined into one particle each; use joint=False."
            )
        particles = [slices] if joint and slices else [(head_slice,) for head_slice in slices]
        for parts in particles:
            name = f"{site.name} {'+'.join(part.projection for part in parts)}".strip()
            groups.append(ParticleGroup(name + _name_members(site, parts, heads.grouping), parts))
    return tuple(groups)


def _name_members(site: Site, parts: tuple[HeadView, ...], grouping: str) -> str:
    """Return which query heads a group holds, as " 4:8", or " 0:8:2" where they lie apart; "" for all."""
    if grouping != "within" or parts[0].projection != "query":
        return ""
    own = site.list_members(parts[0].run)
    return f" {own.start}:{own.stop}{f':{own.step}' if own.step > 1 else ''}"


def divide_groups(optimizers: Sequence[Optimizer], groups: Sequence[ParticleGroup]) -> list[Attachment]:
    """Return an attachment for each optimizer that holds some of the groups' parameters; nothing is hooked yet.

    Raises:
        LayoutError: The parameters of a group are not held by any one of the optimizers.
        SettingError: An optimizer maximizes, or its attachments act on some of these heads already, or several
            optimizers hold the same heads.
    """
    holders = [
        find_holder(optimizers, [tensor for tensor in group.trained.values() if tensor.requires_grad], group.name)
        for group in groups
    ]
    attachments = []
    for optimizer in dict.fromkeys(optimizers):
        own = tuple(group for group, holder in zip(groups, holders, strict=True) if holder is optimizer)
        if not own:
            continue
        attachment = Attachment(optimizer, own)
        claimed = {key for other in find_attachments(optimizer) for key in other.keys}
        taken = sorted(name for key, name in attachment.keys.items() if key in claimed)
        if taken:
            raise SettingError(
                f"the {taken[0]} are repelled by this optimizer already; call .remove() on the earlier handle first."
            )
        attachments.append(attachment)
    return attachments
