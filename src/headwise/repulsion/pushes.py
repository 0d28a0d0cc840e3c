"""The end of a step whose driving term is each head's own gradient: forces are scaled, written and recorded."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from headwise.repulsion.carriers import Carrier, Forces, list_carriers, norm_of, write_forces
from headwise.repulsion.force_norms import ForceNorms
from headwise.repulsion.groups import ParticleGroup
from headwise.repulsion.mixing import Mixing, repulsion_factor


def push_apart(
    group: ParticleGroup,
    pushes: Sequence[Tensor],
    mixing: Mixing,
    equal: Tensor,
    strength: float,
    scale: Tensor | None,
) -> ForceNorms:
    """Replace the gradients of a group in place by drive_ii g_i - s R_i; returns what was done.

    Args:
        group: The group.
        pushes: The repulsion R on the heads of each slice [M, a, b], in at least single precision.
        mixing: Its driving term, the same share of each head's gradient, and its relative strength.
        equal: Whether all of its heads are equal.
        strength: Factor on the repulsion.
        scale: What the gradients are multiplied by (GradScaler).
    """
    dtype = pushes[0].dtype
    share = mixing.drive.to(dtype).diagonal()
    carriers: list[Carrier] = []
    driving: list[Forces] = []
    pulled: list[Forces] = []
    for head_slice, push in zip(group.slices, pushes, strict=True):
        for carrier in list_carriers(head_slice):
            shared = carrier.shared
            if shared is not None and carrier.columns:
                # what columns share has no other way to its share, one for all heads (see `low_rank_drive`)
                shared = share[0] * shared
            carriers.append(carrier)
            driving.append((share.view(-1, 1, 1) * carrier.own.to(dtype), shared))
            pulled.append(carrier.pull(push))
    driving_norm, push_norm = norm_of(driving), norm_of(pulled)
    factor = repulsion_factor(mixing, driving_norm, push_norm, strength, scale)
    finite = driving_norm.isfinite() & (factor * push_norm).isfinite()
    finite = write_forces(carriers, driving, pulled, factor, finite)
    unscale = 1.0 if scale is None else scale.reciprocal()
    sizes = [torch.linalg.vector_norm(head_slice.read().float(), dim=(1, 2)) for head_slice in group.slices]
    return ForceNorms(
        (group.name,),
        (driving_norm * unscale).view(1),
        (factor * push_norm * unscale).view(1),
        torch.stack([size.square() for size in sizes]).sum(0).sqrt().mean().view(1),
        finite.view(1),
        equal.view(1),
        (group.particles,),
    )


def make_share(step_size: float, group: ParticleGroup) -> Tensor:
    """Return eps / M on the diagonal, [M, M]: the same tensor for the same group."""
    return _make_share(step_size / group.particles, group.particles, group.parameters[0].device)


@cache
def _make_share(share: float, particles: int, device: torch.device) -> Tensor:
    return share * torch.eye(particles, dtype=torch.float64, device=device)
