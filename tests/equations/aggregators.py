"""Small aggregators and inputs from a seed."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from headwise.routing.algorithms import DistinctCapsules, PerHead, SharedTrunk
from headwise.routing.modules import EMRouting, SimpleRouting, Trunk, build

vote_settings = st.sampled_from([SharedTrunk(), SharedTrunk(relu=False), PerHead(), DistinctCapsules()])
EVERY = [SimpleRouting(), EMRouting(), EMRouting(activation=False, votes=PerHead()), Trunk(votes=DistinctCapsules())]


H, E, D = 2, 4, 8


def seeded(setting, seed: int = 0, heads: int = H, size: int = E, width: int = D) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(setting, heads, size, width)


def random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
