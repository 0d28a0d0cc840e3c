"""From finished runs to statistics, tables and pages."""
