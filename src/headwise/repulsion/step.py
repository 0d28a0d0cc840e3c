"""One step of a rule on the particle groups of a model, where parameters are whole and where they are sharded.

On a CPU a step has two passes: all Gram matrices and the rule's coefficients first, then the mixing of gradients and
parameters on views of them, without a copy of a weight. Groups whose particles are far apart are mixed in single
precision, `step_columns`; those that are close, and other dtypes, here, in float64. On an accelerator groups are
stacked, and small ones on a CPU too: see `step_batched`. Nothing here waits for an accelerator.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.heads.head_slice import HeadSlice
from headwise.heads.sharding import Share, read_share
from headwise.repulsion.force_norms import ForceNorms
from headwise.repulsion.gram import (
    GramSums,
    add_over_processes,
    add_up,
    cross_gram,
    find_collapsed,
    geometry,
    geometry_from_grams,
    plain_gram,
    shifted_gram,
    squared_norms,
)
from headwise.repulsion.groups import ParticleGroup
from headwise.repulsion.mixing import (
    Strength,
    add_mixed,
    add_repulsion,
    find_strength,
    repulsion_factor,
    repulsion_norms,
    scale_prior,
    stays_finite,
)
from headwise.repulsion.rules import Rule
from headwise.repulsion.step_batched import GroupGradients, apply_stacked, stacks_on
from headwise.repulsion.step_columns import apply_by_columns, find_apart

# On a CPU groups of at most this many numbers are stacked: for them calls cost more than copies.
MOST_CALLED = 2**13


@torch.no_grad()
def apply_rule(
    rule: Rule, groups: Sequence[ParticleGroup], *, strength: Strength, scale: Tensor | None
) -> ForceNorms | None:
    """Replace the gradient of every group in place by that of the rule; None when none has a gradient.

    Where parameters are sharded all processes call it. Groups whose columns are divided over one mesh share one message
    of sums; those that do not divide evenly are computed whole by every process. Groups without a gradient are skipped.
    `strength` multiplies the repulsion, and `scale` is what the gradients are multiplied by (GradScaler).
    """
    divided: dict[tuple[Any, ...], list[ParticleGroup]] = defaultdict(list)
    shares: dict[int, Share] = {}
    for group in groups:
        process_groups, local = _take_local_part(group, shares)
        divided[process_groups].append(local)
    found = [_apply_local(rule, local, strength, scale, members) for members, local in divided.items()]
    for share in shares.values():
        if share.give_back is not None:
            share.give_back()
    records = [record for record in found if record is not None]
    return ForceNorms.join(records) if records else None


def _take_local_part(group: ParticleGroup, shares: dict[int, Share]) -> tuple[tuple[Any, ...], ParticleGroup]:
    """Return the process groups over which a group is divided, and what this process computes of it."""
    gradients = group.gradients() if group.sharded else None
    if gradients is None:
        return (), group

    def share_all(*, everything: bool) -> list[Share]:
        pairs = zip(group.parts, gradients, strict=True)
        return [_share(head_slice, gradient, shares, everything=everything) for head_slice, gradient in pairs]

    own = share_all(everything=False)
    if len({share.groups for share in own}) > 1:
        # projections of one particle that are divided differently are computed whole
        own = share_all(everything=True)
    shared = iter(own)
    slices = [
        head_slice.with_parts([_replace_parameter(part, next(shared)) for part in head_slice.parts])
        for head_slice in group.slices
    ]
    return own[0].groups, ParticleGroup(group.name, tuple(slices))


def _share(head_slice: HeadSlice, gradient: Tensor, shares: dict[int, Share], *, everything: bool) -> Share:
    """Return the share of a head slice's parameter; several slices of one parameter write into one share."""
    known = id(head_slice.parameter)
    if known not in shares or (everything and shares[known].groups):
        shares[known] = read_share(head_slice.parameter, gradient, head_slice.axes.inputs, everything=everything)
    return shares[known]


def _replace_parameter(head_slice: HeadSlice, share: Share) -> HeadSlice:
    holder = nn.Module()
    holder.weight = nn.Parameter(share.parameter)
    holder.weight.grad = share.gradient
    return replace(head_slice, owner=holder, attribute="weight")


def _apply_local(
    rule: Rule,
    groups: Sequence[ParticleGroup],
    strength: Strength,
    scale: Tensor | None,
    process_groups: Sequence[Any],
) -> ForceNorms | None:
    """Apply a rule to groups whose columns are divided over the members of these process groups, or over none."""
    batches: dict[tuple[int, torch.device], list[GroupGradients]] = defaultdict(list)
    written: list[tuple[ParticleGroup, list[Tensor], list[Tensor]]] = []
    for group in groups:
        gradients = group.gradients()
        if gradients is not None:
            views = group.views(gradients)
            batches[group.particles, gradients[0].device].append((group, views))
            written.append((group, views, gradients))
    if not batches:
        return None
    if process_groups or not any(stacks_on(device) for _, device in batches):
        divided = bool(process_groups)
        whole = [] if divided else list(batches.values())
        records, left = [], list(batches.values()) if divided else []
        for batch in whole:
            done, others = _apply_apart(rule, batch, strength, scale)
            records += done
            left += others
        sums = add_over_processes(process_groups, [_add_grams(rule, batch, divided) for batch in left])
        records += [_apply_batch(rule, batch, own, strength, scale) for batch, own in zip(left, sums, strict=True)]
    else:
        every = [pair for batch in batches.values() for pair in batch]
        records = apply_stacked(rule, every, strength=strength, scale=scale)
    for group, views, gradients in written:
        group.write(views, gradients)
    return ForceNorms.join(records)


