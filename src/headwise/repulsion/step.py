"""One step of a rule on the particle groups of a model, where parameters are whole and where they are sharded.

Every step is the same pipeline: Gram matrices of the particles, the rule's coefficients (`evaluate`), and gradients
that are mixed with them and written in place. Gradients are written in one of three forms, the first two on a CPU,
without a copy of a weight:

* By columns, in single precision: groups of float32 whose particles are far apart, as in most models. Their distances
  lose no digits in an unshifted Gram matrix, which itself tells. Columns stay in a core's cache: particles are read
  twice, gradients read and written once.
* On views, with Gram matrices in float64: groups whose particles are close, other dtypes, and sharded parameters.
* Stacked, on an accelerator, where a launch costs more than the arithmetic on one layer's heads, and for small groups
  on a CPU: groups of one shape are copied into one stack, mixed by batched products, and copied back.

Nothing here waits for an accelerator, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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
    find_medoids,
    geometry,
    geometry_from_grams,
    plain_gram,
    shifted_gram,
    squared_norms,
)
from headwise.repulsion.groups import ForceNorms, ParticleGroup
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
    write_finite,
)

# Numbers of the particles in one stack. Each takes about 24 bytes during the step, in float32.
MOST_STACKED = 2**25
# On a CPU groups of at most this many numbers are stacked: for them calls cost more than copies.
MOST_CALLED = 2**13
# A squared distance above this share of the two squared norms has lost at most four bits to their difference.
APART = 2.0**-4
# Numbers of the columns multiplied at a time for a Gram matrix, and mixed at a time: what a core's cache holds.
GRAM_PART, MIXED_PART = 2**16, 2**18

# The particles of each slice of a group, and their gradients, as rows [M, D].
Rows = list[tuple[Tensor, Tensor]]


class Member(NamedTuple):
    """A group in a step: its particles and their gradients, as views [M, a, b] of each slice."""

    group: ParticleGroup
    own: list[Tensor]
    gradients: list[Tensor]

    @property
    def size(self) -> int:
        """How many numbers its gradients are."""
        return sum(view.numel() for view in self.gradients)


def evaluate(rule: Rule, shifted: Tensor, plain: Tensor | None) -> tuple[Geometry, Mixing, Tensor]:
    """Return geometry and coefficients from Gram matrices [G, M, M], and norms [G] of the repulsion."""
    plain = plain if rule.needs_inner else None
    distances = geometry_from_grams(shifted, plain)
    mixing = rule.mixing(distances)
    return distances, mixing, repulsion_norms(mixing, shifted if plain is None else plain)


@torch.no_grad()
def apply_rule(
    rule: Rule, groups: Sequence[ParticleGroup], *, strength: Strength, scale: Tensor | None
) -> ForceNorms | None:
    """Replace the gradient of every group in place by the rule's; None if no group has a gradient.

    Where parameters are sharded all processes call it. Groups whose columns are divided over one mesh share one message
    of sums; if columns do not divide evenly, every process computes the whole. Groups without a gradient are skipped.
    `strength` multiplies the repulsion, and `scale` is what the gradients are multiplied by (GradScaler).
    """
    divided: dict[tuple[Any, ...], list[Member]] = defaultdict(list)
    written: list[tuple[Member, list[Tensor]]] = []
    shares: dict[int, Share] = {}
    for group in groups:
        process_groups, local = _take_local_part(group, shares)
        gradients = local.gradients()
        if gradients is not None:
            member = Member(local, local.views(), local.views(gradients))
            divided[process_groups].append(member)
            if len(gradients) > len(local.slices):
                # views of heads that are parameters of their own are copies
                written.append((member, gradients))
    records = []
    for process_groups, members in divided.items():
        records += _apply_local(rule, members, strength, scale, process_groups)
    for member, gradients in written:
        member.group.write(member.gradients, gradients)
    for share in shares.values():
        if share.give_back is not None:
            share.give_back()
    return ForceNorms.join(records)


def _take_local_part(group: ParticleGroup, shares: dict[int, Share]) -> tuple[tuple[Any, ...], ParticleGroup]:
    """Return the process groups over which a group is divided, and what this process computes of it."""
    gradients = group.gradients() if group.sharded else None
    if gradients is None:
        return (), group

    def share(part: HeadView, gradient: Tensor, *, everything: bool) -> Share:
        known = id(part.parameter)
        # several slices of one parameter write into one share
        if known not in shares or (everything and shares[known].groups):
            shares[known] = read_share(part.parameter, gradient, part.axes.inputs, everything=everything)
        return shares[known]

    pairs = list(zip(group.parts, gradients, strict=True))
    own = [share(*pair, everything=False) for pair in pairs]
    if len({one.groups for one in own}) > 1:
        # projections of one particle that are divided differently are computed whole
        own = [share(*pair, everything=True) for pair in pairs]
    shared = iter(own)

    def replace_parameter(part: HeadView) -> HeadView:
        local, holder = next(shared), nn.Module()
        holder.weight = nn.Parameter(local.parameter)
        holder.weight.grad = local.gradient
        return replace(part, owner=holder, attribute="weight")

    slices = [head_slice.map(replace_parameter) for head_slice in group.slices]
    return own[0].groups, ParticleGroup(group.name, tuple(slices))


def stacks_on(device: torch.device) -> bool:
    """Whether groups on a device are stacked: on all but a CPU."""
    return device.type != "cpu"


def _apply_local(
    rule: Rule, members: Sequence[Member], strength: Strength, scale: Tensor | None, process_groups: Sequence[Any]
) -> list[ForceNorms]:
    """Apply a rule to groups that are whole, or whose columns are divided over the members of process groups."""
    batches: dict[tuple[int, torch.device], list[Member]] = defaultdict(list)
    for member in members:
        batches[member.group.particles, member.gradients[0].device].append(member)
    if not process_groups and any(stacks_on(device) for _, device in batches):
        return apply_stacked(rule, [member for batch in batches.values() for member in batch], strength, scale)
    records: list[ForceNorms] = []
    left = []
    for every in batches.values():
        if process_groups:
            left.append(every)
            continue
        few = [member for member in every if member.size <= MOST_CALLED]
        batch = every
        if len(few) > 1:
            records += apply_stacked(rule, few, strength, scale)
            batch = [member for member in every if member.size > MOST_CALLED]
        apart, grams = find_apart(rule, batch)
        taken = [(member.group, rows) for member, rows in zip(batch, apart, strict=True) if rows is not None]
        if grams is not None:
            records.append(apply_by_columns(rule, taken, grams, strength, scale))
        left.append([member for member, rows in zip(batch, apart, strict=True) if rows is None])
    left = [batch for batch in left if batch]
    sums = add_over_processes(process_groups, [_add_grams(rule, batch, bool(process_groups)) for batch in left])
    return records + [apply_on_views(rule, batch, own, strength, scale) for batch, own in zip(left, sums, strict=True)]


def find_apart(rule: Rule, batch: Sequence[Member]) -> tuple[list[Rows | None], Tensor | None]:
    """Return the rows of each group that is mixed by columns, else None, and their Gram matrices, float64 [G, M, M]."""
    every = [None if rule.needs_inner else _flatten(member) for member in batch]
    grams = [_gram_of_columns([own for own, _ in rows]) for rows in every if rows is not None]
    if not grams:
        return every, None
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


def _flatten(member: Member) -> Rows | None:
    """Return the particles and gradients of each slice as rows, or None where they are no such views."""
    pairs = []
    for views in zip(member.own, member.gradients, strict=True):
        if any(v.dtype != torch.float32 or v.stride(2) != 1 or v.stride(1) != v.shape[2] for v in views):
            return None
        own, gradient = (view.as_strided((len(view), view[0].numel()), (view.stride(0), 1)) for view in views)
        pairs.append((own, gradient))
    return pairs


def _gram_of_columns(every: Sequence[Tensor]) -> Tensor:
    """Return the Gram matrix of particles in several parts: products in float32, their sums in float64."""
    size = len(every[0])
    products = [columns @ columns.T for theta in every for columns in theta.split(max(1, GRAM_PART // size), dim=1)]
    return products[0].double() if len(products) == 1 else torch.stack(products).sum(0, dtype=torch.float64)


def apply_by_columns(
    rule: Rule, batch: Sequence[tuple[ParticleGroup, Rows]], grams: Tensor, strength: Strength, scale: Tensor | None
) -> ForceNorms:
    """Replace the gradients of groups that `find_apart` takes in place by the rule's."""
    distances, mixing, repulsions = evaluate(rule, grams, None)
    groups = [group for group, _ in batch]
    names = [group.name for group in groups]
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
        most = max(1, MIXED_PART // group.particles)
        columns = [part for pair in rows for part in zip(*(whole.split(most, 1) for whole in pair), strict=True)]
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
            factor = repulsion_factor(mixing, norm, repulsions[index], find_strength(strength, group.name), scale)
            own, push = (-factor * mixing.repulsion[index]).to(dtype), (factor * repulsions[index]).to(dtype)
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
    norm, push = torch.stack(driving_norms), torch.stack(found)
    sizes = grams.diagonal(dim1=-2, dim2=-1).sqrt().mean(-1)
    return ForceNorms.of(groups, norm, push, sizes, norm.isfinite() & push.isfinite(), distances, scale)


def _drive(
    buffer: Tensor, drive: Tensor, prior: Tensor | None, theta: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Return drive @ g + prior @ theta, in the buffer, and its norm."""
    driving = buffer[: theta.numel()].view(theta.shape)
    torch.mm(drive, gradient, out=driving)
    if prior is not None:
        driving.addmm_(prior, theta)
    return driving, torch.linalg.vector_norm(driving)


def _stays_finite(drive: Tensor, prior: Tensor | None, rows: Rows, gram: Tensor) -> bool:
    """Whether the driving term is finite for certain: its norm is at most that of these products."""
    most = torch.stack([torch.linalg.vector_norm(gradient) for _, gradient in rows]).norm() * drive.norm()
    if prior is not None:
        most = most + prior.norm() * gram.diagonal().sum().sqrt().float()
    return _is_finite(most)


def _is_finite(number: Tensor) -> bool:
    """Whether a number in the CPU's own memory is finite."""
    return math.isfinite(number.view(1).tolist()[0])


def _add_grams(rule: Rule, batch: Sequence[Member], divided: bool) -> GramSums:
    """Return the sums over particles that a step needs, and over divided gradients, whose norms cannot be computed."""

    def add(gram: Callable[..., Tensor], *every: Sequence[Sequence[Tensor]]) -> Tensor:
        return torch.stack([add_up(list(map(gram, *views))) for views in zip(*every, strict=True)])

    _, own, gradients = zip(*batch, strict=True)
    example = geometry(torch.eye(2, dtype=torch.float64), inner=rule.needs_inner)
    prior = divided and rule.mixing(example).prior is not None
    shifted = add(shifted_gram, own)
    plain = add(plain_gram, own) if rule.needs_inner or prior else None
    if not divided:
        return GramSums(shifted, plain)
    products = add(cross_gram, gradients, own) if prior else None
    return GramSums(shifted, plain, add(plain_gram, gradients), products, add(squared_norms, own))


def apply_on_views(
    rule: Rule, batch: Sequence[Member], sums: GramSums, strength: Strength, scale: Tensor | None
) -> ForceNorms:
    """Replace the gradients of groups of equally many particles in place by the rule's."""
    distances, mixing, repulsions = evaluate(rule, sums.shifted, sums.plain)
    medoids = find_medoids(distances)
    prior = scale_prior(mixing, scale)
    norms = sums.driving_norms(mixing.drive, prior)
    driving_norms, pushes, sound, workspace = [], [], [], _Workspace()
    for index, (group, views, gradients) in enumerate(batch):
        driving = [workspace.borrow(slot, gradient) for slot, gradient in enumerate(gradients)]
        for term, view, gradient in zip(driving, views, gradients, strict=True):
            add_mixed(term, mixing.drive[index], gradient, beta=0)
            if prior is not None:
                add_mixed(term, prior[index], view)
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(term) for term in driving]))
        norm = norm if norms is None else norms[index].to(norm.dtype)
        factor = repulsion_factor(mixing, norm, repulsions[index], find_strength(strength, group.name), scale)
        push = factor * repulsions[index]
        for term, view in zip(driving, views, strict=True):
            rows = workspace.borrow(len(gradients), term)
            add_repulsion(term, -factor * mixing.repulsion[index], view, rows, medoids[index], rule.needs_inner)
        sound.append(write_finite(driving, gradients, norm.isfinite() & push.isfinite()))
        driving_norms.append(norm)
        pushes.append(push)
    sizes = (
        torch.stack([mean_norm(views) for _, views, _ in batch])
        if sums.squares is None
        else sums.squares.sqrt().mean(-1)
    )
    groups = [group for group, _, _ in batch]
    norm, push, finite = torch.stack(driving_norms), torch.stack(pushes), torch.stack(sound)
    return ForceNorms.of(groups, norm, push, sizes, finite, distances, scale)


