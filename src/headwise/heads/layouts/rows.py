"""Layout rows: the ways in which attention modules store their projections.

A row recognizes a module by what it holds, never by its class name, and refuses sizes that do not fit. Beside separate
and fused projections there are rows for latent attention, whose keys and values are made from one narrow state, for
attention that uses the keys or values of another layer, and for heads in a list, each with weights of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

from torch import nn

from headwise.errors import LayoutError, SettingError
from headwise.heads.heads import PROJECTIONS, Site
from headwise.heads.layouts.steps import (
    ATTENTION,
    BESIDE,
    HEAD_SIZE,
    KEY_COUNTS,
    NORMS,
    NUM_HEADS,
    RATIOS,
    Candidate,
    Conditions,
    HeadCount,
    Names,
    attends,
    count_heads,
    find_attribute,
    find_letters,
    find_module,
    list_unused,
    locate,
    projects,
    read_child,
    read_integer,
    read_output_width,
)
from headwise.heads.sharding import computes_part
from headwise.heads.view import HeadView, OutputProjection, Projection, find_obstacle, read_projection
from headwise.nn.additive import AdditiveAttention
from headwise.nn.difference import find_difference
from headwise.nn.multihead import hold_adopted
from headwise.nn.scores import TorchScores
from headwise.settings import check_fields


def _name_each(q: str, query: str, queries: str) -> tuple[str, ...]:
    """Return the names that a projection of queries, keys or values has in the code of many."""
    return (
        *(f"{q}_proj", query, f"{q}_lin", f"{query}_proj", q, f"to_{q}", f"w{q}", f"W{q}", f"linear_{q}"),
        *(f"project_{q}", f"{q}_linear", f"{q}_head", f"W_{query}", f"w_{query}", f"W_{q}", f"w_{q}", f"W_{q.upper()}"),
        *(f"W{q.upper()}", f"w_{q}s", f"fc_{q}", f"{q}_fc", f"fc_{query}", f"lin_{q}", f"proj_{q}", f"{q}_net"),
        *(f"linear_{query}", f"linear_{queries}", f"{query}_linear", f"{query}_layer", f"{query}_dense", queries),
        *(f"{query}_projection", f"to{queries}", f"to_{queries}", f"to_{query}", f"{q}_layer", f"{q}_dense"),
    )


_PLURALS = ("queries", "keys", "values")
_NAMES = {word: _name_each(word[0], word, plural) for word, plural in zip(PROJECTIONS, _PLURALS, strict=True)}


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
        candidate = Candidate(model, name, module)
        packed = module.in_proj_weight is not None
        # less than embed_dim where heads were removed
        width = module.num_heads * module.head_dim
        slices = []
        for index, projection in enumerate(PROJECTIONS):
            attribute = "in_proj_weight" if packed else f"{projection[0]}_proj_weight"
            rows, columns = getattr(module, attribute).shape
            head_slice = HeadView(
                projection,
                candidate.join(attribute),
                module,
                attribute,
                module.num_heads,
                module.head_dim,
                start=index * width if packed else 0,
                bias=None if module.in_proj_bias is None else "in_proj_bias",
                bias_start=index * width,
                along=rows,
                across=columns,
                obstacle=find_obstacle(module, attribute),
            )
            slices.append(head_slice)
        output_projection, layout = OutputProjection(module, "out_proj"), "packed" if packed else "separate"
        settings = {"prepare": hold_adopted, "scores": TorchScores}
        return candidate.site(f"{self.name} {layout}", slices, output_projection, **settings)


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
        query = HeadView(
            "query",
            Candidate(model, name, module).join("score.weight"),
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
        query, key, value: Attribute names of the projections, tried in order.
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
    query: Names = _NAMES["query"]
    key: Names = _NAMES["key"]
    value: Names = _NAMES["value"]
    output: Names = (
        *NORMS,
        *("o_proj", "out_proj", "out_lin", "o", "to_out.0", "to_out", "wo", "Wo", "linear_out", "attention_out"),
        *("proj", "projection_layer", "dense", "output_proj", "..output.dense", "output", "..output", "linear", "post"),
        *("post_proj", "..post", "output_projection.o_proj", "W_o", "W_O", "w_o", "WO", "fc_o", "fc_out", "fc"),
        *("final_linear", "output_linear", "out_linear", "output_transform", "proj_out", "proj_o", "out_layer"),
        *("output_dense", "unify_heads", "unifyheads", "w_concat", "c_proj", "out", "projection"),
    )
    num_heads: HeadCount = NUM_HEADS
    head_size: Names = HEAD_SIZE
    beside: Names = BESIDE
    when: Conditions = ()
    tiled: bool = False
    __post_init__ = check_fields

    def site(self, model: nn.Module, name: str, module: nn.Module) -> Site | None:
        """Return the site of a module that holds the three projections."""
        candidate = Candidate(model, name, module)
        paths = {kind: find_attribute(module, getattr(self, kind)) or "" for kind in PROJECTIONS}
        if not all(paths.values()) or not candidate.fits(self.when):
            return None
        candidate.refuse_others(self.name, {*paths.values()}, (*self.beside, *self.output))
        query, key, value = (read_child(module, path) for path in paths.values())
        # a module under tensor parallelism may hold the number of heads that it computes itself
        divided = computes_part(query.owner, "weight", query.axis)
        size = self._read_size(candidate, query.rows, divided)
        queries = count_heads(candidate.join(paths["query"]), query.rows, size)
        keys = count_heads(candidate.join(paths["key"]), key.rows, size)
        width, count = value.rows // keys, read_integer(module, self.num_heads) or 1
        # projections of the width of one head, which all heads share: W_O takes them once for each head
        taken = candidate.find_output(self.output, query.rows * count)
        if count > 1 and read_output_width(taken) == query.rows * count:
            raise LayoutError(
                f"{candidate.described} has one projection for all {count} heads: {query.rows} features, which W_O "
                f"takes {count} times. No weights belong to one head; leave it out with exclude."
            )
        output_projection, gated = candidate.find_output(self.output, queries * width), 1
        if output_projection is None and queries % 2 == 0:
            output_projection = candidate.find_output(self.output, queries // 2 * width)
            gated = 1 if output_projection is None else 2
        elif output_projection is not None and read_output_width(output_projection) is None and not divided:
            # the width of the heads cannot be read from a module that replaced W_O
            gated = 2 if read_integer(module, self.num_heads) == queries / 2 else 1
        queries //= gated
        # only W_O tells that values are of another width than queries and keys
        if value.rows != keys * (size if output_projection is None else width) or queries % keys:
            raise LayoutError(
                f"{candidate.label}: {queries} query and {keys} key heads of {size} rows and {value.rows} value rows "
                "do not group; the layout row does not describe this module."
            )
        slices = [
            candidate.slice("query", paths["query"], queries, size, stride=size * gated),
            candidate.slice("key", paths["key"], keys, size),
            candidate.slice("value", paths["value"], keys, width),
        ]
        layout = self.name if gated == 1 else f"{self.name} gated"
        return candidate.site(layout, slices, output_projection, tiled=self.tiled)

    def _read_size(self, candidate: Candidate, rows: int, divided: bool) -> int:
        size = None if isinstance(self.num_heads, int) else read_integer(candidate.module, self.head_size)
        if size is not None:
            # of each of the two heads that became one; see `pair_decoder_heads`
            return size if find_difference(candidate.module) is None else 2 * size
        if divided:
            raise LayoutError(
                f"{candidate.described} is divided by tensor parallelism and has none of {', '.join(self.head_size)}; "
                "its number of heads may be that of all processes or of this one. Call find_heads before "
                "parallelize_module."
            )
        heads = read_integer(candidate.module, self.num_heads)
        if heads is None:
            candidate.refuse_uncounted(self.num_heads, self.head_size)
        return count_heads(f"{candidate.label} query", rows, heads)


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
    fused: Names
    output: Names
    order: Names = PROJECTIONS
    interleaved: bool = False
    query: Names = ()
    parts: int = 1
    when: Conditions = ()
    tiled: bool = False
    num_heads: HeadCount = NUM_HEADS
    head_size: Names = HEAD_SIZE
    beside: Names = BESIDE

    def __post_init__(self) -> None:
        check_fields(self)
        require_order(self.order, self.query)

    def site(self, model: nn.Module, name: str, module: nn.Module) -> Site | None:
        """Return the site of a module that holds the fused projection and W_O."""
        candidate = Candidate(model, name, module)
        fused, query = find_attribute(module, self.fused), find_attribute(module, self.query)
        if fused is None or (self.query and query is None) or not candidate.fits(self.when):
            return None
        output_projection = candidate.find_output(self.output)
        if output_projection is None:
            return None
        candidate.refuse_others(self.name, {fused, query or fused}, (*self.beside, *self.output))
        heads, groups, size = self._count(candidate, fused, query, output_projection)
        counts = {kind: heads if kind == "query" else groups for kind in PROJECTIONS}
        parts = groups if self.interleaved else self.parts
        jump, start, slices = sum(counts[kind] // parts for kind in self.order) * size, 0, {}
        for kind in self.order:
            run = counts[kind] // parts
            slices[kind] = candidate.slice(kind, fused, counts[kind], size, start, size).divide_runs(run, jump)
            start += run * size
        if query is not None:
            slices["query"] = candidate.slice("query", query, heads, size)
        return candidate.site(self.name, [slices[kind] for kind in PROJECTIONS], output_projection, tiled=self.tiled)

    def _count(
        self, candidate: Candidate, fused: str, query: str | None, output_projection: OutputProjection
    ) -> tuple[int, int, int]:
        """Return query heads, key/value heads and head size, from the width of W_O where it is known."""
        named = replace(candidate, name=candidate.join(fused))
        module, rows = candidate.module, read_child(candidate.module, fused).rows
        width = read_output_width(output_projection) or (None if query is None else read_child(module, query).rows)
        given = read_integer(module, self.num_heads)
        size = None if isinstance(self.num_heads, int) else read_integer(module, self.head_size)
        if size is None and given is not None:
            size = count_heads(named.name, width or rows // len(self.order), given)
        heads = given if width is None or size is None else count_heads(f"W_O of {named.name}", width, size)
        if heads is None or size is None:
            named.refuse_uncounted(self.num_heads, self.head_size)
        rest, pair = rows - (heads * size if query is None else 0), 2 * size
        fits = rest > 0 and rest % pair == 0 and heads % (rest // pair) == 0
        if not fits or heads % self.parts or rest // pair % self.parts:
            kinds = f"{', '.join(self.order)} {'of each group' if self.interleaved else 'in blocks'}"
            raise LayoutError(
                f"{named.name}.weight: {rows} rows are not {kinds} for {heads} query heads of {size} rows; the layout "
                "row does not describe this module: write one for it (SeparateLinears, num_heads=...), or leave it out "
                "with exclude."
            )
        return heads, rest // pair, size


def require_order(order: tuple[str, ...], query: tuple[str, ...]) -> None:
    """Raise `SettingError` unless `order` is made of query, key and value; of two of them beside a query."""
    expected = sorted(PROJECTIONS[1:] if query else PROJECTIONS)
    if sorted(order) != expected:
        why = ", as the query has its own projection" if query else ""
        raise SettingError(f"order is {order}; expected {', '.join(expected)} in some order{why}.")


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
    query: Names = ("q_b_proj", "q_proj")
    fused: Names = ("kv_b_proj",)
    output: Names = ("o_proj",)
    num_heads: HeadCount = NUM_HEADS
    value_size: Names = ("v_head_dim",)
    beside: Names = (*BESIDE, "q_a_proj", "kv_a_proj_with_mqa")
    __post_init__ = check_fields

    def site(self, model: nn.Module, name: str, module: nn.Module) -> Site | None:
        """Return the site of a module that holds both projections and W_O."""
        candidate = Candidate(model, name, module)
        fused, query = find_attribute(module, self.fused), find_attribute(module, self.query)
        output_projection = candidate.find_output(self.output)
        if fused is None or query is None or output_projection is None:
            return None
        candidate.refuse_others(self.name, {fused, query}, (*self.beside, *self.output))
        pair, width = read_child(module, fused).rows, read_output_width(output_projection)
        value, heads = read_integer(module, self.value_size), read_integer(module, self.num_heads)
        if value is not None and width is not None:
            # the number of heads that the module holds may be from before some were pruned
            heads = count_heads(f"W_O of {name}", width, value)
        elif value is None and width is not None and heads is not None:
            value = count_heads(f"W_O of {name}", width, heads)
        if heads is None or value is None:
            candidate.refuse_uncounted(self.num_heads, self.value_size)
        size = count_heads(candidate.join(query), read_child(module, query).rows, heads)
        rows = count_heads(candidate.join(fused), pair, heads)
        if rows <= value:
            raise LayoutError(
                f"{candidate.join(fused)}.weight: {pair} rows are not a key and a value of {value} rows for each of "
                f"{heads} heads; the layout row does not describe this module."
            )
        slices = [
            candidate.slice("query", query, heads, size),
            candidate.slice("key", fused, heads, rows - value, stride=rows),
            candidate.slice("value", fused, heads, value, start=rows - value, stride=rows),
        ]
        return candidate.site(self.name, slices, output_projection)


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
        candidate = Candidate(model, name, module)
        query, key = find_attribute(module, self.query), find_attribute(module, self.key)
        without_value = any(getattr(module, attribute, module) is None for attribute in self.value)
        if query is None or _holds_others(module, {query, key}) or (key is not None and not without_value):
            return None
        if not attends(module) and ATTENTION.search(type(module).__name__) is None:
            return None
        found = {kind: path for kind, path in (("query", query), ("key", key)) if path is not None}
        size = self._read_size(candidate, read_child(module, query).rows, False)
        counts = {
            kind: count_heads(candidate.join(path), read_child(module, path).rows, size) for kind, path in found.items()
        }
        heads = counts["query"]
        output_projection = candidate.find_output(self.output, heads * size)
        if read_output_width(output_projection) is None:
            return None
        ratio = read_integer(module, RATIOS)
        groups = heads // max(ratio, 1) if ratio is not None else read_integer(module, (*KEY_COUNTS, heads)) or heads
        groups = counts.get("key", groups)
        if heads % groups:
            return None
        slices = [candidate.slice(kind, path, counts[kind], size) for kind, path in found.items()]
        layout = f"{self.name} keys and values" if key is None else f"{self.name} keys as values"
        return candidate.site(layout, slices, output_projection, groups)


def _holds_others(module: nn.Module, used: set[str | None]) -> bool:
    """Return whether a module holds other projections of queries, keys or values, or weights of these."""
    children = [name for name, child in module._modules.items() if child is not None and projects(child)]
    matrices = [name for name, held in module._parameters.items() if held is not None and held.dim() > 1]
    return any(find_letters(name) for name in (*children, *matrices) if name not in used)


@dataclass(frozen=True)
class HeadList:
    """An `nn.ModuleList` of heads, each with a query, a key and a value projection, or three lists of projections.

    The outputs of the heads are concatenated, in the order of the list. A list is one of heads when each of its modules
    holds these three projections and nothing else that has weights, all of one shape, and the module that holds the
    list has an output projection that takes their concatenation; without one, when a head is narrower than its input.

    Args:
        name: Name of the row in tables and messages.
        heads: Attribute names of the list of heads; any list when empty.
        query, key, value: Attribute names of the projections of a head, or of the lists of them, tried in order.
        output: Likewise for W_O; a leading ".." starts an attribute path at the parent module.

    Raises:
        SettingError: Names are not a tuple of strings.

    Example:
        >>> row = HeadList(heads=("heads",), query=("to_q",), key=("to_k",), value=("to_v",), output=("merge",))
    """

    name: str = "list"
    heads: Names = ()
    query: Names = (*SeparateLinears.query, "queries", "q_mappings")
    key: Names = (*SeparateLinears.key, "keys", "k_mappings")
    value: Names = (*SeparateLinears.value, "values", "v_mappings")
    output: Names = (*SeparateLinears.output, "c_proj", "projection", "fc", "fc_out")
    __post_init__ = check_fields

    def site(self, model: nn.Module, name: str, module: nn.Module) -> Site | None:
        """Return the site of a module that holds the list."""
        candidate = Candidate(model, name, module)
        found = self._find(module)
        if found is None:
            return None
        owner, lists = found
        projections = list(chain.from_iterable(lists[kind].values() for kind in PROJECTIONS))
        first, count = projections[0], len(lists["query"])
        if any((p.rows, p.columns, p.axis) != (first.rows, first.columns, first.axis) for p in projections):
            return None
        output_projection = candidate.find_output(self.output, count * first.rows)
        # modules as wide as their inputs may be layers, one after another
        layers = owner is not module and first.rows == first.columns
        if output_projection is None and (layers or count == 1):
            return None
        slices = []
        for kind in PROJECTIONS:
            members = [candidate.slice(kind, path, 1, first.rows) for path in lists[kind]]
            places = zip(*(path.split(".") for path in lists[kind]), strict=True)
            same = ("*" if len(set(parts)) > 1 else parts[0] for parts in places)
            slices.append(HeadView.stack(candidate.join(f"{'.'.join(same)}.weight"), owner, members))
        return candidate.site(self.name, slices, output_projection)

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
