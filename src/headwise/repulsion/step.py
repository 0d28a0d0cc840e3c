"""Ensembles of particles inside a model's parameters, and one step of a rule on all of them.

Owns the two passes on a CPU: every Gram matrix into one small buffer, the rule's algebra on that buffer once, then the
mixing of gradients and parameters on views of them, without a copy of a weight. On an accelerator they are `stacked`.
Nothing here waits for the device.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from headwise.errors import LayoutError, SettingError
from headwise.heads.head_slice import HeadSlice
from headwise.heads.heads import Heads
from headwise.parallel import add_own_part, is_sharded, require_readable, whole
from headwise.repulsion.gram import (
    collapsed,
    cross_gram,
    geometry,
    geometry_from_grams,
    plain_gram,
    require_nonzero,
    shifted_gram,
    squared_norms,
)
from headwise.repulsion.mixing import repulsion_factor, repulsion_norms
from headwise.repulsion.rules import Rule
from headwise.repulsion.step_batched import alike, stacks_on, step_stacked
from headwise.repulsion.sums import Sums, summed_over


@dataclass(frozen=True, eq=False)
class Ensemble:
    """M particles: the heads of one projection of one site, or of all its projections joined.

    Attributes:
        name: For example "layers.0.self_attn query".
        slices: The parts of parameters that make up the particles; particle i is head i of every head_slice.
    """

    name: str
    slices: tuple[HeadSlice, ...]

    @property
    def particles(self) -> int:
        """Number of particles M."""
        return self.slices[0].heads

    @property
    def keys(self) -> dict[tuple[int, int], str]:
        """Parameter and first row of each head slice, which say whose it is, and its name for messages."""
        return {
            (id(head_slice.parameter), head_slice.start): f"{head_slice.projection} heads of {head_slice.name}"
            for head_slice in self.slices
        }

    @property
    def sharded(self) -> bool:
        """Whether several processes hold some of its parameters together."""
        return any(is_sharded(head_slice.parameter) for head_slice in self.slices)

    def check(self) -> None:
        """Raise `LayoutError` unless every parameter is a matrix of which heads can be read, and trainable."""
        for head_slice in self.slices:
            require_readable(head_slice.name, head_slice.owner, head_slice.parameter)
            if not head_slice.parameter.requires_grad:
                raise LayoutError(f"{head_slice.name} does not require a gradient; unfreeze it or select other heads.")

    def require_nonzero(self) -> None:
        """Raise `ShapeError` naming the heads that are zero, which have no direction."""
        with torch.no_grad():
            flat = [head_slice.view(whole(head_slice.parameter)).flatten(1) for head_slice in self.slices]
            require_nonzero(torch.cat(flat, dim=1), f"{self.name}: heads")

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

        A process that holds a part of a gradient adds the part that one process alone would have added there.
        """
        gradients = self.gradients()
        if gradients is None:
            return
        for head_slice, gradient in zip(self.slices, gradients, strict=True):
            sharded = is_sharded(gradient)
            every = torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device) if sharded else gradient
            view = head_slice.view(every)
            generator = torch.Generator(view.device)
            generator.manual_seed(noise_key(seed, step, head_slice.name, head_slice.projection))
            noise = torch.randn(view.shape, generator=generator, device=view.device) * deviation
            with torch.no_grad():
                view.add_((noise if scale is None else noise * scale).to(view.dtype))
            if sharded:
                add_own_part(gradient, every)


