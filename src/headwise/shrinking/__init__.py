"""Smaller models: heads removed, alone or with neurons of MLPs, and key and value heads merged; and smaller caches."""

from headwise.shrinking.budget import KVBudget, kv_budget
from headwise.shrinking.merge import MergeStep, Merging, merge
from headwise.shrinking.prune import Pruning, prune
from headwise.shrinking.shrink import Mix, ShrinkPlan, shrink

__all__ = [
    "KVBudget",
    "MergeStep",
    "Merging",
    "Mix",
    "Pruning",
    "ShrinkPlan",
    "kv_budget",
    "merge",
    "prune",
    "shrink",
]
