"""The layouts in which several projections share one weight.

Nothing but the forward tells their orders apart, so a row names the output projection too, and `verify` proves it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from headwise.errors import LayoutError, SettingError, require_names
from headwise.heads.head_slice import OutputProjection
from headwise.heads.layout_steps import (
    BESIDE,
    HEAD_SIZE,
    NUM_HEADS,
    assembled,
    heads_in,
    integer,
    no_count,
    read_child,
    refuse_others,
)
from headwise.heads.naming import find_output_projection, joined, output_width, projection_slice
from headwise.heads.projection import Projection, read_projection
from headwise.heads.site import PROJECTIONS, Site


@dataclass(frozen=True)
class FusedLinear:
    """Query, key and value in one projection, or key and value in one beside the query's.

    Its output features are blocks, one a projection, each of heads x head size and with fewer key/value heads under
    grouped queries; or, interleaved, the query, key and value of head 0, then those of head 1, and so on. As nothing
    but the forward tells these apart, a row names the output projection too, and fits no module without it.

    Args:
        name: What the row is called in tables and messages.
        fused: Attribute names of the fused projection, tried in order.
        output: Likewise for W_O; a leading ".." names an attribute path from the parent module.
        order: What the fused projection returns, in order.
        interleaved: Whether the heads of `order` alternate.
        query: Attribute names of the query projection where `order` does not have it.
        when: Values that attributes of the module must have, each (name, allowed values); None for an absent one.
        num_heads: Attribute names of the number of query heads, on the module or its `config`.
        head_size: Attribute names of the width of one head; tried before `num_heads`.
        beside: Names of other projections that such a module may hold and that are no heads.

    Raises:
        SettingError: Names are no tuple of strings, or `order` is not made of query, key and value.

    Example:
        >>> row = FusedLinear("mine", fused=("to_qvk",), output=("merge",), order=("query", "value", "key"))
    """

    name: str
    fused: tuple[str, ...]
    output: tuple[str, ...]
    order: tuple[str, ...] = PROJECTIONS
    interleaved: bool = False
    query: tuple[str, ...] = ()
    when: tuple[tuple[str, tuple[object, ...]], ...] = ()
    num_heads: tuple[str, ...] = NUM_HEADS
    head_size: tuple[str, ...] = HEAD_SIZE
    beside: tuple[str, ...] = BESIDE

    def __post_init__(self) -> None:
        for field in ("fused", "output", "order", "query", "num_heads", "head_size", "beside"):
            require_names(field, getattr(self, field))
        expected = sorted(PROJECTIONS[1:] if self.query else PROJECTIONS)
        if sorted(self.order) != expected:
            raise SettingError(
                f"order is {self.order}; expected {', '.join(expected)} in some order"
                f"{', as the query has a projection of its own' if self.query else ''}."
            )

    def site(self, model: nn.Module, name: str, module: nn.Module) -> Site | None:
        """Return the site of a module that holds the fused projection and W_O."""
        fused = next((a for a in self.fused if read_projection(module._modules.get(a)) is not None), None)
        query = next((a for a in self.query if read_projection(module._modules.get(a)) is not None), None)
        if fused is None or (self.query and query is None):
            return None
        if any(getattr(module, attribute, None) not in allowed for attribute, allowed in self.when):
            return None
        output_projection = find_output_projection(model, name, module, self.output, None)
        if output_projection is None:
            return None
        refuse_others(self.name, name, module, {fused, query or fused}, self.beside)
        projection = read_child(module, fused)
        beside = None if query is None else read_child(module, query)
        heads, groups, size = self._counts(joined(name, fused), module, projection, beside, output_projection)
        counts = {kind: heads if kind == "query" else groups for kind in PROJECTIONS}
        stride, start, slices = (len(self.order) * size if self.interleaved else size), 0, {}
        for kind in self.order:
            path = joined(name, fused)
            slices[kind] = projection_slice(kind, path, projection, counts[kind], size, start, stride)
            start += size if self.interleaved else counts[kind] * size
        if beside is not None:
            slices["query"] = projection_slice("query", joined(name, str(query)), beside, heads, size)
        return assembled(model, name, module, self.name, [slices[kind] for kind in PROJECTIONS], output_projection)

    def _counts(
        self,
        name: str,
        module: nn.Module,
        fused: Projection,
        query: Projection | None,
        output_projection: OutputProjection,
    ) -> tuple[int, int, int]:
        """Return query heads, key/value heads and head size; W_O's width, where it is known, says how many heads."""
        width = output_width(output_projection) or (None if query is None else query.rows)
        given = integer(module, self.num_heads)
        size = integer(module, self.head_size)
        if size is None:
            if given is None:
                raise LayoutError(no_count(name, module, self.num_heads, self.head_size))
            size = heads_in(name, width or fused.rows // len(self.order), given)
        heads = given if width is None else heads_in(f"W_O of {name}", width, size)
        if heads is None:
            raise LayoutError(no_count(name, module, self.num_heads, self.head_size))
        rest, several = fused.rows - (heads * size if query is None else 0), 2 * size
        fits = rest > 0 and rest % several == 0 and heads % (rest // several) == 0
        if not fits or (self.interleaved and rest != heads * several):
            kinds = f"one {'each' if self.interleaved else 'block each'} of {', '.join(self.order)}"
            raise LayoutError(
                f"{name}.weight: {fused.rows} rows are not {kinds} for {heads} query heads of {size} rows; "
                "the layout row does not describe this module (heads fused per group have no row: write one for "
                "the modules you need, or leave them out with exclude)."
            )
        return heads, rest // several, size
