"""Where the heads of a model are: find, select, read, bias, remove and verify them."""

from headwise.heads.ablation import Ablation, Importance, ablate, importance
from headwise.heads.capture import Capture
from headwise.heads.experiments.verify import Verification, verify
from headwise.heads.find import LAYOUTS, find_heads
from headwise.heads.head_slice import HeadSlice, OutputProjection
from headwise.heads.heads import KINDS, PROJECTIONS, Heads, Site
from headwise.heads.layouts.parameters import FusedParameter, SeparateParameters
from headwise.heads.layouts.rows import (
    AdditiveQueries,
    FusedLinear,
    HeadList,
    LatentLinears,
    Layout,
    SeparateLinears,
    TorchMultihead,
)
from headwise.heads.scores.bias import BiasFunction, HeadBias, bias_heads
from headwise.heads.taps import Taps

__all__ = [
    "KINDS",
    "LAYOUTS",
    "PROJECTIONS",
    "Ablation",
    "AdditiveQueries",
    "BiasFunction",
    "Capture",
    "FusedLinear",
    "FusedParameter",
    "HeadBias",
    "HeadList",
    "HeadSlice",
    "Heads",
    "Importance",
    "LatentLinears",
    "Layout",
    "OutputProjection",
    "SeparateLinears",
    "SeparateParameters",
    "Site",
    "Taps",
    "TorchMultihead",
    "Verification",
    "ablate",
    "bias_heads",
    "find_heads",
    "importance",
    "verify",
]
