"""The functions of a model's heads, and one step of `FunctionSVGD` on them.

Owns which two parts of a site make a product, and the writing of forces into gradients. The equations are
`function_rules`', the hooks `attachments`'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.errors import LayoutError, SettingError
from headwise.heads.head_slice import HeadSlice
from headwise.heads.heads import Heads
from headwise.heads.site import Site
from headwise.nn.additive import AdditiveAttention
from headwise.repulsion.function_rule import FunctionSVGD, products, pulled_back
from headwise.repulsion.gram import collapsed, geometry_from_grams, plain_gram, shifted_gram
from headwise.repulsion.mixing import Mixing, repulsion_scale
from headwise.repulsion.step import Ensemble, ForceNorms


@dataclass(frozen=True, eq=False)
class FunctionEnsemble(Ensemble):
    """M heads whose function is the product of two slices, or of one and of a module's weight that all heads share.

    Attributes:
        shared: The module of that weight, [e, b]; None where both factors are the head's own.
    """

    shared: nn.Module | None = None

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A [M, e, a] and B [M, e, b] in at least single precision."""
        first = _rows(self.slices[0], self.slices[0].parameter)
        if self.shared is None:
            second = _rows(self.slices[1], self.slices[1].parameter)
        else:
            # one row of a score matrix is a column of A
            first, weight = first.mT, self.shared._parameters["weight"]
            assert weight is not None
            second = weight.detach().expand(len(first), -1, -1)
        dtype = torch.promote_types(first.dtype, torch.float32)
        return first.detach().to(dtype), second.detach().to(dtype)


def function_ensembles_of(heads: Heads) -> tuple[FunctionEnsemble, ...]:
    """Return the query-key and the output-value products of each site, of the projections selected.

    Raises:
        LayoutError: W_O of a site was not found, or the projections selected make no product.
        SettingError: A site has fewer key/value heads than query heads, or its parameters are divided over processes.
    """
    found: list[FunctionEnsemble] = []
    for site in heads.sites:
        if isinstance(site.module, AdditiveAttention):
            if "query" in heads.projections:
                found.append(FunctionEnsemble(f"{site.name} scores".strip(), site.slices, site.module.hidden))
            continue
        if site.num_heads != site.key_value_heads:
            raise SettingError(
                f"{site.name}: {site.num_heads} query heads share {site.key_value_heads} key/value heads, so that no "
                "head has a function of its own parameters alone; take SVGD, which repels parameters."
            )
        found += _of_site(site, heads.projections)
    if not found:
        raise LayoutError(
            f"the projections {', '.join(heads.projections)} make no product; select query and key, value, or all."
        )
    for ensemble in found:
        if ensemble.sharded:
            raise SettingError(
                f"{ensemble.name} is divided over processes, and FunctionSVGD reads whole heads; take SVGD there."
            )
    return tuple(found)


def _of_site(site: Site, projections: Sequence[str]) -> list[FunctionEnsemble]:
    slices = {head_slice.projection: head_slice for head_slice in site.slices}
    found = []
    if {"query", "key"} <= set(projections):
        found.append(FunctionEnsemble(f"{site.name} query-key".strip(), (slices["query"], slices["key"])))
    if "value" in projections:
        if site.output is None:
            raise LayoutError(
                f"{site.name or 'the model'}: no output projection of its heads was found, so what they add is not "
                "known; select heads.projection('query', 'key')."
            )
        found.append(FunctionEnsemble(f"{site.name} output-value".strip(), (site.output, slices["value"])))
    return found


