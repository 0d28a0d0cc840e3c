"""Repulsion between what heads compute, or between the subspaces they span, instead of between their parameters.

Both are ours, not in the papers. Subspaces are turned and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor, nn

from headwise.errors import LayoutError, SettingError
from headwise.functional.subspaces import RIDGE, orthonormal_basis
from headwise.heads.heads import PROJECTIONS, Heads, Site
from headwise.kernels import AnyBandwidth, Geometry, Median, geometry_from_grams, plain_gram, shifted_gram
from headwise.nn.additive import AdditiveAttention
from headwise.repulsion.groups import ForceNorms, ParticleGroup, find_groups
from headwise.repulsion.low_rank import Evaluation, carry
from headwise.repulsion.rules import KernelRule, Mixing, RepulsiveRule, Strength, identity
from headwise.repulsion.step import mean_norm


class OwnSpace(RepulsiveRule, ABC):
    """A rule that compares something else than the parameters of whole heads, each of which keeps its own gradient."""

    compared: ClassVar[str]

    def find_groups(self, heads: Heads, *, joint: bool = False) -> tuple[ParticleGroup, ...]:
        """Return the groups it acts on.

        Raises:
            LayoutError, SettingError: The rule cannot compare these heads, `joint` is True, or parameters are divided
                over processes.
        """
        name = type(self).__name__
        if joint:
            raise SettingError(f"{name} compares {self.compared}, which cannot be joined; leave joint out.")
        groups = self._find(heads)
        for group in groups:
            if group.sharded:
                raise SettingError(
                    f"{group.name} is divided over processes, and {name} reads whole heads; use SVGD there."
                )
        return groups

    @torch.no_grad()
    def apply(self, groups: Sequence[ParticleGroup], *, strength: Strength, scale: Tensor | None) -> ForceNorms | None:
        """Replace the gradient of every group in place by the rule's; None if no group has a gradient."""
        records = []
        for group in groups:
            if group.gradients() is not None:
                mixing, geometry, pushes = self._push(group)
                size = mean_norm([head_slice.read() for head_slice in group.slices])
                found, share = Evaluation(mixing, geometry, size), self.step_size / group.particles
                records.append(carry(group, found, pushes, share=share, strength=strength, scale=scale))
        return ForceNorms.join(records)

    def drive(self, group: ParticleGroup) -> Tensor:
        """The coefficients [M, M] of a group's driving term: eps / M on the diagonal; one tensor for equal groups."""
        return _make_share(self.step_size / group.particles, group.particles, group.parameters[0].device)

    @abstractmethod
    def _find(self, heads: Heads) -> tuple[ParticleGroup, ...]: ...

    @abstractmethod
    def _push(self, group: ParticleGroup) -> tuple[Mixing, Geometry, list[Tensor]]:
        """Return the coefficients, what they were computed from, and the repulsion on the heads of each slice."""


@cache
def _make_share(share: float, particles: int, device: torch.device) -> Tensor:
    return share * torch.eye(particles, dtype=torch.float64, device=device)


