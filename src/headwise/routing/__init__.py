"""Routing by agreement in place of the output projection."""

from headwise.routing.aggregate import Aggregation, Replaced, aggregate
from headwise.routing.gate import Gate, GatedProjection
from headwise.routing.modules import (
    Aggregator,
    EMAggregator,
    Residual,
    ResidualAggregator,
    Routing,
    Setting,
    SimpleAggregator,
    TrunkAggregator,
    build,
    require_setting,
)
from headwise.routing.save import load, save
from headwise.routing.settings import (
    Chunks,
    EMRouting,
    Routed,
    SimpleRouting,
    Trunk,
    em_routing,
    simple_routing,
    uniform_routing,
)
from headwise.routing.votes import (
    DistinctCapsules,
    PerHead,
    SharedTrunk,
    Votes,
    VoteSetting,
    VoteWeight,
    full_precision,
)

__all__ = [
    "Aggregation",
    "Aggregator",
    "Chunks",
    "DistinctCapsules",
    "EMAggregator",
    "EMRouting",
    "Gate",
    "GatedProjection",
    "PerHead",
    "Replaced",
    "Residual",
    "ResidualAggregator",
    "Routed",
    "Routing",
    "Setting",
    "SharedTrunk",
    "SimpleAggregator",
    "SimpleRouting",
    "Trunk",
    "TrunkAggregator",
    "VoteSetting",
    "VoteWeight",
    "Votes",
    "aggregate",
    "build",
    "em_routing",
    "full_precision",
    "load",
    "require_setting",
    "save",
    "simple_routing",
    "uniform_routing",
]
