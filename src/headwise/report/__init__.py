"""Measure the heads of a model, and the report that comes back."""

from headwise.report.layer import LayerReport
from headwise.report.measure import measure
from headwise.report.report import Comparison, Report, load_report

__all__ = ["Comparison", "LayerReport", "Report", "load_report", "measure"]
