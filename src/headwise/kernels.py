"""Kernels on particles, as [M, M] matrices, the rules that choose their bandwidth, and the Gram matrices they read.

With R_i the repulsion on particle i, `repulsion @ particles` is R. Every kernel is written as
R_i = sum_j (a_ij theta_i - b_ij theta_j) over the pairs that are apart, so that particles equal to rounding do not push
each other. The bandwidth h is a constant of the step: nothing is differentiated through it. A group of one particle, or
one whose median distance is zero, gets h = 1, so that its kernel stays finite and its repulsion is zero.

Sums are in float64 whatever the dtype of the parameters, and distances are taken between particles shifted by particle
0 of their group: when heads collapse, the Gram matrix of unshifted float32 weights has no correct digit left. The Gram
matrix of a group of several slices is the sum of their matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from headwise.errors import SettingError, ShapeError
from headwise.heads.sharding import sum_over
from headwise.settings import Positive, check_fields

__all__ = [
    "IMQ",
    "RBF",
    "Bandwidth",
    "Cosine",
    "Fixed",
    "Kernel",
    "KernelMatrices",
    "Median",
    "NormalizedRBF",
    "RadialRBF",
    "ReleasedMedian",
    "cosine_gradient",
]

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
    """The inner products of the particles in two views [M, ...] of one shape: float64 [M, M].

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


def find_medoids(geometry: Geometry) -> Tensor:
    """The particle nearest to all others, [*]: differences to it have the smallest rounding errors."""
    return geometry.squared_distances.sum(-1).argmin(-1)


def require_nonzero(name: str, views: Sequence[Tensor]) -> None:
    """Raise `ShapeError` naming the particles of some [M, ...] views that are zero, and so have no direction.

    >>> require_nonzero("particles", [torch.tensor([[1.0, 0.0], [0.0, 2.0]])])
    """
    squares = add_up([squared_norms(view) for view in views])
    zero = (squares <= SMALLEST).nonzero().flatten().tolist()
    if zero:
        raise ShapeError(
            f"{name} {zero} of {len(squares)} are zero and have no direction; initialize those heads, or use a kernel "
            "on distances such as RBF()."
        )


@dataclass(frozen=True, eq=False)
class GramSums:
    """Inner products of G groups of M particles, float64: what a step needs of whole particles and gradients.

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

        def trace(left: Tensor, matrix: Tensor, right: Tensor) -> Tensor:
            return (left @ matrix * right).sum((-2, -1))

        if self.gradients is None:
            return None
        squares = trace(driving, self.gradients, driving)
        if prior is not None:
            assert self.products is not None  # the sums of a rule with a prior have them, and these too
            assert self.plain is not None
            squares = squares + 2.0 * trace(driving, self.products, prior)
            squares = squares + trace(prior, self.plain, prior)
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
    matrices = [{name: own for name, own in vars(sums).items() if own is not None} for sums in every]
    parts = [
        own if name in NOT_SYMMETRIC else own[:, *_triangle(name, own)]
        for sums in matrices
        for name, own in sums.items()
    ]
    added = iter(sum_over(process_groups, parts))
    for sums in matrices:
        for name, own in sums.items():
            part = next(added)
            if name not in NOT_SYMMETRIC:
                rows, columns = _triangle(name, own)
                whole = torch.zeros_like(own)
                whole[:, rows, columns] = whole[:, columns, rows] = part
                part = whole
            sums[name] = part
    return [GramSums(**sums) for sums in matrices]


def _triangle(name: str, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the upper triangle, without row 0 where that is zero."""
    first = 1 if name == "shifted" else 0
    rows, columns = torch.triu_indices(matrix.shape[-1] - first, matrix.shape[-1] - first, device=matrix.device) + first
    return rows, columns


def _empty_gram(view: Tensor) -> Tensor:
    return torch.zeros(len(view), len(view), dtype=torch.float64, device=view.device)