def _apply_apart(
    rule: Rule, batch: list[GroupGradients], strength: Strength, scale: Tensor | None
) -> tuple[list[ForceNorms], list[list[GroupGradients]]]:
    """Apply a rule to the groups of a CPU that need no float64; return what it did, and the groups left."""
    few = [pair for pair in batch if sum(view.numel() for view in pair[1]) <= MOST_CALLED]
    records = apply_stacked(rule, few, strength=strength, scale=scale) if len(few) > 1 else []
    batch = [pair for pair in batch if not records or sum(view.numel() for view in pair[1]) > MOST_CALLED]
    if not batch:
        return records, []
    apart, grams = find_apart(rule, batch)
    taken = [(group, rows) for (group, _), rows in zip(batch, apart, strict=True) if rows is not None]
    if grams is not None:
        records.append(apply_by_columns(rule, taken, grams, strength, scale))
    left = [pair for pair, rows in zip(batch, apart, strict=True) if rows is None]
    return records, [left] if left else []


def _add_grams(rule: Rule, batch: Sequence[GroupGradients], divided: bool) -> GramSums:
    """Return the sums over particles that a step needs, and over divided gradients, whose norms cannot be computed."""
    parameters = [group.views() for group, _ in batch]

    def add(gram: Callable[[Tensor], Tensor], every: Sequence[Sequence[Tensor]]) -> Tensor:
        return torch.stack([add_up([gram(view) for view in views]) for views in every])

    shifted = add(shifted_gram, parameters)
    example = geometry(torch.eye(2, dtype=torch.float64), inner=rule.needs_inner)
    prior = divided and rule.mixing(example).prior is not None
    plain = add(plain_gram, parameters) if rule.needs_inner or prior else None
    if not divided:
        return GramSums(shifted, plain)
    gradients = [views for _, views in batch]
    pairs = [list(zip(*both, strict=True)) for both in zip(gradients, parameters, strict=True)]
    return GramSums(
        shifted,
        plain,
        gradients=add(plain_gram, gradients),
        products=torch.stack([add_up([cross_gram(g, p) for g, p in own]) for own in pairs]) if prior else None,
        squares=add(squared_norms, parameters),
    )


def _apply_batch(
    rule: Rule, batch: Sequence[GroupGradients], sums: GramSums, strength: Strength, scale: Tensor | None
) -> ForceNorms:
    parameters = [group.views() for group, _ in batch]
    plain = sums.plain if rule.needs_inner else None
    distances = geometry_from_grams(sums.shifted, plain)
    mixing = rule.mixing(distances)
    prior = scale_prior(mixing, scale)
    repulsions = repulsion_norms(mixing, sums.shifted if plain is None else plain)
    norms = sums.driving_norms(mixing.drive, prior)
    # the particle nearest to all others: differences to it have the smallest rounding errors
    medoids = distances.squared_distances.sum(-1).argmin(-1)
    driving_norms, pushes, sound, workspace = [], [], [], _Workspace()
    for index, (views, (group, gradients)) in enumerate(zip(parameters, batch, strict=True)):
        driving = [workspace.borrow(slot, gradient) for slot, gradient in enumerate(gradients)]
        for term, view, gradient in zip(driving, views, gradients, strict=True):
            add_mixed(term, mixing.drive[index], gradient, beta=0)
            if prior is not None:
                add_mixed(term, prior[index], view)
        own = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(term) for term in driving]))
        driving_norm = own if norms is None else norms[index].to(own.dtype)
        factor = repulsion_factor(mixing, driving_norm, repulsions[index], find_strength(strength, group.name), scale)
        push = factor * repulsions[index]
        finite = driving_norm.isfinite() & push.isfinite()
        for term, view, gradient in zip(driving, views, gradients, strict=True):
            rows = workspace.borrow(len(gradients), term)
            add_repulsion(term, -factor * mixing.repulsion[index], view, rows, medoids[index], rule.needs_inner)
            finite = stays_finite(finite, term, gradient.dtype)
        for term, gradient in zip(driving, gradients, strict=True):
            # a gradient that is not finite stays as it is, for the loop or a GradScaler to notice
            torch.where(finite, term.to(gradient.dtype), gradient, out=gradient)
        driving_norms.append(driving_norm)
        pushes.append(push)
        sound.append(finite)
    unscale = 1.0 if scale is None else scale.reciprocal()
    return ForceNorms(
        tuple(group.name for group, _ in batch),
        torch.stack(driving_norms) * unscale,
        torch.stack(pushes).to(driving_norms[0].dtype) * unscale,
        torch.stack([_mean_norm(views) for views in parameters])
        if sums.squares is None
        else sums.squares.sqrt().mean(-1).to(driving_norms[0].dtype),
        torch.stack(sound),
        find_collapsed(distances),
        tuple(group.particles for group, _ in batch),
    )


def _mean_norm(views: Sequence[Tensor]) -> Tensor:
    dtypes = [torch.promote_types(view.dtype, torch.float32) for view in views]
    norms = [torch.linalg.vector_norm(v, dim=(1, 2), dtype=d) for v, d in zip(views, dtypes, strict=True)]
    return add_up([norm.square() for norm in norms]).sqrt().mean()


class _Workspace:
    """Buffers for driving terms, reused from one group to the next: fresh memory costs more than the arithmetic."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, torch.dtype], Tensor] = {}

    def borrow(self, slot: int, view: Tensor) -> Tensor:
        """Return a contiguous buffer of the view's shape, in at least single precision."""
        key = slot, torch.promote_types(view.dtype, torch.float32)
        buffer = self._slots.get(key)
        if buffer is None or buffer.numel() < view.numel():
            buffer = self._slots[key] = torch.empty(view.numel(), dtype=key[1], device=view.device)
        return buffer[: view.numel()].view(view.shape)
