"""The coefficients of one step of a particle rule, as [M, M] matrices, and how they are applied."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import require_positive


@dataclass(frozen=True)
class Relative:
    """Strength relative to the driving term: ||repulsion|| = ratio * ||driving term|| in every group at every step.

    Ours, not in the papers. Norms are Frobenius norms over the group. Use it instead of a search over `alpha`, whose
    effect depends on the loss, the width and the bandwidth.

    Args:
        ratio: repulsion norm over driving norm, above 0.
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
        relative: the ratio of a `Relative` strength, which sets s (`repulsion_scale`); None means s = 1.
    """

    drive: Tensor
    prior: Tensor | None
    repulsion: Tensor
    relative: float | None


def blend(mixing: Mixing, particles: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """The driving term drive @ g + prior @ theta, [*, M, D], and the repulsion s * (repulsion @ theta) of one step."""
    driving = mixing.drive.to(gradients.dtype) @ gradients
    if mixing.prior is not None:
        driving = driving + mixing.prior.to(particles.dtype) @ particles
    # In the basis (theta_0, theta_1 - theta_0, ...) nearly equal particles lose no digits: column 0 then holds the
    # sums of the rows, which are zero for every kernel on distances.
    rows = torch.cat([particles[..., :1, :], particles[..., 1:, :] - particles[..., :1, :]], dim=-2)
    sums = mixing.repulsion.sum(-1, keepdim=True)
    repulsion = torch.cat([sums, mixing.repulsion[..., 1:]], dim=-1).to(particles.dtype) @ rows
    norms = (torch.linalg.vector_norm(force, dim=(-2, -1)) for force in (driving, repulsion))
    return driving, repulsion_scale(mixing, *norms)[..., None, None].to(repulsion.dtype) * repulsion


def repulsion_scale(mixing: Mixing, drive_norm: Tensor, repulsion_norm: Tensor) -> Tensor:
    """The factor s [*] on the repulsion: 1, or what makes its norm `relative` times that of the driving term.

    From the norms [*] of the driving term, drive @ g + prior @ theta, and of repulsion @ theta. It is 0 for a group
    whose particles do not repel each other, whatever the ratio.
    """
    if mixing.relative is None:
        return torch.ones_like(repulsion_norm)
    return torch.where(repulsion_norm > 0, mixing.relative * drive_norm / repulsion_norm, 0.0)


def repulsion_norms(mixing: Mixing, gram: Tensor) -> Tensor:
    """The norm of `mixing.repulsion @ particles` of each group from their Gram matrices, [G]."""
    squares = (mixing.repulsion @ gram * mixing.repulsion).sum((-2, -1))
    return squares.clamp_min(0).sqrt()


def repulsion_factor(
    mixing: Mixing, drive_norm: Tensor, repulsion_norm: Tensor, strength: float, scale: Tensor | None
) -> Tensor:
    """The factor on the repulsion of each group: scheduled strength, relative strength, scale of the gradients."""
    factor = strength * repulsion_scale(mixing, drive_norm, repulsion_norm.to(drive_norm.dtype))
    # a relative strength follows the driving term, which carries the gradient scale already
    return factor if scale is None or mixing.relative is not None else factor * scale


def scale_prior(mixing: Mixing, scale: Tensor | None) -> Tensor | None:
    """The coefficients of the prior, times the scale of the gradients; None when the prior is flat."""
    return mixing.prior if mixing.prior is None or scale is None else mixing.prior * scale


def identity(like: Tensor) -> Tensor:
    """The identity of the size, dtype and device of [*, M, M] coefficients, expanded to their shape."""
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device).expand_as(like)
