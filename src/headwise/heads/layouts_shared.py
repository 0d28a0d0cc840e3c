"""The layout row of attentions that hold no values, or neither keys nor values: they use others in their place."""

from dataclasses import dataclass

from torch import nn

from headwise.heads.heads import Site
from headwise.heads.irregular import ATTENTION, attends
from headwise.heads.layout_steps import (
    KEY_COUNTS,
    RATIOS,
    build_site,
    build_slice,
    count_heads,
    find_attribute,
    find_letters,
    find_output_projection,
    join_names,
    projects,
    read_child,
    read_integer,
    read_output_width,
)
from headwise.heads.layouts import SeparateLinears


@dataclass(frozen=True)
class SharedLinears(SeparateLinears):
    """Separate projections of which some are missing.

    Without a value projection (its attribute is there, and None) values are the keys, before any norm or position.
    Without both an attention computes with the keys and values of another layer, which it is given when it is called.
    Such a site has the slices that there are: query and key, or the query alone.

    Its arguments are those of `SeparateLinears`.
    """

    name: str = "shared"

    def site(self, model: nn.Module, name: str, module: nn.Module) -> Site | None:
        """Return the site of a module that attends with a query projection and no value projection."""
        query, key = (find_attribute(module, names) for names in (self.query, self.key))
        none = any(getattr(module, attribute, module) is None for attribute in self.value)
        if query is None or _holds_others(module, {query, key}) or (key is not None and not none):
            return None
        if not attends(module) and ATTENTION.search(type(module).__name__) is None:
            return None
        found = {kind: read_child(module, path) for kind, path in (("query", query), ("key", key)) if path is not None}
        size = self._read_size(name, module, found["query"].rows, False)
        counts = {
            kind: count_heads(join_names(name, path), found[kind].rows, size)
            for kind, path in (("query", query), ("key", key))
            if path is not None
        }
        heads = counts["query"]
        output_projection = find_output_projection(model, name, module, self.output, heads * size)
        if output_projection is None or read_output_width(output_projection) is None:
            return None
        slices = [
            build_slice(kind, join_names(name, path), found[kind], counts[kind], size)
            for kind, path in (("query", query), ("key", key))
            if path is not None
        ]
        groups = counts.get("key", self._count_groups(module, heads))
        if heads % groups:
            return None
        layout = f"{self.name} keys and values" if key is None else f"{self.name} keys as values"
        return build_site(model, name, module, layout, slices, output_projection, groups)

    @staticmethod
    def _count_groups(module: nn.Module, heads: int) -> int:
        """Return the number of key/value heads of an attention that holds none of them."""
        ratio = read_integer(module, RATIOS)
        return read_integer(module, (*KEY_COUNTS, heads)) or heads if ratio is None else heads // max(ratio, 1)


def _holds_others(module: nn.Module, used: set[str | None]) -> bool:
    """Return whether a module holds other projections of queries, keys or values, or weights of these."""
    children = [name for name, child in module._modules.items() if child is not None and projects(child)]
    matrices = [name for name, held in module._parameters.items() if held is not None and held.dim() > 1]
    return any(find_letters(name) for name in (*children, *matrices) if name not in used)
