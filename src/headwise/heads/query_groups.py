"""What a head is under grouped queries: the query heads that share a key/value head, apart or as one."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from headwise.errors import LayoutError
from headwise.heads.head_slice import HeadSlice
from headwise.heads.heads import Site


def group_slices(site: Site, grouping: str) -> tuple[HeadSlice, ...]:
    """Return the queries of a site as one slice for each group, of its M / G heads; or as one slice of G wide heads.

    A wide head is all query heads of a group, one after another: G heads as many as there are keys and values.

    Args:
        site: An attention of M query and G key/value heads.
        grouping: "within" for the former, "across" for the latter.

    Raises:
        LayoutError: The query heads of a group do not lie next to one another in one parameter.
    """
    query = next(part for part in site.slices if part.projection == "query")
    members, axes = site.count_members(), query.axes
    if type(query) is not HeadSlice or axes.start != axes.heads:
        raise LayoutError(
            f"{site.label} ({site.layout}): its query heads do not lie in one run of rows, which groups of them are "
            "read from; leave out the grouping."
        )
    if grouping == "within":
        own = [site.list_members(group) for group in range(site.key_value_heads)]
        return tuple(
            replace(
                query,
                heads=members,
                start=query.start + heads[0] * query.stride,
                stride=heads.step * query.stride,
                bias=None,
                run=run,
            )
            for run, heads in enumerate(own)
        )
    if site.tiled or axes.features != axes.heads or query.step != 1 or query.stride != query.head_size:
        between = "other query heads lie between those of a group" if site.tiled else "rows of other projections lie"
        raise LayoutError(
            f"{site.label} ({site.layout}): {between}{'' if site.tiled else ' between its query heads'}, which cannot "
            "be joined into one head for each group; use 'within', or leave out the grouping."
        )
    size = members * query.head_size
    return (replace(query, heads=site.key_value_heads, head_size=size, stride=size, bias=None),)


def group_features(tensor: Tensor, site: Site, grouping: str, axis: int) -> Tensor:
    """Return what query heads computed, [..., H, ...], with the groups apart, [G, ..., H / G, ...], or joined.

    Joined, the features of a group's heads follow one another, and of attention weights the mean over its heads is
    taken.

    Args:
        tensor: Outputs [B, L, H, e], with `axis` 2, or weights [B, H, Q, K], with `axis` 1.
        site: The attention.
        grouping: "within" or "across".
        axis: Axis of the heads.
    """
    site.count_members()
    apart = site.group_queries(tensor, axis)
    if grouping == "within":
        return apart.movedim(axis, 0)
    return apart.flatten(axis + 1, axis + 2) if axis == 2 else apart.mean(dim=axis + 1)


def list_sharing(found: Sequence[Site], site: Site) -> list[Site]:
    """Return the sites that compute with the same keys and values as a site, itself among them.

    That is told by modules of transformers: the last layer of a kind that has keys hands them to all that have none.
    """
    stores = getattr(site.module, "store_full_length_kv", None) is True
    if not (stores or site.borrows) or not hasattr(site.module, "layer_type"):
        return [site]
    return [
        other
        for other in found
        if other is site
        or (
            other.stack == site.stack
            and getattr(other.module, "layer_type", None) == site.module.layer_type
            and (other.borrows or getattr(other.module, "store_full_length_kv", None) is True)
        )
    ]
