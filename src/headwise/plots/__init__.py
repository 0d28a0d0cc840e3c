"""Figures from data: numbers in, a matplotlib figure out; no function here takes a model."""

from headwise.plots.drawing import to_png
from headwise.plots.trust import entropy_cdf, reliability_diagram

__all__ = ["entropy_cdf", "reliability_diagram", "to_png"]
