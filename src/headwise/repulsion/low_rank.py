"""A rule's step on heads under LoRA: the particles are the heads of the effective weight, the forces go to A and B.

theta = W + sum_a s_a B_a A_a, [d_out, d_in], with W frozen, A_a [r, d_in] and B_a [d_out, r]; particle h is the rows of
head h. With G = dL/dtheta the rule asks for the force F = K G + P theta - alpha R (see `Mixing`), whose matrices mix
heads, and the optimizer gets J^T F (see `Carrier`): s F A^T for B and s B^T F for A. Both are exact:

* P theta and R depend on the parameters alone.
* K G on B: autograd's dL/dB = s G A^T, and mixing rows commutes with a factor from the right.
* K G on A: s B^T K G = s (K^T B)^T G, what autograd would give A if B were K^T B. `low_rank_drive` has it compute that,
  so that G, as large as W, is never formed. Under dropout both take the G of the dropped inputs that A sees.

Norms are those of the forces on B, whose rows belong to heads; A is shared, also by the projections of a fused layer.

The driving term of A under LoRA: backward passes give A the gradient it would have if B were K^T B.

An adapter computes s B A x. With G = dL/d(s B A) autograd gives A the gradient s B^T G, and the rule asks for
s B^T K G = s (K^T B)^T G. Since G = g^T x over tokens, g the gradient of the adapter's output [T, d_out], only the
product g B [T, r] on the way back to A is replaced, by g (K^T B): r numbers per token more and no matrix as large as W.
Sums over micro-batches and processes, and the factor of a GradScaler, stay what autograd makes of them. The values of
the forward pass and the gradients of B, of the inputs and of all else do not change.
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
from headwise.kernels import (
    Geometry,
    add_up,
    find_collapsed,
    geometry_from_grams,
    plain_gram,
    shifted_gram,
    squared_norms,
)
from headwise.nn.hooks import Handle, PerThread, read_first_argument, replace_first_argument
from headwise.repulsion.groups import Carrier, ForceNorms, Forces, ParticleGroup, list_carriers, norm_of, write_forces
from headwise.repulsion.rules import (
    Mixing,
    Rule,
    Strength,
    add_mixed,
    add_repulsion,
    find_strength,
    repulsion_factor,
    scale_prior,
)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What a rule says of a group at its present parameters: coefficients, geometry, mean norm of the particles."""

    mixing: Mixing
    geometry: Geometry
    particle_norm: Tensor


