"""A step of a rule on ensembles whose parameters several processes hold together.

Owns standing in for a sharded ensemble with what this process computes of it, so that `ensembles` sees plain tensors.
How parameters are divided is in `sharded`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.heads.head_slice import HeadSlice
from headwise.parallel import Share, share_of
from headwise.repulsion.rules import Rule
from headwise.repulsion.step import Ensemble, ForceNorms, apply_rule


@torch.no_grad()
def apply_rule_everywhere(
    rule: Rule, ensembles: Sequence[Ensemble], *, strength: float, scale: Tensor | None
) -> ForceNorms | None:
    """Do what `apply_rule` does, where parameters are whole and where they are sharded; all processes call it.

    Ensembles whose columns lie on the processes of one mesh are summed in one message; those that do not divide evenly
    are computed whole by every process.

    Args:
        rule: The particle rule.
        ensembles: Ensembles of any sizes.
        strength: Multiplies the repulsion.
        scale: What the gradients are multiplied by, or None.
    """
    if not any(ensemble.sharded for ensemble in ensembles):
        return apply_rule(rule, ensembles, strength=strength, scale=scale)
    divided: dict[tuple[Any, ...], list[Ensemble]] = defaultdict(list)
    shares: dict[int, Share] = {}
    for ensemble in ensembles:
        groups, local = _local(ensemble, shares)
        divided[groups].append(local)
    records = [
        record
        for groups, local in divided.items()
        if (record := apply_rule(rule, local, strength=strength, scale=scale, groups=groups)) is not None
    ]
    for share in shares.values():
        if share.give_back is not None:
            share.give_back()
    return ForceNorms.joined(records) if records else None


def _local(ensemble: Ensemble, shares: dict[int, Share]) -> tuple[tuple[Any, ...], Ensemble]:
    """Return the groups over which an ensemble is divided and what this process computes of it."""
    gradients = ensemble.gradients()
    if gradients is None or not ensemble.sharded:
        return (), ensemble
    own = [
        _share(head_slice, gradient, shares) for head_slice, gradient in zip(ensemble.slices, gradients, strict=True)
    ]
    if len({share.groups for share in own}) > 1:
        # projections of one particle that are divided differently are computed whole
        own = [
            _share(head_slice, gradient, shares, everything=True)
            for head_slice, gradient in zip(ensemble.slices, gradients, strict=True)
        ]
    slices = [_standing_in(head_slice, share) for head_slice, share in zip(ensemble.slices, own, strict=True)]
    return own[0].groups, Ensemble(ensemble.name, tuple(slices))


def _share(head_slice: HeadSlice, gradient: Tensor, shares: dict[int, Share], *, everything: bool = False) -> Share:
    """Return the share of a head slice's parameter; several slices of one parameter write into one share."""
    known = id(head_slice.parameter)
    if known not in shares or (everything and shares[known].groups):
        shares[known] = share_of(head_slice.parameter, gradient, 1 - head_slice.axis, everything=everything)
    return shares[known]


def _standing_in(head_slice: HeadSlice, share: Share) -> HeadSlice:
    holder = nn.Module()
    holder.weight = nn.Parameter(share.parameter)
    holder.weight.grad = share.gradient
    return replace(head_slice, owner=holder, attribute="weight")
