"""Forces on what heads are trained through: W itself, or under LoRA the factors A and B of what is added to W.

theta = W + sum_a s_a B_a A_a, [d_out, d_in], with W frozen, A_a [r, d_in] and B_a [d_out, r]; particle h is the rows of
head h. With G = dL/dtheta the rule asks for the force F = K G + P theta - alpha R (see `Mixing`), whose matrices mix
heads, and the optimizer gets J^T F (see `Carrier`): s F A^T for B and s B^T F for A. Both are exact:

* P theta and R depend on the parameters alone.
* K G on B: autograd's dL/dB = s G A^T, and mixing rows commutes with a factor from the right.
* K G on A: s B^T K G = s (K^T B)^T G, what autograd would give A if B were K^T B. Since G = g^T x over tokens, g the
  gradient of the adapter's output [T, d_out], `DriveRoutes` replaces the product g B [T, r] on the way back to A by
  g (K^T B): r numbers per token more and no matrix as large as W. Sums over micro-batches and processes, and the factor
  of a GradScaler, stay what autograd makes of them. The values of the forward pass and all other gradients do not
  change. Under dropout both take the G of the dropped inputs that A sees.

Norms are of the forces on B, whose rows belong to heads; A is shared, also by the projections of a fused layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headwise.errors import NotFired
from headwise.heads.adapters import Adapter
from headwise.heads.view import HeadView
from headwise.kernels import Geometry, add_up, find_medoids, plain_gram, shifted_gram, squared_norms
from headwise.nn.hooks import Handle, PerThread, read_first_argument, replace_first_argument
from headwise.repulsion.groups import ForceNorms, ParticleGroup
from headwise.repulsion.rules import (
    Mixing,
    Rule,
    Strength,
    add_mixed,
    add_repulsion,
    find_strength,
    repulsion_factor,
    scale_prior,
    write_finite,
)
from headwise.repulsion.step import apply_rule, evaluate

# Forces on what is divided by heads, [M, ...], and on what the heads share; the latter None without LoRA.
Forces = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, eq=False)
class Carrier:
    """What one head slice is trained through: its parameter W, or one adapter of the LoRA layer that adds s B A to W.

    A force F on the effective weight theta = W + s B A, [d_out, d_in], is J^T F on A and B, J the derivative of theta:

    on B: s F A^T, [d_out, r], of which row c depends on row c of F alone, so that it is divided by heads as F is;
    on A: s B^T F, [r, d_in], a sum over heads, which share A.

    In W_O, whose heads are columns, A is divided by heads and B is shared. Without LoRA, J is the identity.

    Attributes:
        head_slice: The heads.
        adapter: The adapter; None where they are trained through W.
    """

    head_slice: HeadView
    adapter: Adapter | None = None

    @property
    def columns(self) -> bool:
        """Whether the heads are columns of the effective weight, as in W_O."""
        return self.head_slice.projection == "output"

    @property
    def factors(self) -> tuple[Tensor, Tensor] | None:
        """The factor that is divided by heads, and the one that all heads share; None without LoRA."""
        if self.adapter is None:
            return None
        first, second = self.adapter.first, self.adapter.second
        return (first, second) if self.columns else (second, first)

    @property
    def own(self) -> Tensor:
        """The part of the gradient that is divided by heads, [M, ...]: a view where there is one."""
        return _join(self._targets)

    @property
    def shared(self) -> Tensor | None:
        """The gradient of the factor that all heads share; None without LoRA."""
        factors = self.factors
        return None if factors is None else factors[1].grad

    @property
    def _targets(self) -> list[Tensor]:
        """The gradients that are divided by heads, as views of each part."""
        if self.adapter is None:
            return [part.of(_get_gradient(part.parameter)) for part in self.head_slice.parts]
        return self.list_own(_get_gradient(self.adapter.first), _get_gradient(self.adapter.second))

    def list_own(self, first: Tensor, second: Tensor) -> list[Tensor]:
        """Return the heads' own part of tensors of the shapes of A and B, as views, one for each part."""
        return [part.divide(first, second)[1 if self.columns else 0] for part in self.head_slice.parts]

    def mix(self, drive: Tensor | float, dtype: torch.dtype) -> Forces:
        """Return the driving term of coefficients [M, M], or of the share of its own gradient that each head keeps.

        The factor that rows share gets its driving term in the backward pass (`DriveRoutes`); the one that columns
        share has no per-head gradient, so it is scaled by the common share.
        """
        own, shared = self.own, self.shared
        if not isinstance(drive, Tensor):
            return drive * own.to(dtype), drive * shared if shared is not None and self.columns else shared
        mixed = torch.empty(own.shape, dtype=dtype, device=own.device)
        add_mixed(mixed, drive, own, beta=0)
        return mixed, shared

    def pull(self, force: Tensor) -> Forces:
        """Return J^T of a force on the heads, [M, a, b] as they are read: on `own` and on `shared`."""
        if self.adapter is None:
            return force, None
        force = self.adapter.scaling * self.head_slice.orient(force)
        first, second = self.adapter.first.detach(), self.adapter.second.detach()
        heads, shared = _join(self.list_own(first, second)), second if self.columns else first
        heads, shared = heads.to(force.dtype), shared.to(force.dtype)
        if self.columns:
            return shared.mT @ force, torch.einsum("hoe,hre->or", force, heads)
        return force @ shared.mT, heads.flatten(0, 1).mT @ force.flatten(0, 1)

    def list_targets(self, own: Tensor, shared: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Return each part of a force on `own` and on `shared`, with the gradient that it replaces."""
        targets, gradient = self._targets, self.shared
        pairs = list(zip(own.split([len(target) for target in targets]), targets, strict=True))
        return pairs if shared is None or gradient is None else [*pairs, (shared, gradient)]


def list_carriers(head_slice: HeadView) -> list[Carrier]:
    """Return what a head slice is trained through; frozen adapters are left out."""
    if head_slice.lora is None:
        return [Carrier(head_slice)]
    return [Carrier(head_slice, adapter) for adapter in head_slice.adapters if adapter.trained]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The coefficients of a rule for a group at its present parameters, its geometry and mean norm."""

    mixing: Mixing
    geometry: Geometry
    size: Tensor


def carry(
    group: ParticleGroup,
    found: Evaluation,
    pushes: Sequence[Tensor],
    priors: Sequence[Tensor] | None = None,
    share: float | None = None,
    *,
    strength: Strength,
    scale: Tensor | None,
) -> ForceNorms:
    """Replace the gradients of a group in place by driving term - s * push, both as what its heads are trained through.

    Args:
        group: The group.
        found: Its evaluation.
        pushes: The repulsion on the heads of each slice [M, a, b], in at least single precision.
        priors: The term of the prior, likewise; None when it is flat.
        share: The share of its own gradient that each head keeps; None where gradients are mixed.
        strength: Factor on the repulsion.
        scale: What the gradients are multiplied by (GradScaler).
    """
    drive = found.mixing.drive if share is None else share
    carriers: list[Carrier] = []
    driving: list[Forces] = []
    pulled: list[Forces] = []
    for index, head_slice in enumerate(group.slices):
        for carrier in list_carriers(head_slice):
            own, shared = carrier.mix(drive, pushes[index].dtype)
            if priors is not None:
                more, also = carrier.pull(priors[index])
                own, shared = own + more, None if shared is None or also is None else shared + also
            carriers.append(carrier)
            driving.append((own, shared))
            pulled.append(carrier.pull(pushes[index]))
    norm, push = (torch.stack([torch.linalg.vector_norm(own) for own, _ in term]).norm() for term in (driving, pulled))
    factor = repulsion_factor(found.mixing, norm, push, find_strength(strength, group.name), scale)
    forces: list[Tensor] = []
    targets: list[Tensor] = []
    for carrier, (own, shared), (push_own, push_shared) in zip(carriers, driving, pulled, strict=True):
        common = None if shared is None or push_shared is None else shared - factor * push_shared
        for force, target in carrier.list_targets(own - factor * push_own, common):
            forces.append(force)
            targets.append(target)
    finite = write_finite(forces, targets, norm + factor * push).isfinite()
    return ForceNorms.of([group], norm, factor * push, found.size, finite, found.geometry, scale)


def _join(views: list[Tensor]) -> Tensor:
    return views[0] if len(views) == 1 else torch.cat(views)


def _get_gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None  # groups without a gradient are skipped
    return gradient


class ParameterSpace:
    """The heads' parameters as particles: under LoRA, the heads of the effective weight.

    A rule's evaluation of a group under LoRA, which forward passes need too, is computed once until parameters change,
    and then together with all others.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._known: dict[ParticleGroup, tuple[object, Evaluation | None]] = {}

    def apply(self, groups: Sequence[ParticleGroup], *, strength: Strength, scale: Tensor | None) -> ForceNorms | None:
        """Replace the gradient of every group in place; None if no group has a gradient."""
        plain = [group for group in groups if not group.adapted]
        adapted = [group for group in groups if group.adapted and group.gradients() is not None]
        records = [
            apply_rule(self.rule, plain, strength=strength, scale=scale),
            *(self._carry(group, strength, scale) for group in adapted),
        ]
        # an optimizer may write parameters in ways that leave no trace
        self._known = dict.fromkeys(self._known, (None, None))
        return ForceNorms.join(records)

    def drive(self, group: ParticleGroup) -> Tensor:
        """Return the coefficients [M, M] of a group's driving term at its present parameters."""
        return self.evaluate(group).mixing.drive

    def evaluate(self, group: ParticleGroup) -> Evaluation:
        """Return the evaluation of a group at its present parameters."""
        if self._known.get(group, (None, None))[0] != _describe_state(group):
            batches: dict[tuple[int, torch.device], dict[ParticleGroup, object]] = defaultdict(dict)
            for own in {**self._known, group: None}:
                state = _describe_state(own)
                if self._known.get(own, (None, None))[0] != state:
                    batches[own.particles, own.parameters[0].device][own] = state
            for batch in batches.values():
                found = _evaluate(self.rule, list(batch))
                self._known |= {own: (batch[own], evaluation) for own, evaluation in zip(batch, found, strict=True)}
        evaluation = self._known[group][1]
        assert evaluation is not None
        return evaluation

    @torch.no_grad()
    def _carry(self, group: ParticleGroup, strength: Strength, scale: Tensor | None) -> ForceNorms:
        found = self.evaluate(group)
        repulsion, prior = found.mixing.repulsion, scale_prior(found.mixing, scale)
        medoid = find_medoids(found.geometry)
        pushes, priors = [], []
        for head_slice in group.slices:
            heads = head_slice.read()
            heads = heads.to(torch.promote_types(heads.dtype, torch.float32))
            push = torch.zeros_like(heads, memory_format=torch.contiguous_format)
            add_repulsion(push, repulsion, heads, torch.empty_like(push), medoid, self.rule.needs_inner)
            pushes.append(push)
            if prior is not None:
                priors.append(torch.empty_like(push))
                add_mixed(priors[-1], prior, heads, beta=0)
        return carry(group, found, pushes, priors or None, strength=strength, scale=scale)


@torch.no_grad()
def _evaluate(rule: Rule, groups: Sequence[ParticleGroup]) -> list[Evaluation]:
    """Return the evaluations of groups of equally many particles."""
    every = []
    for group in groups:
        with torch.autocast(group.parameters[0].device.type, enabled=False):
            every.append([head_slice.read() for head_slice in group.slices])

    def add(gram: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.stack([add_up([gram(view) for view in views]) for views in every])

    geometry, mixing, _ = evaluate(rule, add(shifted_gram), add(plain_gram) if rule.needs_inner else None)
    sizes = add(squared_norms).sqrt().mean(-1)
    priors = [None] * len(groups) if mixing.prior is None else mixing.prior.unbind()
    each = zip(mixing.drive, priors, mixing.repulsion, geometry.squared_distances, sizes, strict=True)
    return [
        Evaluation(Mixing(drive, prior, repulsion, mixing.relative), Geometry(distances, None), size)
        for drive, prior, repulsion, distances, size in each
    ]


def _describe_state(group: ParticleGroup) -> object:
    state: list[object] = []
    for part in group.parts:
        tensors: list[Tensor] = [part.parameter]
        for adapter in part.adapters:
            tensors += [adapter.first, adapter.second]
            state.append(adapter.scaling)
        state += [(id(tensor), tensor.data_ptr(), tensor._version) for tensor in tensors]
    return state


# A group, and the head slice of it that lies in one LoRA layer.
Member = tuple[ParticleGroup, HeadView]


class DriveRoutes(Handle):
    """Hooks on the adapters of some groups, which mix the driving term of A until `remove()`.

    Args:
        groups: Particle groups; those without LoRA need no hooks.
        drive: The coefficients K [M, M] of a group's driving term at its present parameters.
    """

    def __init__(self, groups: Sequence[ParticleGroup], drive: Callable[[ParticleGroup], Tensor]) -> None:
        super().__init__()
        members: dict[tuple[nn.Module, str], tuple[Adapter, list[Member]]] = {}
        for group in groups:
            for head_slice in group.slices:
                # the columns of W_O are heads: there A is divided by heads
                if head_slice.lora is None or head_slice.projection == "output":
                    continue
                for adapter in head_slice.adapters:
                    if adapter.trained:
                        _, held = members.setdefault((adapter.down, adapter.name), (adapter, []))
                        held.append((group, head_slice))
        self.routes = [Route(*one, drive) for one in members.values()]
        for route in self.routes:
            route.refresh()
            self.hook_before(route.adapter.down, route.before_down)
            self.hook_after(route.adapter.down, route.after_down)
            self.hook_after(route.adapter.up, route.after_up)

    def refresh_after(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Mix B as the parameters are after a step: a compiled forward pass cannot ask what changed."""
        for route in self.routes:
            # an optimizer may write parameters in ways that leave no trace
            route.refresh(always=True)

    def require_taken(self) -> None:
        """Raise `NotFired` where A has a gradient that did not come this way."""
        for route in self.routes:
            if not route.taken and route.adapter.first.grad is not None:
                name = route.members[0][1].name
                raise NotFired(
                    f"the adapter {route.adapter.name!r} of {name} has a gradient from a forward pass that ran without "
                    "the repulsion: before hw.repel, or compiled before it. Call hw.repel before the forward pass "
                    "(and before torch.compile), and zero_grad() now."
                )


@dataclass
class _Call:
    """The inputs of a running call of an adapter, and A x of them."""

    inputs: Tensor | None = None
    hidden: Tensor | None = None


class Route:
    """The way of the gradient to A in one adapter.

    Attributes:
        adapter: The adapter.
        members: The groups and head slices whose rows B has.
        mixed: K^T B, [d_out, r]: B with the rows of each group mixed, other rows as they are.
        taken: Whether a forward pass took it yet.
    """

    def __init__(self, adapter: Adapter, members: Sequence[Member], drive: Callable[[ParticleGroup], Tensor]) -> None:
        self.adapter, self.members, self.taken = adapter, tuple(members), False
        self.mixed = adapter.second.detach().clone()
        self._drive = drive
        self._mixed_from: tuple[object, list[Tensor]] = None, []
        self._call = PerThread(_Call)

    def before_down(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Give A x no gradient in x: `after_down` adds it."""
        call = self._call.own
        call.inputs = call.hidden = None
        if not torch.is_grad_enabled() or not self.adapter.trained:
            return None
        call.inputs = read_first_argument(module, args, kwargs)
        return replace_first_argument(args, kwargs, call.inputs.detach())

    def after_down(self, _module: nn.Module, _args: tuple, output: Tensor) -> Tensor | None:
        """Keep A x, whose gradient goes to A, and return the same numbers, whose gradient goes to x."""
        call = self._call.own
        inputs, call.inputs = call.inputs, None
        if inputs is None:
            return None
        call.hidden = output
        passed: Tensor = _ToInput.apply(output.detach(), inputs, self.adapter.first.detach())
        return passed

    def after_up(self, _module: nn.Module, _args: tuple, output: Tensor) -> Tensor | None:
        """Return B A x, from which A gets its gradient through K^T B."""
        call = self._call.own
        hidden, call.hidden = call.hidden, None
        if hidden is None:
            return None
        self.taken = True
        if not torch.compiler.is_compiling():
            self.refresh()
        routed: Tensor = _ThroughMixed.apply(output, hidden, self.mixed)
        return routed

    @torch.no_grad()
    def refresh(self, *, always: bool = False) -> None:
        """Mix B again unless nothing changed; in place, since a compiled graph holds the tensor."""
        second, drives = self.adapter.second, [self._drive(group) for group, _ in self.members]
        state = (id(second), second.data_ptr(), second._version)
        known, before = self._mixed_from
        if not always and state == known and all(one is other for one, other in zip(drives, before, strict=True)):
            return
        if self.mixed.dtype != second.dtype or self.mixed.device != second.device:
            self.mixed = second.clone()
        self.mixed.copy_(second)
        with torch.autocast(second.device.type, enabled=False):
            for drive, (_, head_slice) in zip(drives, self.members, strict=True):
                own = Carrier(head_slice, self.adapter).list_own(self.adapter.first, self.mixed)
                rows = torch.cat(own)
                add_mixed(rows, drive.mT, rows.clone(), beta=0)
                for target, heads in zip(own, rows.split([len(target) for target in own]), strict=True):
                    target.copy_(heads)
        self._mixed_from = state, drives


class _ToInput(torch.autograd.Function):
    """A x as it is, [..., r], with the gradient of A x in x alone."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.dtype = inputs.dtype
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        (weight,) = ctx.saved_tensors
        return None, (grads[0] @ weight.to(grads[0].dtype)).to(ctx.dtype), None


class _ThroughMixed(torch.autograd.Function):
    """B h as it is, [..., d_out], with the gradient of h as if B were another matrix [d_out, r]."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, hidden: Tensor, mixed: Tensor) -> Tensor:
        ctx.save_for_backward(mixed)
        ctx.dtype = hidden.dtype
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (mixed,) = ctx.saved_tensors
        return grads[0], (grads[0] @ mixed.to(grads[0].dtype)).to(ctx.dtype), None