class Evaluations:
    """A rule's evaluations of groups, each computed once until parameters change, and then all in one batch."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._known: dict[ParticleGroup, tuple[object, Evaluation | None]] = {}

    def of(self, group: ParticleGroup) -> Evaluation:
        """Return the evaluation of a group at its present parameters."""
        state, evaluation = self._known.get(group, (None, None))
        if evaluation is None or state != _describe_state(group):
            self._renew(group)
            _, evaluation = self._known[group]
        assert evaluation is not None  # it was renewed
        return evaluation

    def forget(self) -> None:
        """Forget all, before the parameters change: an optimizer may write them in ways that leave no trace."""
        self._known = dict.fromkeys(self._known, (None, None))

    def _renew(self, group: ParticleGroup) -> None:
        """Evaluate a group, and all others whose parameters have changed."""
        batches: dict[tuple[int, torch.device], dict[ParticleGroup, object]] = defaultdict(dict)
        for own in {**self._known, group: None}:
            state = _describe_state(own)
            if self._known.get(own, (None, None))[0] != state:
                batches[own.particles, own.parameters[0].device][own] = state
        for batch in batches.values():
            found = _evaluate(self.rule, list(batch))
            self._known |= {own: (batch[own], evaluation) for own, evaluation in zip(batch, found, strict=True)}


@torch.no_grad()
def apply_low_rank(
    evaluations: Evaluations, groups: Sequence[ParticleGroup], *, strength: Strength, scale: Tensor | None
) -> ForceNorms | None:
    """Replace the gradients of A and B of every group in place by those of the rule; None when none has a gradient."""
    ready = [group for group in groups if group.gradients() is not None]
    records = [_apply(evaluations, group, find_strength(strength, group.name), scale) for group in ready]
    evaluations.forget()
    return ForceNorms.join(records) if records else None


def _apply(evaluations: Evaluations, group: ParticleGroup, strength: float, scale: Tensor | None) -> ForceNorms:
    evaluation = evaluations.of(group)
    mixing, needs_inner = evaluation.mixing, evaluations.rule.needs_inner
    prior = scale_prior(mixing, scale)
    medoid = evaluation.geometry.squared_distances.sum(-1).argmin(-1)
    carriers: list[Carrier] = []
    driving: list[Forces] = []
    pushes: list[Forces] = []
    for head_slice in group.slices:
        heads = head_slice.read()
        heads = heads.to(torch.promote_types(heads.dtype, torch.float32))
        push = torch.zeros_like(heads, memory_format=torch.contiguous_format)
        add_repulsion(push, mixing.repulsion, heads, torch.empty_like(push), medoid, needs_inner)
        pull = None
        if prior is not None:
            pull = torch.empty_like(push)
            add_mixed(pull, prior, heads, beta=0)
        for carrier in list_carriers(head_slice):
            gradient, shared = carrier.own, carrier.shared
            own = torch.empty(gradient.shape, dtype=heads.dtype, device=heads.device)
            add_mixed(own, mixing.drive, gradient, beta=0)
            if pull is not None:
                pulled, also = carrier.pull(pull)
                own, shared = own + pulled, None if shared is None or also is None else shared + also
            carriers.append(carrier)
            driving.append((own, shared))
            pushes.append(carrier.pull(push))
    driving_norm, push_norm = norm_of(driving), norm_of(pushes)
    factor = repulsion_factor(mixing, driving_norm, push_norm, strength, scale)
    finite = driving_norm.isfinite() & (factor * push_norm).isfinite()
    finite = write_forces(carriers, driving, pushes, factor, finite)
    unscale = 1.0 if scale is None else scale.reciprocal()
    return ForceNorms(
        (group.name,),
        (driving_norm * unscale).view(1),
        (factor * push_norm * unscale).view(1),
        evaluation.particle_norm.to(driving_norm.dtype).view(1),
        finite.view(1),
        find_collapsed(evaluation.geometry).view(1),
        (group.particles,),
    )


@torch.no_grad()
def _evaluate(rule: Rule, groups: Sequence[ParticleGroup]) -> list[Evaluation]:
    """Return what a rule says of groups of equally many particles."""
    shifted, plain, squares = [], [], []
    for group in groups:
        with torch.autocast(group.parameters[0].device.type, enabled=False):
            views = [head_slice.read() for head_slice in group.slices]
        shifted.append(add_up([shifted_gram(view) for view in views]))
        squares.append(add_up([squared_norms(view) for view in views]))
        if rule.needs_inner:
            plain.append(add_up([plain_gram(view) for view in views]))
    distances = geometry_from_grams(torch.stack(shifted), torch.stack(plain) if rule.needs_inner else None)
    mixing = rule.mixing(distances)
    norms = torch.stack(squares).sqrt().mean(-1)
    evaluations = []
    for index in range(len(groups)):
        inner = None if distances.inner is None else distances.inner[index]
        prior = None if mixing.prior is None else mixing.prior[index]
        evaluations.append(
            Evaluation(
                Mixing(mixing.drive[index], prior, mixing.repulsion[index], mixing.relative),
                Geometry(distances.squared_distances[index], inner),
                norms[index],
            )
        )
    return evaluations


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
        members: dict[tuple[nn.Module, str], list[Member]] = defaultdict(list)
        adapters: dict[tuple[nn.Module, str], Adapter] = {}
        for group in groups:
            for head_slice in group.slices:
                # the columns of W_O are heads: there A is divided by heads
                if head_slice.lora is None or head_slice.projection == "output":
                    continue
                for adapter in head_slice.adapters:
                    if adapter.trained:
                        adapters[adapter.down, adapter.name] = adapter
                        members[adapter.down, adapter.name].append((group, head_slice))
        self.routes = [Route(adapter, members[key], drive) for key, adapter in adapters.items()]
        for route in self.routes:
            route.refresh()
            self.hook_before(route.adapter.down, route.before_down)
            self.hook_after(route.adapter.down, route.after_down)
            self.hook_after(route.adapter.up, route.after_up)

    def refresh_after(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Mix B as the parameters are after a step: a compiled forward pass cannot ask what changed."""
        for route in self.routes:
            # an optimizer may write parameters in ways that leave no trace
            route.forget()
            route.refresh()

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


class _Call:
    """What the running call of an adapter was given, and A x of it."""

    def __init__(self) -> None:
        self.inputs: Tensor | None = None
        self.hidden: Tensor | None = None


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

    def forget(self) -> None:
        """Forget what B was mixed from."""
        self._mixed_from = None, []

    @torch.no_grad()
    def refresh(self) -> None:
        """Mix B again unless nothing changed; in place, since a compiled graph holds the tensor."""
        second, drives = self.adapter.second, [self._drive(group) for group, _ in self.members]
        state = (id(second), second.data_ptr(), second._version)
        known, before = self._mixed_from
        if state == known and all(one is other for one, other in zip(drives, before, strict=True)):
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
