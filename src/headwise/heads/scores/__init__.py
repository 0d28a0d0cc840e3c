"""Scores: the places at which attention weights are read, biased and masked."""
