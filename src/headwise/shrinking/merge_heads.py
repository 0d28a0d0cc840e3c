"""Key and value heads of one attention made alike within groups, so that one of each group is enough."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import torch
from torch import Tensor

from headwise.heads.head_slice import HeadSlice
from headwise.heads.heads import Site
from headwise.shrinking.alignment import Sharing, measure_loss
from headwise.shrinking.grouping import Groups, group_by_similarity, group_in_order
from headwise.shrinking.key_freedom import Alignment, KeyFreedom
from headwise.shrinking.merge_freedom import Freedom
from headwise.shrinking.merge_moments import read_output, read_rows, write_output, write_rows
from headwise.shrinking.prune_beside import list_beside

Grouping = Literal["similarity", "order"]
GROUPINGS: tuple[Grouping, ...] = ("similarity", "order")


@dataclass(frozen=True)
class Way:
    """One way of merging.

    Attributes:
        alignment: How heads are brought together before one takes their place.
        grouping: Which heads go together.
        refit: Whether W_O is fitted anew to what the attention gave before.
    """

    alignment: Alignment
    grouping: Grouping
    refit: bool

    def __str__(self) -> str:
        aligned = {"none": "averaged as they are", "orthogonal": "aligned and averaged", "low_rank": "closed form"}
        grouped = {"order": "neighbors", "similarity": "groups of similar heads"}
        return f"{aligned[self.alignment]}, {grouped[self.grouping]}" + (", W_O refitted" if self.refit else "")


@dataclass(frozen=True, eq=False)
class _Kind:
    """Keys or values of all heads: their rows, moments, and how their readers weigh them.

    Attributes:
        rows: [G, e, d + 1].
        gram: y_i^T y_j, [G, e, G, e].
        weights: S_i, [G, e, e].
        freedom: What is free in them; None where nothing is.
        alignment: How they are brought together.
    """

    rows: Tensor
    gram: Tensor
    weights: Tensor
    freedom: KeyFreedom | None
    alignment: Alignment

    def share(self, groups: Sequence[Sequence[int]]) -> tuple[Sharing, Tensor, Tensor]:
        """Return how the heads of each group become one, [g, m, e, e], with the moments and weights of the groups."""
        index = torch.tensor([list(group) for group in groups], device=self.gram.device)
        gram = torch.stack([self.gram[own][:, :, own] for own in index])
        weights = self.weights[index]
        alignment = "none" if self.freedom is None else self.alignment
        return (self.freedom or KeyFreedom(0)).share(gram, weights, alignment), gram, weights

    def compare(self) -> Tensor:
        """Return the share of each pair of heads that one head keeps of both, [G, G]."""
        count = len(self.rows)
        pairs = list(combinations(range(count), 2))
        sharing, gram, weights = self.share(pairs)
        lost, total = measure_loss(gram, weights, sharing)
        kept = 1 - lost / total.clamp_min(torch.finfo(total.dtype).tiny)
        alike = kept.new_zeros(count, count)
        first, second = torch.tensor(pairs, device=alike.device).T
        alike[first, second] = alike[second, first] = kept
        return alike

    def write(self, sharing: Sharing, groups: Groups) -> Tensor:
        """Return the rows of the heads that take the place of groups, [g, e, d + 1]."""
        index = torch.tensor([list(group) for group in groups], device=self.rows.device)
        return torch.einsum("gmef,gmed->gfd", sharing.write, self.rows[index])


def make_alike(site: Site, groups: int, way: Way, freedom: Freedom, moments: Mapping[int, Tensor]) -> Groups:
    """Write weights under which the key/value heads of each group are copies, and groups are next to one another.

    Nothing has other sizes yet: the m heads of group j are heads j * m to j * m + m - 1 afterwards, and query heads
    with their columns of W_O, and what else belongs to them, move along.

    Args:
        site: The attention.
        groups: Their number.
        way: How.
        freedom: What is free in its keys and values.
        moments: Of the inputs [x, 1] of each projecting module.

    Returns:
        The heads of each group, by their numbers from before.
    """
    query, key, value = site.slices
    members = site.num_heads // site.key_value_heads

    def measure(head_slice: HeadSlice) -> tuple[Tensor, Tensor]:
        rows = read_rows(head_slice)
        return rows, moments[id(head_slice.parts[0].module)]

    query_rows, query_moments = measure(query)
    scores = torch.einsum("hed,dc,hfc->hef", query_rows, query_moments, query_rows)
    outputs = read_output(site)
    kinds = []
    for head_slice, weights, free in (
        (key, scores, freedom.key),
        (value, torch.einsum("hde,hdf->hef", outputs, outputs), freedom.value),
    ):
        rows, own = measure(head_slice)
        gram = torch.einsum("iad,dc,jbc->iajb", rows, own, rows)
        kinds.append(_Kind(rows, gram, weights.unflatten(0, (-1, members)).sum(1), free, way.alignment))
    if way.grouping == "order":
        chosen = group_in_order(site.key_value_heads, groups)
    else:
        chosen = group_by_similarity(torch.stack([kind.compare() for kind in kinds]).mean(0), groups)
    (key_sharing, *_), (value_sharing, *_) = (kind.share(chosen) for kind in kinds)
    order = [head for group in chosen for head in group]
    queries = [head * members + member for head in order for member in range(members)]
    size = site.key_value_heads // groups
    _move_queries(site, queries)
    for head_slice, kind, sharing in ((key, kinds[0], key_sharing), (value, kinds[1], value_sharing)):
        write_rows(head_slice, kind.write(sharing, chosen).repeat_interleave(size, 0))
    # y_i is about u G_i^T: what reads it reads u with G_i^T in between
    read = key_sharing.read.flatten(0, 1).repeat_interleave(members, 0)
    write_rows(query, read.mT @ query_rows[queries])
    read = value_sharing.read.flatten(0, 1).repeat_interleave(members, 0)
    write_output(site, outputs[queries] @ read)
    return chosen


def _move_queries(site: Site, order: Sequence[int]) -> None:
    """Bring what belongs to query heads, other than their rows and columns, into an order."""
    query = site.slices[0]
    if site.layout.endswith("gated"):
        # the gate of a head lies next to its query
        whole = replace(query, head_size=query.stride)
        write_rows(whole, read_rows(whole)[list(order)])
    for _, parameter, axis, units in list_beside(site, proved=True):
        if units == "query":
            data = parameter.data.movedim(axis, 0).unflatten(0, (site.num_heads, -1))
            data.copy_(data[list(order)])


def keep_first(site: Site, groups: int) -> dict[str, tuple[int, ...]]:
    """Return the key/value heads that are copies of the first of their group, by projection."""
    size = site.key_value_heads // groups
    gone = tuple(head for head in range(site.key_value_heads) if head % size)
    return {"query": (), "key": gone, "value": gone, "output": ()}


def remember(sites: Sequence[Site]) -> Callable[[], None]:
    """Return what puts the weights of sites back as they are now."""
    held = {id(one): one for site in sites for one in site.module.parameters()}
    held |= {id(site.output.parameter): site.output.parameter for site in sites if site.output is not None}
    saved = [(one, one.data.clone()) for one in held.values()]

    def restore() -> None:
        for parameter, data in saved:
            parameter.data.copy_(data)

    return restore
