"""What a step needs to know of whole particles and gradients, as sums over their entries.

Where processes hold different columns of them, each adds up its own and the sums are added over the processes, those of
all ensembles in one message. Owns what is in that message and how little of it there is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from headwise.parallel import sum_over
from headwise.repulsion.mixing import Mixing


@dataclass(frozen=True, eq=False)
class Sums:
    """Inner products of G ensembles of M particles, float64.

    Attributes:
        shifted: Of the particles less particle 0, [G, M, M].
        plain: Of the particles, [G, M, M]; None where no kernel and no prior asks for it.
        gradients: Of their gradients, [G, M, M]; None where the gradients are whole and have norms of their own.
        products: Of each gradient with each particle, [G, M, M]; None without a prior.
        squares: Squared norms of the particles, [G, M]; None where the particles are whole.
    """

    shifted: Tensor
    plain: Tensor | None = None
    gradients: Tensor | None = None
    products: Tensor | None = None
    squares: Tensor | None = None

    def drive_norms(self, mixing: Mixing, scale: Tensor | None) -> Tensor | None:
        """Return the norms of K g + P theta, [G]: ||K g||^2 = tr(K g g^T K^T), and so on; None for whole gradients."""
        if self.gradients is None:
            return None
        squares = _quadratic(mixing.drive, self.gradients, mixing.drive)
        if mixing.prior is not None:
            assert self.products is not None  # the sums of a rule with a prior have them, and these too
            assert self.plain is not None
            prior = mixing.prior if scale is None else mixing.prior * scale
            squares = squares + 2.0 * _quadratic(mixing.drive, self.products, prior)
            squares = squares + _quadratic(prior, self.plain, prior)
        return torch.where(squares > 0, squares, squares * 0.0).sqrt()


def summed_over(groups: Sequence[Any], every: Sequence[Sums]) -> list[Sums]:
    """Return these sums added over the processes of some groups, in one message a group.

    M (M + 1) numbers an ensemble in the plainest case: of symmetric matrices one triangle is sent, and of the shifted
    particles none of the zeros.

    >>> one = Sums(torch.zeros(1, 2, 2, dtype=torch.float64))
    >>> summed_over((), [one])[0] is one
    True
    """
    if not groups:
        return list(every)
    parts = [part for sums in every for part in _packed(sums)]
    added = iter(sum_over(groups, parts))
    return [_unpacked(sums, added) for sums in every]


def _packed(sums: Sums) -> Iterable[Tensor]:
    for name, matrix in _present(sums):
        if name in ("products", "squares"):
            yield matrix
        else:
            rows, columns = _triangle(name, matrix)
            yield matrix[:, rows, columns]


def _unpacked(sums: Sums, added: Iterable[Tensor]) -> Sums:
    found: dict[str, Tensor] = {}
    for (name, matrix), part in zip(_present(sums), itertools.islice(added, len(list(_present(sums)))), strict=True):
        if name in ("products", "squares"):
            found[name] = part
        else:
            rows, columns = _triangle(name, matrix)
            whole = torch.zeros_like(matrix)
            whole[:, rows, columns] = part
            whole[:, columns, rows] = part
            found[name] = whole
    return Sums(**found)


def _present(sums: Sums) -> list[tuple[str, Tensor]]:
    every = ((field.name, getattr(sums, field.name)) for field in fields(sums))
    return [(name, matrix) for name, matrix in every if matrix is not None]


def _triangle(name: str, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the upper triangle, without row 0 where that is zero."""
    first = 1 if name == "shifted" else 0
    rows, columns = torch.triu_indices(matrix.shape[-1] - first, matrix.shape[-1] - first, device=matrix.device) + first
    return rows, columns


def _quadratic(left: Tensor, matrix: Tensor, right: Tensor) -> Tensor:
    """Return tr(left @ matrix @ right^T) of each group."""
    return (left @ matrix * right).sum((-2, -1))
