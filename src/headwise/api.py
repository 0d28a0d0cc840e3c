"""The public names of headwise, which `import headwise` offers and loads when the first is used.

The calls, the methods and their strengths are here; everything else is in the namespace of its subject.
"""

from headwise import (
    attached,
    errors,
    gating,
    heads,
    integrations,
    kernels,
    nn,
    optim,
    plots,
    report,
    repulsion,
    roles,
    routing,
    shrinking,
    similarity,
)
from headwise.attached import attach
from headwise.caching.budget import kv_budget
from headwise.gating.attach import GateHeads, gate_heads
from headwise.heads import layouts
from headwise.heads.ablation import Ablate, DropHeads, ablate, drop_heads, importance
from headwise.heads.experiments.verify import verify
from headwise.heads.find import find_heads
from headwise.heads.heads import Heads
from headwise.heads.method import Method
from headwise.heads.scores.bias import BiasHeads, bias_heads
from headwise.heads.scores.mixing import MixHeads, mix_heads
from headwise.heads.taps import Tap, Taps
from headwise.optim.clipping import ClipScores, clip_scores
from headwise.report.head_roles import roles_of
from headwise.report.measure import measure
from headwise.repulsion.repel import Repel, repel
from headwise.repulsion.rules import SGLD, SPOS, SVGD
from headwise.roles.guide import Guide, guide
from headwise.routing.aggregate import Aggregate, aggregate
from headwise.routing.save import load, save
from headwise.shrinking.distill import Distill, distill
from headwise.shrinking.merge import merge
from headwise.shrinking.prune import prune
from headwise.shrinking.shrink import shrink
from headwise.similarity.penalty import Disagreement, Penalize
from headwise.strength import Relative, Target

__all__ = [
    "SGLD",
    "SPOS",
    "SVGD",
    "Ablate",
    "Aggregate",
    "BiasHeads",
    "ClipScores",
    "Disagreement",
    "Distill",
    "DropHeads",
    "GateHeads",
    "Guide",
    "Heads",
    "Method",
    "MixHeads",
    "Penalize",
    "Relative",
    "Repel",
    "Tap",
    "Taps",
    "Target",
    "ablate",
    "aggregate",
    "attach",
    "bias_heads",
    "clip_scores",
    "distill",
    "drop_heads",
    "errors",
    "find_heads",
    "gate_heads",
    "gating",
    "guide",
    "heads",
    "importance",
    "integrations",
    "kernels",
    "kv_budget",
    "layouts",
    "load",
    "measure",
    "merge",
    "mix_heads",
    "nn",
    "optim",
    "plots",
    "prune",
    "repel",
    "report",
    "repulsion",
    "roles",
    "roles_of",
    "routing",
    "save",
    "shrink",
    "shrinking",
    "similarity",
    "verify",
]

# Names that were here until version 0.3, by the module they are in.
MOVED = {
    name: module
    for module, names in {
        attached: "Attached",
        errors: "DataError HeadwiseError LayoutError MaskError NotFired SettingError ShapeError",
        gating: "Gating MixtureOfHeads SigmoidGate",
        heads: "Ablation Capture HeadBias HeadBlocks HeadDropping HeadMixing Importance Site Verification head_blocks",
        kernels: "IMQ RBF Cosine Fixed Median NormalizedRBF RadialRBF ReleasedMedian",
        layouts: "LAYOUTS AdditiveQueries FusedLinear FusedParameter HeadList LatentLinears Layout SeparateLinears "
        "SeparateParameters TorchMultihead",
        nn: "Handle ScoreCall",
        report: "Comparison LayerReport Report load_report",
        repulsion: "CosinePenalty CosineRepulsion FunctionSVGD Repulsion SpanSVGD jitter",
        roles: "IDF Alignment Dependency Guidance HeadMask Major Rare Role RoleCollator Roles Separator Window "
        "WordTable align idf read_conllu",
        routing: "Aggregation Chunks DistinctCapsules EMRouting Gate PerHead Residual SharedTrunk SimpleRouting Trunk",
        shrinking: "MergeStep Merging Pruning",
        similarity: "CKA HSIC CrossCorrelation Frobenius GroupedQueries LogDeterminant MapCosine Output Position "
        "PositionSquaredDifference SpanOverlap SquaredCosine Subspace",
    }.items()
    for name in names.split()
}