@dataclass(frozen=True)
class ForceNorms:
    """What a step did to each ensemble; tensors on the parameters' device, read at leisure.

    Attributes:
        names: Names of the ensembles acted on.
        drive_norm: Norm of the drive (loss and prior) handed to the optimizer, [G].
        repulsion_norm: Norm of the repulsion handed to the optimizer, [G].
        particle_norm: Mean norm of the particles before the step, [G].
        finite: False where gradient or particles were not finite and the gradient was left alone, [G].
        equal: True where several heads are all equal, so that they do not repel, [G].
        particles: Number of particles M of each ensemble; nothing repels one alone.
        skipped: Names of ensembles without a gradient.
    """

    names: tuple[str, ...]
    drive_norm: Tensor
    repulsion_norm: Tensor
    particle_norm: Tensor
    finite: Tensor
    equal: Tensor
    particles: tuple[int, ...]
    skipped: tuple[str, ...] = ()

    @property
    def force_ratio(self) -> Tensor:
        """Repulsion norm / drive norm of each ensemble, [G]; what the strength of repulsion means in a run."""
        return self.repulsion_norm / self.drive_norm

    @staticmethod
    def joined(records: Sequence[ForceNorms]) -> ForceNorms:
        """Return the records of several optimizers, or of ensembles of several sizes, as one."""
        if len(records) == 1:
            return records[0]
        device = records[0].drive_norm.device

        def together(name: str) -> Tensor:
            return torch.cat([getattr(record, name).to(device) for record in records])

        return ForceNorms(
            tuple(name for record in records for name in record.names),
            together("drive_norm"),
            together("repulsion_norm"),
            together("particle_norm"),
            together("finite"),
            together("equal"),
            tuple(count for record in records for count in record.particles),
            tuple(name for record in records for name in record.skipped),
        )

    def __str__(self) -> str:
        lines = [f"{'ensemble':<40} {'drive':>9} {'repulsion':>9} {'ratio':>9} {'particle':>9}"]
        columns = (self.drive_norm, self.repulsion_norm, self.force_ratio, self.particle_norm)
        for index, name in enumerate(self.names):
            notes = "  equal heads: hw.jitter separates them" if self.equal[index] else ""
            notes += "  one head: nothing repels it" if self.particles[index] == 1 else ""
            left = "gradient" if self.particle_norm[index].isfinite() else "heads"
            notes += "" if self.finite[index] else f"  {left} not finite, left alone"
            lines.append(f"{name:<40} " + " ".join(f"{float(c[index]):9.3g}" for c in columns) + notes)
        lines += [f"{name:<40} no gradient" for name in self.skipped]
        return "\n".join(lines)


def ensembles_of(heads: Heads, *, joint: bool) -> tuple[Ensemble, ...]:
    """Return one ensemble a projection of each site, or one a site when `joint`.

    Raises:
        SettingError: `joint` was asked for a site whose key/value heads are fewer than its query heads.
    """
    ensembles: list[Ensemble] = []
    taken: set[tuple[int, int]] = set()
    for site in heads.sites:
        # a parameter tied between layers is one set of particles, acted on once a step
        slices = tuple(
            head_slice
            for head_slice in site.slices
            if head_slice.projection in heads.projections and (id(head_slice.parameter), head_slice.start) not in taken
        )
        taken.update((id(head_slice.parameter), head_slice.start) for head_slice in slices)
        if not joint:
            ensembles += [
                Ensemble(f"{site.name} {head_slice.projection}".strip(), (head_slice,)) for head_slice in slices
            ]
            continue
        if not slices:
            continue
        if len({head_slice.heads for head_slice in slices}) > 1:
            raise SettingError(
                f"{site.name}: {site.num_heads} query heads and {site.key_value_heads} key/value heads cannot be "
                "joined into one particle each; use joint=False."
            )
        ensembles.append(Ensemble(f"{site.name} {'+'.join(s.projection for s in slices)}".strip(), slices))
    return tuple(ensembles)


@torch.no_grad()
def apply_rule(
    rule: Rule, ensembles: Sequence[Ensemble], *, strength: float, scale: Tensor | None, groups: Sequence[Any] = ()
) -> ForceNorms | None:
    """Replace the gradient of every ensemble by what the rule says, in place; None when none has a gradient.

    Args:
        rule: The particle rule.
        ensembles: Ensembles of any sizes; those without a gradient are skipped and named.
        strength: Multiplies the repulsion.
        scale: What the gradients are multiplied by (a GradScaler's scale), or None.
        groups: Process groups over whose members the columns of these parameters are divided; none where they are
            whole. The sums of all ensembles then go over the wire in one message.
    """
    batches: dict[tuple[int, torch.device], list[tuple[Ensemble, list[Tensor]]]] = defaultdict(list)
    skipped = []
    for ensemble in ensembles:
        gradients = ensemble.gradients()
        if gradients is None:
            skipped.append(ensemble.name)
        else:
            views = [head_slice.view(gradient) for head_slice, gradient in zip(ensemble.slices, gradients, strict=True)]
            batches[ensemble.particles, gradients[0].device].append((ensemble, views))
    if not batches:
        return None
    if groups or not any(stacks_on(device) for _, device in batches):
        sums = summed_over(groups, [_sums(rule, batch, divided=bool(groups)) for batch in batches.values()])
        pairs = zip(batches.values(), sums, strict=True)
        records = [_apply_batch(rule, batch, own, strength, scale) for batch, own in pairs]
    else:
        every = [pair for batch in batches.values() for pair in batch]
        records = _apply_stacked(rule, every, strength, scale)
    forces = ForceNorms.joined(records)
    return ForceNorms(**{**vars(forces), "skipped": tuple(skipped)})


