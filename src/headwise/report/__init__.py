"""Measure the heads of a model, and the report that comes back."""

from headwise.report.layer import LayerReport
from headwise.report.measure import evaluating, measure, readable
from headwise.report.report import Comparison, Report, load_report

__all__ = ["Comparison", "LayerReport", "Report", "evaluating", "load_report", "measure", "readable"]
