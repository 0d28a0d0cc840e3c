"""What some arms change in a model before its parameters are drawn: how heads attend, and how wide layers are."""

from typing import Any

from torch import nn

from headwise.errors import LayoutError, SettingError
from headwise.heads.heads import Heads
from headwise.nn.difference import pair_heads


def pair_all_heads(heads: Heads, *, second: bool) -> None:
    """Pair the heads of each attention; find heads again afterwards.

    Raises:
        LayoutError: An attention cannot be paired.
    """
    for site in heads:
        if not isinstance(site.module, nn.MultiheadAttention):
            raise LayoutError(
                f"{site.label} is a {type(site.module).__name__}; the arms differential and paired change torch's "
                "multi-head attention alone, so leave them out of this task."
            )
        if site.prepare is not None:
            site.prepare(site.model, site.module)
        pair_heads(site.module, site.layer + 1, second=second)


def widen_feed_forward(heads: Heads, units: int | None = None) -> None:
    """Give the feed-forward layer beside each attention further hidden units.

    It is the `feed_forward` of the module that holds the attention: a sequence of a Linear, what is between, and
    another Linear. Attentions of one module share it.

    Args:
        heads: The attentions.
        units: Number of further units; None for half the width.

    Raises:
        SettingError: A layer has no such feed-forward layer.
    """
    holders: dict[int, Any] = {}
    for site in heads:
        holder: Any = site.model.get_submodule(site.name.rpartition(".")[0])
        holders[id(holder)] = holder
    for holder in holders.values():
        found = [part for part in getattr(holder, "feed_forward", ()) if isinstance(part, nn.Linear)]
        if len(found) != 2:
            raise SettingError(
                f"{type(holder).__name__} has no feed_forward of two Linears, which the arm wider would widen; leave "
                "that arm out of this task."
            )
        first, second = found
        hidden = first.out_features + (first.in_features // 2 if units is None else units)
        for index, part in enumerate(holder.feed_forward):
            sizes = {id(first): (first.in_features, hidden), id(second): (hidden, second.out_features)}.get(id(part))
            if sizes is not None:
                weight = part.weight
                new = nn.Linear(*sizes, bias=part.bias is not None, device=weight.device, dtype=weight.dtype)
                holder.feed_forward[index] = new
