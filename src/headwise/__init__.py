"""headwise: diverse multi-head attention for PyTorch, in your own model and training loop."""

from headwise import nn, plots
from headwise.ablation import Ablation, Importance, ablate, importance
from headwise.aggregation import Aggregation, aggregate
from headwise.aggregators import Residual
from headwise.align import Alignment, align
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
from headwise.collate import RoleCollator
from headwise.conllu import read_conllu
from headwise.cosine_rules import CosinePenalty, CosineRepulsion
from headwise.function_rules import FunctionSVGD
from headwise.gates import Gate
from headwise.guidance import Guidance, guide
from headwise.head_bias import HeadBias, bias_heads
from headwise.heads import Heads, Site
from headwise.kernels import IMQ, RBF, Cosine, NormalizedRBF
from headwise.layouts import (
    LAYOUTS,
    AdditiveQueries,
    FusedLinear,
    Layout,
    SeparateLinears,
    TorchMultihead,
    find_heads,
)
from headwise.masks import HeadMask
from headwise.measurement import measure
from headwise.particles import SGLD, SPOS, SVGD, Relative
from headwise.penalty import Disagreement, Frobenius, Output, Position, PositionSquaredDifference, Subspace
from headwise.report import Comparison, Report, load_report
from headwise.report_layers import LayerReport
from headwise.repulsion import Repulsion, repel
from headwise.role_masks import Roles
from headwise.roles import Dependency, Major, Rare, Role, Separator, Window
from headwise.routing import Chunks, EMRouting, SimpleRouting, Trunk
from headwise.saving import load, save
from headwise.scores import ScoreCall
from headwise.separation import jitter
from headwise.taps import Capture, Taps
from headwise.verify import Verification, verify
from headwise.votes import DistinctCapsules, PerHead, SharedTrunk
from headwise.word_rarity import IDF, idf
from headwise.word_tables import WordTable

__all__ = [
    "IDF",
    "IMQ",
    "LAYOUTS",
    "RBF",
    "SGLD",
    "SPOS",
    "SVGD",
    "Ablation",
    "AdditiveQueries",
    "Aggregation",
    "Alignment",
    "Capture",
    "Chunks",
    "Comparison",
    "Cosine",
    "CosinePenalty",
    "CosineRepulsion",
    "DataError",
    "Dependency",
    "Disagreement",
    "DistinctCapsules",
    "EMRouting",
    "Fixed",
    "Frobenius",
    "FunctionSVGD",
    "FusedLinear",
    "Gate",
    "Guidance",
    "HeadBias",
    "HeadMask",
    "Heads",
    "HeadwiseError",
    "Importance",
    "LayerReport",
    "Layout",
    "LayoutError",
    "Major",
    "MaskError",
    "Median",
    "NormalizedRBF",
    "NotFired",
    "Output",
    "PerHead",
    "Position",
    "PositionSquaredDifference",
    "Rare",
    "Relative",
    "ReleasedMedian",
    "Report",
    "Repulsion",
    "Residual",
    "Role",
    "RoleCollator",
    "Roles",
    "ScoreCall",
    "SeparateLinears",
    "Separator",
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
    "Window",
    "WordTable",
    "ablate",
    "aggregate",
    "align",
    "bias_heads",
    "find_heads",
    "guide",
    "idf",
    "importance",
    "jitter",
    "load",
    "load_report",
    "measure",
    "nn",
    "plots",
    "read_conllu",
    "repel",
    "save",
    "verify",
]

__version__ = "0.1.0"
