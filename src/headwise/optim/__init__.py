"""Optimizers that take the matrix of each head by itself."""

from headwise.optim.muon import Blocks, PerHeadMuon, orthogonalize, per_head_muon, split_heads

__all__ = ["Blocks", "PerHeadMuon", "orthogonalize", "per_head_muon", "split_heads"]
