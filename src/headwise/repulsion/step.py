"""One step of a rule on the particle groups of a model, where parameters are whole and where they are sharded.

On a CPU a step has two passes: all Gram matrices and the rule's coefficients first, then the mixing of gradients and
parameters on views of them, without a copy of a weight. There are three forms of it:

* By columns, in single precision: groups of float32 whose particles are far apart, as those of most models are. Their
  distances lose no digits in an unshifted Gram matrix, which itself tells. Columns stay in a core's cache: particles
  are read twice, gradients read and written once.
* In float64, on views: groups whose particles are close, and other dtypes.
* Stacked, on an accelerator, where a launch costs more than the arithmetic on one layer's heads, and for small groups
  on a CPU: groups of one shape are copied into one stack, mixed by batched products, and copied back.

Nothing here waits for the device, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from headwise.heads.sharding import Share, read_share
from headwise.heads.view import HeadView
from headwise.kernels import (
    Geometry,
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
from headwise.repulsion.groups import Carrier, ForceNorms, Forces, ParticleGroup, list_carriers, norm_of, write_forces
from headwise.repulsion.rules import (
    Mixing,
    Rule,
    Strength,
    add_mixed,
    add_repulsion,
    find_strength,
    repulsion_factor,
    repulsion_norms,
    scale_prior,
    stack_strengths,
    stays_finite,
)

# Numbers of the particles in one stack. Each takes about 24 bytes during the step, in float32.
MOST_STACKED = 2**25

# A group, and the views [M, a, b] of its gradients.
GroupGradients = tuple[ParticleGroup, list[Tensor]]
# The same with those of its parameters.
Member = tuple[ParticleGroup, list[Tensor], list[Tensor]]


def stacks_on(device: torch.device) -> bool:
    """Whether groups on a device are stacked: on all but a CPU."""
    return device.type != "cpu"


@torch.no_grad()
def apply_stacked(
    rule: Rule, every: Sequence[GroupGradients], *, strength: Strength, scale: Tensor | None
) -> list[ForceNorms]:
    """Replace the gradients of groups of any shapes in place by those of the rule; returns one record per stack."""
    return [apply_to_stack(rule, members, strength, scale) for members in _divide_into_stacks(every)]


def _divide_into_stacks(every: Sequence[GroupGradients]) -> list[list[Member]]:
    kinds: dict[Hashable, list[Member]] = defaultdict(list)
    for group, gradients in every:
        own = group.views()
        kind = tuple((view.shape, view.dtype, view.device) for view in (*own, *gradients))
        kinds[kind].append((group, gradients, own))
    stacks = []
    for members in kinds.values():
        size = sum(view.numel() for view in members[0][1])
        most = max(1, MOST_STACKED // max(size, 1))
        stacks += [members[start : start + most] for start in range(0, len(members), most)]
    return stacks


def apply_to_stack(rule: Rule, members: Sequence[Member], strength: Strength, scale: Tensor | None) -> ForceNorms:
    """Replace the gradients of G groups of one shape in place by those of the rule."""
    groups, gradients = [group for group, _, _ in members], [views for _, views, _ in members]
    own = [torch.stack(views).flatten(2) for views in zip(*(particles for _, _, particles in members), strict=True)]
    given = [torch.stack(views).flatten(2) for views in zip(*gradients, strict=True)]
    exact = [stack.to(torch.float64) for stack in own]
    plain = add_up([stack @ stack.mT for stack in exact]) if rule.needs_inner else None
    squares = add_up([stack.square().sum(-1) for stack in exact])
    # the shift comes after the conversion: a difference in float32 would round heads that are close
    exact = [stack - stack[:, :1] for stack in exact]
    shifted = add_up([stack @ stack.mT for stack in exact])
    del exact
    geometry = geometry_from_grams(shifted, plain)
    mixing = rule.mixing(geometry)
    medoids = geometry.squared_distances.sum(-1).argmin(-1)
    driving = [_mix_driving(mixing, gradient, stack, scale) for gradient, stack in zip(given, own, strict=True)]
    driving_norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(term, dim=(1, 2)) for term in driving]), dim=0
    )
    repulsion = repulsion_norms(mixing, shifted if plain is None else plain)
    strengths = stack_strengths(strength, [group.name for group in groups], driving_norm)
    factor = repulsion_factor(mixing, driving_norm, repulsion, strengths, scale)
    push = factor * repulsion
    finite = (driving_norm + push).isfinite()
    coefficients = -factor[:, None, None] * mixing.repulsion
    for term, stack, before in zip(driving, own, given, strict=True):
        _add_repulsion(term, coefficients, stack, medoids, rule.needs_inner)
        finite = stays_finite(finite, term, before.dtype)
    for slot, (term, before) in enumerate(zip(driving, given, strict=True)):
        # a gradient that is not finite stays as it is, for the loop or a GradScaler to notice
        after = torch.where(finite[:, None, None], term.to(before.dtype), before)
        views = [of[slot] for of in gradients]
        torch.ops.aten._foreach_copy_(views, list(after.view(len(views), *views[0].shape).unbind(0)))
    unscale = 1.0 if scale is None else scale.reciprocal()
    return ForceNorms(
        tuple(group.name for group in groups),
        driving_norm * unscale,
        push.to(driving_norm.dtype) * unscale,
        squares.sqrt().mean(-1).to(driving_norm.dtype),
        finite,
        find_collapsed(geometry),
        tuple(group.particles for group in groups),
    )


def _mix_driving(mixing: Mixing, gradients: Tensor, particles: Tensor, scale: Tensor | None) -> Tensor:
    """Return drive @ g + prior @ theta, [G, M, D], in at least single precision."""
    dtype = torch.promote_types(gradients.dtype, torch.float32)
    driving = torch.bmm(mixing.drive.to(dtype), gradients.to(dtype))
    prior = scale_prior(mixing, scale)
    if prior is not None:
        driving.baddbmm_(prior.to(dtype), particles.to(dtype))
    return driving


def _add_repulsion(
    driving: Tensor, coefficients: Tensor, particles: Tensor, medoids: Tensor, needs_inner: bool
) -> None:
    """Add sum_j coefficients_ij theta_j, computed from the differences to one particle: see `step`."""
    index = medoids[:, None, None].expand(-1, 1, particles.shape[2])
    origin = particles.gather(1, index).to(driving.dtype)
    driving.baddbmm_(coefficients.to(driving.dtype), particles.to(driving.dtype) - origin)
    if needs_inner:
        driving.addcmul_(coefficients.sum(-1, keepdim=True).to(driving.dtype), origin)


def push_apart(
    group: ParticleGroup,
    pushes: Sequence[Tensor],
    mixing: Mixing,
    equal: Tensor,
    strength: float,
    scale: Tensor | None,
) -> ForceNorms:
    """Replace the gradients of a group in place by drive_ii g_i - s R_i; returns what was done.

    Args:
        group: The group.
        pushes: The repulsion R on the heads of each slice [M, a, b], in at least single precision.
        mixing: Its driving term, the same share of each head's gradient, and its relative strength.
        equal: Whether all of its heads are equal.
        strength: Factor on the repulsion.
        scale: What the gradients are multiplied by (GradScaler).
    """
    dtype = pushes[0].dtype
    share = mixing.drive.to(dtype).diagonal()
    carriers: list[Carrier] = []
    driving: list[Forces] = []
    pulled: list[Forces] = []
    for head_slice, push in zip(group.slices, pushes, strict=True):
        for carrier in list_carriers(head_slice):
            shared = carrier.shared
            if shared is not None and carrier.columns:
                # what columns share has no other way to its share, one for all heads (see `low_rank_drive`)
                shared = share[0] * shared
            carriers.append(carrier)
            driving.append((share.view(-1, 1, 1) * carrier.own.to(dtype), shared))
            pulled.append(carrier.pull(push))
    driving_norm, push_norm = norm_of(driving), norm_of(pulled)
    factor = repulsion_factor(mixing, driving_norm, push_norm, strength, scale)
    finite = driving_norm.isfinite() & (factor * push_norm).isfinite()
    finite = write_forces(carriers, driving, pulled, factor, finite)
    unscale = 1.0 if scale is None else scale.reciprocal()
    sizes = [torch.linalg.vector_norm(head_slice.read().float(), dim=(1, 2)) for head_slice in group.slices]
    return ForceNorms(
        (group.name,),
        (driving_norm * unscale).view(1),
        (factor * push_norm * unscale).view(1),
        torch.stack([size.square() for size in sizes]).sum(0).sqrt().mean().view(1),
        finite.view(1),
        equal.view(1),
        (group.particles,),
    )


def make_share(step_size: float, group: ParticleGroup) -> Tensor:
    """Return eps / M on the diagonal, [M, M]: the same tensor for the same group."""
    return _make_share(step_size / group.particles, group.particles, group.parameters[0].device)


@cache
def _make_share(share: float, particles: int, device: torch.device) -> Tensor:
    return share * torch.eye(particles, dtype=torch.float64, device=device)


# A squared distance above this share of the two squared norms has lost at most four bits to their difference.
APART = 2.0**-4
# Numbers of the columns multiplied at a time for a Gram matrix, and mixed at a time: what a core's cache holds.
GRAM_PART, MIXED_PART = 2**16, 2**18

# The particles of each slice of a group, and their gradients, as rows [M, D].
Rows = list[tuple[Tensor, Tensor]]


@torch.no_grad()
def find_apart(rule: Rule, batch: Sequence[GroupGradients]) -> tuple[list[Rows | None], Tensor | None]:
    """Return the rows of each group of M particles that is taken, and the Gram matrices of those, float64 [G, M, M]."""
    if rule.needs_inner:
        return [None] * len(batch), None
    every = [_flatten(group, gradients) for group, gradients in batch]
    found = [None if rows is None else _gram_of_columns([own for own, _ in rows]) for rows in every]
    grams = [gram for gram in found if gram is not None]
    if not grams:
        return [None] * len(batch), None
    stack = torch.stack(grams)
    norms = stack.diagonal(dim1=-2, dim2=-1)
    scale = norms.unsqueeze(-1) + norms.unsqueeze(-2)
    # NaN is not apart
    apart = (scale - 2 * stack > APART * scale) & scale.isfinite()
    apart.diagonal(dim1=-2, dim2=-1).fill_(True)
    told = (apart.flatten(1).all(-1) & norms.isfinite().all(-1)).tolist()
    answers = iter(told)
    taken = [None if rows is None or not next(answers) else rows for rows in every]
    kept = [gram for gram, own in zip(grams, told, strict=True) if own]
    return taken, torch.stack(kept) if kept else None


@torch.no_grad()
def apply_by_columns(
    rule: Rule, batch: Sequence[tuple[ParticleGroup, Rows]], grams: Tensor, strength: Strength, scale: Tensor | None
) -> ForceNorms:
    """Replace the gradients of groups that `find_apart` takes in place by those of the rule."""
    geometry: Geometry = geometry_from_grams(grams, None)
    mixing = rule.mixing(geometry)
    repulsions = repulsion_norms(mixing, grams)
    names = [group.name for group, _ in batch]
    dtype = torch.float32
    drives = mixing.drive.to(dtype).unbind()
    prior = scale_prior(mixing, scale)
    priors = [None] * len(batch) if prior is None else prior.to(dtype).unbind()
    coefficients: list[Tensor | None] = [None] * len(batch)
    pushes = None
    if mixing.relative is None:
        factors = repulsion_factor(mixing, repulsions, repulsions, stack_strengths(strength, names, repulsions), scale)
        pushes = (factors * repulsions).to(dtype)
        coefficients = list((-factors[:, None, None] * mixing.repulsion).to(dtype).unbind())
    buffer = torch.empty(0, dtype=dtype)
    driving_norms, found = [], []
    for index, (group, rows) in enumerate(batch):
        columns = [part for pair in rows for part in _divide(*pair)]
        whole = len(columns) == 1
        size = max(own.numel() for own, _ in columns)
        buffer = buffer if buffer.numel() >= size else torch.empty(size, dtype=dtype)
        # of several columns each is written before the next is computed
        finite = whole or _stays_finite(drives[index], priors[index], rows, grams[index])
        own = coefficients[index]
        push = None if pushes is None else pushes[index]
        norm = torch.zeros((), dtype=dtype)
        if finite and own is None:
            norms = [_drive(buffer, drives[index], priors[index], *part)[1] for part in columns]
            norm = torch.stack(norms).norm()
            own, push = _scale(mixing, index, norm, repulsions, find_strength(strength, group.name), scale)
        if finite:
            assert own is not None
            assert push is not None
            norms = []
            for theta, gradient in columns:
                driving, part_norm = _drive(buffer, drives[index], priors[index], theta, gradient)
                norms.append(part_norm)
                finite = finite and (not whole or _is_finite(part_norm + push))
                if finite:
                    gradient.copy_(driving.addmm_(own, theta))
            norm = torch.stack(norms).norm() if len(norms) > 1 else norms[0]
        else:
            norm = torch.stack([torch.linalg.vector_norm(gradient) for _, gradient in rows]).norm() * math.inf
            push = repulsions[index].to(dtype) if push is None else push
        driving_norms.append(norm)
        found.append(push)
    driving_norm, push = torch.stack(driving_norms), torch.stack(found)
    unscale = 1.0 if scale is None else scale.reciprocal()
    return ForceNorms(
        tuple(names),
        driving_norm * unscale,
        push * unscale,
        grams.diagonal(dim1=-2, dim2=-1).sqrt().mean(-1).to(dtype),
        driving_norm.isfinite() & push.isfinite(),
        find_collapsed(geometry),
        tuple(group.particles for group, _ in batch),
    )


def _flatten(group: ParticleGroup, gradients: Sequence[Tensor]) -> Rows | None:
    """Return each slice's particles and gradients as rows, or None where they are no such views."""
    pairs = []
    for view, gradient in zip(group.views(), gradients, strict=True):
        own = [_as_rows(view.detach()), _as_rows(gradient)]
        if own[0] is None or own[1] is None:
            return None
        pairs.append((own[0], own[1]))
    return pairs


