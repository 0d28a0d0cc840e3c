"""Random tensors from a seed, and their comparison to rounding."""

from __future__ import annotations

from types import ModuleType

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from headwise.routing.algorithms import DistinctCapsules, PerHead, SharedTrunk
from headwise.routing.modules import EMRouting, SimpleRouting, Trunk, build

EPS = torch.finfo(torch.float64).eps


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(actual: Tensor, wanted: Tensor, *, terms: float = 1024) -> None:
    """Assert that tensors differ by at most so many roundings of the largest number, or of 1."""
    scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
    torch.testing.assert_close(actual, wanted, rtol=0, atol=terms * EPS * scale)


def vectors(batch: int, length: int, heads: int, width: int) -> Tensor:
    scale = torch.rand(batch, length, heads, 1, dtype=torch.float64) * 3 + 0.1
    return torch.randn(batch, length, heads, width, dtype=torch.float64) * scale


def rows(batch: int, length: int, heads: int, width: int) -> Tensor:
    return (1.7 * torch.randn(batch, heads, length, width, dtype=torch.float64)).softmax(-1)


def public_names(module: ModuleType) -> set[str]:
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {name for name, value in own.items() if getattr(value, "__module__", None) == module.__name__}


vote_settings = st.sampled_from([SharedTrunk(), SharedTrunk(relu=False), PerHead(), DistinctCapsules()])
EVERY = [SimpleRouting(), EMRouting(), EMRouting(activation=False, votes=PerHead()), Trunk(votes=DistinctCapsules())]


H, E, D = 2, 4, 8


def seeded(setting, seed: int = 0, heads: int = H, size: int = E, width: int = D) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(setting, heads, size, width)


def random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
