"""A step of a rule on particle groups in a CPU's memory, in single precision, by columns that stay in a core's cache.

It takes groups of float32 whose particles are far apart, as those of most models are: their distances then lose no
digits in an unshifted Gram matrix of single precision. The Gram matrix itself tells, and `step` takes the others. Of
what is in memory, particles are read twice, gradients read and written once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headwise.repulsion.force_norms import ForceNorms
from headwise.repulsion.gram import Geometry, find_collapsed, geometry_from_grams
from headwise.repulsion.groups import ParticleGroup
from headwise.repulsion.mixing import (
    Mixing,
    Strength,
    find_strength,
    repulsion_factor,
    repulsion_norms,
    scale_prior,
    stack_strengths,
)
from headwise.repulsion.rules import Rule
from headwise.repulsion.step_batched import GroupGradients

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
