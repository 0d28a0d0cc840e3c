"""Smaller models: heads and MLP neurons removed, key/value heads merged, recovery by training; and smaller caches."""

from headwise.caching.budget import KVBudget, kv_budget
from headwise.shrinking.distill import Distill, Distillation, Recovery, distill, logit_divergence, state_error
from headwise.shrinking.merge import MergeStep, Merging, merge
from headwise.shrinking.prune import Pruning, prune
from headwise.shrinking.shrink import Mix, ShrinkPlan, shrink

__all__ = [
    "Distill",
    "Distillation",
    "KVBudget",
    "MergeStep",
    "Merging",
    "Mix",
    "Pruning",
    "Recovery",
    "ShrinkPlan",
    "distill",
    "kv_budget",
    "logit_divergence",
    "merge",
    "prune",
    "shrink",
    "state_error",
]
