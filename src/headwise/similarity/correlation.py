"""Cross-correlation between the features of two heads."""

import torch
from torch import Tensor

from headwise.similarity.alignment import center_features, square_products
from headwise.similarity.tokens import autocast_off

# Added to the variance of a feature, as a share of the mean variance of its head.
SMALLEST_VARIANCE = 1e-5


def cross_correlation(features: Tensor, keep: Tensor | None = None, *, matched: bool = False) -> Tensor:
    """Return how strongly the features of two heads correlate, [H, H].

    With C^ij = Z_i^T Z_j / N of standardized features, s_ij = (1/e) sum_ab (C^ij_ab)^2 in [0, e], the redundancy term
    of Barlow Twins (Zbontar et al. 2021) between heads in place of views, or mean_a (C^ij_aa)^2 in [0, 1] with
    `matched`. VICReg's covariance term (Bardes et al. 2022) is the first without the division by the deviation.

    It does not change with the scale and offset of each feature, but does with a rotation inside a head, which the
    matched form does not see through. Its value for a copy is not fixed, so that layers do not compare. Independent
    heads score about e / N, and one that is constant over tokens 0. Prefer the debiased alignment of `alignment`, which
    is invariant and unbiased.

    Args:
        features: [..., H, e].
        keep: [...], bool, True = valid token; None keeps all.
        matched: Whether to compare feature a of one head with feature a of the other alone.

    >>> features = torch.tensor([[[1.0], [2.0]], [[2.0], [0.0]], [[4.0], [1.0]]])
    >>> round(float(cross_correlation(features)[0, 1]), 4)
    0.1071
    """
    centered, count, least = center_features(features, keep)
    count = count.clamp_min(1)
    size = (centered.detach().square().sum(0) / count).mean(-1, keepdim=True)
    # the result does not change with a head's scale, which needs no gradient; a constant head has none at all
    smallest = torch.finfo(size.dtype).tiny / torch.finfo(size.dtype).eps
    sound = size > (least[:, None] / features.shape[-1]).clamp_min(smallest)
    scaled = centered * (torch.where(sound, size, 1.0).rsqrt() * sound)
    variance = scaled.square().sum(0) / count
    # the root of a variance of 0 would have an infinite slope
    added = torch.where(sound, SMALLEST_VARIANCE * variance.mean(-1, keepdim=True), 1.0)
    units = scaled * (variance + added).rsqrt()
    with autocast_off(units):
        if matched:
            return torch.einsum("tia,tja->ija", units, units).div(count).square().mean(-1)
        return square_products(units) / (count.square() * units.shape[-1])
