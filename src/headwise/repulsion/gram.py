"""Gram matrices of particles, and the squared distances computed from them.

Sums are in float64 whatever the dtype of the parameters, and distances are taken between particles shifted by particle
0 of their group: when heads collapse, the Gram matrix of unshifted float32 weights has no correct digit left. The Gram
matrix of a group of several slices is the sum of theirs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ShapeError
from headwise.heads.sharding import sum_over

# A squared distance below this share of the norms it was computed from is float64 rounding: 64 epsilon, which is
# also the square of the resolution of float32 parameters.
ROUNDING = 2.0**-46
# A squared norm or bandwidth below this counts as zero, so that its reciprocal stays finite in float32.
SMALLEST = 1e-30
# Float64 temporaries of this many elements (512 KiB) stay in a core's cache; on an accelerator launches cost more.
CPU_CHUNK = 2**16
ACCELERATOR_CHUNK = 2**24
# Fields of `GramSums` that are sent whole.
NOT_SYMMETRIC = ("products", "squares")


@dataclass(frozen=True, eq=False)
class Geometry:
    """Squared distances and inner products of the particles of one or many groups: the input of kernels and rules.

    Args:
        squared_distances: float64 [*, M, M], zero on the diagonal and for particles equal to rounding.
        inner: float64 [*, M, M] inner products of the unshifted particles; None when no kernel needs them.
    """

    squared_distances: Tensor
    inner: Tensor | None


def geometry(particles: Tensor, *, inner: bool) -> Geometry:
    """The `Geometry` of particles [*, M, D], with their unshifted inner products if `inner` (a kernel's `needs_inner`).

    >>> geometry(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), inner=False).squared_distances.tolist()
    [[0.0, 25.0], [25.0, 0.0]]
    """
    exact = particles.detach().to(torch.float64)
    shifted = exact - exact[..., :1, :]
    return geometry_from_grams(shifted @ shifted.mT, exact @ exact.mT if inner else None)


def geometry_from_grams(shifted: Tensor, plain: Tensor | None) -> Geometry:
    """The `Geometry` of groups from their Gram matrices [*, M, M]: D_ij = S_ii + S_jj - 2 S_ij, never below 0."""
    norms = shifted.diagonal(dim1=-2, dim2=-1)
    scale = norms.unsqueeze(-1) + norms.unsqueeze(-2)
    distances = scale - (shifted + shifted.mT)
    # written so that NaN stays NaN: particles that are not finite are not equal
    return Geometry(torch.where(distances <= ROUNDING * scale, 0.0, distances), plain)


def shifted_gram(view: Tensor) -> Tensor:
    """The float64 Gram matrix [M, M] of the particles [M, ...] less particle 0; its row and column 0 are zero.

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
    """The float64 Gram matrix [M, M] of the particles [M, ...] as they are."""
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


