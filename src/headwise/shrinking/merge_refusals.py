"""Attentions whose key and value heads cannot be merged."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from headwise.errors import LayoutError, SettingError, require_integer
from headwise.heads.head_slice import is_sharded
from headwise.heads.heads import PROJECTIONS, Heads, Site
from headwise.heads.replay import draw_noise
from headwise.shrinking.grouping import group_in_order
from headwise.shrinking.merge_moments import Batch
from headwise.shrinking.prune_beside import list_beside, list_guessed
from headwise.shrinking.prune_counts import counts_groups
from headwise.shrinking.prune_proof import run
from headwise.shrinking.prune_refusals import find_obstacle, find_table_owner

# What to do where nothing helps.
_LEAVE = "leave its heads as they are, and select the others (heads.where)"


def require_mergeable(heads: Heads, groups: int, *, moves: bool) -> None:
    """Raise unless the key/value heads of all sites can become `groups` ones.

    Args:
        heads: The sites.
        groups: Key/value heads of each afterwards.
        moves: Whether query heads may move to other places.

    Raises:
        SettingError: A site has no more key/value heads than that, or a number that does not divide into it.
        LayoutError: Its code takes no fewer, or something of it belongs to each key/value head.
    """
    require_integer("groups", groups, low=1)
    for site in heads:
        if groups >= site.key_value_heads:
            raise SettingError(
                f"groups is {groups}, and {site.label} has {site.key_value_heads} key/value heads; expected fewer."
            )
        reason = find_obstacle(heads, site, _LEAVE) or _find_form(site, moves=moves)
        if reason is not None:
            raise LayoutError(f"{site.label} ({type(site.module).__name__}) {reason}")
        owner = find_table_owner(heads, site) if moves else None
        if owner is not None:
            raise LayoutError(
                f"{site.label} has the position biases of {owner.label}, as have the other layers of {site.stack}, so "
                'its query heads must stay where they are; use grouping="order".'
            )
        group_in_order(site.key_value_heads, groups)
        _require_own(heads.found, site)


def require_unread(heads: Heads, batch: Batch) -> None:
    """Raise `LayoutError` where something other than the sites themselves reads their keys or values."""
    if not _are_read(heads.model, heads.sites, batch):
        return
    read = [site.label for site in heads if _are_read(heads.model, [site], batch)]
    others = "; select the other attentions (heads.where), or" if 0 < len(read) < len(heads) else ";"
    raise LayoutError(
        f"the keys and values of {', '.join(read[:6]) or 'these attentions'} are read by other attentions of the "
        f"{type(heads.model).__name__} too, whose queries would meet other heads{others} remove heads with hw.prune."
    )


@torch.no_grad()
def _are_read(model: nn.Module, sites: Sequence[Site], batch: Batch) -> bool:
    """Return whether keys and values of sites change what a model computes when W_O of these sites is zero."""
    held = [part.parameter for site in sites for head_slice in site.slices[1:] for part in head_slice.parts]
    outputs = [site.output.parameter for site in sites if site.output is not None]
    saved = {id(parameter): (parameter, parameter.data) for parameter in (*held, *outputs)}
    try:
        for parameter in outputs:
            parameter.data = torch.zeros_like(parameter.data)
        before = run(model, batch)
        for parameter in held:
            parameter.data = draw_noise(parameter.data) * parameter.data.std()
        after = run(model, batch)
    finally:
        for parameter, data in saved.values():
            parameter.data = data
    # the weights of attentions and cached keys are among what a model may return
    counts = {count for site in sites for count in (site.num_heads, site.key_value_heads)}
    pairs = [pair for pair in zip(before, after, strict=True) if pair[0].dim() != 4 or pair[0].shape[1] not in counts]
    return not all(torch.equal(first, second) for first, second in pairs)


def _find_form(site: Site, *, moves: bool) -> str | None:
    """Return what of an attention keeps its key/value heads from being merged, and what to do."""
    if site.borrows:
        return f"computes with the keys and values of another layer and holds none to merge; {_LEAVE}."
    if len(site.slices) != len(PROJECTIONS):
        return f"holds no values beside its keys, so that the two cannot be aligned apart; {_LEAVE}."
    if not (counts_groups(site) or type(site.module).__module__.startswith("transformers.")):
        return (
            "has a key/value head for each query head, and its code takes no fewer; merging is for attentions with "
            f"grouped queries, such as those of Llama, Mistral, Qwen and Gemma; {_LEAVE}, or call hw.prune."
        )
    if site.tiled:
        return "gives query head h the keys and values of head h mod G, so that merged heads would be other heads'."
    query, key, value = site.slices
    if query.head_size != key.head_size or any(part.module is None for part in site.parts):
        return f"makes queries and keys in several parts (latent attention), of which only some are heads; {_LEAVE}."
    for part in _list_parts(site):
        if part.lora is not None:
            return "has LoRA adapters: merge them into the weight first (merge_and_unload), and find heads again."
        if is_sharded(part.parameter):
            return "is sharded over processes; heads are merged in whole weights, before the model is sharded."
    if value.head_size != site.head_size:
        return f"has values of {value.head_size} features and gives W_O {site.head_size} of each head; {_LEAVE}."
    return _find_beside(site, moves=moves)


def _find_beside(site: Site, *, moves: bool) -> str | None:
    unknown = list_guessed(site) if moves else []
    if unknown:
        return (
            f"has {unknown[0][0]}, which may hold something of each query head, so that they must stay where they are; "
            'use grouping="order".'
        )
    own = [name for name, _, _, units in list_beside(site, proved=True) if units == "key"]
    if not own:
        return None
    return (
        f"has {own[0]}, of which each key/value head has a part of its own, so that they cannot become one; {_LEAVE}."
    )


def _require_own(found: Sequence[Site], site: Site) -> None:
    """Raise `LayoutError` where a weight is another attention's too."""
    held = Counter(
        id(parameter)
        for other in found
        for parameter in {id(part.parameter): part.parameter for part in _list_parts(other)}.values()
    )
    shared = next((part.name for part in _list_parts(site) if held[id(part.parameter)] > 1), None)
    if shared is not None:
        raise LayoutError(
            f"{shared} is another attention's too, and what merges heads in one is not right in the other; {_LEAVE}."
        )


def _list_parts(site: Site):
    return [part for part in (*site.parts, *(() if site.output is None else (site.output,))) if part.obstacle is None]
