"""headwise: diverse multi-head attention for PyTorch, in your own model and training loop."""

from headwise import moved, nn, plots
from headwise.disagreement.penalty import Disagreement, Frobenius, Output, Position, PositionSquaredDifference, Subspace
from headwise.errors import (
    DataError,
    HeadwiseError,
    LayoutError,
    MaskError,
    NotFired,
    SettingError,
    ShapeError,
)
from headwise.heads.ablation import Ablation, Importance, ablate, importance
from headwise.heads.bias import HeadBias, bias_heads
from headwise.heads.capture import Capture
from headwise.heads.find import LAYOUTS, find_heads
from headwise.heads.heads import Heads, Site
from headwise.heads.layouts import AdditiveQueries, FusedLinear, Layout, SeparateLinears, TorchMultihead
from headwise.heads.taps import Taps
from headwise.heads.verify import Verification, verify
from headwise.masks.head_mask import HeadMask
from headwise.nn.scores import ScoreCall
from headwise.report.layer import LayerReport
from headwise.report.measure import measure
from headwise.report.report import Comparison, Report, load_report
from headwise.repulsion.function_space import FunctionSVGD
from headwise.repulsion.groups import jitter
from headwise.repulsion.kernels import IMQ, RBF, Cosine, Fixed, Median, NormalizedRBF, ReleasedMedian
from headwise.repulsion.mixing import Relative
from headwise.repulsion.repel import Repulsion, repel
from headwise.repulsion.rules import SGLD, SPOS, SVGD, CosinePenalty, CosineRepulsion
from headwise.roles.align import Alignment, align
from headwise.roles.build import Roles
from headwise.roles.collator import RoleCollator
from headwise.roles.conllu import read_conllu
from headwise.roles.guide import Guidance, guide
from headwise.roles.idf import IDF, idf
from headwise.roles.roles import Dependency, Major, Rare, Role, Separator, Window
from headwise.roles.word_table import WordTable
from headwise.routing.aggregate import Aggregation, aggregate
from headwise.routing.modules import Gate, Residual
from headwise.routing.save import load, save
from headwise.routing.settings import Chunks, EMRouting, SimpleRouting, Trunk
from headwise.routing.votes import DistinctCapsules, PerHead, SharedTrunk

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

moved.install()
