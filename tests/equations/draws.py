"""Random tensors from a seed, and their comparison to rounding."""

from __future__ import annotations

import torch
from torch import Tensor

EPS = torch.finfo(torch.float64).eps


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(actual: Tensor, wanted: Tensor, *, terms: float = 1024) -> None:
    """Assert that tensors differ by at most so many roundings of the largest number, or of 1."""
    scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
    torch.testing.assert_close(actual, wanted, rtol=0, atol=terms * EPS * scale)
