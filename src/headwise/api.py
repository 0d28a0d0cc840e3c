"""The public names of headwise, which `import headwise` offers and loads when the first is used."""

from headwise import integrations, nn, plots
from headwise.disagreement.invariant import (
    CKA,
    HSIC,
    CrossCorrelation,
    LogDeterminant,
    MapCosine,
    SpanOverlap,
    SquaredCosine,
)
from headwise.disagreement.penalty import Disagreement
from headwise.disagreement.terms import Frobenius, GroupedQueries, Output, Position, PositionSquaredDifference, Subspace
from headwise.errors import (
    DataError,
    HeadwiseError,
    LayoutError,
    MaskError,
    NotFired,
    SettingError,
    ShapeError,
)
from headwise.gating.attach import Gating, gate_heads
from headwise.gating.gates import MixtureOfHeads, SigmoidGate
from headwise.heads.ablation import Ablation, HeadDropping, Importance, ablate, drop_heads, importance
from headwise.heads.bias import HeadBias, bias_heads
from headwise.heads.blocks import HeadBlocks, head_blocks
from headwise.heads.capture import Capture
from headwise.heads.experiments.verify import Verification, verify
from headwise.heads.find import LAYOUTS, find_heads
from headwise.heads.heads import Heads, Site
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
from headwise.heads.mixing import HeadMixing, mix_heads
from headwise.heads.taps import Taps
from headwise.masks.head_mask import HeadMask
from headwise.nn.scores import ScoreCall
from headwise.report.layer import LayerReport
from headwise.report.measure import measure
from headwise.report.report import Comparison, Report, load_report
from headwise.repulsion.function_space import FunctionSVGD, SpanSVGD
from headwise.repulsion.kernels import IMQ, RBF, Cosine, Fixed, Median, NormalizedRBF, RadialRBF, ReleasedMedian
from headwise.repulsion.repel import Repulsion, jitter, repel
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
from headwise.routing.algorithms import DistinctCapsules, PerHead, SharedTrunk
from headwise.routing.modules import Chunks, EMRouting, Gate, Residual, SimpleRouting, Trunk
from headwise.routing.save import load, save
from headwise.shrinking.merge import MergeStep, Merging, merge
from headwise.shrinking.prune import Pruning, prune
from headwise.strength import Relative, Target

__all__ = [
    "CKA",
    "HSIC",
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
    "CrossCorrelation",
    "DataError",
    "Dependency",
    "Disagreement",
    "DistinctCapsules",
    "EMRouting",
    "Fixed",
    "Frobenius",
    "FunctionSVGD",
    "FusedLinear",
    "FusedParameter",
    "Gate",
    "Gating",
    "GroupedQueries",
    "Guidance",
    "HeadBias",
    "HeadBlocks",
    "HeadDropping",
    "HeadList",
    "HeadMask",
    "HeadMixing",
    "Heads",
    "HeadwiseError",
    "Importance",
    "LatentLinears",
    "LayerReport",
    "Layout",
    "LayoutError",
    "LogDeterminant",
    "Major",
    "MapCosine",
    "MaskError",
    "Median",
    "MergeStep",
    "Merging",
    "MixtureOfHeads",
    "NormalizedRBF",
    "NotFired",
    "Output",
    "PerHead",
    "Position",
    "PositionSquaredDifference",
    "Pruning",
    "RadialRBF",
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
    "SeparateParameters",
    "Separator",
    "SettingError",
    "ShapeError",
    "SharedTrunk",
    "SigmoidGate",
    "SimpleRouting",
    "Site",
    "SpanOverlap",
    "SpanSVGD",
    "SquaredCosine",
    "Subspace",
    "Taps",
    "Target",
    "TorchMultihead",
    "Trunk",
    "Verification",
    "Window",
    "WordTable",
    "ablate",
    "aggregate",
    "align",
    "bias_heads",
    "drop_heads",
    "find_heads",
    "gate_heads",
    "guide",
    "head_blocks",
    "idf",
    "importance",
    "integrations",
    "jitter",
    "load",
    "load_report",
    "measure",
    "merge",
    "mix_heads",
    "nn",
    "plots",
    "prune",
    "read_conllu",
    "repel",
    "save",
    "verify",
]
