"""Logical inference."""
