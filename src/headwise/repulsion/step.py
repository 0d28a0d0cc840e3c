"""One step of a rule on the particle groups of a model, where parameters are whole and where they are sharded.

Every step is the same pipeline: Gram matrices of the particles, the rule's coefficients (`evaluate`), and gradients
that are mixed with them and written, in one of two forms:

* In place, on a CPU and where parameters are sharded. Groups of float32 whose particles are far apart, as in most
  models, lose no digits in an unshifted Gram matrix, which itself tells; they are mixed in columns that stay in a
  core's cache. The others are mixed whole, from differences, with Gram matrices in float64.
* Stacked, on an accelerator, where a launch costs more than the arithmetic on one layer's heads, and for small groups
  on a CPU: groups of one shape are copied into one stack, mixed by batched products, and copied back.

Nothing here waits for an accelerator, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
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
    is_finite,
    mark_overflow,
    repulsion_factor,
    repulsion_norms,
    scale_prior,
    stack_strengths,
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


class Member(NamedTuple):
    """A group in a step: its particles and their gradients, as views [M, a, b] of each slice, or rows [M, D]."""

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
        taken, near, sums = find_apart(rule, batch)
        if sums is not None:
            records.append(apply_in_place(rule, taken, sums, strength, scale, apart=True))
        left.append(near)
    left = [batch for batch in left if batch]
    every = add_over_processes(process_groups, [_add_grams(rule, batch, bool(process_groups)) for batch in left])
    return records + [
        apply_in_place(rule, batch, sums, strength, scale, apart=False) for batch, sums in zip(left, every, strict=True)
    ]


def find_apart(rule: Rule, batch: Sequence[Member]) -> tuple[list[Member], list[Member], GramSums | None]:
    """Return the groups that are mixed by columns, as rows; the others; and what a step needs of the first."""
    rows = [None if rule.needs_inner else _flatten(member) for member in batch]
    grams = [_gram_of_columns(member.own) for member in rows if member is not None]
    if not grams:
        return [], list(batch), None
    stack = torch.stack(grams)
    norms = stack.diagonal(dim1=-2, dim2=-1)
    scale = norms.unsqueeze(-1) + norms.unsqueeze(-2)
    # NaN is not apart
    apart = (scale - 2 * stack > APART * scale) & scale.isfinite()
    apart.diagonal(dim1=-2, dim2=-1).fill_(True)
    known = (apart.flatten(1).all(-1) & norms.isfinite().all(-1)).tolist()
    answers = iter(known)
    taken, left = [], []
    for member, flat in zip(batch, rows, strict=True):
        if flat is not None and next(answers):
            taken.append(flat)
        else:
            left.append(member)
    if not taken:
        return [], left, None
    stack = torch.stack([gram for gram, own in zip(grams, known, strict=True) if own])
    return taken, left, GramSums(stack, squares=stack.diagonal(dim1=-2, dim2=-1))


def _flatten(member: Member) -> Member | None:
    """Return a group with its particles and gradients as rows [M, D], or None where they are no such views."""
    if any(
        view.dtype != torch.float32 or view.stride(2) != 1 or view.stride(1) != view.shape[2]
        for view in (*member.own, *member.gradients)
    ):
        return None
    rows = [[_view_as_rows(view) for view in views] for views in (member.own, member.gradients)]
    return Member(member.group, *rows)


def _view_as_rows(view: Tensor) -> Tensor:
    size = view[0].numel()
    return view.as_strided((len(view), size), (view.stride(0), 1))


def _gram_of_columns(every: Sequence[Tensor]) -> Tensor:
    """Return the Gram matrix of rows [M, D] in several parts: products in float32, their sums in float64."""
    size, products = max(1, GRAM_PART // len(every[0])), []
    for rows in every:
        whole = rows.shape[1] // size * size
        for columns, width in ((rows[:, :whole], size), (rows[:, whole:], rows.shape[1] - whole)):
            if columns.shape[1]:
                # one batched product costs less than a call for each part
                parts = columns.unflatten(1, (-1, width)).transpose(0, 1)
                products.append(parts @ parts.mT)
    return torch.cat(products).sum(0, dtype=torch.float64)


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


def apply_in_place(
    rule: Rule, batch: Sequence[Member], sums: GramSums, strength: Strength, scale: Tensor | None, *, apart: bool
) -> ForceNorms:
    """Replace the gradients of groups of equally many particles in place by the rule's.

    Rows that are `apart` are mixed in columns that a core's cache holds, and other views whole, from differences.
    """
    distances, mixing, norms = evaluate(rule, sums.shifted, sums.plain)
    groups = [group for group, _, _ in batch]
    drive, prior, repulsion, pushes = mixing.drive, scale_prior(mixing, scale), -mixing.repulsion, norms
    known = sums.driving_norms(drive, prior)
    if mixing.relative is None:
        strengths = stack_strengths(strength, [group.name for group in groups], norms)
        factors = repulsion_factor(mixing, norms, norms, strengths, scale)
        repulsion, pushes = factors[:, None, None] * repulsion, factors * norms
    if apart:
        # one conversion for all groups
        drive, prior, pushes = drive.float(), None if prior is None else prior.float(), pushes.float()
        repulsion = repulsion.float() if mixing.relative is None else repulsion
    medoids = None if apart else find_medoids(distances)
    buffers, found = _Buffers(), []
    priors = [None] * len(batch) if prior is None else prior.unbind()
    every = zip(drive.unbind(), priors, repulsion.unbind(), pushes.unbind(), strict=True)
    for index, ((group, own, gradients), coefficients) in enumerate(zip(batch, every, strict=True)):
        factor = None
        if mixing.relative is not None:
            alpha = find_strength(strength, group.name)
            factor = partial(repulsion_factor, mixing, repulsion_norm=norms[index], strength=alpha, scale=scale)
        one = _Coefficients(*coefficients, factor)
        parts = list(zip(own, gradients, strict=True))
        if apart:
            most = max(1, MIXED_PART // group.particles)
            if any(rows.shape[1] > most for rows in own):
                parts = [part for pair in parts for part in zip(*(rows.split(most, 1) for rows in pair), strict=True)]
        if apart and len(parts) > 1:
            found.append(_mix_columns(one, gradients, parts, sums.shifted[index], buffers))
        else:
            origin = None if medoids is None else (medoids[index], rule.needs_inner)
            found.append(_mix_whole(one, parts, None if known is None else known[index], origin, buffers))
    driving, pushed, totals = map(torch.stack, zip(*found, strict=True))
    squares = sums.squares
    sizes = torch.stack([mean_norm(own) for _, own, _ in batch]) if squares is None else squares.sqrt().mean(-1)
    return ForceNorms.of(groups, driving, pushed, sizes, totals.isfinite(), distances, scale)


class _Coefficients(NamedTuple):
    """The coefficients [M, M] of one group; `factor` gives that on the repulsion, if the driving term decides it."""

    drive: Tensor
    prior: Tensor | None
    repulsion: Tensor
    push: Tensor
    factor: Callable[[Tensor], Tensor] | None

    def mix(self, term: Tensor, view: Tensor, gradient: Tensor) -> Tensor:
        """Write the driving term drive @ g + prior @ theta, and return it."""
        add_mixed(term, self.drive, gradient, beta=0)
        if self.prior is not None:
            add_mixed(term, self.prior, view)
        return term

    def repel(self, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Return coefficients and norm of the repulsion, by the norm of the driving term."""
        if self.factor is None:
            return self.repulsion, self.push
        factor = self.factor(norm)
        return factor * self.repulsion, factor * self.push