def add_up(parts: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of one shape, without a kernel launch for a single one."""
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0)


def find_collapsed(geometry: Geometry) -> Tensor:
    """Which groups of several particles have all of them equal, so that they do not repel one another: bool [*]."""
    equal = (geometry.squared_distances == 0).all(-1).all(-1)
    return equal if geometry.squared_distances.shape[-1] > 1 else torch.zeros_like(equal)


def require_nonzero(particles: Tensor) -> None:
    """Raise `ShapeError` naming the particles of [M, D] that are zero, which a kernel on directions cannot take.

    >>> require_nonzero(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    """
    zero = (squared_norms(particles) <= SMALLEST).nonzero().flatten().tolist()
    if zero:
        raise ShapeError(
            f"particles {zero} of {len(particles)} are zero and have no direction; expected nonzero particles. "
            "Initialize those heads, or use a kernel on distances such as RBF()."
        )


@dataclass(frozen=True, eq=False)
class GramSums:
    """Inner products of G groups of M particles, float64: what a step needs of whole particles and gradients.

    Where processes hold different columns of them, each adds up its columns and `add_over_processes` adds the sums.

    Attributes:
        shifted: Of the particles less particle 0, [G, M, M].
        plain: Of the particles, [G, M, M]; None when neither kernel nor prior needs it.
        gradients: Of the gradients, [G, M, M]; None where the gradients are whole and their norms can be computed.
        products: Of each gradient with each particle, [G, M, M]; None without a prior.
        squares: Squared norms of the particles, [G, M]; None where the particles are whole.
    """

    shifted: Tensor
    plain: Tensor | None = None
    gradients: Tensor | None = None
    products: Tensor | None = None
    squares: Tensor | None = None

    def driving_norms(self, driving: Tensor, prior: Tensor | None) -> Tensor | None:
        """Return the norms of K g + P theta, [G]: ||K g||^2 = tr(K g g^T K^T), and so on; None for whole gradients."""
        if self.gradients is None:
            return None
        squares = _quadratic(driving, self.gradients, driving)
        if prior is not None:
            assert self.products is not None  # the sums of a rule with a prior have them, and these too
            assert self.plain is not None
            squares = squares + 2.0 * _quadratic(driving, self.products, prior)
            squares = squares + _quadratic(prior, self.plain, prior)
        return torch.where(squares > 0, squares, squares * 0.0).sqrt()


def add_over_processes(process_groups: Sequence[Any], every: Sequence[GramSums]) -> list[GramSums]:
    """Return these sums added over the processes of some process groups, in one message per process group.

    At least M (M + 1) numbers per particle group: one triangle of each symmetric matrix, without the zeros of the
    shifted one.

    >>> one = GramSums(torch.zeros(1, 2, 2, dtype=torch.float64))
    >>> add_over_processes((), [one])[0] is one
    True
    """
    if not process_groups:
        return list(every)
    parts = [part for sums in every for part in _pack(sums)]
    added = iter(sum_over(process_groups, parts))
    return [_unpack(sums, added) for sums in every]


def _pack(sums: GramSums) -> Iterator[Tensor]:
    for name, matrix in _list_matrices(sums):
        yield matrix if name in NOT_SYMMETRIC else matrix[:, *_triangle(name, matrix)]


def _unpack(sums: GramSums, added: Iterator[Tensor]) -> GramSums:
    found: dict[str, Tensor] = {}
    for name, matrix in _list_matrices(sums):
        found[name] = part = next(added)
        if name not in NOT_SYMMETRIC:
            rows, columns = _triangle(name, matrix)
            found[name] = torch.zeros_like(matrix)
            found[name][:, rows, columns] = part
            found[name][:, columns, rows] = part
    return GramSums(**found)


def _list_matrices(sums: GramSums) -> list[tuple[str, Tensor]]:
    return [(name, matrix) for name, matrix in vars(sums).items() if matrix is not None]


def _triangle(name: str, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the upper triangle, without row 0 where that is zero."""
    first = 1 if name == "shifted" else 0
    rows, columns = torch.triu_indices(matrix.shape[-1] - first, matrix.shape[-1] - first, device=matrix.device) + first
    return rows, columns


def _quadratic(left: Tensor, matrix: Tensor, right: Tensor) -> Tensor:
    """Return tr(left @ matrix @ right^T) of each group."""
    return (left @ matrix * right).sum((-2, -1))


def _empty_gram(view: Tensor) -> Tensor:
    return torch.zeros(len(view), len(view), dtype=torch.float64, device=view.device)


def _columns(view: Tensor) -> Iterator[Tensor]:
    """Fresh float64 copies [M, n] of successive columns of a [M, ...] view."""
    rows = view.detach().reshape(len(view), -1)
    chunk = CPU_CHUNK if view.device.type == "cpu" else ACCELERATOR_CHUNK
    for columns in rows.split(max(1, chunk // max(1, len(view))), dim=1):
        # A float64 parameter must be copied too: the caller subtracts in place.
        yield columns.to(torch.float64, copy=True)
