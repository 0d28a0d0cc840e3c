"""Figures from data: numbers in, a matplotlib figure out; no function here takes a model."""

from headwise.plots.calibration import entropy_cdf, reliability_diagram
from headwise.plots.heads import ablation_histogram, budget_map, head_embedding, head_similarity, shrink_plan
from headwise.plots.overview import overview
from headwise.plots.sentences import sentence_heatmap
from headwise.plots.style import to_png
from headwise.plots.sweeps import sweep

__all__ = [
    "ablation_histogram",
    "budget_map",
    "entropy_cdf",
    "head_embedding",
    "head_similarity",
    "overview",
    "reliability_diagram",
    "sentence_heatmap",
    "shrink_plan",
    "sweep",
    "to_png",
]
