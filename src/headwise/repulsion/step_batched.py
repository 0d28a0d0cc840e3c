"""A step of a rule on many particle groups at once, in a number of kernel launches that does not grow with the layers.

On an accelerator a launch costs more than the arithmetic on one layer's heads, so groups of one shape are copied into
one stack, mixed there by batched products, and copied back. On a CPU the copies cost more than they save, and `step`
works on views. Nothing here waits for the device, so that a step can be captured in a CUDA graph.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from headwise.repulsion.force_norms import ForceNorms
from headwise.repulsion.gram import add_up, find_collapsed, geometry_from_grams
from headwise.repulsion.groups import ParticleGroup
from headwise.repulsion.mixing import (
    Mixing,
    Strength,
    repulsion_factor,
    repulsion_norms,
    scale_prior,
    stack_strengths,
    stays_finite,
)
from headwise.repulsion.rules import Rule

# Numbers of the particles in one stack. Each takes about 24 bytes during the step, in float32.
MOST_STACKED = 2**25

# A group, and the views [M, a, b] of its gradients.
GroupGradients = tuple[ParticleGroup, list[Tensor]]
# The same with those of its parameters.
Member = tuple[ParticleGroup, list[Tensor], list[Tensor]]


def stacks_on(device: torch.device) -> bool:
    """Whether groups on a device are stacked: on all but a CPU."""
    return device.type != "cpu"


@torch.no_grad()
def apply_stacked(
    rule: Rule, every: Sequence[GroupGradients], *, strength: Strength, scale: Tensor | None
) -> list[ForceNorms]:
    """Replace the gradients of groups of any shapes in place by those of the rule; returns one record per stack."""
    return [apply_to_stack(rule, members, strength, scale) for members in _divide_into_stacks(every)]


def _divide_into_stacks(every: Sequence[GroupGradients]) -> list[list[Member]]:
    kinds: dict[Hashable, list[Member]] = defaultdict(list)
    for group, gradients in every:
        own = group.views()
        kind = tuple((view.shape, view.dtype, view.device) for view in (*own, *gradients))
        kinds[kind].append((group, gradients, own))
    stacks = []
    for members in kinds.values():
        size = sum(view.numel() for view in members[0][1])
        most = max(1, MOST_STACKED // max(size, 1))
        stacks += [members[start : start + most] for start in range(0, len(members), most)]
    return stacks


def apply_to_stack(rule: Rule, members: Sequence[Member], strength: Strength, scale: Tensor | None) -> ForceNorms:
    """Replace the gradients of G groups of one shape in place by those of the rule."""
    groups, gradients = [group for group, _, _ in members], [views for _, views, _ in members]
    own = [torch.stack(views).flatten(2) for views in zip(*(particles for _, _, particles in members), strict=True)]
    given = [torch.stack(views).flatten(2) for views in zip(*gradients, strict=True)]
    exact = [stack.to(torch.float64) for stack in own]
    plain = add_up([stack @ stack.mT for stack in exact]) if rule.needs_inner else None
    squares = add_up([stack.square().sum(-1) for stack in exact])
    # the shift comes after the conversion: a difference in float32 would round heads that are close
    exact = [stack - stack[:, :1] for stack in exact]
    shifted = add_up([stack @ stack.mT for stack in exact])
    del exact
    geometry = geometry_from_grams(shifted, plain)
    mixing = rule.mixing(geometry)
    medoids = geometry.squared_distances.sum(-1).argmin(-1)
    driving = [_mix_driving(mixing, gradient, stack, scale) for gradient, stack in zip(given, own, strict=True)]
    driving_norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(term, dim=(1, 2)) for term in driving]), dim=0
    )
    repulsion = repulsion_norms(mixing, shifted if plain is None else plain)
    strengths = stack_strengths(strength, [group.name for group in groups], driving_norm)
    factor = repulsion_factor(mixing, driving_norm, repulsion, strengths, scale)
    push = factor * repulsion
    finite = (driving_norm + push).isfinite()
    coefficients = -factor[:, None, None] * mixing.repulsion
    for term, stack, before in zip(driving, own, given, strict=True):
        _add_repulsion(term, coefficients, stack, medoids, rule.needs_inner)
        finite = stays_finite(finite, term, before.dtype)
    for slot, (term, before) in enumerate(zip(driving, given, strict=True)):
        # a gradient that is not finite stays as it is, for the loop or a GradScaler to notice
        after = torch.where(finite[:, None, None], term.to(before.dtype), before)
        views = [of[slot] for of in gradients]
        torch.ops.aten._foreach_copy_(views, list(after.view(len(views), *views[0].shape).unbind(0)))
    unscale = 1.0 if scale is None else scale.reciprocal()
    return ForceNorms(
        tuple(group.name for group in groups),
        driving_norm * unscale,
        push.to(driving_norm.dtype) * unscale,
        squares.sqrt().mean(-1).to(driving_norm.dtype),
        finite,
        find_collapsed(geometry),
        tuple(group.particles for group in groups),
    )


def _mix_driving(mixing: Mixing, gradients: Tensor, particles: Tensor, scale: Tensor | None) -> Tensor:
    """Return drive @ g + prior @ theta, [G, M, D], in at least single precision."""
    dtype = torch.promote_types(gradients.dtype, torch.float32)
    driving = torch.bmm(mixing.drive.to(dtype), gradients.to(dtype))
    prior = scale_prior(mixing, scale)
    if prior is not None:
        driving.baddbmm_(prior.to(dtype), particles.to(dtype))
    return driving


def _add_repulsion(
    driving: Tensor, coefficients: Tensor, particles: Tensor, medoids: Tensor, needs_inner: bool
) -> None:
    """Add sum_j coefficients_ij theta_j, computed from the differences to one particle: see `step`."""
    index = medoids[:, None, None].expand(-1, 1, particles.shape[2])
    origin = particles.gather(1, index).to(driving.dtype)
    driving.baddbmm_(coefficients.to(driving.dtype), particles.to(driving.dtype) - origin)
    if needs_inner:
        driving.addcmul_(coefficients.sum(-1, keepdim=True).to(driving.dtype), origin)
