"""Where the heads of a model are: find, select, read, bias, remove and verify them."""

from typing import Any

from headwise.errors import warn_renamed
from headwise.heads.ablation import Ablation, Importance, ablate, importance
from headwise.heads.capture import Capture
from headwise.heads.experiments.verify import Verification, verify
from headwise.heads.find import LAYOUTS, find_heads
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
from headwise.heads.view import HeadView, OutputProjection

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
    "HeadView",
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


def __getattr__(name: str) -> Any:
    if name == "HeadSlice":
        warn_renamed("headwise.heads.HeadSlice", "HeadView")
        return HeadView
    raise AttributeError(f"module 'headwise.heads' has no attribute {name!r}")
