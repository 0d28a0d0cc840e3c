"""Layout rows: the ways in which attention modules store their projections.

A row recognizes a module by what it holds, never by its class name, and refuses sizes that do not fit.
"""

from dataclasses import dataclass, replace
from typing import Protocol

from torch import nn

from headwise.errors import LayoutError, SettingError, require_names
from headwise.heads.head_runs import HeadRuns
from headwise.heads.head_slice import HeadSlice, OutputProjection
from headwise.heads.heads import PROJECTIONS, Site
from headwise.heads.layout_steps import (
    BESIDE,
    HEAD_SIZE,
    NORMS,
    NUM_HEADS,
    Conditions,
    build_site,
    build_slice,
    count_heads,
    find_attribute,
    find_output_projection,
    has_values,
    join_names,
    locate,
    read_child,
    read_integer,
    read_output_width,
    refuse_others,
    refuse_uncounted,
    require_count,
)
from headwise.heads.projection import Projection, find_obstacle
from headwise.heads.sharding import computes_part
from headwise.nn.additive import AdditiveAttention
from headwise.nn.difference import find_difference
from headwise.nn.multihead import hold_adopted
from headwise.nn.scores import TorchScores


def _name_each(letter: str, word: str, several: str) -> tuple[str, ...]:
    """Return the names that a projection of queries, keys or values has in the code of many."""
    q, query, queries = letter, word, several
    return (
        *(f"{q}_proj", query, f"{q}_lin", f"{query}_proj", q, f"to_{q}", f"w{q}", f"W{q}", f"linear_{q}"),
        *(f"project_{q}", f"{q}_linear", f"{q}_head", f"W_{query}", f"w_{query}", f"W_{q}", f"w_{q}", f"W_{q.upper()}"),
        *(f"W{q.upper()}", f"w_{q}s", f"fc_{q}", f"{q}_fc", f"fc_{query}", f"lin_{q}", f"proj_{q}", f"{q}_net"),
        *(f"linear_{query}", f"linear_{queries}", f"{query}_linear", f"{query}_layer", f"{query}_dense", queries),
        *(f"{query}_projection", f"to{queries}", f"to_{queries}", f"to_{query}", f"{q}_layer", f"{q}_dense"),
    )


class Layout(Protocol):
    """One way the projections of an attention module are stored."""

    @property
    def name(self) -> str:
        """Name of the layout in tables and messages."""
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
        packed = module.in_proj_weight is not None
        # less than embed_dim where heads were removed
        width = module.num_heads * module.head_dim
        slices = []
        for index, projection in enumerate(PROJECTIONS):
            attribute = "in_proj_weight" if packed else f"{projection[0]}_proj_weight"
            weight = getattr(module, attribute)
            slices.append(
                HeadSlice(
                    projection,
                    join_names(name, attribute),
                    module,
                    attribute,
                    module.num_heads,
                    module.head_dim,
                    start=index * width if packed else 0,
                    bias=None if module.in_proj_bias is None else "in_proj_bias",
                    bias_start=index * width,
                    along=weight.shape[0],
                    across=weight.shape[1],
                    obstacle=find_obstacle(module, attribute),
                )
            )
        layout = f"{self.name} {'packed' if packed else 'separate'}"
        site = build_site(model, name, module, layout, slices, OutputProjection(module, "out_proj"))
        return replace(site, prepare=hold_adopted, scores=TorchScores)


