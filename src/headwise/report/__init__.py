"""Measure the heads of a model, and the report that comes back."""

from headwise.report.head_roles import HeadRoles, roles_of
from headwise.report.layer import LayerReport
from headwise.report.measure import measure
from headwise.report.report import Comparison, Report, load_report

__all__ = ["Comparison", "HeadRoles", "LayerReport", "Report", "load_report", "measure", "roles_of"]
