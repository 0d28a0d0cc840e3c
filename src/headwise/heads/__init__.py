"""Where the heads of a model are: find, select, read, bias, remove and verify them."""

from typing import Any

from headwise.errors import warn_renamed
from headwise.heads.ablation import Ablation, HeadDropping, Importance, ablate, drop_heads, importance
from headwise.heads.blocks import HeadBlocks, head_blocks
from headwise.heads.capture import Capture
from headwise.heads.experiments.verify import Verification, verify
from headwise.heads.find import find_heads
from headwise.heads.heads import KINDS, PROJECTIONS, Heads, Site
from headwise.heads.scores.bias import BiasFunction, HeadBias, bias_heads
from headwise.heads.scores.mixing import HeadMixing, mix_heads
from headwise.heads.taps import Taps
from headwise.heads.view import HeadView, OutputProjection

__all__ = [
    "KINDS",
    "PROJECTIONS",
    "Ablation",
    "BiasFunction",
    "Capture",
    "HeadBias",
    "HeadBlocks",
    "HeadDropping",
    "HeadMixing",
    "HeadView",
    "Heads",
    "Importance",
    "OutputProjection",
    "Site",
    "Taps",
    "Verification",
    "ablate",
    "bias_heads",
    "drop_heads",
    "find_heads",
    "head_blocks",
    "importance",
    "mix_heads",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "HeadSlice":
        warn_renamed("headwise.heads.HeadSlice", "HeadView")
        return HeadView
    raise AttributeError(f"module 'headwise.heads' has no attribute {name!r}")