@dataclass(frozen=True)
class AdditiveQueries:
    """`headwise.nn.AdditiveAttention`: each row of its score matrix is the learned query of one head.

    All heads share keys and values, so there is one key/value head and no head slice of them.
    """

    name: str = "additive"

    def site(self, model: nn.Module, name: str, module: nn.Module) -> Site | None:
        """Return the site of an additive attention module."""
        if not isinstance(module, AdditiveAttention):
            return None
        query = HeadSlice(
            "query",
            join_names(name, "score.weight"),
            module.score,
            "weight",
            module.num_heads,
            1,
            along=module.num_heads,
            across=module.score.in_features,
            obstacle=find_obstacle(module.score, "weight"),
        )
        return Site(
            model=model,
            name=name,
            module=module,
            **{**locate(model, name), "kind": "pooling"},
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
    are grouped queries. Values may be of another width than queries and keys, where W_O takes that. Queries twice as
    wide as the input of W_O are gated: head h is [query; gate].

    Args:
        name: Name of the row in tables and messages.
        query: Attribute names of the query projection, tried in order.
        key: Likewise for the key projection.
        value: Likewise for the value projection.
        output: Likewise for W_O; a leading ".." starts an attribute path at the parent module.
        num_heads: Number of query heads, or attribute names of it on the module or its `config`.
        head_size: Attribute names of the width of one head; tried before `num_heads`.
        beside: Names of other projections that the module may hold and that have no heads.
        when: Values that attributes of the module must have, each (name, allowed values); None allows its absence, ...
            any value.
        tiled: Whether query head h uses key/value head h mod G, as where keys are repeated as a whole, and not h // (H
            / G).

    Raises:
        SettingError: Names are not a tuple of strings.

    Example:
        >>> row = SeparateLinears(query=("wq",), key=("wk",), value=("wv",), output=("wo",), num_heads=("nh",))
    """

    name: str = "separate"
    query: tuple[str, ...] = _name_each("q", "query", "queries")
    key: tuple[str, ...] = _name_each("k", "key", "keys")
    value: tuple[str, ...] = _name_each("v", "value", "values")
    output: tuple[str, ...] = (
        *NORMS,
        *("o_proj", "out_proj", "out_lin", "o", "to_out.0", "to_out", "wo", "Wo", "linear_out", "attention_out"),
        *("proj", "projection_layer", "dense", "output_proj", "..output.dense", "output", "..output", "linear", "post"),
        *("post_proj", "..post", "output_projection.o_proj", "W_o", "W_O", "w_o", "WO", "fc_o", "fc_out", "fc"),
        *("final_linear", "output_linear", "out_linear", "output_transform", "proj_out", "proj_o", "out_layer"),
        *("output_dense", "unify_heads", "unifyheads", "w_concat", "c_proj", "out", "projection"),
    )
    num_heads: tuple[str | int, ...] | int = NUM_HEADS
    head_size: tuple[str, ...] = HEAD_SIZE
    beside: tuple[str, ...] = BESIDE
    when: Conditions = ()
    tiled: bool = False

    def __post_init__(self) -> None:
        for field in (*PROJECTIONS, "output", "head_size", "beside"):
            require_names(field, getattr(self, field))
        require_count("num_heads", self.num_heads)

    def site(self, model: nn.Module, name: str, module: nn.Module) -> Site | None:
        """Return the site of a module that holds the three projections."""
        paths = {kind: find_attribute(module, getattr(self, kind)) or "" for kind in PROJECTIONS}
        if not all(paths.values()) or not has_values(module, self.when):
            return None
        refuse_others(self.name, name, module, {*paths.values()}, (*self.beside, *self.output))
        found = {kind: read_child(module, path) for kind, path in paths.items()}
        names = {kind: join_names(name, path) for kind, path in paths.items()}
        # a module under tensor parallelism may hold the number of heads that it computes itself
        divided = computes_part(found["query"].owner, "weight", found["query"].axis)
        size = self._read_size(name, module, found["query"].rows, divided)
        queries, keys = (count_heads(names[kind], found[kind].rows, size) for kind in ("query", "key"))
        width = found["value"].rows // keys
        self._refuse_shared(model, name, module, found["query"].rows)
        output_projection, gated = find_output_projection(model, name, module, self.output, queries * width), 1
        if output_projection is None and queries % 2 == 0:
            output_projection = find_output_projection(model, name, module, self.output, queries // 2 * width)
            gated = 1 if output_projection is None else 2
        elif (
            output_projection is not None
            and read_output_width(output_projection) is None
            and not divided
            and read_integer(module, self.num_heads) == queries / 2
        ):
            # the width of the heads cannot be read from a module that replaced W_O
            gated = 2
        queries //= gated
        # only W_O tells that values are of another width than queries and keys
        if found["value"].rows != keys * (size if output_projection is None else width) or queries % keys:
            raise LayoutError(
                f"{name or 'the model'}: {queries} query and {keys} key heads of {size} rows and {found['value'].rows} "
                "value rows do not group; the layout row does not describe this module."
            )
        counts, sizes = {"query": queries, "key": keys, "value": keys}, {"query": size, "key": size, "value": width}
        strides = {**sizes, "query": size * gated}
        slices = [
            build_slice(kind, names[kind], found[kind], counts[kind], sizes[kind], stride=strides[kind])
            for kind in PROJECTIONS
        ]
        layout = self.name if gated == 1 else f"{self.name} gated"
        return replace(build_site(model, name, module, layout, slices, output_projection), tiled=self.tiled)

    def _refuse_shared(self, model: nn.Module, name: str, module: nn.Module, rows: int) -> None:
        """Refuse projections of the width of one head, which all heads share: W_O takes them once for each head."""
        heads = read_integer(module, self.num_heads)
        taken = find_output_projection(model, name, module, self.output, rows * (heads or 1))
        if heads is not None and heads > 1 and read_output_width(taken) == rows * heads:
            raise LayoutError(
                f"{name or 'the model'} ({type(module).__name__}) has one projection for all {heads} heads: {rows} "
                f"features, which W_O takes {heads} times. No weights belong to one head; leave it out with exclude."
            )

    def _read_size(self, name: str, module: nn.Module, rows: int, divided: bool) -> int:
        size = None if isinstance(self.num_heads, int) else read_integer(module, self.head_size)
        if size is not None:
            # of each of the two heads that became one; see `pairing`
            return size if find_difference(module) is None else 2 * size
        if divided:
            raise LayoutError(
                f"{name or 'the model'} ({type(module).__name__}) is divided by tensor parallelism and has none of "
                f"{', '.join(self.head_size)}; its number of heads may be that of all processes or of this one. Call "
                "find_heads before parallelize_module."
            )
        heads = read_integer(module, self.num_heads)
        if heads is None:
            refuse_uncounted(name, module, self.num_heads, self.head_size)
        return count_heads(f"{name or 'the model'} query", rows, heads)


@dataclass(frozen=True)
class FusedLinear:
    """Query, key and value in one projection, or key and value in one and the query in another.

    The output features of the fused projection are one block per projection, each of heads x head size, with fewer
    key/value heads under grouped queries. Interleaved, they are query, key and value of head 0, then of head 1, and so
    on. Only the forward tells these orders apart: a row therefore names the output projection too and fits no module
    without it, and `verify` proves the order.

    Args:
        name: Name of the row in tables and messages.
        fused: Attribute names of the fused projection, tried in order.
        output: Likewise for W_O; a leading ".." starts an attribute path at the parent module.
        order: What the fused projection returns, in order.
        interleaved: Whether the heads of `order` alternate: all of one key/value head, then all of the next.
        query: Attribute names of the query projection where it is not in `order`.
        parts: Number of equal parts the output features are divided into, each with its blocks.
        num_heads, head_size, beside, when, tiled: As in `SeparateLinears`.

    Raises:
        SettingError: Names are not a tuple of strings, or `order` is not made of query, key and value.

    Example:
        >>> row = FusedLinear("mine", fused=("to_qvk",), output=("merge",), order=("query", "value", "key"))
    """

    name: str
    fused: tuple[str, ...]
    output: tuple[str, ...]
    order: tuple[str, ...] = PROJECTIONS
    interleaved: bool = False
    query: tuple[str, ...] = ()
    parts: int = 1
    when: Conditions = ()
    tiled: bool = False
    num_heads: tuple[str | int, ...] | int = NUM_HEADS
    head_size: tuple[str, ...] = HEAD_SIZE
    beside: tuple[str, ...] = BESIDE

    def __post_init__(self) -> None:
        for field in ("fused", "output", "order", "query", "head_size", "beside"):
            require_names(field, getattr(self, field))
        require_count("num_heads", self.num_heads)
        expected = sorted(PROJECTIONS[1:] if self.query else PROJECTIONS)
        if sorted(self.order) != expected:
            raise SettingError(
                f"order is {self.order}; expected {', '.join(expected)} in some order"
                f"{', as the query has its own projection' if self.query else ''}."
            )

    def site(self, model: nn.Module, name: str, module: nn.Module) -> Site | None:
        """Return the site of a module that holds the fused projection and W_O."""
        fused, query = find_attribute(module, self.fused), find_attribute(module, self.query)
        if fused is None or (self.query and query is None) or not has_values(module, self.when):
            return None
        output_projection = find_output_projection(model, name, module, self.output, None)
        if output_projection is None:
            return None
        refuse_others(self.name, name, module, {fused, query or fused}, (*self.beside, *self.output))
        path, projection = join_names(name, fused), read_child(module, fused)
        separate = None if query is None else read_child(module, query)
        heads, groups, size = self._count(path, module, projection, separate, output_projection)
        counts = {kind: heads if kind == "query" else groups for kind in PROJECTIONS}
        parts = groups if self.interleaved else self.parts
        jump, start, slices = sum(counts[kind] // parts for kind in self.order) * size, 0, {}
        for kind in self.order:
            run = counts[kind] // parts
            whole = build_slice(kind, path, projection, counts[kind], size, start, size)
            slices[kind] = HeadRuns.build(whole, run, jump)
            start += run * size
        if separate is not None:
            slices["query"] = build_slice("query", join_names(name, str(query)), separate, heads, size)
        own = [slices[kind] for kind in PROJECTIONS]
        return replace(build_site(model, name, module, self.name, own, output_projection), tiled=self.tiled)

    def _count(
        self,
        name: str,
        module: nn.Module,
        fused: Projection,
        query: Projection | None,
        output_projection: OutputProjection,
    ) -> tuple[int, int, int]:
        """Return query heads, key/value heads and head size, from the width of W_O where it is known."""
        width = read_output_width(output_projection) or (None if query is None else query.rows)
        given = read_integer(module, self.num_heads)
        size = None if isinstance(self.num_heads, int) else read_integer(module, self.head_size)
        if size is None:
            if given is None:
                refuse_uncounted(name, module, self.num_heads, self.head_size)
            size = count_heads(name, width or fused.rows // len(self.order), given)
        heads = given if width is None else count_heads(f"W_O of {name}", width, size)
        if heads is None:
            refuse_uncounted(name, module, self.num_heads, self.head_size)
        rest, pair = fused.rows - (heads * size if query is None else 0), 2 * size
        fits = rest > 0 and rest % pair == 0 and heads % (rest // pair) == 0
        if not fits or heads % self.parts or rest // pair % self.parts:
            kinds = f"{', '.join(self.order)} {'of each group' if self.interleaved else 'in blocks'}"
            raise LayoutError(
                f"{name}.weight: {fused.rows} rows are not {kinds} for {heads} query heads of {size} rows; "
                "the layout row does not describe this module: write one for it (SeparateLinears, num_heads=...), or "
                "leave it out with exclude."
            )
        return heads, rest // pair, size
