"""Probes: what a linear classifier reads in the layers and heads of a frozen model."""
