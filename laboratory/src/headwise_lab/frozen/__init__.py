"""Trained models opened for reading."""