def langevin_rate(optimizer: Optimizer, ensemble: Ensemble) -> float | Tensor:
    """Return what Langevin noise is multiplied by so that its temperature is right under this optimizer.

    theta <- theta - lr (eps grad U - a xi) samples at the asked temperature when a = sqrt(2 eps / beta) / sqrt(lr): the
    noise is divided by sqrt(lr) under plain SGD. Under any other optimizer there is no such factor, the noise is
    gradient noise and not Langevin, and it is left as it is.
    """
    plain = type(optimizer) is SGD
    owned = {id(head_slice.parameter) for head_slice in ensemble.slices}
    for group in optimizer.param_groups:
        if plain and group["momentum"] == 0 and any(id(parameter) in owned for parameter in group["params"]):
            rate = group["lr"]
            # a rate of zero moves nothing, whatever the noise
            if isinstance(rate, Tensor):
                return torch.where(rate > 0, rate.clamp_min(torch.finfo(rate.dtype).tiny).rsqrt(), 1.0)
            return rate**-0.5 if rate > 0.0 else 1.0
    return 1.0


def noise_key(*parts: object) -> int:
    """Return a 63-bit seed that depends on the parts alone, the same on every machine and process."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _sums(rule: Rule, batch: Sequence[tuple[Ensemble, list[Tensor]]], *, divided: bool) -> Sums:
    """Return what a step needs to know of the particles of a batch, and of divided gradients, which have no norm."""
    parameters = [[head_slice.view(head_slice.parameter) for head_slice in ensemble.slices] for ensemble, _ in batch]

    def grams(of: Callable[[Tensor], Tensor], every: Sequence[Sequence[Tensor]]) -> Tensor:
        return torch.stack([_summed([of(view) for view in views]) for views in every])

    shifted = grams(shifted_gram, parameters)
    example = geometry(torch.eye(2, dtype=torch.float64), inner=rule.needs_inner)
    prior = divided and rule.mixing(example).prior is not None
    plain = grams(plain_gram, parameters) if rule.needs_inner or prior else None
    if not divided:
        return Sums(shifted, plain)
    gradients = [views for _, views in batch]
    pairs = [list(zip(*both, strict=True)) for both in zip(gradients, parameters, strict=True)]
    return Sums(
        shifted,
        plain,
        gradients=grams(plain_gram, gradients),
        products=torch.stack([_summed([cross_gram(g, p) for g, p in own]) for own in pairs]) if prior else None,
        squares=grams(squared_norms, parameters),
    )


def _apply_batch(
    rule: Rule, batch: Sequence[tuple[Ensemble, list[Tensor]]], sums: Sums, strength: float, scale: Tensor | None
) -> ForceNorms:
    parameters = [[head_slice.view(head_slice.parameter) for head_slice in ensemble.slices] for ensemble, _ in batch]
    plain = sums.plain if rule.needs_inner else None
    distances = geometry_from_grams(sums.shifted, plain)
    mixing = rule.mixing(distances)
    repulsions = repulsion_norms(mixing, sums.shifted if plain is None else plain)
    norms = sums.drive_norms(mixing, scale)
    # the particle nearest to all others: differences from it are the ones that round least
    medoids = distances.squared_distances.sum(-1).argmin(-1)
    drive_norms, pushed, sound, workspace = [], [], [], _Workspace()
    for index, (views, (_, gradients)) in enumerate(zip(parameters, batch, strict=True)):
        drives = [workspace.like(slot, gradient) for slot, gradient in enumerate(gradients)]
        for drive, view, gradient in zip(drives, views, gradients, strict=True):
            _add_mixed(drive, mixing.drive[index], gradient, beta=0)
            if mixing.prior is not None:
                _add_mixed(drive, mixing.prior[index] if scale is None else mixing.prior[index] * scale, view)
        own = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(drive) for drive in drives]))
        drive_norm = own if norms is None else norms[index].to(own.dtype)
        factor = repulsion_factor(mixing, drive_norm, repulsions[index], strength, scale)
        push = factor * repulsions[index]
        finite = drive_norm.isfinite() & push.isfinite()
        for drive, view, gradient in zip(drives, views, gradients, strict=True):
            rows = workspace.like(len(gradients), drive)
            _add_repulsion(drive, -factor * mixing.repulsion[index], view, rows, medoids[index], rule.needs_inner)
            # a gradient that is not finite stays as it is, for the loop or a GradScaler to notice
            torch.where(finite, drive.to(gradient.dtype), gradient, out=gradient)
        drive_norms.append(drive_norm)
        pushed.append(push)
        sound.append(finite)
    unscale = 1.0 if scale is None else scale.reciprocal()
    return ForceNorms(
        tuple(ensemble.name for ensemble, _ in batch),
        torch.stack(drive_norms) * unscale,
        torch.stack(pushed).to(drive_norms[0].dtype) * unscale,
        torch.stack([_mean_norm(views) for views in parameters])
        if sums.squares is None
        else sums.squares.sqrt().mean(-1).to(drive_norms[0].dtype),
        torch.stack(sound),
        collapsed(distances),
        tuple(ensemble.particles for ensemble, _ in batch),
    )


def _apply_stacked(
    rule: Rule, every: Sequence[tuple[Ensemble, list[Tensor]]], strength: float, scale: Tensor | None
) -> list[ForceNorms]:
    particles = [[head_slice.view(head_slice.parameter) for head_slice in ensemble.slices] for ensemble, _ in every]
    gradients = [views for _, views in every]
    records = []
    for stack in alike(particles, gradients):
        own, given = ([views[index] for index in stack] for views in (particles, gradients))
        norms = step_stacked(rule, own, given, strength=strength, scale=scale)
        members = [every[index][0] for index in stack]
        names, counts = tuple(e.name for e in members), tuple(e.particles for e in members)
        records.append(ForceNorms(names, **vars(norms), particles=counts))
    return records


def _summed(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(list(tensors)).sum(0)


def _mean_norm(views: Sequence[Tensor]) -> Tensor:
    dtypes = [torch.promote_types(view.dtype, torch.float32) for view in views]
    norms = [torch.linalg.vector_norm(v, dim=(1, 2), dtype=d) for v, d in zip(views, dtypes, strict=True)]
    return _summed([norm.square() for norm in norms]).sqrt().mean()


class _Workspace:
    """Buffers for drives, reused from one ensemble to the next: fresh memory costs more than the arithmetic."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, torch.dtype], Tensor] = {}

    def like(self, slot: int, view: Tensor) -> Tensor:
        """Return a contiguous buffer of the view's shape, in at least single precision."""
        key = slot, torch.promote_types(view.dtype, torch.float32)
        buffer = self._slots.get(key)
        if buffer is None or buffer.numel() < view.numel():
            buffer = self._slots[key] = torch.empty(view.numel(), dtype=key[1], device=view.device)
        return buffer[: view.numel()].view(view.shape)


