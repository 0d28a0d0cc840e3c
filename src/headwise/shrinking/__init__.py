"""Models with fewer heads: heads removed, key and value heads merged."""

from headwise.shrinking.merge import MergeStep, Merging, merge
from headwise.shrinking.prune import Pruning, prune

__all__ = ["MergeStep", "Merging", "Pruning", "merge", "prune"]
