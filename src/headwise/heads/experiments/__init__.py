"""Experiments: calls of a model that prove what was read about its heads."""
