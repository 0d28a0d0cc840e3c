"""What every layout row does: count heads, refuse what it does not describe, and put a site together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import nn

from headwise.errors import LayoutError
from headwise.heads.head_slice import HeadSlice, OutputProjection
from headwise.heads.naming import joined, output_slice, place
from headwise.heads.projection import Projection, read_projection
from headwise.heads.site import Site

NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
HEAD_SIZE = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_head")
# Projections of positions beside query, key and value: no heads of their own, and no reason to refuse.
BESIDE = ("pos_key_proj", "pos_query_proj", "pos_proj", "pos_q_proj", "relative_k_proj", "linear_pos")


def projects(module: nn.Module) -> bool:
    """Whether a module may project: it holds a matrix and looks nothing up."""
    if isinstance(module, nn.Embedding):
        return False
    return any(parameter.dim() > 1 for parameter in module.parameters()) or read_projection(module) is not None


def letters(name: str) -> set[str]:
    """Return which of q, k, v an attribute name speaks of: "query_key_value" of all, "to_kv" of k and v."""
    words = re.split(r"_|\d+|(?<=[a-z])(?=[A-Z])", name)
    spoken: set[str] = set()
    for word in words:
        lower = word.lower().removeprefix("w")
        if lower in ("q", "k", "v", "qk", "kv", "qkv", "qv", "kvq", "qvk", "qkvz", "qkvg"):
            spoken |= set(lower) & set("qkv")
        for full in ("query", "queries", "key", "keys", "value", "values"):
            if lower == full:
                spoken.add(full[0])
    return {*"qkv"} if name in ("c_attn", "att_proj", "attn_proj") else spoken


def assembled(
    model: nn.Module,
    name: str,
    module: nn.Module,
    layout: str,
    slices: Sequence[HeadSlice],
    output_projection: OutputProjection | None,
) -> Site:
    """Return the site with these slices of query, key and value."""
    query, key, value = slices
    return Site(
        model=model,
        name=name,
        module=module,
        **place(model, name),
        layout=layout,
        num_heads=query.heads,
        key_value_heads=key.heads,
        head_size=query.head_size,
        slices=tuple(slices),
        output=None
        if output_projection is None
        else output_slice(_name_in(model, output_projection), output_projection, query.heads, query.head_size),
        output_projection=output_projection,
        value_module=value.module,
    )


def _name_in(model: nn.Module, output_projection: OutputProjection) -> str:
    owner = next((name for name, module in model.named_modules() if module is output_projection.owner), "")
    return joined(owner, output_projection.attribute)


def read_child(module: nn.Module, attribute: str) -> Projection:
    """Return the projection that a module holds under a name; the row asked before whether it is one."""
    projection = read_projection(module._modules.get(attribute))
    assert projection is not None
    return projection


def refuse_others(row: str, name: str, module: nn.Module, used: set[str], beside: Sequence[str]) -> None:
    """Raise where the module projects more queries, keys or values than the row describes: it would be half found."""
    others = [
        child
        for child, held in module._modules.items()
        if held is not None and child not in used and child not in beside
        if (letters(child) and projects(held)) or isinstance(held, nn.Conv1d)
    ]
    if others:
        raise LayoutError(
            f"{name or 'the model'} ({type(module).__name__}) holds {', '.join(others)} beside "
            f"{', '.join(sorted(used))}, which the layout {row!r} does not describe. If they are no heads, name "
            "them in a row (beside=...); if this is no softmax attention, leave it out with "
            "find_heads(model, exclude=('...',))."
        )


def integer(module: nn.Module, names: Sequence[str]) -> int | None:
    """Return the first of these attributes that is an integer, of the module or else of its `config`."""
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def no_count(name: str, module: nn.Module, num_heads: Sequence[str], head_size: Sequence[str]) -> str:
    """Return the refusal of a module that does not say how many heads it has."""
    return (
        f"{name or 'the model'} ({type(module).__name__}) holds query, key and value projections but neither "
        f"{', '.join(num_heads)} nor {', '.join(head_size)}; name its number of heads in a layout row "
        "(num_heads=('...',))."
    )


def heads_in(name: str, rows: int, size: int) -> int:
    """Return how often a size goes into a number of rows, and refuse a rest."""
    if size < 1 or rows % size:
        raise LayoutError(f"{name}: {rows} rows do not divide into heads of {size} rows.")
    return rows // size
