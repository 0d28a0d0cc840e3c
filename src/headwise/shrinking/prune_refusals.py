"""Attentions whose heads cannot be removed: removing them would not be ablating them."""

import inspect
import re
from collections.abc import Mapping, Sequence

from headwise.errors import LayoutError, SettingError
from headwise.heads.functional import hands_to_attention
from headwise.heads.head_runs import HeadRuns
from headwise.heads.head_stack import HeadStack
from headwise.heads.heads import Heads, Site
from headwise.heads.query_groups import list_sharing
from headwise.nn.difference import find_difference
from headwise.nn.multihead import MultiheadAttention
from headwise.routing.save import find_aggregators
from headwise.shrinking.prune_cuts import list_gone

# A bias for each distance and head, which the layers of a stack may share.
_TABLE = re.compile(r"(?:^|\.)(?:relative_attention_bias|rel_attn_embed)\.weight$")
# What tells such a layer whether it holds the table.
_HELD = "has_relative_attention_bias"
# A value of each head that comes from outside of the attention.
_GIVEN = {"alibi": "ALiBi slopes", "value_embeds": "value embeddings"}

RemovedHeads = Mapping[Site, Sequence[int]]


def require_prunable(heads: Heads, site: Site, removed: RemovedHeads) -> None:
    """Raise unless heads can be removed from a site.

    Raises:
        SettingError: It would lose all its heads.
        LayoutError: What it computes would not be what it computes with the heads ablated.
    """
    gone = removed[site]
    if len(gone) == site.num_heads:
        raise SettingError(f"{site.label} would lose all its {site.num_heads} heads; expected at least one that stays.")
    reason = (
        find_obstacle(heads, site, "use hw.ablate")
        or _find_parts(site, gone)
        or _find_shared_table(heads, site, removed)
        or _find_shared_keys(heads, site, removed)
    )
    if reason is not None:
        raise LayoutError(f"{site.label} ({type(site.module).__name__}) {reason}")


def find_obstacle(heads: Heads, site: Site, otherwise: str) -> str | None:
    """Return why the heads of a site cannot be taken apart, and what to do; None where they can.

    Args:
        heads: All sites of the model that were found.
        site: The site.
        otherwise: What to do where nothing helps.
    """
    found = _find_wrapping(heads, site) or _find_form(site) or _find_given(heads, site)
    return None if found is None else f"{found[0]}; {found[1] or otherwise}."


# What is in the way, and what helps; None where nothing does.
Obstacle = tuple[str, str | None]


def _find_wrapping(heads: Heads, site: Site) -> Obstacle | None:
    if heads.replicated:
        return (
            "is wrapped by DistributedDataParallel, which holds the parameters as they were",
            "take the model out of it (.module), find heads there, and wrap it again afterwards",
        )
    if site.divided:
        return "is divided by tensor parallelism", "do it before the model is divided"
    return None


def _find_form(site: Site) -> Obstacle | None:
    if hands_to_attention(site):
        return "hands its weights to torch's function, which takes as many heads as its width holds", None
    added = next((name for name in ("head_gates", "head_mixer") if name in site.module._modules), None)
    if added is not None:
        return (
            f"has {added}, made for all heads",
            "remove them (remove() of their handle) first, and attach new ones afterwards",
        )
    if find_difference(site.module) is not None and not isinstance(site.module, MultiheadAttention):
        return "has head_difference, which no folder that transformers or hw.load reads can hold", None
    if any(isinstance(head_slice, HeadStack) for head_slice in site.slices):
        return (
            "keeps its heads in a list of modules",
            "delete them there, and their columns of the output projection, and find heads again",
        )
    if site.output is None:
        module = None if site.output_projection is None else site.output_projection.module
        if module is not None and find_aggregators(module):
            return (
                f"has {type(module).__name__} as its output, built for all heads",
                "remove it (remove() of its handle) first, and call hw.aggregate afterwards",
            )
        if module is None:
            return "has no output projection that was found", "name it in a layout row of your own (output=...)"
        if not list(module.children()):
            alone = "which takes all of them together, so the others change when one is removed"
            return f"passes its heads through a {type(module).__name__} before W_O, {alone}", None
        return "has no linear output projection that was found, so its columns cannot be removed", None
    return None


