"""Kernels on particles, as [M, M] matrices, and the rules that choose their bandwidth.

With R_i the repulsion on particle i, `repulsion @ particles` is R. Every kernel is written as
R_i = sum_j (a_ij theta_i - b_ij theta_j) over the pairs that are apart, so that particles equal to rounding do not push
each other. The bandwidth h is a constant of the step: nothing is differentiated through it. A group of one particle, or
one whose median distance is zero, gets h = 1, so that its kernel stays finite and its repulsion is zero.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from headwise.errors import SettingError, require_positive
from headwise.repulsion.gram import ROUNDING, SMALLEST, Geometry


@runtime_checkable
class Bandwidth(Protocol):
    """A rule for h: `Median()`, `ReleasedMedian()`, `Fixed(value)`, or your own frozen dataclass."""

    def resolve(self, squared_distances: Tensor) -> Tensor:
        """The bandwidth [*] of groups with squared distances [*, M, M]."""
        ...


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

    value: float

    def __post_init__(self) -> None:
        require_positive("Fixed.value", self.value)

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
    """What kernels with a bandwidth share."""

    bandwidth: Bandwidth = field(default_factory=Median)

    def __post_init__(self) -> None:
        if isinstance(self.bandwidth, type) or not isinstance(self.bandwidth, Bandwidth):
            raise SettingError(
                f"{type(self).__name__}.bandwidth is {self.bandwidth!r}; expected a rule such as Median() or "
                "Fixed(1.0), an instance."
            )


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

        >>> from headwise.repulsion.gram import geometry
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
        """The kernel's values and repulsion coefficients, each [*, M, M].

        A zero particle counts as orthogonal to all others; it neither pushes nor is pushed.
        """
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
        """The kernel's values and repulsion coefficients, each [*, M, M].

        A zero particle counts as orthogonal to all others; it neither pushes nor is pushed.
        """
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
        """The kernel's values and repulsion coefficients, each [*, M, M]; the latter diagonal.

        A zero particle has no direction, and is not pushed.
        """
        inverse, _, _ = _directions(geometry)
        assert geometry.inner is not None  # `_directions` read it
        kernel = RBF(self.bandwidth).matrices(geometry)
        along = (kernel.repulsion * geometry.inner).sum(-1) * inverse.square()
        return KernelMatrices(kernel.values, torch.diag_embed(along))


def cosine_gradient(geometry: Geometry) -> Tensor:
    """The coefficients [*, M, M] of grad_{theta_i} sum_j cos(theta_i, theta_j), for a penalty on cosines.

    Row i is sum_j [theta_j / (n_i n_j) - cos_ij theta_i / n_i^2], orthogonal to theta_i. Its argument must hold inner
    products.
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
