"""Particle groups: the heads that repel one another, what a step did to them, and whether they can be told apart.

The checks read values of parameters and so wait for the device: no step makes any.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from headwise.errors import HeadwiseError, LayoutError, SettingError, ShapeError, require_integer, require_positive
from headwise.heads.head_slice import HeadSlice
from headwise.heads.heads import PROJECTIONS, Heads, require_heads
from headwise.parallel import add_own_part, find_flattening, gather_full, is_sharded, write_own_part
from headwise.repulsion.gram import SMALLEST, geometry, geometry_from_grams, shifted_gram, squared_norms
from headwise.repulsion.rules import Rule


@dataclass(frozen=True, eq=False)
class ParticleGroup:
    """M particles: the heads of one projection of one attention, or of all its projections joined.

    Attributes:
        name: For example "layers.0.self_attn query".
        slices: The parts of parameters that make up the particles; particle i is head i of every slice.
    """

    name: str
    slices: tuple[HeadSlice, ...]

    @property
    def particles(self) -> int:
        """Number of particles M."""
        return self.slices[0].heads

    @property
    def keys(self) -> dict[tuple[int, int], str]:
        """Parameter and first row of each head slice, which identify it, and its name for messages."""
        return {
            (id(head_slice.parameter), head_slice.start): f"{head_slice.projection} heads of {head_slice.name}"
            for head_slice in self.slices
        }

    @property
    def sharded(self) -> bool:
        """Whether some of its parameters are divided over processes."""
        return any(is_sharded(head_slice.parameter) for head_slice in self.slices)

    def views(self, tensors: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return the heads of its parameters, or of tensors shaped like them, as views [M, a, b]."""
        tensors = [head_slice.parameter for head_slice in self.slices] if tensors is None else tensors
        return [head_slice.view(tensor) for head_slice, tensor in zip(self.slices, tensors, strict=True)]

    def whole_views(self) -> list[Tensor]:
        """Return `views()` of the whole parameters, gathered from the processes that hold them."""
        return self.views([gather_full(head_slice.parameter) for head_slice in self.slices])

    def gradients(self) -> list[Tensor] | None:
        """Return the gradient of each parameter, or None unless every one has a gradient and is trainable."""
        gradients = []
        for head_slice in self.slices:
            gradient = head_slice.parameter.grad
            # a parameter frozen in mid-training may keep a gradient of zeros, which repulsion would move
            if gradient is None or not head_slice.parameter.requires_grad:
                return None
            if gradient.is_sparse:
                raise LayoutError(f"{head_slice.name} has a sparse gradient; repulsion needs a dense one.")
            gradients.append(gradient)
        return gradients

    def add_noise(self, deviation: float | Tensor, *, seed: int, step: int, scale: Tensor | None) -> None:
        """Add N(0, deviation^2) to the gradients of the heads, the same for the same (seed, step, parameter).

        A process that holds a part of a gradient adds what a single process would have added to that part.
        """
        gradients = self.gradients()
        if gradients is None:
            return
        for head_slice, gradient in zip(self.slices, gradients, strict=True):
            sharded = is_sharded(gradient)
            every = torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device) if sharded else gradient
            view = head_slice.view(every)
            noise = _draw_noise(view, seed, step, head_slice) * deviation
            with torch.no_grad():
                view.add_((noise if scale is None else noise * scale).to(view.dtype))
            if sharded:
                add_own_part(gradient, every)

    def require_trainable(self) -> None:
        """Raise `LayoutError` unless every parameter is a trainable matrix of which heads can be read."""
        for head_slice in self.slices:
            reason = find_flattening(head_slice.owner, head_slice.parameter)
            if reason is not None:
                raise LayoutError(f"{head_slice.name} {reason}.")
            if not head_slice.parameter.requires_grad:
                raise LayoutError(f"{head_slice.name} does not require a gradient; unfreeze it or select other heads.")

    def require_nonzero(self) -> None:
        """Raise `ShapeError` naming the heads that are zero, which have no direction."""
        squares = sum((squared_norms(view) for view in self.whole_views()), torch.zeros(()))
        zero = (squares <= SMALLEST).nonzero().flatten().tolist()
        if zero:
            raise ShapeError(
                f"{self.name}: heads {zero} of {self.particles} are zero and have no direction; initialize them, or "
                "use a kernel on distances such as RBF()."
            )

    def require_apart(self) -> None:
        """Raise `HeadwiseError` where heads are not finite, or all of them equal; `LayoutError` on the meta device."""
        for head_slice in self.slices:
            _require_finite(head_slice)
        if self.particles > 1 and self.measure_spread() == 0.0:
            raise HeadwiseError(
                f"{self.name}: all {self.particles} heads are equal, so their repulsion is zero and stays so. "
                "Separate them with hw.jitter(heads, scale), for example scale=1e-3."
            )

    def measure_spread(self) -> float:
        """Return the largest distance between two particles."""
        with torch.no_grad():
            gram = sum((shifted_gram(view) for view in self.whole_views()), torch.zeros(()))
            return math.sqrt(float(geometry_from_grams(gram, None).squared_distances.max()))


