"""A rule's step on heads under LoRA: the particles are the heads of the effective weight, the forces go to A and B.

theta = W + sum_a s_a B_a A_a, [d_out, d_in], with W frozen, A_a [r, d_in] and B_a [d_out, r]; particle h is the rows of
head h. With G = dL/dtheta the rule asks for the force F = K G + P theta - alpha R (see `Mixing`), whose matrices mix
heads, and the optimizer gets J^T F (see `Carrier`): s F A^T for B and s B^T F for A. Both are exact:

* P theta and R depend on the parameters alone.
* K G on B: autograd's dL/dB = s G A^T, and mixing rows commutes with a factor from the right.
* K G on A: s B^T K G = s (K^T B)^T G, what autograd would give A if B were K^T B. `low_rank_drive` has it compute that,
  so that G, as large as W, is never formed. Under dropout both take the G of the dropped inputs that A sees.

Norms are those of the forces on B, whose rows belong to heads; A is shared, also by the projections of a fused layer.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.repulsion.carriers import Carrier, Forces, list_carriers, norm_of, write_forces
from headwise.repulsion.force_norms import ForceNorms
from headwise.repulsion.gram import (
    Geometry,
    add_up,
    find_collapsed,
    geometry_from_grams,
    plain_gram,
    shifted_gram,
    squared_norms,
)
from headwise.repulsion.groups import ParticleGroup
from headwise.repulsion.mixing import (
    Mixing,
    Strength,
    add_mixed,
    add_repulsion,
    find_strength,
    repulsion_factor,
    scale_prior,
)
from headwise.repulsion.rules import Rule


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
