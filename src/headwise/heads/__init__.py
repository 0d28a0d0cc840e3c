"""Where the heads of a model are: find, select, read, bias, remove and verify them."""

from headwise.heads.ablation import Ablation, HeadDropping, Importance, ablate, drop_heads, importance
from headwise.heads.blocks import HeadBlocks, head_blocks
from headwise.heads.capture import Capture
from headwise.heads.experiments.verify import Verification, verify
from headwise.heads.find import find_heads
from headwise.heads.head_slice import HeadSlice, OutputProjection
from headwise.heads.heads import KINDS, PROJECTIONS, Heads, Site
from headwise.heads.scores.bias import BiasFunction, HeadBias, bias_heads
from headwise.heads.scores.mixing import HeadMixing, mix_heads
from headwise.heads.taps import Taps

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
    "HeadSlice",
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