def _mix_whole(
    own: _Coefficients,
    parts: Sequence[tuple[Tensor, Tensor]],
    norm: Tensor | None,
    origin: tuple[Tensor, bool] | None,
    buffers: _Buffers,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mix views with all their driving terms in memory; returns the norms of driving term and repulsion, and a sum.

    `norm` is that of the driving term where a process has a share of it alone, and `origin` the particle from which
    differences are taken, and whether coefficients act on it too.
    """
    terms = [own.mix(buffers.borrow(slot, gradient), view, gradient) for slot, (view, gradient) in enumerate(parts)]
    norm = _find_norm(terms) if norm is None else norm.to(terms[0].dtype)
    coefficients, push = own.repel(norm)
    for term, (view, _) in zip(terms, parts, strict=True):
        if origin is None:
            add_mixed(term, coefficients, view)
        else:
            add_repulsion(term, coefficients, view, buffers.borrow(len(parts), term), *origin)
    return norm, push, write_finite(terms, [gradient for _, gradient in parts], norm + push)


def _mix_columns(
    own: _Coefficients,
    gradients: Sequence[Tensor],
    columns: Sequence[tuple[Tensor, Tensor]],
    gram: Tensor,
    buffers: _Buffers,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mix columns one after another, so that nothing is written unless all are finite for certain."""

    def drive() -> Iterator[Tensor]:
        return (own.mix(buffers.borrow(0, gradient), rows, gradient) for rows, gradient in columns)

    # the driving term is at most as long as these products
    most = _find_norm(gradients) * own.drive.norm().float()
    if own.prior is not None:
        most = most + own.prior.norm().float() * gram.diagonal().sum().sqrt().float()
    norm = most if own.factor is None or not is_finite(most) else _find_norm(drive())
    coefficients, push = own.repel(norm)
    if not is_finite(most + push):
        return most * math.inf, push, most * math.inf
    norms = []
    for term, (rows, gradient) in zip(drive(), columns, strict=True):
        norms.append(torch.linalg.vector_norm(term))
        add_mixed(term, coefficients, rows)
        gradient.copy_(term)
    norm = torch.stack(norms).norm()
    return norm, push, norm + push


def _find_norm(terms: Iterable[Tensor]) -> Tensor:
    """Return the norm of several terms together."""
    norms = [torch.linalg.vector_norm(term) for term in terms]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def mean_norm(views: Sequence[Tensor]) -> Tensor:
    """Return the mean norm of particles in several views [M, a, b], in at least single precision."""
    dtypes = [torch.promote_types(view.dtype, torch.float32) for view in views]
    norms = [torch.linalg.vector_norm(v, dim=(1, 2), dtype=d) for v, d in zip(views, dtypes, strict=True)]
    return add_up([norm.square() for norm in norms]).sqrt().mean()


class _Buffers:
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
    total = norm + push
    coefficients = -factor[:, None, None] * mixing.repulsion
    medoids = find_medoids(distances)[:, None, None]
    for term, stack, before in zip(driving, own, given, strict=True):
        # from differences to one particle: see `add_repulsion`
        origin = stack.gather(1, medoids.expand(-1, 1, stack.shape[2])).to(term.dtype)
        term.baddbmm_(coefficients.to(term.dtype), stack.to(term.dtype) - origin)
        if rule.needs_inner:
            term.addcmul_(coefficients.sum(-1, keepdim=True).to(term.dtype), origin)
        total = mark_overflow(total, term, before.dtype)
    finite = total.isfinite()
    for slot, (term, before) in enumerate(zip(driving, given, strict=True)):
        # a gradient that is not finite stays as it is, for the loop or a GradScaler to notice
        after = torch.where(finite[:, None, None], term.to(before.dtype), before)
        views = [of[slot] for of in gradients]
        torch.ops.aten._foreach_copy_(views, list(after.view(len(views), *views[0].shape).unbind(0)))
    return ForceNorms.of(groups, norm, push, squares.sqrt().mean(-1), finite, distances, scale)