def _find_given(heads: Heads, site: Site) -> Obstacle | None:
    """Return what of each head is computed outside of the attentions, for all heads, and given to this one."""
    arguments = inspect.signature(type(site.module).forward).parameters
    config = getattr(site.module, "config", None)
    given = [what for name, what in _GIVEN.items() if name in arguments and getattr(config, name, True) is not False]
    # of T5, which holds tables itself, the cross attention has none
    if "position_bias" in arguments and not hasattr(site.module, _HELD) and not _list_tables(_list_alike(heads, site)):
        given.append("position biases")
    read = {id(parameter) for other in heads.found for parameter in other.module.parameters()}
    outside = [name for name, table in heads.model.named_parameters() if _TABLE.search(name) and id(table) not in read]
    given += [f"the position biases {name}" for name in outside]
    return (f"is given {given[0]} of each head that are computed elsewhere, for all of them", None) if given else None


def _find_parts(site: Site, gone: Sequence[int]) -> str | None:
    if not all(isinstance(head_slice, HeadRuns) for head_slice in site.slices):
        return None
    run = site.slices[0].parts[0].heads
    left = [run - sum(head // run == part for head in gone) for part in range(site.num_heads // run)]
    if len({*left}) == 1:
        return None
    return (
        f"holds its heads in {len(left)} parts of {run}, and removing heads {', '.join(map(str, gone))} would leave "
        f"{', '.join(map(str, left))} in them; remove equally many of each."
    )


def _find_shared_table(heads: Heads, site: Site, removed: RemovedHeads) -> str | None:
    """Return why the other layers of a stack must lose the same heads: they get their position biases of one table."""
    owner, alike = find_table_owner(heads, site), _list_alike(heads, site)
    if owner is None or len({tuple(removed.get(other, ())) for other in alike}) == 1:
        return None
    return (
        f"has the position biases of {owner.label}, as have the other layers of {site.stack}, so all of "
        f"them must lose the same heads: {{{', '.join(f'{other.name!r}: [...]' for other in alike[:2])}, ...}}."
    )


def _find_shared_keys(heads: Heads, site: Site, removed: RemovedHeads) -> str | None:
    """Return why other layers must lose the same groups: they compute with the same keys and values."""
    alike = list_sharing(heads.found, site)
    gone = {other: list_gone(other, removed.get(other, ()))["key"] for other in alike}
    if len({*gone.values()}) == 1:
        return None
    told = "; ".join(f"{other.label} group {', '.join(map(str, groups)) or 'none'}" for other, groups in gone.items())
    return (
        f"computes with the same keys and values as {', '.join(other.label for other in alike if other is not site)}, "
        f"and the key/value heads that would go are not the same ({told}); remove all query heads of the same groups "
        f"from each of them (group g has heads g * {site.num_heads // site.key_value_heads} and on)."
    )


def find_table_owner(heads: Heads, site: Site) -> Site | None:
    """Return the site whose table of position biases several layers share, a site among them; None without one."""
    alike = _list_alike(heads, site)
    owners = _list_tables(alike)
    return (owners or alike)[0] if hasattr(site.module, _HELD) and len(owners) < len(alike) else None


def _list_alike(heads: Heads, site: Site) -> list[Site]:
    return [other for other in heads.found if (other.stack, other.kind) == (site.stack, site.kind)]


def _list_tables(sites: Sequence[Site]) -> list[Site]:
    """Return the sites that hold a table of position biases."""
    return [site for site in sites if any(_TABLE.search(name) for name, _ in site.module.named_parameters())]