@torch.no_grad()
def apply_function_rule(
    rule: FunctionSVGD, ensembles: Sequence[Ensemble], *, strength: float, scale: Tensor | None
) -> ForceNorms | None:
    """Replace the gradient of every ensemble by what the rule says, in place; None when none has a gradient.

    Args:
        rule: The rule.
        ensembles: From `function_ensembles_of`; those without a gradient are skipped and named.
        strength: Multiplies the repulsion.
        scale: What the gradients are multiplied by (a GradScaler's scale), or None.
    """
    records, skipped = [], []
    for ensemble in ensembles:
        assert isinstance(ensemble, FunctionEnsemble)
        gradients = ensemble.gradients()
        if gradients is None:
            skipped.append(ensemble.name)
        else:
            views = [head_slice.view(gradient) for head_slice, gradient in zip(ensemble.slices, gradients, strict=True)]
            records.append(_apply(rule, ensemble, views, strength, scale))
    if not records:
        return None
    forces = ForceNorms.joined(records)
    return ForceNorms(**{**vars(forces), "skipped": tuple(skipped)})


def _apply(
    rule: FunctionSVGD, ensemble: FunctionEnsemble, gradients: list[Tensor], strength: float, scale: Tensor | None
) -> ForceNorms:
    first, second = ensemble.factors()
    functions = products(first, second)
    shifted = shifted_gram(functions)
    geometry = geometry_from_grams(shifted, plain_gram(functions) if rule.needs_inner else None)
    mixing = rule.mixing(geometry)
    forces = pulled_back(_mixed(mixing.repulsion, functions), first, second)
    pushes = [_as_view(ensemble, index, forces[index]) for index in range(len(gradients))]
    coefficients = mixing.drive.to(first.dtype).diagonal().view(-1, 1, 1)
    drives = [coefficients * gradient.to(first.dtype) for gradient in gradients]
    drive_norm, push_norm = _norm(drives), _norm(pushes)
    factor = _factor(mixing, drive_norm, push_norm, strength, scale)
    finite = drive_norm.isfinite() & (factor * push_norm).isfinite()
    for gradient, drive, push in zip(gradients, drives, pushes, strict=True):
        # a gradient that is not finite stays as it is, for the loop or a GradScaler to notice
        torch.where(finite, (drive - factor * push).to(gradient.dtype), gradient, out=gradient)
    unscale = 1.0 if scale is None else scale.reciprocal()
    sizes = [
        torch.linalg.vector_norm(head_slice.view(head_slice.parameter).float(), dim=(1, 2))
        for head_slice in ensemble.slices
    ]
    return ForceNorms(
        (ensemble.name,),
        (drive_norm * unscale).view(1),
        (factor * push_norm * unscale).view(1),
        torch.stack([size.square() for size in sizes]).sum(0).sqrt().mean().view(1),
        finite.view(1),
        collapsed(geometry).view(1),
        (ensemble.particles,),
    )


def _rows(head_slice: HeadSlice, tensor: Tensor) -> Tensor:
    """Return the heads of a tensor shaped like the parameter as [M, e, other], whichever way the weight lies."""
    view = head_slice.view(tensor)
    return view if head_slice.axis == 0 else view.mT


def _as_view(ensemble: FunctionEnsemble, index: int, force: Tensor) -> Tensor:
    if ensemble.shared is not None:
        return force.mT
    return force if ensemble.slices[index].axis == 0 else force.mT


def _mixed(repulsion: Tensor, functions: Tensor) -> Tensor:
    """Return sum_j repulsion_ij F_j by way of the differences from F_0: nearly equal functions lose no digits."""
    coefficients = repulsion.to(functions.dtype)
    origin = functions[:1]
    differences = torch.tensordot(coefficients, functions - origin, dims=1)
    return differences + repulsion.sum(-1).to(functions.dtype).view(-1, 1, 1) * origin


def _norm(forces: Sequence[Tensor]) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(force) for force in forces]).norm()


def _factor(mixing: Mixing, drive: Tensor, push: Tensor, strength: float, scale: Tensor | None) -> Tensor:
    """Return what the repulsion is multiplied by: schedule, gradient scale, relative strength."""
    factor = strength * repulsion_scale(mixing, drive, push)
    # a relative strength follows the drive, which carries the gradient scale already
    return factor if scale is None or mixing.relative is not None else factor * scale
