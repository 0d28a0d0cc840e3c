"""The coefficients of one step of a particle rule, as [M, M] matrices, and how they are applied."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# A factor on the repulsion of all groups, or of each by name.
Strength = float | Mapping[str, float]


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
    mixing: Mixing, drive_norm: Tensor, repulsion_norm: Tensor, strength: float | Tensor, scale: Tensor | None
) -> Tensor:
    """The factor on the repulsion of each group: scheduled strength, relative strength, scale of the gradients."""
    factor = strength * repulsion_scale(mixing, drive_norm, repulsion_norm.to(drive_norm.dtype))
    # a relative strength follows the driving term, which carries the gradient scale already
    return factor if scale is None or mixing.relative is not None else factor * scale


def find_strength(strength: Strength, name: str) -> float:
    """The factor on the repulsion of a group.

    >>> find_strength({"layers.0 query": 0.5}, "layers.0 query")
    0.5
    """
    return strength[name] if isinstance(strength, Mapping) else strength


def stack_strengths(strength: Strength, names: Sequence[str], like: Tensor) -> float | Tensor:
    """The factors of several groups, [G], or one number where they are equal."""
    factors = [find_strength(strength, name) for name in names]
    return factors[0] if len(set(factors)) == 1 else torch.tensor(factors, dtype=like.dtype, device=like.device)


def stays_finite(finite: Tensor, force: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether forces [*, ...], which are `finite` [*] in at least single precision, are so in the dtype of a gradient.

    >>> stays_finite(torch.tensor([True, True]), torch.tensor([[1.0], [-7e4]]), torch.float16)
    tensor([ True, False])
    """
    # others hold all numbers whose norm is finite in single precision
    if dtype != torch.float16:
        return finite
    largest = torch.linalg.vector_norm(force.flatten(finite.dim()), math.inf, dim=-1)
    return finite & (largest <= torch.finfo(dtype).max)


def scale_prior(mixing: Mixing, scale: Tensor | None) -> Tensor | None:
    """The coefficients of the prior, times the scale of the gradients; None when the prior is flat."""
    return mixing.prior if mixing.prior is None or scale is None else mixing.prior * scale


def identity(like: Tensor) -> Tensor:
    """The identity of the size, dtype and device of [*, M, M] coefficients, expanded to their shape."""
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device).expand_as(like)


def add_repulsion(
    buffer: Tensor, coefficients: Tensor, view: Tensor, rows: Tensor, medoid: Tensor, needs_inner: bool
) -> None:
    """Add sum_j coefficients_ij view_j, computed from the differences to one particle, which are written to `rows`.

    Nearly equal particles would lose in single precision, and more so under TF32, what tells them apart. Coefficients
    of a kernel on distances have rows that sum to zero, so that the differences are all there is.
    """
    origin = view.index_select(0, medoid.view(1)).to(buffer.dtype)
    torch.sub(view, origin, out=rows)
    add_mixed(buffer, coefficients, rows)
    if needs_inner:
        sums = coefficients.sum(-1).to(buffer.dtype)
        buffer.addcmul_(sums.view(-1, 1, 1), origin)


def add_mixed(buffer: Tensor, coefficients: Tensor, view: Tensor, *, beta: int = 1) -> None:
    """Set buffer to beta * buffer + sum_j coefficients_ij view_j; view [M, a, b] need not be contiguous."""
    wide = view.to(buffer.dtype)
    coefficients = coefficients.to(buffer.dtype)
    if wide.stride(1) == wide.shape[2] * wide.stride(2) and wide.stride(2) == 1:
        flat = wide.as_strided((wide.shape[0], wide.shape[1] * wide.shape[2]), (wide.stride(0), 1))
        buffer.flatten(1).addmm_(coefficients, flat, beta=beta)
    else:
        mixed = torch.matmul(coefficients, wide.transpose(0, 1)).transpose(0, 1)
        buffer.copy_(mixed) if beta == 0 else buffer.add_(mixed)
