"""headwise: diverse multi-head attention for PyTorch, in your own model and training loop."""

from headwise import nn
from headwise.ablation import Ablation, Importance, ablate, importance
from headwise.aggregation import Aggregation, aggregate
from headwise.aggregators import Residual
from headwise.bandwidths import Fixed, Median, ReleasedMedian
from headwise.checks import (
    DataError,
    HeadwiseError,
    LayoutError,
    MaskError,
    NotFired,
    SettingError,
    ShapeError,
)
from headwise.cosine_rules import CosinePenalty, CosineRepulsion
from headwise.head_bias import HeadBias, bias_heads
from headwise.heads import Heads, Site
from headwise.kernels import IMQ, RBF, Cosine, NormalizedRBF
from headwise.layouts import LAYOUTS, FusedLinear, Layout, SeparateLinears, TorchMultihead, find_heads
from headwise.masks import HeadMask
from headwise.particles import SGLD, SPOS, SVGD, Relative
from headwise.penalty import Disagreement, Frobenius, Output, Position, PositionSquaredDifference, Subspace
from headwise.repulsion import Repulsion, jitter, repel
from headwise.routing import Chunks, EMRouting, SimpleRouting, Trunk
from headwise.saving import load, save
from headwise.scores import ScoreCall
from headwise.taps import Capture, Taps
from headwise.verify import Verification, verify
from headwise.votes import DistinctCapsules, PerHead, SharedTrunk

__all__ = [
    "IMQ",
    "LAYOUTS",
    "RBF",
    "SGLD",
    "SPOS",
    "SVGD",
    "Ablation",
    "Aggregation",
    "Capture",
    "Chunks",
    "Cosine",
    "CosinePenalty",
    "CosineRepulsion",
    "DataError",
    "Disagreement",
    "DistinctCapsules",
    "EMRouting",
    "Fixed",
    "Frobenius",
    "FusedLinear",
    "HeadBias",
    "HeadMask",
    "Heads",
    "HeadwiseError",
    "Importance",
    "Layout",
    "LayoutError",
    "MaskError",
    "Median",
    "NormalizedRBF",
    "NotFired",
    "Output",
    "PerHead",
    "Position",
    "PositionSquaredDifference",
    "Relative",
    "ReleasedMedian",
    "Repulsion",
    "Residual",
    "ScoreCall",
    "SeparateLinears",
    "SettingError",
    "ShapeError",
    "SharedTrunk",
    "SimpleRouting",
    "Site",
    "Subspace",
    "Taps",
    "TorchMultihead",
    "Trunk",
    "Verification",
    "ablate",
    "aggregate",
    "bias_heads",
    "find_heads",
    "importance",
    "jitter",
    "load",
    "nn",
    "repel",
    "save",
    "verify",
]

__version__ = "0.1.0"
