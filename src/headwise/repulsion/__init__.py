"""Heads as particles: update rules, kernels, and the hook that runs them in an optimizer step."""

from headwise.repulsion.function_space import FunctionSVGD, SpanSVGD
from headwise.repulsion.repel import Repulsion, jitter, repel
from headwise.repulsion.rules import (
    SGLD,
    SPOS,
    SVGD,
    CosinePenalty,
    CosineRepulsion,
    Forces,
    Mixing,
    Rule,
    blend,
    repulsion_scale,
    update,
)
from headwise.strength import Relative, Target

__all__ = [
    "SGLD",
    "SPOS",
    "SVGD",
    "CosinePenalty",
    "CosineRepulsion",
    "Forces",
    "FunctionSVGD",
    "Mixing",
    "Relative",
    "Repulsion",
    "Rule",
    "SpanSVGD",
    "Target",
    "blend",
    "jitter",
    "repel",
    "repulsion_scale",
    "update",
]
