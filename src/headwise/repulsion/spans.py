"""Repulsion between the subspaces of heads, which turns them and nothing else; ours, not in the papers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.errors import SettingError
from headwise.heads.heads import Heads
from headwise.repulsion.force_norms import ForceNorms
from headwise.repulsion.gram import Geometry
from headwise.repulsion.groups import ParticleGroup, find_groups
from headwise.repulsion.kernels import Bandwidth, Median
from headwise.repulsion.mixing import Mixing, Strength, find_strength, identity
from headwise.repulsion.pushes import make_share, push_apart
from headwise.repulsion.rules import RepulsiveRule
from headwise.similarity.subspaces import RIDGE, orthonormal_basis


@dataclass(frozen=True)
class SpanSVGD(RepulsiveRule):
    """SVGD whose kernel compares the subspaces that heads read from or write to; ours, not in the papers.

    g'_i = (eps / M) [ g_i - alpha R_i ],  R_i = -sum_j grad_{theta_i} k_ij = sum_j (k_ij / h) grad_{theta_i} D_ij

    with k_ij = exp(-D_ij / h), D_ij = e - tr(P_i P_j) the squared projection distance of the spans of two heads
    (Edelman, Arias and Smith 1998), P_i the projector on the e rows of a query, key or value head, and h a constant of
    the step. With W_i [d, e] those rows as columns,

    R_i = -2 (I - P_i) (sum_j (k_ij / h) P_j) W_i (W_i^T W_i)^-1.

    No mixing inside a head, W_i -> W_i A, changes what is compared, and W_i^T R_i = 0: the force turns the span, and
    neither lengthens a head nor moves it within its span, where kernels on parameters do both. Norms grow only at
    second order in the step. The driving term is not smoothed, as gradients of heads in different bases cannot be
    added. Heads of equal spans do not part.

    Args:
        alpha: weight of the repulsion, in units of the loss, at least 0, a `Relative` or a `Target`.
        step_size: eps, above 0.
        bandwidth: the rule for h, from the distances of spans.
    """

    bandwidth: Bandwidth = field(default_factory=Median)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.bandwidth, type) or not isinstance(self.bandwidth, Bandwidth):
            raise SettingError(
                f"SpanSVGD.bandwidth is {self.bandwidth!r}; expected a rule such as Median(), an instance."
            )

    @property
    def needs_inner(self) -> bool:
        """False: spans are compared by their distances."""
        return False

    def mixing(self, geometry: Geometry) -> Mixing:
        """The coefficients [*, M, M] of one step from distances of spans; alpha k_ij / h in those of the repulsion."""
        distances = geometry.squared_distances
        h = self.bandwidth.resolve(distances)[..., None, None]
        pull = torch.where(distances > 0, torch.exp(-distances / h) / h, 0.0)
        share = self.step_size / distances.shape[-1]
        return Mixing(share * identity(pull), None, share * self._weight * pull, self._ratio)

    def find_groups(self, heads: Heads, *, joint: bool = False) -> tuple[ParticleGroup, ...]:
        """Return one group per projection of each attention.

        Raises:
            SettingError: `joint` is True, parameters are divided over processes, or each head spans all of its input.
        """
        if joint:
            raise SettingError(
                "SpanSVGD compares the spans of one projection, which cannot be joined; leave joint out."
            )
        groups = find_groups(heads)
        for group in groups:
            if group.sharded:
                raise SettingError(
                    f"{group.name} is divided over processes, and SpanSVGD reads whole heads; use SVGD there."
                )
            (head_slice,) = group.slices
            inputs, width = head_slice.turn(head_slice.read()).shape[1:]
            if width > inputs:
                raise SettingError(
                    f"the heads of {group.name} have {width} features of {inputs} inputs, so that each spans all of "
                    "them and no two differ; select other projections, or use SVGD."
                )
        return groups

    @torch.no_grad()
    def apply(self, groups: Sequence[ParticleGroup], *, strength: Strength, scale: Tensor | None) -> ForceNorms | None:
        """Replace the gradient of every group in place by that of the rule; None when none has a gradient."""
        records = []
        for group in groups:
            if group.gradients() is None:
                continue
            (head_slice,) = group.slices
            rows = head_slice.turn(head_slice.read()).mT
            mixing, push, equal = find_turns(self, rows.to(torch.promote_types(rows.dtype, torch.float32)))
            own = find_strength(strength, group.name)
            records.append(push_apart(group, [head_slice.turn(push.mT)], mixing, equal, own, scale))
        return ForceNorms.join(records) if records else None

    def drive(self, group: ParticleGroup) -> Tensor:
        """The coefficients [M, M] of a group's driving term: eps / M on the diagonal."""
        return make_share(self.step_size, group)


def find_turns(rule: SpanSVGD, rows: Tensor) -> tuple[Mixing, Tensor, Tensor]:
    """Return the coefficients, the force eps alpha R / M on rows [M, e, d] of heads, and whether spans are equal."""
    basis, triangle = orthonormal_basis(rows.mT)
    heads, _, width = basis.shape
    flat = basis.mT.flatten(0, 1)
    overlaps = (flat @ flat.mT).view(heads, width, heads, width)
    distances = (width - overlaps.square().sum((1, 3))).to(torch.float64)
    # what the ridge leaves between equal spans of ill-conditioned heads is no distance
    distances = torch.where(distances > 1e3 * RIDGE[rows.dtype], distances, 0.0)
    distances = distances.masked_fill(torch.eye(heads, dtype=torch.bool, device=rows.device), 0.0)
    mixing = rule.mixing(Geometry(distances, None))
    coefficients = mixing.repulsion.to(rows.dtype)
    # in the basis Q of its span W is Q L^T, so that P_j W_i (W_i^T W_i)^-1 = Q_j (Q_j^T Q_i) L_i^-1
    inside = coefficients[:, None, :, None] * overlaps
    towards = (inside.flatten(2).flatten(0, 1) @ flat).view(heads, width, -1).mT
    across = towards - basis @ (basis.mT @ towards)
    push = -2 * torch.linalg.solve_triangular(triangle, across, upper=False, left=False)
    return mixing, push.mT, (distances == 0).all()