@dataclass(frozen=True)
class FunctionSVGD(KernelRule, OwnSpace):
    """SVGD whose kernel compares what heads compute; ours, not in the papers.

    Let x W_Q,h^T W_K,h y^T be the score of key y for query x in head h, and W_O,h W_V,h y what the head adds to its
    output for y. The functions of a head are the products F_h = W_Q,h^T W_K,h and W_O,h W_V,h, each with its own
    kernel, and the rule is

    g'_i = (eps / M) [ g_i - alpha R_i ],  R_i = -sum_j grad_{theta_i} k(F_i, F_j) = J_i^T sum_j grad_{F_j} k(F_j, F_i)

    with J_i the derivative of F_i in the head's parameters and the bandwidth a constant of the step. In additive
    attention F_h = w_h W_1, the scores of head h where tanh is linear; W_1, which the heads share, gets no force.

    Two heads that compute the same may look different: W_Q -> A W_Q, W_K -> A^-T W_K changes the parameters of a head
    and no output. k and its gradient in F do not see such a change, where kernels on parameters push apart heads that
    compute the same; R, that gradient in the parameters, turns with the basis. The driving term is not smoothed:
    gradients of two heads in different bases cannot be added. W_O is moved too, biases are not. Where the model rotates
    queries and keys by their positions (rotary embeddings) or normalizes them, W_Q^T W_K is not all a head computes,
    and its basis matters.

    Args:
        alpha: weight of the repulsion, in units of the loss, at least 0, a `Relative` or a `Target`.
        step_size: eps, above 0.
        kernel: k, on the products.
    """

    compared: ClassVar[str] = "products of projections"

    def mixing(self, geometry: Geometry) -> Mixing:
        """The coefficients [*, M, M] of one step; the repulsion's multiply the products of heads."""
        repulsion = self.kernel.matrices(geometry).repulsion
        share = self.step_size / repulsion.shape[-1]
        return Mixing(share * identity(repulsion), None, share * self._weight * repulsion, self._ratio)

    def _find(self, heads: Heads) -> tuple[FunctionGroup, ...]:
        """Return the query-key and the output-value products of each attention, of the projections selected."""
        groups: list[FunctionGroup] = []
        products: set[frozenset[tuple[int, int]]] = set()
        for site in heads.sites:
            for group in _find_products(site, heads.projections):
                places = frozenset((id(part.parameter), part.start) for part in group.parts)
                # a product tied between layers is acted on once per step
                if places in products:
                    continue
                if any(places & other for other in products):
                    raise SettingError(
                        f"{group.name} shares one of its factors with an earlier attention, and the force of each "
                        "product would act on it; use SVGD, or leave this attention out."
                    )
                groups.append(group)
                products.add(places)
        if not groups:
            raise LayoutError(
                f"the projections {', '.join(heads.projections)} make no product; select query and key, value, or all."
            )
        return tuple(groups)

    def _push(self, group: ParticleGroup) -> tuple[Mixing, Geometry, list[Tensor]]:
        assert isinstance(group, FunctionGroup)
        first, second = group.factors()
        functions = first.mT @ second
        plain = plain_gram(functions) if self.needs_inner else None
        geometry = geometry_from_grams(shifted_gram(functions), plain)
        mixing = self.mixing(geometry)
        # sum_j c_ij F_j from the differences to F_0: nearly equal functions lose no digits
        origin, sums = functions[:1], mixing.repulsion.sum(-1).to(functions.dtype)
        force = torch.tensordot(mixing.repulsion.to(functions.dtype), functions - origin, dims=1)
        force = force + sums.view(-1, 1, 1) * origin
        # the derivative of <G, A^T B> is B G^T in A and A G in B
        pushes = second @ force.mT, first @ force
        return mixing, geometry, group.turn_back(pushes)


@dataclass(frozen=True, eq=False)
class FunctionGroup(ParticleGroup):
    """M heads whose function is the product of two slices, or of one and of a module's weight that all heads share.

    Attributes:
        shared: The module of that weight, [e, b]; None where both factors belong to the head.
    """

    shared: nn.Module | None = field(default=None, repr=False)

    def factors(self) -> list[Tensor]:
        """Return A [M, e, a] and B [M, e, b] in at least single precision; functions are A^T B."""
        found = [head_slice.turn(head_slice.read()).mT for head_slice in self.slices]
        if self.shared is not None:
            weight = self.shared._parameters["weight"]
            assert weight is not None
            # one row of a score matrix is a column of A
            found = [found[0].mT, weight.detach().expand(self.particles, -1, -1)]
        dtype = torch.promote_types(found[0].dtype, torch.float32)
        return [factor.to(dtype) for factor in found]

    def turn_back(self, forces: Sequence[Tensor]) -> list[Tensor]:
        """Return forces on the factors of heads as its slices are read."""
        if self.shared is not None:
            return [forces[0].mT]
        return [head_slice.turn(force.mT) for head_slice, force in zip(self.slices, forces, strict=True)]