def _as_rows(view: Tensor) -> Tensor | None:
    heads, rows, columns = view.shape
    if view.dtype != torch.float32 or view.stride(2) != 1 or view.stride(1) != columns:
        return None
    return view.as_strided((heads, rows * columns), (view.stride(0), 1))


def _divide(theta: Tensor, gradient: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    size = max(1, MIXED_PART // len(theta))
    yield from zip(theta.split(size, 1), gradient.split(size, 1), strict=True)


def _gram_of_columns(every: Sequence[Tensor]) -> Tensor:
    """Return the Gram matrix of particles in several parts: products in float32, their sums in float64."""
    size = len(every[0])
    products = [columns @ columns.T for theta in every for columns in theta.split(max(1, GRAM_PART // size), dim=1)]
    return products[0].double() if len(products) == 1 else torch.stack(products).sum(0, dtype=torch.float64)


def _drive(
    buffer: Tensor, drive: Tensor, prior: Tensor | None, theta: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Return drive @ g + prior @ theta, in the buffer, and its norm."""
    driving = buffer[: theta.numel()].view(theta.shape)
    torch.mm(drive, gradient, out=driving)
    if prior is not None:
        driving.addmm_(prior, theta)
    return driving, torch.linalg.vector_norm(driving)


def _scale(
    mixing: Mixing, index: int, norm: Tensor, repulsions: Tensor, strength: float, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the coefficients of a repulsion relative to the driving term, and its norm."""
    factor = repulsion_factor(mixing, norm, repulsions[index], strength, scale)
    return (-factor * mixing.repulsion[index]).to(norm.dtype), (factor * repulsions[index]).to(norm.dtype)


def _stays_finite(drive: Tensor, prior: Tensor | None, rows: Rows, gram: Tensor) -> bool:
    """Whether what is handed to the optimizer is finite for certain: its norm is at most that of these products."""
    most = torch.stack([torch.linalg.vector_norm(gradient) for _, gradient in rows]).norm() * drive.norm()
    if prior is not None:
        most = most + prior.norm() * gram.diagonal().sum().sqrt().float()
    return _is_finite(most)


def _is_finite(number: Tensor) -> bool:
    """Whether a number in the CPU's own memory is finite."""
    return math.isfinite(number.view(1).tolist()[0])


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
    slices = [head_slice.map(lambda part: _replace_parameter(part, next(shared))) for head_slice in group.slices]
    return own[0].groups, ParticleGroup(group.name, tuple(slices))


def _share(head_slice: HeadView, gradient: Tensor, shares: dict[int, Share], *, everything: bool) -> Share:
    """Return the share of a head slice's parameter; several slices of one parameter write into one share."""
    known = id(head_slice.parameter)
    if known not in shares or (everything and shares[known].groups):
        shares[known] = read_share(head_slice.parameter, gradient, head_slice.axes.inputs, everything=everything)
    return shares[known]


def _replace_parameter(head_slice: HeadView, share: Share) -> HeadView:
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
