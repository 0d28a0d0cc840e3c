"""Models with fewer heads: heads removed, key and value heads merged; and caches in which fewer heads keep all."""

from headwise.shrinking.budget import KVBudget, kv_budget
from headwise.shrinking.merge import MergeStep, Merging, merge
from headwise.shrinking.prune import Pruning, prune

__all__ = ["KVBudget", "MergeStep", "Merging", "Pruning", "kv_budget", "merge", "prune"]
