"""Heads as particles: update rules, kernels, and the hook that runs them in an optimizer step."""

from headwise.repulsion.function_space import FunctionSVGD
from headwise.repulsion.kernels import (
    IMQ,
    RBF,
    Bandwidth,
    Cosine,
    Fixed,
    Kernel,
    KernelMatrices,
    Median,
    NormalizedRBF,
    RadialRBF,
    ReleasedMedian,
    cosine_gradient,
)
from headwise.repulsion.mixing import Mixing, blend, repulsion_scale
from headwise.repulsion.noise import jitter
from headwise.repulsion.repel import Repulsion, repel
from headwise.repulsion.rules import SGLD, SPOS, SVGD, CosinePenalty, CosineRepulsion, Forces, Rule, update
from headwise.repulsion.spans import SpanSVGD
from headwise.strength import Relative, Target

__all__ = [
    "IMQ",
    "RBF",
    "SGLD",
    "SPOS",
    "SVGD",
    "Bandwidth",
    "Cosine",
    "CosinePenalty",
    "CosineRepulsion",
    "Fixed",
    "Forces",
    "FunctionSVGD",
    "Kernel",
    "KernelMatrices",
    "Median",
    "Mixing",
    "NormalizedRBF",
    "RadialRBF",
    "Relative",
    "ReleasedMedian",
    "Repulsion",
    "Rule",
    "SpanSVGD",
    "Target",
    "blend",
    "cosine_gradient",
    "jitter",
    "repel",
    "repulsion_scale",
    "update",
]
