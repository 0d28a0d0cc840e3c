"""Where the heads of a model are: find, select, read, bias, remove and verify them."""

from headwise.heads.ablation import Ablation, Importance, ablate, importance
from headwise.heads.bias import BiasFunction, HeadBias, bias_heads
from headwise.heads.find import (
    LAYOUTS,
    AdditiveQueries,
    FusedLinear,
    Layout,
    SeparateLinears,
    TorchMultihead,
    find_heads,
)
from headwise.heads.heads import KINDS, PROJECTIONS, Heads, Seam, Site, Slab
from headwise.heads.taps import Capture, Taps
from headwise.heads.verify import Verification, verify

__all__ = [
    "KINDS",
    "LAYOUTS",
    "PROJECTIONS",
    "Ablation",
    "AdditiveQueries",
    "BiasFunction",
    "Capture",
    "FusedLinear",
    "HeadBias",
    "Heads",
    "Importance",
    "Layout",
    "Seam",
    "SeparateLinears",
    "Site",
    "Slab",
    "Taps",
    "TorchMultihead",
    "Verification",
    "ablate",
    "bias_heads",
    "find_heads",
    "importance",
    "verify",
]
