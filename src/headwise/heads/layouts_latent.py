"""The layout row of multi-head latent attention, whose keys and values are made from one narrow state."""

from dataclasses import dataclass

from torch import nn

from headwise.errors import LayoutError, require_names
from headwise.heads.heads import PROJECTIONS, Site
from headwise.heads.layout_steps import (
    BESIDE,
    NUM_HEADS,
    build_site,
    build_slice,
    count_heads,
    find_attribute,
    find_output_projection,
    join_names,
    read_child,
    read_integer,
    read_output_width,
    refuse_others,
    refuse_uncounted,
    require_count,
)


@dataclass(frozen=True)
class LatentLinears:
    """Queries in one projection, and keys and values in another that takes a narrow state which all heads share.

    Multi-head latent attention of DeepSeek-V2: output features of the fused projection are [key; value] of head 0, then
    of head 1, and so on, each of a size of its own. A second part of queries and keys has positions; that of the keys
    comes from a projection without heads, so a key head is read without it and is narrower than a query head.

    Args:
        name: Name of the row in tables and messages.
        query: Attribute names of the query projection, tried in order; the second one of two, where there are two.
        fused: Likewise for the projection of the state to keys and values.
        output: Likewise for W_O.
        num_heads: Number of heads, or attribute names of it on the module or its `config`.
        value_size: Attribute names of the width of a value head.
        beside: Names of other projections that the module may hold and that have no heads.

    Raises:
        SettingError: Names are not a tuple of strings.

    Example:
        >>> LatentLinears(fused=("kv_up",), beside=("kv_down", "q_down")).name
        'latent'
    """

    name: str = "latent"
    query: tuple[str, ...] = ("q_b_proj", "q_proj")
    fused: tuple[str, ...] = ("kv_b_proj",)
    output: tuple[str, ...] = ("o_proj",)
    num_heads: tuple[str | int, ...] | int = NUM_HEADS
    value_size: tuple[str, ...] = ("v_head_dim",)
    beside: tuple[str, ...] = (*BESIDE, "q_a_proj", "kv_a_proj_with_mqa")

    def __post_init__(self) -> None:
        for field in ("query", "fused", "output", "value_size", "beside"):
            require_names(field, getattr(self, field))
        require_count("num_heads", self.num_heads)

    def site(self, model: nn.Module, name: str, module: nn.Module) -> Site | None:
        """Return the site of a module that holds both projections and W_O."""
        fused, query = find_attribute(module, self.fused), find_attribute(module, self.query)
        if fused is None or query is None:
            return None
        output_projection = find_output_projection(model, name, module, self.output, None)
        if output_projection is None:
            return None
        refuse_others(self.name, name, module, {fused, query}, (*self.beside, *self.output))
        pair, queries = read_child(module, fused), read_child(module, query)
        width, value = read_output_width(output_projection), read_integer(module, self.value_size)
        heads = read_integer(module, self.num_heads)
        if value is not None and width is not None:
            # the number of heads that the module holds may be from before some were pruned
            heads = count_heads(f"W_O of {name}", width, value)
        if heads is None or (value is None and width is None):
            refuse_uncounted(name, module, self.num_heads, self.value_size)
        value = count_heads(f"W_O of {name}", int(width or 0), heads) if value is None else value
        paths = {kind: join_names(name, query if kind == "query" else fused) for kind in PROJECTIONS}
        size, rows = count_heads(paths["query"], queries.rows, heads), count_heads(paths["key"], pair.rows, heads)
        if rows <= value:
            raise LayoutError(
                f"{paths['key']}.weight: {pair.rows} rows are not a key and a value of {value} rows for each of "
                f"{heads} heads; the layout row does not describe this module."
            )
        slices = [
            build_slice("query", paths["query"], queries, heads, size),
            build_slice("key", paths["key"], pair, heads, rows - value, stride=rows),
            build_slice("value", paths["value"], pair, heads, value, start=rows - value, stride=rows),
        ]
        return build_site(model, name, module, self.name, slices, output_projection)