def _find_products(site: Site, projections: Sequence[str]) -> list[FunctionGroup]:
    if isinstance(site.module, AdditiveAttention):
        selected = "query" in projections
        return [FunctionGroup(f"{site.name} scores".strip(), site.slices, site.module.hidden)] if selected else []
    slices = {head_slice.projection: head_slice for head_slice in site.slices}
    missing = [name for name in PROJECTIONS if name not in slices]
    reason = f"{site.label} has no {' and '.join(missing)} projection of its own" if missing else ""
    if site.num_heads != site.key_value_heads and not missing:
        reason = f"{site.name}: {site.num_heads} query heads share {site.key_value_heads} key/value heads"
    if reason:
        raise SettingError(
            f"{reason}, so that the function of a head depends on shared parameters; use SVGD, which repels parameters."
        )
    found = []
    if {"query", "key"} <= set(projections):
        sizes = slices["query"].head_size, slices["key"].head_size
        if sizes[0] != sizes[1]:
            raise SettingError(
                f"{site.name}: a query head has {sizes[0]} features and a key head {sizes[1]} (all heads share the "
                "others), so no product of the two is its function; select heads.projection('value'), or use SVGD."
            )
        found.append(FunctionGroup(f"{site.name} query-key".strip(), (slices["query"], slices["key"])))
    if "value" in projections:
        if site.output is None:
            raise LayoutError(
                f"{site.label}: no output projection of its heads was found, so what they add is not "
                "known; select heads.projection('query', 'key')."
            )
        found.append(FunctionGroup(f"{site.name} output-value".strip(), (site.output, slices["value"])))
    return found


@dataclass(frozen=True)
class SpanSVGD(OwnSpace):
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

    compared: ClassVar[str] = "the spans of one projection"
    bandwidth: AnyBandwidth = field(default_factory=Median)

    @property
    def needs_inner(self) -> bool:
        """False: spans are compared by their distances."""
        return False

    def mixing(self, geometry: Geometry) -> Mixing:
        """The coefficients [*, M, M] of one step from distances of spans; the repulsion's hold alpha k_ij / h."""
        distances = geometry.squared_distances
        h = self.bandwidth.resolve(distances)[..., None, None]
        pull = torch.where(distances > 0, torch.exp(-distances / h) / h, 0.0)
        share = self.step_size / distances.shape[-1]
        return Mixing(share * identity(pull), None, share * self._weight * pull, self._ratio)

    def _find(self, heads: Heads) -> tuple[ParticleGroup, ...]:
        groups = find_groups(heads)
        for group in groups:
            (head_slice,) = group.slices
            inputs, width = head_slice.turn(head_slice.read()).shape[1:]
            if width > inputs:
                raise SettingError(
                    f"the heads of {group.name} have {width} features of {inputs} inputs, so that each spans all of "
                    "them and no two differ; select other projections, or use SVGD."
                )
        return groups

    def _push(self, group: ParticleGroup) -> tuple[Mixing, Geometry, list[Tensor]]:
        (head_slice,) = group.slices
        rows = head_slice.turn(head_slice.read()).mT
        mixing, push, geometry = find_turns(self, rows.to(torch.promote_types(rows.dtype, torch.float32)))
        return mixing, geometry, [head_slice.turn(push.mT)]


def find_turns(rule: SpanSVGD, rows: Tensor) -> tuple[Mixing, Tensor, Geometry]:
    """Return the coefficients, the force eps alpha R / M on rows [M, e, d] of heads, and the distances of spans."""
    basis, triangle = orthonormal_basis(rows.mT)
    heads, _, width = basis.shape
    flat = basis.mT.flatten(0, 1)
    overlaps = (flat @ flat.mT).view(heads, width, heads, width)
    distances = (width - overlaps.square().sum((1, 3))).to(torch.float64)
    # what the ridge leaves between equal spans of ill-conditioned heads is no distance
    distances = torch.where(distances > 1e3 * RIDGE[rows.dtype], distances, 0.0)
    distances = distances.masked_fill(torch.eye(heads, dtype=torch.bool, device=rows.device), 0.0)
    geometry = Geometry(distances, None)
    mixing = rule.mixing(geometry)
    coefficients = mixing.repulsion.to(rows.dtype)
    # in the basis Q of its span W is Q L^T, so that P_j W_i (W_i^T W_i)^-1 = Q_j (Q_j^T Q_i) L_i^-1
    inside = coefficients[:, None, :, None] * overlaps
    towards = (inside.flatten(2).flatten(0, 1) @ flat).view(heads, width, -1).mT
    across = towards - basis @ (basis.mT @ towards)
    push = -2 * torch.linalg.solve_triangular(triangle, across, upper=False, left=False)
    return mixing, push.mT, geometry
