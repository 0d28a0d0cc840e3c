"""Random tensors from a seed."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
