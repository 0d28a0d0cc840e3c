"""The cosine-similarity rules of An et al. 2020, Table 9 and appendix C.6, between a penalty and SVGD.

`CosinePenalty` is the regularizer, `CosineRepulsion` takes its derivative in the other head, and the third row, with
smoothing, is `SVGD(kernel=Cosine())`. A zero head has no direction and is refused where values can be looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import require_positive
from headwise.repulsion.gram import Geometry
from headwise.repulsion.kernels import Cosine, cosine_gradient
from headwise.repulsion.mixing import Mixing, Relative, require_alpha


@dataclass(frozen=True)
class CosinePenalty:
    """Gradient descent with a penalty on the cosine similarity between heads (An et al. 2020, appendix C.6).

    g'_i = eps [ g_i + alpha grad_{theta_i} (1/M) sum_j cos(theta_i, theta_j) ]. The paper prints the penalty with the
    sign that would raise the similarity; this lowers it. The penalty turns a head and never lengthens it.

    Args:
        alpha: weight of the penalty, in units of the loss, at least 0, or a `Relative`.
        step_size: eps, above 0.
    """

    alpha: float | Relative = 0.01
    step_size: float = 0.1

    def __post_init__(self) -> None:
        require_alpha("CosinePenalty", self.alpha)
        require_positive("CosinePenalty.step_size", self.step_size)

    @property
    def needs_inner(self) -> bool:
        """True: cosines are read off inner products."""
        return True

    def noise_scale(self) -> float:
        """0.0: no noise."""
        return 0.0

    def mixing(self, geometry: Geometry) -> Mixing:
        """The coefficients [*, M, M] of one step."""
        return _unsmoothed(self.step_size, self.alpha, -cosine_gradient(geometry))


@dataclass(frozen=True)
class CosineRepulsion:
    """The repulsion of the cosine kernel without its smoothing (An et al. 2020, Table 9, row "i->j").

    g'_i = eps [ g_i - alpha (1/M) sum_j grad_{theta_j} cos(theta_j, theta_i) ]. Between nearly orthogonal heads the
    repulsion is almost wholly radial: heads grow, and hardly turn.

    Args:
        alpha: weight of the repulsion, in units of the loss, at least 0, or a `Relative`.
        step_size: eps, above 0.
    """

    alpha: float | Relative = 0.01
    step_size: float = 0.1

    def __post_init__(self) -> None:
        require_alpha("CosineRepulsion", self.alpha)
        require_positive("CosineRepulsion.step_size", self.step_size)

    @property
    def needs_inner(self) -> bool:
        """True: cosines are read off inner products."""
        return True

    def noise_scale(self) -> float:
        """0.0: no noise."""
        return 0.0

    def mixing(self, geometry: Geometry) -> Mixing:
        """The coefficients [*, M, M] of one step."""
        return _unsmoothed(self.step_size, self.alpha, Cosine().matrices(geometry).repulsion)


def _unsmoothed(step_size: float, alpha: float | Relative, repulsion: Tensor) -> Mixing:
    count = repulsion.shape[-1]
    drive = step_size * torch.eye(count, dtype=repulsion.dtype, device=repulsion.device).expand_as(repulsion)
    if isinstance(alpha, Relative):
        return Mixing(drive, None, step_size / count * repulsion, alpha.ratio)
    return Mixing(drive, None, step_size * alpha / count * repulsion, None)
