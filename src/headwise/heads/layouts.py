"""The layouts of torch's attention, of additive attention and of separate projections, and what a layout is.

A row recognises a module by what it holds, never by its class name, and refuses numbers that do not fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import nn

from headwise import nn as headwise_nn
from headwise.errors import LayoutError, require_names
from headwise.heads.head_slice import HeadSlice, OutputProjection
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
from headwise.heads.naming import find_output_projection, joined, output_slice, output_width, place, projection_slice
from headwise.heads.projection import obstacle_to, read_projection
from headwise.heads.site import PROJECTIONS, Site
from headwise.nn.additive import AdditiveAttention
from headwise.nn.scores import TorchScores
from headwise.parallel import computes_part


class Layout(Protocol):
    """One way the projections of an attention module are stored."""

    @property
    def name(self) -> str:
        """What the layout is called in tables and messages."""
        ...

    def site(self, model: nn.Module, name: str, module: nn.Module) -> Site | None:
        """Return the site when `module` fits this layout, None when it does not."""
        ...


@dataclass(frozen=True)
class TorchMultihead:
    """`torch.nn.MultiheadAttention`, packed ([3d, d] in one parameter) or separate (kdim, vdim)."""

    name: str = "torch"

    def site(self, model: nn.Module, name: str, module: nn.Module) -> Site | None:
        """Return the site of a torch multi-head attention module."""
        if not isinstance(module, nn.MultiheadAttention):
            return None
        heads, size = module.num_heads, module.head_dim
        bias = None if module.in_proj_bias is None else "in_proj_bias"
        packed = module.in_proj_weight is not None
        slices = []
        for index, projection in enumerate(PROJECTIONS):
            attribute = "in_proj_weight" if packed else f"{projection[0]}_proj_weight"
            weight = getattr(module, attribute)
            slices.append(
                HeadSlice(
                    projection,
                    joined(name, attribute),
                    module,
                    attribute,
                    heads,
                    size,
                    start=index * module.embed_dim if packed else 0,
                    bias=bias,
                    bias_start=index * module.embed_dim,
                    along=weight.shape[0],
                    across=weight.shape[1],
                    obstacle=obstacle_to(module, attribute),
                )
            )
        output_projection = OutputProjection(module, "out_proj")
        return Site(
            model=model,
            name=name,
            module=module,
            **place(model, name),
            layout=f"{self.name} {'packed' if packed else 'separate'}",
            num_heads=heads,
            key_value_heads=heads,
            head_size=size,
            slices=tuple(slices),
            output=output_slice(joined(name, "out_proj"), output_projection, heads, size),
            output_projection=output_projection,
            prepare=headwise_nn.adopt,
            scores=TorchScores,
        )


@dataclass(frozen=True)
class AdditiveQueries:
    """`headwise.nn.AdditiveAttention`: the rows of its score matrix, each the learned query of one head.

    Keys and values are the same for all heads, so there is one key/value head and no head slice of them.
    """

    name: str = "additive"

    def site(self, model: nn.Module, name: str, module: nn.Module) -> Site | None:
        """Return the site of an additive attention module."""
        if not isinstance(module, AdditiveAttention):
            return None
        weight = joined(joined(name, "score"), "weight")
        query = HeadSlice(
            "query",
            weight,
            module.score,
            "weight",
            module.num_heads,
            1,
            along=module.num_heads,
            across=module.score.in_features,
            obstacle=obstacle_to(module.score, "weight"),
        )
        return Site(
            model=model,
            name=name,
            module=module,
            **{**place(model, name), "kind": "pooling"},
            layout=self.name,
            num_heads=module.num_heads,
            key_value_heads=1,
            head_size=module.embed_dim,
            slices=(query,),
            output_projection=OutputProjection(module, "output"),
            scores=TorchScores,
        )


@dataclass(frozen=True)
class SeparateLinears:
    """Query, key and value projections as three modules whose output features are heads x head size.

    Each is an `nn.Linear`, GPT-2's Conv1D, or a layer that wraps one (LoRA). Fewer key/value heads than query heads
    are grouped queries. Queries twice as wide as W_O takes are gated: head h is [query; gate].

    Args:
        name: What the row is called in tables and messages.
        query: Attribute names of the query projection, tried in order.
        key: Likewise for the key projection.
        value: Likewise for the value projection.
        output: Likewise for W_O; a leading ".." names an attribute path from the parent module.
        num_heads: Attribute names of the number of query heads, on the module or its `config`.
        head_size: Attribute names of the width of one head; tried before `num_heads`.
        beside: Names of other projections that such a module may hold and that are no heads.

    Raises:
        SettingError: Names are no tuple of strings.

    Example:
        >>> row = SeparateLinears(query=("wq",), key=("wk",), value=("wv",), output=("wo",), num_heads=("nh",))
    """

    name: str = "separate"
    query: tuple[str, ...] = (
        *("q_proj", "query", "q_lin", "query_proj", "q", "to_q", "wq", "Wq", "linear_q", "project_q", "q_linear"),
    )
    key: tuple[str, ...] = (
        *("k_proj", "key", "k_lin", "key_proj", "k", "to_k", "wk", "Wk", "linear_k", "project_k", "k_linear"),
    )
    value: tuple[str, ...] = (
        *("v_proj", "value", "v_lin", "value_proj", "v", "to_v", "wv", "Wv", "linear_v", "project_v", "v_linear"),
    )
    output: tuple[str, ...] = (
        *("o_proj", "out_proj", "out_lin", "o", "to_out.0", "to_out", "wo", "Wo", "linear_out", "attention_out"),
        *("proj", "projection_layer", "dense", "output_proj", "..output.dense", "output", "..output", "linear", "post"),
    )
    num_heads: tuple[str, ...] = NUM_HEADS
    head_size: tuple[str, ...] = HEAD_SIZE
    beside: tuple[str, ...] = BESIDE

    def __post_init__(self) -> None:
        for field in (*PROJECTIONS, "output", "num_heads", "head_size", "beside"):
            require_names(field, getattr(self, field))

    def site(self, model: nn.Module, name: str, module: nn.Module) -> Site | None:
        """Return the site of a module that holds the three projections."""
        paths = {
            kind: next((a for a in getattr(self, kind) if read_projection(module._modules.get(a)) is not None), "")
            for kind in PROJECTIONS
        }
        if not all(paths.values()):
            return None
        refuse_others(self.name, name, module, {*paths.values()}, self.beside)
        found = {kind: read_child(module, path) for kind, path in paths.items()}
        rows = found["query"].rows
        # a module under tensor parallel may count the heads that it computes itself
        divided = computes_part(found["query"].owner, "weight", found["query"].axis)
        size = self._size(name, module, rows, divided)
        output_projection, gated = find_output_projection(model, name, module, self.output, rows), 1
        if output_projection is None and rows % (2 * size) == 0:
            output_projection = find_output_projection(model, name, module, self.output, rows // 2)
            gated = 1 if output_projection is None else 2
        elif (
            output_projection is not None
            and output_width(output_projection) is None
            and not divided
            and integer(module, self.num_heads) == rows / (2 * size)
        ):
            # another module in the place of W_O does not say how wide the heads are
            gated = 2
        counts = {
            kind: heads_in(joined(name, paths[kind]), projection.rows, size * (gated if kind == "query" else 1))
            for kind, projection in found.items()
        }
        if counts["key"] != counts["value"] or counts["query"] % counts["key"]:
            raise LayoutError(
                f"{name or 'the model'}: {counts['query']} query, {counts['key']} key and {counts['value']} value "
                f"heads of {size} rows do not group; the layout row does not describe this module."
            )
        slices = [
            projection_slice(
                kind,
                joined(name, paths[kind]),
                projection,
                counts[kind],
                size,
                stride=gated * size if kind == "query" else size,
            )
            for kind, projection in found.items()
        ]
        layout = self.name if gated == 1 else f"{self.name} gated"
        return assembled(model, name, module, layout, slices, output_projection)

    def _size(self, name: str, module: nn.Module, rows: int, divided: bool) -> int:
        size = integer(module, self.head_size)
        if size is not None:
            return size
        if divided:
            raise LayoutError(
                f"{name or 'the model'} ({type(module).__name__}) is divided by tensor parallel and has none of "
                f"{', '.join(self.head_size)}; its number of heads may be that of all processes or of this one. Call "
                "find_heads before parallelize_module."
            )
        heads = integer(module, self.num_heads)
        if heads is None:
            raise LayoutError(no_count(name, module, self.num_heads, self.head_size))
        return heads_in(f"{name or 'the model'} query", rows, heads)
