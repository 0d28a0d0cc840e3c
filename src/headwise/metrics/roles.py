"""Share of each head's attention on the pairs of each role, compared with random masks; batches add up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import MaskError, ShapeError
from headwise.functional.tokens import accumulation_dtype, require_floating, require_keep


@dataclass(frozen=True, eq=False)
class RoleShares:
    """Attention on the pairs of roles, summed over queries; `a + b` is the sum over both sets of queries.

    Attributes:
        mass: [H, R] float64, attention on the pairs of the role.
        chance: [R] float64, the expected attention on a random mask of equal sparsity.
        queries: [R] int64, number of queries for which the role allows a key.
    """

    mass: Tensor
    chance: Tensor
    queries: Tensor

    def __add__(self, other: RoleShares) -> RoleShares:
        return RoleShares(self.mass + other.mass, self.chance + other.chance, self.queries + other.queries)

    @property
    def share(self) -> Tensor:
        """Mean share of a query's attention on the role's keys, [H, R]; NaN if no query has any."""
        return self.mass / self.queries

    @property
    def expected(self) -> Tensor:
        """The expected share for a random mask of equal sparsity, [R]; NaN if no query has any."""
        return self.chance / self.queries


@torch.no_grad()
def role_shares(weights: Tensor, roles: Tensor, keep: Tensor | None = None) -> RoleShares:
    """Return the attention of each head on the pairs of each role.

    share_hr = mean_q Σ_k A_hqk M_rqk over the queries q for which role r allows a key. A random mask with the same
    number of keys per query, drawn from the K_q keys it can attend to, has an expected share of Σ_k M_rqk / K_q for any
    attention row that sums to one; this is `expected`, computed without drawing. A key with a weight of exactly 0 in
    every head counts as one that cannot be attended to (padding, the future).

    Args:
        weights: [B, H, Q, K], attention weights before dropout.
        roles: [B or 1, R, Q or 1, K], bool, True = allowed by the role.
        keep: [B, Q], bool, True = valid query; None keeps all.

    Raises:
        ShapeError: Shapes or dtypes do not fit.
        MaskError: `roles` or `keep` is not bool, or `keep` has another shape.

    Example:
        >>> weights = torch.tensor([[[[0.7, 0.2, 0.1]]]])
        >>> found = role_shares(weights, torch.tensor([[[[True, False, False]]]]))
        >>> found.share, found.expected
        (tensor([[0.7000]], dtype=torch.float64), tensor([0.3333], dtype=torch.float64))
    """
    require_floating("weights", weights, 4, "[B, H, Q, K]")
    if roles.dtype != torch.bool:
        raise MaskError(f"roles is {roles.dtype}; expected torch.bool, True where a role allows.")
    batch, _heads, queries, keys = weights.shape
    fits = roles.dim() == 4 and roles.shape[0] in (1, batch) and roles.shape[2] in (1, queries)
    if not fits or roles.shape[3] != keys:
        raise ShapeError(
            f"roles has shape {tuple(roles.shape)}; expected ({batch} or 1, roles, {queries} or 1, {keys}) for the "
            f"attention weights {tuple(weights.shape)}."
        )
    weights = weights.to(accumulation_dtype(weights))
    attended = (weights > 0).any(1, keepdim=True)
    allowed = roles & attended
    counts = allowed.sum(-1)
    counted = counts > 0
    if keep is not None:
        require_keep(keep, (batch, queries))
        counted = counted & keep[:, None, :]
    mass = torch.einsum("bhqk,brqk->bhrq", weights, allowed.to(weights.dtype))
    chance = counts.double() / attended.sum(-1).clamp_min(1)
    return RoleShares(
        (mass * counted[:, None]).double().sum((0, 3)),
        (chance * counted).sum((0, 2)),
        counted.sum((0, 2)),
    )