def mean_norm(views: Sequence[Tensor]) -> Tensor:
    """Return the mean norm of particles in several views [M, a, b], in at least single precision."""
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


def apply_stacked(rule: Rule, members: Sequence[Member], strength: Strength, scale: Tensor | None) -> list[ForceNorms]:
    """Replace the gradients of groups of any shapes in place by the rule's; returns one record per stack."""
    kinds: dict[Hashable, list[Member]] = defaultdict(list)
    for member in members:
        kinds[tuple((v.shape, v.dtype, v.device) for v in (*member.own, *member.gradients))].append(member)
    records = []
    for alike in kinds.values():
        most = max(1, MOST_STACKED // max(alike[0].size, 1))
        stacks = [alike[start : start + most] for start in range(0, len(alike), most)]
        records += [apply_to_stack(rule, stack, strength, scale) for stack in stacks]
    return records


def apply_to_stack(rule: Rule, members: Sequence[Member], strength: Strength, scale: Tensor | None) -> ForceNorms:
    """Replace the gradients of G groups of one shape in place by the rule's."""
    groups, particles, gradients = zip(*members, strict=True)
    own = [torch.stack(views).flatten(2) for views in zip(*particles, strict=True)]
    given = [torch.stack(views).flatten(2) for views in zip(*gradients, strict=True)]
    exact = [stack.to(torch.float64) for stack in own]
    plain = add_up([stack @ stack.mT for stack in exact]) if rule.needs_inner else None
    squares = add_up([stack.square().sum(-1) for stack in exact])
    # the shift comes after the conversion: a difference in float32 would round heads that are close
    exact = [stack - stack[:, :1] for stack in exact]
    shifted = add_up([stack @ stack.mT for stack in exact])
    del exact
    distances, mixing, repulsions = evaluate(rule, shifted, plain)
    prior = scale_prior(mixing, scale)
    driving = []
    for gradient, stack in zip(given, own, strict=True):
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        driving.append(torch.bmm(mixing.drive.to(dtype), gradient.to(dtype)))
        if prior is not None:
            driving[-1].baddbmm_(prior.to(dtype), stack.to(dtype))
    norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(term, dim=(1, 2)) for term in driving]), dim=0
    )
    strengths = stack_strengths(strength, [group.name for group in groups], norm)
    factor = repulsion_factor(mixing, norm, repulsions, strengths, scale)
    push = factor * repulsions
    finite = (norm + push).isfinite()
    coefficients = -factor[:, None, None] * mixing.repulsion
    medoids = find_medoids(distances)[:, None, None]
    for term, stack, before in zip(driving, own, given, strict=True):
        # from differences to one particle: see `add_repulsion`
        origin = stack.gather(1, medoids.expand(-1, 1, stack.shape[2])).to(term.dtype)
        term.baddbmm_(coefficients.to(term.dtype), stack.to(term.dtype) - origin)
        if rule.needs_inner:
            term.addcmul_(coefficients.sum(-1, keepdim=True).to(term.dtype), origin)
        finite = stays_finite(finite, term, before.dtype)
    for slot, (term, before) in enumerate(zip(driving, given, strict=True)):
        # a gradient that is not finite stays as it is, for the loop or a GradScaler to notice
        after = torch.where(finite[:, None, None], term.to(before.dtype), before)
        views = [of[slot] for of in gradients]
        torch.ops.aten._foreach_copy_(views, list(after.view(len(views), *views[0].shape).unbind(0)))
    return ForceNorms.of(groups, norm, push, squares.sqrt().mean(-1), finite, distances, scale)
