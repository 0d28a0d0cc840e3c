"""Rules that choose the bandwidth h of a kernel from the squared distances between particles.

A bandwidth is a constant of the step: nothing is differentiated through it. A group of one particle, or one whose
median distance is zero, gets h = 1, so that its kernel stays finite and its repulsion is zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from headwise.errors import require_positive
from headwise.repulsion.gram import SMALLEST


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


def _middle(values: Tensor) -> Tensor:
    """The median along the last axis, the two middle values averaged (torch's own takes the lower)."""
    ordered = values.sort(dim=-1).values
    count = values.shape[-1]
    return (ordered[..., (count - 1) // 2] + ordered[..., count // 2]) / 2


def _usable(bandwidth: Tensor) -> Tensor:
    return torch.where(bandwidth > SMALLEST, bandwidth, 1.0)
