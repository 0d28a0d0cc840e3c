"""How far each head already plays each role: the attention it spends on the role's pairs, against a random mask.

Owns the shares, summed over queries so that batches add up. Must not know words or models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.disagreement.terms import accumulation_dtype, require_floating
from headwise.errors import MaskError, ShapeError


@dataclass(frozen=True, eq=False)
class RoleShares:
    """Sums over queries; `a + b` is that of both sets of queries.

    Attributes:
        mass: [H, R] float64, attention on the pairs of the role.
        chance: [R] float64, what a random mask as sparse would get.
        queries: [R] int64, number of queries to which the role allows a key.
    """

    mass: Tensor
    chance: Tensor
    queries: Tensor

    def __add__(self, other: RoleShares) -> RoleShares:
        return RoleShares(self.mass + other.mass, self.chance + other.chance, self.queries + other.queries)

    @property
    def share(self) -> Tensor:
        """Mean share of a query's attention on the role's keys, [H, R]; NaN where no query has any."""
        return self.mass / self.queries

    @property
    def expected(self) -> Tensor:
        """The same of a random mask as sparse, [R]; NaN where no query has any."""
        return self.chance / self.queries


@torch.no_grad()
def role_shares(weights: Tensor, roles: Tensor, keep: Tensor | None = None) -> RoleShares:
    """Return how much attention each head spends on the pairs of each role.

    share_hr = mean_q Σ_k A_hqk M_rqk over the queries q to which role r allows a key. A random mask that allows each
    of those queries as many keys, drawn among the K_q it can attend to, gets Σ_k M_rqk / K_q of any attention whose
    row sums to one, on average over draws: that is `expected`, without drawing. A key to which every head gives
    exactly 0 is one that cannot be attended to (padding, the future).

    Args:
        weights: [B, H, Q, K], attention weights before dropout.
        roles: [B or 1, R, Q or 1, K], bool, True = the role allows the pair.
        keep: [B, Q], bool, True = valid query; None keeps all.

    Raises:
        ShapeError: Shapes or types do not fit.
        MaskError: `roles` is not bool.

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
    told = counts > 0
    if keep is not None:
        told = told & keep[:, None, :]
    mass = torch.einsum("bhqk,brqk->bhrq", weights, allowed.to(weights.dtype))
    chance = counts.double() / attended.sum(-1).clamp_min(1)
    return RoleShares(
        (mass * told[:, None]).double().sum((0, 3)),
        (chance * told).sum((0, 2)),
        told.sum((0, 2)),
    )
