"""What acts in the step of an optimizer on the matrices of each head: Muon, and a limit on scores."""

from headwise.optim.clipping import ScoreClipping
from headwise.optim.muon import Blocks, PerHeadMuon, orthogonalize, per_head_muon, split_heads

__all__ = ["Blocks", "PerHeadMuon", "ScoreClipping", "orthogonalize", "per_head_muon", "split_heads"]
