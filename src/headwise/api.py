"""The public names of headwise, which `import headwise` offers and loads when the first is used."""

from headwise import integrations, nn, plots
from headwise.attached import Attached, attach
from headwise.disagreement.invariant import (
    CKA,
    HSIC,
    CrossCorrelation,
    LogDeterminant,
    MapCosine,
    SpanOverlap,
    SquaredCosine,
)
from headwise.disagreement.penalty import Disagreement, Penalize
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
from headwise.gating.attach import GateHeads, Gating, gate_heads
from headwise.gating.gates import MixtureOfHeads, SigmoidGate
from headwise.heads.ablation import (
    Ablate,
    Ablation,
    DropHeads,
    HeadDropping,
    Importance,
    ablate,
    drop_heads,
    importance,
)
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
from headwise.heads.method import Method
from headwise.heads.scores.bias import BiasHeads, HeadBias, bias_heads
from headwise.heads.scores.mixing import HeadMixing, MixHeads, mix_heads
from headwise.heads.taps import Tap, Taps
from headwise.masks.head_mask import HeadMask
from headwise.nn.hooks import Handle
from headwise.nn.scores import ScoreCall
from headwise.report.layer import LayerReport
from headwise.report.measure import measure
from headwise.report.report import Comparison, Report, load_report
from headwise.repulsion.function_space import FunctionSVGD, SpanSVGD
from headwise.repulsion.kernels import IMQ, RBF, Cosine, Fixed, Median, NormalizedRBF, RadialRBF, ReleasedMedian
from headwise.repulsion.repel import Repel, Repulsion, jitter, repel
from headwise.repulsion.rules import SGLD, SPOS, SVGD, CosinePenalty, CosineRepulsion
from headwise.roles.align import Alignment, align
from headwise.roles.build import Roles
from headwise.roles.collator import RoleCollator
from headwise.roles.conllu import read_conllu
from headwise.roles.guide import Guidance, Guide, guide
from headwise.roles.idf import IDF, idf
from headwise.roles.roles import Dependency, Major, Rare, Role, Separator, Window
from headwise.roles.word_table import WordTable
from headwise.routing.aggregate import Aggregate, Aggregation, aggregate
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
    "Ablate",
    "Ablation",
    "AdditiveQueries",
    "Aggregate",
    "Aggregation",
    "Alignment",
    "Attached",
    "BiasHeads",
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
    "DropHeads",
    "EMRouting",
    "Fixed",
    "Frobenius",
    "FunctionSVGD",
    "FusedLinear",
    "FusedParameter",
    "Gate",
    "GateHeads",
    "Gating",
    "GroupedQueries",
    "Guidance",
    "Guide",
    "Handle",
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
    "Method",
    "MixHeads",
    "MixtureOfHeads",
    "NormalizedRBF",
    "NotFired",
    "Output",
    "Penalize",
    "PerHead",
    "Position",
    "PositionSquaredDifference",
    "Pruning",
    "RadialRBF",
    "Rare",
    "Relative",
    "ReleasedMedian",
    "Repel",
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
    "Tap",
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
    "attach",
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
