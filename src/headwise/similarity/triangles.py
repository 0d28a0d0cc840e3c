"""Cholesky factors that tell of a failure by their values."""

import math

import torch
from torch import Tensor


def find_triangles(matrices: Tensor) -> Tensor:
    """Return L with A = L L^T of symmetric matrices [*, N, N]; NaN where A is not positive definite or not finite.

    A penalty on weights that diverged is NaN then, for which training loops look, and nothing waits for the device;
    `torch.linalg.cholesky` raises an error of its own, and waits.

    >>> find_triangles(torch.tensor([[[4.0]], [[-1.0]]])).flatten()
    tensor([2., nan])
    """
    triangles, failed = torch.linalg.cholesky_ex(matrices)
    return torch.where((failed == 0)[..., None, None], triangles, math.nan)
