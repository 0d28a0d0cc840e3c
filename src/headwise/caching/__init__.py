"""Caches in which each key/value head has a budget of its own."""
