"""Whether heads can be pushed apart at all: several of them, finite, and not equal; and `jitter` where they are.

Owns the refusals that look at the values of parameters, so they wait for the device; none is made in a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from headwise.errors import HeadwiseError, LayoutError, require_integer, require_positive
from headwise.heads.head_slice import HeadSlice
from headwise.heads.heads import Heads, require_heads
from headwise.heads.site import PROJECTIONS
from headwise.parallel import is_sharded, whole, write_own_part
from headwise.repulsion.gram import geometry, geometry_from_grams, shifted_gram
from headwise.repulsion.rules import Rule
from headwise.repulsion.step import Ensemble, noise_key


def acts_apart(rule: Rule) -> bool:
    """Whether a rule moves each head by itself, so that it can act on one: `SGLD`, or `SVGD` with nothing but a scale.

    >>> from headwise.repulsion.rules import SGLD, SVGD
    >>> acts_apart(SGLD(inverse_temperature=4.0)), acts_apart(SVGD(alpha=0.0))
    (True, False)
    """
    mixing = rule.mixing(geometry(torch.eye(2, dtype=torch.float64), inner=rule.needs_inner))
    return not bool((mixing.drive - mixing.drive.diag().diag()).any() or mixing.repulsion.any())


def require_several(ensembles: Sequence[Ensemble], heads: Heads) -> None:
    """Raise `LayoutError` where no ensemble has more than one particle, and say which projections have."""
    if any(ensemble.particles > 1 for ensemble in ensembles):
        return
    grouped = {
        head_slice.projection: head_slice.heads for site in heads for head_slice in site.slices if head_slice.heads > 1
    }
    choose = " or ".join(f"heads.projection({name!r})" for name in PROJECTIONS if name in grouped)
    listed = ", ".join(f"{ensemble.name}: {ensemble.particles}" for ensemble in ensembles[:4])
    raise LayoutError(
        f"no ensemble has more than one particle ({listed}{', ...' if len(ensembles) > 4 else ''}), and one head has "
        "nothing to be repelled from; "
        + (
            f"choose {choose}, with {max(grouped.values())} heads a layer."
            if grouped
            else "select sites with more heads."
        )
    )


def require_apart(ensemble: Ensemble) -> None:
    """Raise `HeadwiseError` where heads of an ensemble are not finite, or all of them equal; `LayoutError` on meta."""
    for head_slice in ensemble.slices:
        _require_finite(head_slice)
    if ensemble.particles > 1 and spread(ensemble) == 0.0:
        raise HeadwiseError(
            f"{ensemble.name}: all {ensemble.particles} heads are equal, so their repulsion is zero and stays so. "
            "Separate them with hw.jitter(heads, scale), for example scale=1e-3."
        )


def spread(ensemble: Ensemble) -> float:
    """Return the largest distance between two particles."""
    with torch.no_grad():
        gram = sum(
            (shifted_gram(head_slice.view(whole(head_slice.parameter))) for head_slice in ensemble.slices),
            torch.zeros(()),
        )
        return math.sqrt(float(geometry_from_grams(gram, None).squared_distances.max()))


def jitter(heads: Heads, scale: float, *, seed: int = 0) -> None:
    """Separate equal heads: add N(0, (scale * r)^2) to every head's parameters, r their root mean square.

    Equal heads have zero repulsion and equal gradients, so no rule can separate them.

    Args:
        heads: Which heads.
        scale: Size of the noise relative to the parameters, above 0; 1e-3 is enough.
        seed: Seed of the noise, at least 0.

    Raises:
        SettingError: `scale` is not above 0, or `heads` is no selection of heads.
        LayoutError: The model was changed since its heads were found.
        HeadwiseError: A parameter is not finite. Nothing is changed then.

    Example:
        >>> import headwise as hw
        >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> jitter(hw.find_heads(model), 1e-3)
    """
    require_heads(heads)
    require_positive("scale", scale)
    require_integer("seed", seed)
    for head_slice in heads.slices():
        _require_finite(head_slice)
    with torch.no_grad():
        for head_slice in heads.slices():
            sharded = is_sharded(head_slice.parameter)
            every = whole(head_slice.parameter)
            view = head_slice.view(every)
            size = view.float().square().mean().sqrt()
            generator = torch.Generator(view.device).manual_seed(
                noise_key(seed, "jitter", head_slice.name, head_slice.projection)
            )
            noise = torch.randn(view.shape, generator=generator, device=view.device)
            view.add_((noise * (scale * torch.where(size > 0, size, 1.0))).to(view.dtype))
            if sharded:
                write_own_part(head_slice.parameter, every)


def _require_finite(head_slice: HeadSlice) -> None:
    if head_slice.parameter.is_meta:
        raise LayoutError(f"{head_slice.name} is on the meta device and has no values; load the weights first.")
    with torch.no_grad():
        sound = head_slice.view(whole(head_slice.parameter)).isfinite().flatten(1).all(1)
    if not sound.all():
        raise HeadwiseError(
            f"{head_slice.name} holds NaN or infinity in {head_slice.projection} heads "
            f"{(~sound).nonzero().flatten().tolist()} of {head_slice.heads}; repulsion needs finite heads. "
            "Load finite weights, or look for the step that produced them."
        )