@dataclass(frozen=True)
class ForceNorms:
    """What a step did to each particle group; tensors stay on the parameters' device until they are read.

    Attributes:
        names: Names of the groups acted on.
        driving_norm: Norm of the driving term (loss and prior) handed to the optimizer, [G].
        repulsion_norm: Norm of the repulsion handed to the optimizer, [G].
        particle_norm: Mean norm of the particles before the step, [G].
        finite: False where gradient or particles were not finite and the gradient was left unchanged, [G].
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
    def drive_norm(self) -> Tensor:
        """`driving_norm`, under its name in version 0.1."""
        return self.driving_norm

    @property
    def force_ratio(self) -> Tensor:
        """Norm of the repulsion over norm of the driving term, [G]: its strength, comparable across runs."""
        return self.repulsion_norm / self.driving_norm

    @staticmethod
    def join(records: Sequence[ForceNorms]) -> ForceNorms:
        """Return the records of several optimizers, or of groups of several sizes, as one."""
        if len(records) == 1:
            return records[0]
        device = records[0].driving_norm.device
        joined: dict[str, Any] = {}
        for field in fields(ForceNorms):
            parts = [getattr(record, field.name) for record in records]
            joined[field.name] = (
                tuple(chain.from_iterable(parts))
                if isinstance(parts[0], tuple)
                else torch.cat([part.to(device) for part in parts])
            )
        return ForceNorms(**joined)

    def __str__(self) -> str:
        lines = [f"{'particle group':<40} {'driving':>9} {'repulsion':>9} {'ratio':>9} {'particle':>9}"]
        columns = (self.driving_norm, self.repulsion_norm, self.force_ratio, self.particle_norm)
        for index, name in enumerate(self.names):
            notes = "  equal heads: hw.jitter separates them" if self.equal[index] else ""
            notes += "  one head: nothing repels it" if self.particles[index] == 1 else ""
            source = "gradient" if self.particle_norm[index].isfinite() else "heads"
            notes += "" if self.finite[index] else f"  {source} not finite, gradient unchanged"
            lines.append(f"{name:<40} " + " ".join(f"{float(c[index]):9.3g}" for c in columns) + notes)
        lines += [f"{name:<40} no gradient" for name in self.skipped]
        return "\n".join(lines)


def find_groups(heads: Heads, *, joint: bool = False) -> tuple[ParticleGroup, ...]:
    """Return one group per projection of each attention, or one per attention when `joint`.

    Raises:
        SettingError: `joint` for an attention that has fewer key/value heads than query heads.
    """
    groups: list[ParticleGroup] = []
    taken: set[tuple[int, int]] = set()
    for site in heads.sites:
        # a parameter tied between layers is one set of particles, acted on once per step
        slices = tuple(
            head_slice
            for head_slice in site.slices
            if head_slice.projection in heads.projections and (id(head_slice.parameter), head_slice.start) not in taken
        )
        taken.update((id(head_slice.parameter), head_slice.start) for head_slice in slices)
        if joint and len({head_slice.heads for head_slice in slices}) > 1:
            raise SettingError(
                f"{site.name}: {site.num_heads} query heads and {site.key_value_heads} key/value heads cannot be "
                "joined into one particle each; use joint=False."
            )
        particles = [slices] if joint and slices else [(head_slice,) for head_slice in slices]
        groups += [
            ParticleGroup(f"{site.name} {'+'.join(part.projection for part in parts)}".strip(), parts)
            for parts in particles
        ]
    return tuple(groups)


def require_particles(groups: Sequence[ParticleGroup], heads: Heads, rule: Rule) -> None:
    """Raise unless a rule can act on the groups: trainable, several heads where it compares them, finite, not equal."""
    for group in groups:
        group.require_trainable()
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


def acts_apart(rule: Rule) -> bool:
    """Whether a rule moves each head by itself, so that it can act on one: `SGLD`, or `SVGD` with nothing but a scale.

    >>> from headwise.repulsion.rules import SGLD, SVGD
    >>> acts_apart(SGLD(inverse_temperature=4.0)), acts_apart(SVGD(alpha=0.0))
    (True, False)
    """
    mixing = rule.mixing(geometry(torch.eye(2, dtype=torch.float64), inner=rule.needs_inner))
    return not bool((mixing.drive - mixing.drive.diag().diag()).any() or mixing.repulsion.any())


def jitter(heads: Heads, scale: float, *, seed: int = 0) -> None:
    """Separate equal heads: add N(0, (scale * r)^2) to every head's parameters, r their root mean square.

    Equal heads have zero repulsion and equal gradients, so no rule can separate them.

    Args:
        heads: Which heads.
        scale: Size of the noise relative to the parameters, above 0; 1e-3 is enough.
        seed: Seed of the noise, at least 0.

    Raises:
        SettingError: `scale` is not above 0, or `heads` is no selection of heads.
        LayoutError: The model was changed since its heads were found.
        HeadwiseError: A parameter is not finite. Nothing is changed then.

    Example:
        >>> import headwise as hw
        >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> jitter(hw.find_heads(model), 1e-3)
    """
    require_heads(heads)
    require_positive("scale", scale)
    require_integer("seed", seed)
    for head_slice in heads.slices():
        _require_finite(head_slice)
    with torch.no_grad():
        for head_slice in heads.slices():
            sharded = is_sharded(head_slice.parameter)
            every = gather_full(head_slice.parameter)
            view = head_slice.view(every)
            size = view.float().square().mean().sqrt()
            noise = _draw_noise(view, seed, "jitter", head_slice)
            view.add_((noise * (scale * torch.where(size > 0, size, 1.0))).to(view.dtype))
            if sharded:
                write_own_part(head_slice.parameter, every)


def find_langevin_rate(optimizer: Optimizer, group: ParticleGroup) -> float | Tensor:
    """Return the factor on Langevin noise that gives it the right temperature under this optimizer.

    theta <- theta - lr (eps grad U - a xi) samples at the temperature 1 / beta when a = sqrt(2 eps / beta) / sqrt(lr):
    the noise is divided by sqrt(lr) under plain SGD. Under any other optimizer no such factor exists: the noise is
    gradient noise and not Langevin, and the factor is 1.
    """
    plain = type(optimizer) is SGD
    owned = {id(head_slice.parameter) for head_slice in group.slices}
    for options in optimizer.param_groups:
        if plain and options["momentum"] == 0 and any(id(parameter) in owned for parameter in options["params"]):
            rate = options["lr"]
            # a rate of zero moves nothing, whatever the noise
            if isinstance(rate, Tensor):
                return torch.where(rate > 0, rate.clamp_min(torch.finfo(rate.dtype).tiny).rsqrt(), 1.0)
            return rate**-0.5 if rate > 0.0 else 1.0
    return 1.0


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends only on the parts, the same on every machine and in every process."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _draw_noise(view: Tensor, seed: int, purpose: object, head_slice: HeadSlice) -> Tensor:
    generator = torch.Generator(view.device)
    generator.manual_seed(derive_seed(seed, purpose, head_slice.name, head_slice.projection))
    return torch.randn(view.shape, generator=generator, device=view.device)


def _require_finite(head_slice: HeadSlice) -> None:
    if head_slice.parameter.is_meta:
        raise LayoutError(f"{head_slice.name} is on the meta device and has no values; load the weights first.")
    with torch.no_grad():
        sound = head_slice.view(gather_full(head_slice.parameter)).isfinite().flatten(1).all(1)
    if not sound.all():
        raise HeadwiseError(
            f"{head_slice.name} holds NaN or infinity in {head_slice.projection} heads "
            f"{(~sound).nonzero().flatten().tolist()} of {head_slice.heads}; repulsion needs finite heads. "
            "Load finite weights, or look for the step that produced them."
        )