def _columns(view: Tensor) -> Iterator[Tensor]:
    """Fresh float64 copies [M, n] of successive columns of a [M, ...] view."""
    rows = view.detach().reshape(len(view), -1)
    chunk = CPU_CHUNK if view.device.type == "cpu" else ACCELERATOR_CHUNK
    for columns in rows.split(max(1, chunk // max(1, len(view))), dim=1):
        # A float64 parameter must be copied too: the caller subtracts in place.
        yield columns.to(torch.float64, copy=True)


def require_instance(kind: type, expected: str, name: str, value: object) -> None:
    """Raise `SettingError` unless a value has what a protocol asks for; a class is not one of its instances.

    >>> require_instance(Bandwidth, "a rule such as Median()", "RBF.bandwidth", Fixed(1.0))
    """
    if isinstance(value, type) or not isinstance(value, kind):
        raise SettingError(f"{name} is {value!r}; expected {expected}.")


@runtime_checkable
class Bandwidth(Protocol):
    """A rule for h: `Median()`, `ReleasedMedian()`, `Fixed(value)`, or your own frozen dataclass."""

    def resolve(self, squared_distances: Tensor) -> Tensor:
        """The bandwidth [*] of groups with squared distances [*, M, M]."""
        ...


AnyBandwidth = Annotated[
    Bandwidth, partial(require_instance, Bandwidth, "a rule such as Median() or Fixed(1.0), an instance")
]


@dataclass(frozen=True)
class Median:
    """h = (median of the pairwise distances, i < j)^2 / log M (An et al. 2020, section 2.2).

    The two middle distances are averaged before squaring. When all distances are equal, every off-diagonal RBF value
    is 1/M, so each head takes as much from the others together as from itself.
    """

    def resolve(self, squared_distances: Tensor) -> Tensor:
        """The bandwidth [*] of groups with squared distances [*, M, M].

        >>> theta = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
        >>> h = Median().resolve(torch.cdist(theta, theta).square())
        >>> round(h.item(), 5)  # 2 ** 2 / log 3
        3.64096
        """
        count = squared_distances.shape[-1]
        if count == 1:
            return torch.ones_like(squared_distances[..., 0, 0])
        first, second = torch.triu_indices(count, count, offset=1, device=squared_distances.device)
        median = _middle(squared_distances[..., first, second].sqrt())
        return _usable(median.square() / math.log(count))


@dataclass(frozen=True)
class ReleasedMedian:
    """h = median(D) / log(M + 1), with the median over all M^2 squared distances, diagonal included.

    The bandwidth of the authors' released TensorFlow code, for comparison with its numbers; the paper's is `Median`.
    Equal distances give an off-diagonal RBF value of 1/(M + 1), but 1/9 at M = 2, where half the entries are the
    diagonal's zeros.
    """

    def resolve(self, squared_distances: Tensor) -> Tensor:
        """The bandwidth [*] of groups with squared distances [*, M, M]."""
        count = squared_distances.shape[-1]
        return _usable(_middle(squared_distances.flatten(-2)) / math.log(count + 1))


@dataclass(frozen=True)
class Fixed:
    """h = value, whatever the particles do.

    Args:
        value: the bandwidth, in squared units of the particles; above 0.
    """

    value: Positive

    __post_init__ = check_fields

    def resolve(self, squared_distances: Tensor) -> Tensor:
        """The bandwidth [*] of groups with squared distances [*, M, M]."""
        return torch.full_like(squared_distances[..., 0, 0], self.value)


@dataclass(frozen=True, eq=False)
class KernelMatrices:
    """A kernel on the particles of one or many groups.

    Args:
        values: [*, M, M], k(theta_i, theta_j).
        repulsion: [*, M, M], the coefficients of the repulsion: R = repulsion @ particles.
    """

    values: Tensor
    repulsion: Tensor


@runtime_checkable
class Kernel(Protocol):
    """A kernel: `RBF()`, `IMQ()`, `Cosine()`, `NormalizedRBF()`, `RadialRBF()`, or your own frozen dataclass.

    A kernel that leaves `needs_inner` False is taken to depend on differences of particles alone: the rows of its
    `repulsion` must sum to zero.
    """

    needs_inner: ClassVar[bool]

    def matrices(self, geometry: Geometry) -> KernelMatrices:
        """The kernel's values and repulsion coefficients, each [*, M, M]."""
        ...


@dataclass(frozen=True)
class BandwidthKernel:
    """Kernels with a bandwidth."""

    bandwidth: AnyBandwidth = field(default_factory=Median)

    __post_init__ = check_fields


@dataclass(frozen=True)
class RBF(BandwidthKernel):
    """k(x, y) = exp(-|x - y|^2 / h) (An et al. 2020, section 2.2).

    R_i = sum_j grad_{theta_j} k(theta_j, theta_i) = (2/h) sum_j k_ij (theta_i - theta_j).

    Args:
        bandwidth: the rule for h.
    """

    needs_inner: ClassVar[bool] = False

    def matrices(self, geometry: Geometry) -> KernelMatrices:
        """The kernel's values and repulsion coefficients, each [*, M, M]; rows and columns of the latter sum to zero.

        >>> from headwise.kernels import geometry
        >>> RBF(Fixed(2.0)).matrices(geometry(torch.tensor([[0.0], [1.0]]), inner=False)).values
        tensor([[1.0000, 0.6065],
                [0.6065, 1.0000]], dtype=torch.float64)
        """
        h = self.bandwidth.resolve(geometry.squared_distances)[..., None, None]
        values = torch.exp(-geometry.squared_distances / h)
        weight = 2 / h * values
        return KernelMatrices(values, _pairwise(weight, weight, geometry.squared_distances > 0))


@dataclass(frozen=True)
class IMQ(BandwidthKernel):
    """k(x, y) = (1 + |x - y|^2 / h)^(-1/2), the inverse multiquadric; not in the papers.

    R_i = (1/h) sum_j k_ij^3 (theta_i - theta_j): its tails reach heads that an RBF no longer sees.

    Args:
        bandwidth: the rule for h.
    """

    needs_inner: ClassVar[bool] = False

    def matrices(self, geometry: Geometry) -> KernelMatrices:
        """The kernel's values and repulsion coefficients [*, M, M]; rows and columns of the latter sum to zero."""
        h = self.bandwidth.resolve(geometry.squared_distances)[..., None, None]
        values = torch.rsqrt(1 + geometry.squared_distances / h)
        weight = values**3 / h
        return KernelMatrices(values, _pairwise(weight, weight, geometry.squared_distances > 0))


@dataclass(frozen=True)
class Cosine:
    """k(x, y) = x.y / (|x| |y|) (An et al. 2020, appendix C.6).

    R_i = sum_j grad_{theta_j} k = sum_j [theta_i / (n_i n_j) - k_ij theta_j / n_j^2] with n_i = |theta_i|. Values can
    be negative. Between heads that are nearly orthogonal R_i is almost wholly radial: it lengthens heads more than it
    turns them.
    """

    needs_inner: ClassVar[bool] = True

    def matrices(self, geometry: Geometry) -> KernelMatrices:
        """Values and repulsion coefficients [*, M, M]; a zero particle is orthogonal to all and is not pushed."""
        inverse, cosine, apart = _directions(geometry)
        toward_self = inverse.unsqueeze(-1) * inverse.unsqueeze(-2)
        repulsion = _pairwise(toward_self, cosine * inverse.square().unsqueeze(-2), apart)
        return KernelMatrices(cosine, repulsion)


@dataclass(frozen=True)
class NormalizedRBF(BandwidthKernel):
    """k(x, y) = exp(-|u - v|^2 / h) on directions u = x/|x|, v = y/|y|; ours, not in the papers.

    R_i = -sum_j grad_{theta_i} k(u_i, u_j) = -(2/h) sum_j k_ij (u_j - cos_ij u_i) / |theta_i|. It is orthogonal to
    theta_i: it turns a head and never lengthens it. Under `RBF` heads also separate by growing: their norms double
    while their directions become more alike. To stay on the sphere of the head the derivative is taken in
    theta_i, where the SVGD of the other kernels takes it in theta_j; for a function of x - y the two agree.

    Args:
        bandwidth: the rule for h, from the distances between directions.
    """

    needs_inner: ClassVar[bool] = True

    def matrices(self, geometry: Geometry) -> KernelMatrices:
        """Values and repulsion coefficients [*, M, M]; a zero particle is orthogonal to all and is not pushed."""
        inverse, cosine, apart = _directions(geometry)
        distances = torch.where(apart, 2 - 2 * cosine, 0.0)
        h = self.bandwidth.resolve(distances)[..., None, None]
        values = torch.exp(-distances / h)
        weight = 2 / h * values
        on_self = weight * cosine * inverse.square().unsqueeze(-1)
        on_other = weight * inverse.unsqueeze(-1) * inverse.unsqueeze(-2)
        return KernelMatrices(values, _pairwise(on_self, on_other, apart))


@dataclass(frozen=True)
class RadialRBF(BandwidthKernel):
    """`RBF` whose repulsion only changes how long heads are, a control; ours, not in the papers.

    k(x, y) = exp(-|x - y|^2 / h), R_i = (2/h) sum_j k_ij ((theta_i - theta_j) . u_i) u_i, u_i = theta_i / |theta_i|.

    That is the part of RBF's repulsion along each head. Under `RBF` heads grow as well as turn, and larger heads attend
    more sharply; what this kernel does too is not due to heads that differ. `NormalizedRBF` only turns them.

    Args:
        bandwidth: the rule for h.
    """

    needs_inner: ClassVar[bool] = True

    def matrices(self, geometry: Geometry) -> KernelMatrices:
        """Values and repulsion coefficients [*, M, M], the latter diagonal; a zero particle is not pushed."""
        inverse, _, _ = _directions(geometry)
        assert geometry.inner is not None  # `_directions` read it
        kernel = RBF(self.bandwidth).matrices(geometry)
        along = (kernel.repulsion * geometry.inner).sum(-1) * inverse.square()
        return KernelMatrices(kernel.values, torch.diag_embed(along))


def cosine_gradient(geometry: Geometry) -> Tensor:
    """The coefficients [*, M, M] of grad_{theta_i} sum_j cos(theta_i, theta_j), from a geometry with inner products.

    Row i is sum_j [theta_j / (n_i n_j) - cos_ij theta_i / n_i^2], orthogonal to theta_i.
    """
    inverse, cosine, apart = _directions(geometry)
    on_self = cosine * inverse.square().unsqueeze(-1)
    return -_pairwise(on_self, inverse.unsqueeze(-1) * inverse.unsqueeze(-2), apart)


def _directions(geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """1/|theta_i| [*, M] (0 for a zero particle), cosines [*, M, M], and which pairs have two directions apart."""
    if geometry.inner is None:
        raise SettingError("This kernel reads inner products; expected geometry(particles, inner=True).")
    squared_norms = geometry.inner.diagonal(dim1=-2, dim2=-1)
    inverse = torch.where(squared_norms > SMALLEST, squared_norms.rsqrt(), 0.0)
    cosine = geometry.inner * inverse.unsqueeze(-1) * inverse.unsqueeze(-2)
    own = torch.eye(cosine.shape[-1], dtype=torch.bool, device=cosine.device)
    cosine = torch.where(own, 1.0, cosine)
    return inverse, cosine, 1 - cosine > ROUNDING


def _pairwise(on_self: Tensor, on_other: Tensor, apart: Tensor) -> Tensor:
    """The matrix of R_i = sum_j (on_self_ij theta_i - on_other_ij theta_j) over the pairs `apart`; all [*, M, M]."""
    own = torch.where(apart, on_self, 0.0).sum(-1)
    return torch.diag_embed(own) - torch.where(apart, on_other, 0.0)


def _middle(values: Tensor) -> Tensor:
    """The median along the last axis, the two middle values averaged (torch's own takes the lower)."""
    ordered = values.sort(dim=-1).values
    count = values.shape[-1]
    return (ordered[..., (count - 1) // 2] + ordered[..., count // 2]) / 2


def _usable(bandwidth: Tensor) -> Tensor:
    return torch.where(bandwidth > SMALLEST, bandwidth, 1.0)
