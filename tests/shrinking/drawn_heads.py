"""Features of heads that are copies of fewer ones, turned, and their moments; for the tests of merging."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gram_of(features: Tensor) -> Tensor:
    """Moments y_i^H y_j of features [N, m, e]."""
    return torch.einsum("nie,njf->iejf", features.conj(), features)


def weights_of(readers: Tensor) -> Tensor:
    """S_i = sum_h R_h^T R_h of readers [m, n, d, e]."""
    return torch.einsum("mnde,mndf->mef", readers, readers)