def _add_repulsion(
    buffer: Tensor, coefficients: Tensor, view: Tensor, rows: Tensor, medoid: Tensor, needs_inner: bool
) -> None:
    """Add sum_j coefficients_ij view_j by way of the differences from one particle, written to `rows`.

    Nearly equal particles would lose in single precision, and more so under TF32, what tells them apart. Coefficients
    of a kernel on distances have rows that sum to zero, so the differences are all there is.
    """
    origin = view.index_select(0, medoid.view(1)).to(buffer.dtype)
    torch.sub(view, origin, out=rows)
    _add_mixed(buffer, coefficients, rows)
    if needs_inner:
        sums = coefficients.sum(-1).to(buffer.dtype)
        buffer.addcmul_(sums.view(-1, 1, 1), origin)


def _add_mixed(buffer: Tensor, coefficients: Tensor, view: Tensor, *, beta: int = 1) -> None:
    """Set buffer to beta * buffer + sum_j coefficients_ij view_j; view [M, a, b] need not be contiguous."""
    wide = view.to(buffer.dtype)
    coefficients = coefficients.to(buffer.dtype)
    if wide.stride(1) == wide.shape[2] * wide.stride(2) and wide.stride(2) == 1:
        flat = wide.as_strided((wide.shape[0], wide.shape[1] * wide.shape[2]), (wide.stride(0), 1))
        buffer.flatten(1).addmm_(coefficients, flat, beta=beta)
    else:
        mixed = torch.matmul(coefficients, wide.transpose(0, 1)).transpose(0, 1)
        buffer.copy_(mixed) if beta == 0 else buffer.add_(mixed)
