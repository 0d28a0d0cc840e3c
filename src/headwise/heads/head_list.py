"""A layout row of attention that keeps its heads in a list, each with weights of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from torch import nn

from headwise.errors import require_names
from headwise.heads.head_stack import HeadStack
from headwise.heads.heads import PROJECTIONS, Site
from headwise.heads.layout_steps import (
    NUM_HEADS,
    build_site,
    build_slice,
    find_attribute,
    find_module,
    find_output_projection,
    join_names,
    list_unused,
    projects,
    read_child,
    read_integer,
)
from headwise.heads.layouts import SeparateLinears
from headwise.heads.projection import Projection, read_projection

_LINEARS = SeparateLinears()


@dataclass(frozen=True)
class HeadList:
    """An `nn.ModuleList` of heads, each with a query, a key and a value projection, or three lists of projections.

    The outputs of the heads are concatenated, in the order of the list. A list is one of heads when each of its modules
    holds these three projections and nothing else that has weights, all of one shape, and the module that holds the
    list has an output projection that takes their concatenation; without one, when a head is narrower than its input.

    Args:
        name: Name of the row in tables and messages.
        heads: Attribute names of the list of heads; any list when empty.
        query: Attribute names of the query projection of a head, or of the list of query projections, tried in order.
        key: Likewise for the key projection.
        value: Likewise for the value projection.
        output: Likewise for W_O; a leading ".." starts an attribute path at the parent module.

    Raises:
        SettingError: Names are not a tuple of strings.

    Example:
        >>> row = HeadList(heads=("heads",), query=("to_q",), key=("to_k",), value=("to_v",), output=("merge",))
    """

    name: str = "list"
    heads: tuple[str, ...] = ()
    query: tuple[str, ...] = (*_LINEARS.query, "queries", "q_mappings")
    key: tuple[str, ...] = (*_LINEARS.key, "keys", "k_mappings")
    value: tuple[str, ...] = (*_LINEARS.value, "values", "v_mappings")
    output: tuple[str, ...] = (*_LINEARS.output, "c_proj", "projection", "fc", "fc_out")

    def __post_init__(self) -> None:
        for field in ("heads", *PROJECTIONS, "output"):
            require_names(field, getattr(self, field))

    def site(self, model: nn.Module, name: str, module: nn.Module) -> Site | None:
        """Return the site of a module that holds the list."""
        found = self._find(module)
        if found is None:
            return None
        owner, lists = found
        projections = list(chain.from_iterable(lists[kind].values() for kind in PROJECTIONS))
        first = projections[0]
        if any((p.rows, p.columns, p.axis) != (first.rows, first.columns, first.axis) for p in projections):
            return None
        count = len(lists["query"])
        output_projection = find_output_projection(model, name, module, self.output, count * first.rows)
        # modules as wide as their inputs may be layers, one after another
        layers = owner is not module and first.rows == first.columns
        if output_projection is None and (layers or count == 1):
            return None
        slices = []
        for kind in PROJECTIONS:
            members = [
                build_slice(kind, join_names(name, path), projection, 1, first.rows)
                for path, projection in lists[kind].items()
            ]
            places = [path.split(".") for path in lists[kind]]
            same = ("*" if len(set(parts)) > 1 else parts[0] for parts in zip(*places, strict=True))
            slices.append(HeadStack.build(kind, join_names(name, f"{'.'.join(same)}.weight"), owner, members))
        return build_site(model, name, module, self.name, slices, output_projection)

    def _find(self, module: nn.Module) -> tuple[nn.Module, dict[str, dict[str, Projection]]] | None:
        """Return what holds the heads, and the projections of each kind by their paths from the module."""
        for attribute in self.heads or module._modules:
            child = find_module(module, attribute)
            if isinstance(child, nn.ModuleList):
                # an empty place of the list is no head
                heads = {index: head for index, head in enumerate(child) if head is not None}
                found = self._read_heads(attribute, heads) if heads else None
                if found is not None:
                    return child, found
        lists = {kind: _find_list(module, getattr(self, kind)) for kind in PROJECTIONS}
        if self.heads or not all(lists.values()) or len({len(paths) for paths in lists.values()}) > 1:
            return None
        return module, lists

    def _read_heads(self, attribute: str, heads: Mapping[int, nn.Module]) -> dict[str, dict[str, Projection]] | None:
        found: dict[str, dict[str, Projection]] = {kind: {} for kind in PROJECTIONS}
        for index, head in heads.items():
            names = {kind: find_attribute(head, getattr(self, kind)) for kind in PROJECTIONS}
            used = {name for name in names.values() if name is not None}
            # heads of several heads, or layers of attention
            several = read_integer(head, NUM_HEADS) not in (None, 1)
            if several or len(used) < len(PROJECTIONS) or any(projects(child) for _, child in list_unused(head, used)):
                return None
            for kind, name in names.items():
                found[kind][f"{attribute}.{index}.{name}"] = read_child(head, str(name))
        return found


def _find_list(module: nn.Module, names: tuple[str, ...]) -> dict[str, Projection]:
    """Return the projections in the first list under these names, by path."""
    for name in names:
        child = find_module(module, name)
        if isinstance(child, nn.ModuleList):
            found = {f"{name}.{index}": read_projection(part) for index, part in enumerate(child)}
            return {path: projection for path, projection in found.items() if projection is not None}
    return {}
