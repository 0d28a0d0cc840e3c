"""What a particle rule asks for in one step, as [M, M] coefficients, and the algebra that carries it out.

Owns the strength of the repulsion too. Which coefficients a rule asks for is the rule's affair.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import require_positive, require_range


@dataclass(frozen=True)
class Relative:
    """A strength of repulsion in units of the drive: ||repulsion|| = ratio * ||drive|| in every group at every step.

    Ours, not in the papers. Norms are Frobenius norms over the group. Use it where `alpha` would need a search: its
    effect depends on the loss, the width and the bandwidth.

    Args:
        ratio: repulsion norm over drive norm, above 0.
    """

    ratio: float

    def __post_init__(self) -> None:
        require_positive("Relative.ratio", self.ratio)


@dataclass(frozen=True, eq=False)
class Mixing:
    """Coefficients of one step: g' = drive @ g + prior @ theta - s * (repulsion @ theta).

    Args:
        drive: [*, M, M], multiplies the loss gradients g.
        prior: [*, M, M], multiplies the particles; None when the prior is flat.
        repulsion: [*, M, M], multiplies the particles; alpha, epsilon and 1/M are in it.
        relative: the ratio of a `Relative` strength, from which s follows (`repulsion_scale`); None means s = 1.
    """

    drive: Tensor
    prior: Tensor | None
    repulsion: Tensor
    relative: float | None


def blend(mixing: Mixing, particles: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """The drive and the repulsion of one step, [*, M, D] each; the gradient is their difference.

    Args:
        mixing: coefficients [*, M, M].
        particles: [*, M, D].
        gradients: [*, M, D], of the same dtype.

    Returns:
        drive = drive @ g + prior @ theta, and repulsion = s * (repulsion @ theta).
    """
    drive = mixing.drive.to(gradients.dtype) @ gradients
    if mixing.prior is not None:
        drive = drive + mixing.prior.to(particles.dtype) @ particles
    # In the basis (theta_0, theta_1 - theta_0, ...) nearly equal particles lose no digits: column 0 then holds the
    # sums of the rows, which are zero for every kernel on distances.
    rows = torch.cat([particles[..., :1, :], particles[..., 1:, :] - particles[..., :1, :]], dim=-2)
    sums = mixing.repulsion.sum(-1, keepdim=True)
    repulsion = torch.cat([sums, mixing.repulsion[..., 1:]], dim=-1).to(particles.dtype) @ rows
    scale = repulsion_scale(mixing, _group_norm(drive), _group_norm(repulsion))
    return drive, scale[..., None, None].to(repulsion.dtype) * repulsion


def repulsion_scale(mixing: Mixing, drive_norm: Tensor, repulsion_norm: Tensor) -> Tensor:
    """The factor s [*] on the repulsion: 1, or what makes its norm `relative` times the drive's.

    Args:
        mixing: coefficients of the step.
        drive_norm: [*], norm over each group of drive @ g + prior @ theta.
        repulsion_norm: [*], norm over each group of repulsion @ theta.

    Returns:
        [*]; 0 for a group whose particles do not repel each other, whatever the ratio.
    """
    if mixing.relative is None:
        return torch.ones_like(repulsion_norm)
    return torch.where(repulsion_norm > 0, mixing.relative * drive_norm / repulsion_norm, 0.0)


def repulsion_norms(mixing: Mixing, gram: Tensor) -> Tensor:
    """Return the norm of `mixing.repulsion @ particles` of each group from their Gram matrices, [G]."""
    squares = (mixing.repulsion @ gram * mixing.repulsion).sum((-2, -1))
    return squares.clamp_min(0).sqrt()


def repulsion_factor(mixing: Mixing, drive: Tensor, repulsion: Tensor, strength: float, scale: Tensor | None) -> Tensor:
    """Return what the repulsion of one group is multiplied by: schedule, gradient scale, relative strength."""
    factor = strength * repulsion_scale(mixing, drive, repulsion.to(drive.dtype))
    # a relative strength follows the drive, which carries the gradient scale already
    return factor if scale is None or mixing.relative is not None else factor * scale


def require_alpha(owner: str, alpha: float | Relative) -> None:
    """Raise `SettingError` unless `alpha` is a `Relative` or a finite number of at least 0."""
    if not isinstance(alpha, Relative):
        require_range(f"{owner}.alpha", alpha, low=0.0)


def _group_norm(forces: Tensor) -> Tensor:
    return torch.linalg.vector_norm(forces, dim=(-2, -1))
