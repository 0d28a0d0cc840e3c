"""The tasks: one package per task."""
