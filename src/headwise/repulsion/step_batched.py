"""A step of a rule on many ensembles at once, in a number of launches that does not grow with the layers.

On an accelerator a launch costs more than the arithmetic on one layer's heads, so ensembles of one shape are copied
into one stack, mixed there by batched products, and copied back. On a CPU the copies cost more than they save, and
`ensembles` works on views. Nothing here waits for the device, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.repulsion.gram import collapsed, geometry_from_grams
from headwise.repulsion.mixing import Mixing, repulsion_factor, repulsion_norms
from headwise.repulsion.rules import Rule

# Numbers of the particles in one stack. A stack takes about 24 bytes a number while it is worked on, in float32.
MOST_STACKED = 2**25

Views = Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class StackedNorms:
    """What a step did to each of G ensembles; the fields of `ForceNorms` that hold tensors, each [G]."""

    drive_norm: Tensor
    repulsion_norm: Tensor
    particle_norm: Tensor
    finite: Tensor
    equal: Tensor


def stacks_on(device: torch.device) -> bool:
    """Whether ensembles on a device are stacked: on every one but a CPU."""
    return device.type != "cpu"


def alike(particles: Sequence[Views], gradients: Sequence[Views]) -> list[list[int]]:
    """Return the indices of ensembles that fit in one stack, stack by stack.

    Args:
        particles: For each ensemble the views [M, a, b] that make up its particles.
        gradients: Their gradients, likewise.

    Example:
        >>> heads, single = torch.zeros(2, 3, 5), torch.zeros(1, 3, 5)
        >>> alike([[heads], [single], [heads]], [[heads], [single], [heads]])
        [[0, 2], [1]]
    """
    kinds: dict[Hashable, list[int]] = defaultdict(list)
    for index, (views, own) in enumerate(zip(particles, gradients, strict=True)):
        kind = [(view.shape, view.dtype, view.device) for view in (*views, *own)]
        kinds[tuple(kind)].append(index)
    stacks = []
    for members in kinds.values():
        size = sum(view.numel() for view in particles[members[0]])
        most = max(1, MOST_STACKED // max(size, 1))
        stacks += [members[start : start + most] for start in range(0, len(members), most)]
    return stacks


@torch.no_grad()
def step_stacked(
    rule: Rule, particles: Sequence[Views], gradients: Sequence[Views], *, strength: float, scale: Tensor | None
) -> StackedNorms:
    """Replace the gradients of ensembles of one shape by what the rule says, in place.

    Args:
        rule: The particle rule.
        particles: For each of G ensembles the views [M, a, b] that make up its particles; alike in all of them.
        gradients: Their gradients, likewise; written to.
        strength: Multiplies the repulsion.
        scale: What the gradients are multiplied by, or None.
    """
    own = [torch.stack(views).flatten(2) for views in zip(*particles, strict=True)]
    given = [torch.stack(views).flatten(2) for views in zip(*gradients, strict=True)]
    exact = [stack.to(torch.float64) for stack in own]
    plain = _added([stack @ stack.mT for stack in exact]) if rule.needs_inner else None
    squares = _added([stack.square().sum(-1) for stack in exact])
    # the shift comes after the conversion: a difference in float32 would round heads that are close
    exact = [stack - stack[:, :1] for stack in exact]
    shifted = _added([stack @ stack.mT for stack in exact])
    del exact
    geometry = geometry_from_grams(shifted, plain)
    mixing = rule.mixing(geometry)
    medoids = geometry.squared_distances.sum(-1).argmin(-1)
    drives = [_drive(mixing, gradient, stack, scale) for gradient, stack in zip(given, own, strict=True)]
    drive_norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(drive, dim=(1, 2)) for drive in drives]), dim=0
    )
    repulsion = repulsion_norms(mixing, shifted if plain is None else plain)
    factor = repulsion_factor(mixing, drive_norm, repulsion, strength, scale)
    push = factor * repulsion
    finite = (drive_norm + push).isfinite()
    coefficients = -factor[:, None, None] * mixing.repulsion
    for drive, stack in zip(drives, own, strict=True):
        _add_repulsion(drive, coefficients, stack, medoids, rule.needs_inner)
    for slot, (drive, before) in enumerate(zip(drives, given, strict=True)):
        # a gradient that is not finite stays as it is, for the loop or a GradScaler to notice
        after = torch.where(finite[:, None, None], drive.to(before.dtype), before)
        views = [of[slot] for of in gradients]
        torch.ops.aten._foreach_copy_(views, list(after.view(len(views), *views[0].shape).unbind(0)))
    unscale = 1.0 if scale is None else scale.reciprocal()
    return StackedNorms(
        drive_norm * unscale,
        push.to(drive_norm.dtype) * unscale,
        squares.sqrt().mean(-1).to(drive_norm.dtype),
        finite,
        collapsed(geometry),
    )


def _drive(mixing: Mixing, gradients: Tensor, particles: Tensor, scale: Tensor | None) -> Tensor:
    """Return drive @ g + prior @ theta, [G, M, D], in at least single precision."""
    dtype = torch.promote_types(gradients.dtype, torch.float32)
    drive = torch.bmm(mixing.drive.to(dtype), gradients.to(dtype))
    if mixing.prior is not None:
        prior = mixing.prior if scale is None else mixing.prior * scale
        drive.baddbmm_(prior.to(dtype), particles.to(dtype))
    return drive


def _add_repulsion(drive: Tensor, coefficients: Tensor, particles: Tensor, medoids: Tensor, needs_inner: bool) -> None:
    """Add sum_j coefficients_ij theta_j, by way of the differences from one particle: see `ensembles`."""
    index = medoids[:, None, None].expand(-1, 1, particles.shape[2])
    origin = particles.gather(1, index).to(drive.dtype)
    drive.baddbmm_(coefficients.to(drive.dtype), particles.to(drive.dtype) - origin)
    if needs_inner:
        drive.addcmul_(coefficients.sum(-1, keepdim=True).to(drive.dtype), origin)


def _added(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0)
