"""Gram matrices of particles and the squared distances read off them.

Accumulation is in float64 whatever the parameters' dtype, and distances are taken between particles shifted by
particle 0 of their group: when heads collapse the Gram of unshifted fp32 weights has no correct digit left. A group
made of several slices adds their Gram matrices. No kernel and no bandwidth here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import ShapeError

# A squared distance below this share of the norms it was computed from is float64 rounding: 64 epsilon, which is
# also the square of the resolution of float32 parameters.
ROUNDING = 2.0**-46
# A squared norm or bandwidth below this counts as zero, so that its reciprocal stays finite in float32.
SMALLEST = 1e-30
# Float64 temporaries of this many elements (512 KiB) stay in a core's cache; on an accelerator launches cost more.
CPU_CHUNK = 2**16
ACCELERATOR_CHUNK = 2**24


@dataclass(frozen=True, eq=False)
class Geometry:
    """What the kernels need to know of the particles of one or many groups.

    Args:
        squared_distances: float64 [*, M, M], zero on the diagonal and for particles equal to rounding.
        inner: float64 [*, M, M] inner products of the unshifted particles; None when no kernel asks for them.
    """

    squared_distances: Tensor
    inner: Tensor | None


def geometry(particles: Tensor, *, inner: bool) -> Geometry:
    """The `Geometry` of `particles`.

    Args:
        particles: [*, M, D] floating point, any leading group axes.
        inner: whether to keep the unshifted inner products too (a kernel's `needs_inner`).

    Returns:
        A `Geometry` of float64 [*, M, M] matrices on the device of the particles.

    >>> geometry(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), inner=False).squared_distances.tolist()
    [[0.0, 25.0], [25.0, 0.0]]
    """
    exact = particles.detach().to(torch.float64)
    shifted = exact - exact[..., :1, :]
    return geometry_from_grams(shifted @ shifted.mT, exact @ exact.mT if inner else None)


def geometry_from_grams(shifted: Tensor, plain: Tensor | None) -> Geometry:
    """The `Geometry` of groups whose Gram matrices are already there: D_ij = S_ii + S_jj - 2 S_ij, never below 0.

    Args:
        shifted: float64 [*, M, M], sums of `shifted_gram` over the slices of a group.
        plain: float64 [*, M, M], the same sums of `plain_gram`, or None.

    Returns:
        A `Geometry` with matrices of the same shape.
    """
    norms = shifted.diagonal(dim1=-2, dim2=-1)
    scale = norms.unsqueeze(-1) + norms.unsqueeze(-2)
    distances = scale - (shifted + shifted.mT)
    # written so that NaN stays NaN: particles that are not finite are not equal
    return Geometry(torch.where(distances <= ROUNDING * scale, 0.0, distances), plain)


def shifted_gram(view: Tensor) -> Tensor:
    """The Gram matrix of the particles less particle 0, accumulated in float64.

    Args:
        view: [M, ...] floating point, one particle to an entry of the first axis; not modified.

    Returns:
        float64 [M, M]; row and column 0 are zero.

    >>> shifted_gram(torch.tensor([[1.0, 1.0], [4.0, 5.0]])).tolist()
    [[0.0, 0.0], [0.0, 25.0]]
    """
    gram = _empty_gram(view)
    # Row 0 less itself is zero: only the other rows are subtracted and multiplied.
    others = gram[1:, 1:]
    for columns in _columns(view):
        # The shift comes after the conversion: an fp32 difference from one far head would round the near ones.
        rows = columns[1:].sub_(columns[:1])
        others.addmm_(rows, rows.T)
    return gram


def plain_gram(view: Tensor) -> Tensor:
    """The Gram matrix of the particles as they are, accumulated in float64.

    Args:
        view: [M, ...] floating point; not modified.

    Returns:
        float64 [M, M].
    """
    gram = _empty_gram(view)
    for columns in _columns(view):
        gram.addmm_(columns, columns.T)
    return gram


def cross_gram(view: Tensor, other: Tensor) -> Tensor:
    """The inner products of the entries of one view with those of another of its shape: float64 [M, M].

    >>> cross_gram(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])).tolist()
    [[11.0]]
    """
    gram = _empty_gram(view)
    for columns, others in zip(_columns(view), _columns(other), strict=True):
        gram.addmm_(columns, others.T)
    return gram


def squared_norms(view: Tensor) -> Tensor:
    """The squared norm of each particle of a [M, ...] view: float64 [M]."""
    return sum((columns.square().sum(1) for columns in _columns(view)), _empty_gram(view).diagonal().clone())


def collapsed(geometry: Geometry) -> Tensor:
    """Which groups of several particles have all of them equal, so that nothing can push them apart: bool [*]."""
    equal = (geometry.squared_distances == 0).all(-1).all(-1)
    return equal if geometry.squared_distances.shape[-1] > 1 else torch.zeros_like(equal)


def require_nonzero(particles: Tensor, name: str = "particles") -> None:
    """Raise `ShapeError` naming the particles of [M, D] that are zero, which a kernel on directions cannot take.

    >>> require_nonzero(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    """
    squared_norms = particles.detach().to(torch.float64).square().sum(-1)
    empty = (squared_norms <= SMALLEST).nonzero().flatten().tolist()
    if empty:
        raise ShapeError(
            f"{name} {empty} of {len(particles)} are zero and have no direction; expected nonzero particles. "
            "Initialize those heads, or use a kernel on distances such as RBF()."
        )


def _empty_gram(view: Tensor) -> Tensor:
    return torch.zeros(len(view), len(view), dtype=torch.float64, device=view.device)


def _columns(view: Tensor) -> Iterator[Tensor]:
    """Fresh float64 copies [M, n] of successive columns of a [M, ...] view."""
    rows = view.detach().reshape(len(view), -1)
    chunk = CPU_CHUNK if view.device.type == "cpu" else ACCELERATOR_CHUNK
    for columns in rows.split(max(1, chunk // max(1, len(view))), dim=1):
        # A float64 parameter must be copied too: the caller subtracts in place.
        yield columns.to(torch.float64, copy=True)
