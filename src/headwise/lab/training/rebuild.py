"""What some arms change in a model before its parameters are drawn: how heads attend, and how wide layers are."""

from typing import Any

from torch import nn

from headwise.errors import LayoutError, SettingError
from headwise.heads.heads import Heads
from headwise.heads.pairing import pair_decoder_heads, reads_pairs
from headwise.nn.difference import pair_heads

FEED_FORWARD = ("feed_forward", "mlp")


def pair_all_heads(heads: Heads, *, second: bool) -> None:
    """Pair the heads of each attention; find heads again afterwards.

    Raises:
        LayoutError: An attention cannot be paired.
    """
    for site in heads:
        if reads_pairs(site):
            pair_decoder_heads(site, site.layer + 1, second=second)
            continue
        if not isinstance(site.module, nn.MultiheadAttention):
            raise LayoutError(
                f"{site.label} is a {type(site.module).__name__}; the arms differential and paired change torch's "
                "multi-head attention and the decoders of transformers, so leave them out of this task."
            )
        if site.prepare is not None:
            site.prepare(site.model, site.module)
        pair_heads(site.module, site.layer + 1, second=second)


def widen_feed_forward(heads: Heads, units: int | None = None) -> None:
    """Give the feed-forward layer beside each attention further hidden units, with parameters that are not drawn yet.

    It is the `feed_forward` or `mlp` of the module that holds the attention: Linears from the width to the hidden
    units, and after them one back; a PReLU may have a slope for each unit. Attentions of one module share it.

    Args:
        heads: The attentions.
        units: Number of further units; None for about as many parameters as gates on features have, (d + 1) d.

    Raises:
        SettingError: A layer has no such feed-forward layer.
    """
    holders: dict[int, Any] = {}
    for site in heads:
        holder: Any = site.model.get_submodule(site.name.rpartition(".")[0])
        holders[id(holder)] = holder
    for holder in holders.values():
        layer = next((found for name in FEED_FORWARD if (found := getattr(holder, name, None)) is not None), None)
        parts = [] if layer is None else list(layer.modules())
        linears = [part for part in parts if isinstance(part, nn.Linear)]
        sizes = [(part.in_features, part.out_features) for part in linears]
        if len(sizes) < 2 or {*sizes[:-1]} != {sizes[-1][::-1]}:
            raise SettingError(
                f"{type(holder).__name__} has no feed_forward or mlp of Linears that the arm wider would widen; leave "
                "that arm out of this task."
            )
        width, hidden = sizes[0]
        slopes = [part for part in parts if isinstance(part, nn.PReLU) and part.num_parameters == hidden]
        each = sum(width + (part.bias is not None) for part in linears[:-1]) + width + len(slopes)
        new = hidden + (round((width + 1) * width / each) if units is None else units)
        for part in linears[:-1]:
            part.out_features = new
        linears[-1].in_features = new
        for part in linears:
            part.weight = nn.Parameter(part.weight.new_empty(part.out_features, part.in_features))
            if part.bias is not None:
                part.bias = nn.Parameter(part.bias.new_empty(part.out_features))
        for part in slopes:
            part.num_parameters = new
            part.weight = nn.Parameter(part.weight.new_empty(new))
        config: Any = getattr(layer, "config", None)
        if getattr(config, "intermediate_size", None) == hidden:
            # transformers builds the model anew from it
            config.intermediate_size = new
