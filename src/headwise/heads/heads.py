"""The attention heads of a model: its attentions, the collection a user holds, and the check that both still fit.

Under grouped queries a head is a query head, or all query heads that share a key/value head as one. A reading that
shapes alone do not determine is a guess until a call settles it, and nothing acts on a guess.
"""

from __future__ import annotations

import fnmatch
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn

from headwise.errors import LayoutError, SettingError, require_choice, warn_renamed
from headwise.heads.adapters import find_lora_obstacle
from headwise.heads.sharding import computes_part, count_parts, gather_features, scale_features, select_own_heads
from headwise.heads.view import HeadView, OutputProjection, gather_full, read_projection
from headwise.nn.hooks import strip_wrappers, unwrap_compiled
from headwise.nn.resized import GROUPS
from headwise.nn.scores import Scores

# What fits on a screen.
LINES = 40

T = TypeVar("T")


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, with its cells below those of the row before."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def shorten(rows: Sequence[T], most: int) -> tuple[Sequence[T], int, Sequence[T]]:
    """Return the first rows, the number of rows left out, and the last rows, which with a line between are `most`."""
    if len(rows) <= most:
        return rows, 0, rows[:0]
    last = (most - 1) // 2
    first = most - 1 - last
    return rows[:first], len(rows) - first - last, rows[len(rows) - last :]


PROJECTIONS = ("query", "key", "value")
GROUPINGS = ("within", "across")
KINDS = ("self", "decoder", "cross", "pooling")

# Keeps a function to call later: the `append` of a list, the `callback` of an `ExitStack`.
Undo = Callable[[Callable[[], object]], object]


@dataclass(frozen=True, eq=False)
class Site:
    """One attention module of a model, and how its heads are read.

    Attributes:
        model: The model it was found in.
        name, module: The attention module, and its dotted name in the model; empty when it is the model.
        kind: "self", "decoder" (self-attention of the decoder of an encoder-decoder), "cross", or "pooling" (one
            learned query per head for the whole sequence).
        layer, stack: Index of the layer in its stack, from 0, and the dotted name of that, such as "encoder.layers".
        layout: Name of the layout row that matched.
        num_heads, key_value_heads, head_size: Query heads H, key/value heads G (H unless queries are grouped), width e.
        slices: The query, key and value head slices; query and key where values are the keys; the query alone where
            keys and values are another layer's, and in additive attention, whose keys and values all heads share.
        output: The head slice of W_O (columns are heads), or None where W_O was not found.
        output_projection: Where the module that plays W_O is, or None where it was not found.
        value_module: The module whose output holds the projected values, at `slices[-1].features(output)`; None where
            no module call returns them (`nn.MultiheadAttention`), and where they are another layer's.
        prepare: Makes the output projection a module call (swaps a stock torch module), given model and module, and
            returns what undoes it.
        scores: Makes what reaches the attention scores of the module, given it; None where nothing does.
        tiled: Whether query head h uses key/value head h mod G, as where keys are repeated as a whole, and not h // (H
            / G).
        guessed: Whether the layout is one of several that the shapes allow, and no call of the module has shown which.
        found_at: What `paths` returned when the site was made, which tells when a layer was wrapped since.
    """

    model: nn.Module = field(repr=False)
    name: str
    module: nn.Module = field(repr=False)
    kind: str
    layer: int
    stack: str
    layout: str
    num_heads: int
    key_value_heads: int
    head_size: int
    slices: tuple[HeadView, ...] = field(repr=False)
    output: HeadView | None = field(default=None, repr=False)
    output_projection: OutputProjection | None = None
    value_module: nn.Module | None = field(default=None, repr=False)
    prepare: Callable[[nn.Module, nn.Module], Callable[[], object]] | None = field(default=None, repr=False)
    scores: Callable[[nn.Module], Scores] | None = field(default=None, repr=False)
    tiled: bool = False
    guessed: bool = field(default=False, repr=False)
    found_at: tuple[tuple[str | None, str | None], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "found_at", self.paths())

    @property
    def label(self) -> str:
        """Its name in messages: "the model" where the model itself is the attention."""
        return self.name or "the model"

    @property
    def shown(self) -> str:
        """Its name in tables: "(model)" where the model itself is the attention."""
        return self.name or "(model)"

    @property
    def borrows(self) -> bool:
        """Whether its keys and values are those of another attention, so that it holds queries alone."""
        return self.kind != "pooling" and len(self.slices) == 1

    @property
    def parts(self) -> tuple[HeadView, ...]:
        """The slices of single parameters that `slices` are made of."""
        return tuple(part for head_slice in self.slices for part in head_slice.parts)

    @property
    def value_modules(self) -> tuple[nn.Module, ...]:
        """The modules that project values: `value_module`, or one for each head; none where no module call does."""
        if self.value_module is not None:
            return (self.value_module,)
        values = [part for part in self.parts if part.projection == "value" and len(self.parts) > len(self.slices)]
        return tuple(part.module for part in values if part.module is not None)

    def paths(self) -> tuple[tuple[str | None, str | None], ...]:
        """Return the current paths of each part's owner and called module inside the attention module."""
        paths = {id(part): strip_wrappers(path) for path, part in self.module.named_modules()}
        return tuple((paths.get(id(part.owner)), paths.get(id(part.module))) for part in self.parts)

    def expose(self, undo: Undo | None = None) -> OutputProjection:
        """Make the output projection's call visible and return the output projection; `undo` gets what undoes it.

        Raises:
            LayoutError: The module that plays W_O was not found.
        """
        if self.output_projection is None:
            found = (
                "no output projection was found next to its query, key and value; name it in the layout row "
                "(output=...)."
                if self.output is None
                else f"W_O is the parameter {self.output.name}, which its forward uses itself; outputs of heads are "
                "read, removed and aggregated where W_O is a module, such as an nn.Linear."
            )
            raise LayoutError(f"{self.label} ({type(self.module).__name__}): {found}")
        self.make_visible(undo)
        return self.output_projection

    def find_output_weights(self) -> Tensor | None:
        """Return W_O of each head, [H, d, e], or None where no linear output projection can be read now."""
        output, projection = self.output, self.output_projection
        if output is None or output.obstacle is not None or projection is None:
            return None
        # another wrapper may not be linear: it may clip
        linear = projection.module in (output.owner, output.lora)
        adapted = output.lora is not None and find_lora_obstacle(output.lora) is not None
        if not linear or adapted or output.owner._parameters.get(output.attribute) is None:
            return None
        return output.turn(output.compute(lambda parameter: gather_full(parameter.detach())))

    def reach_scores(self, undo: Undo | None = None) -> Scores:
        """Return what reaches the attention scores of the module: its weights and what is added to them.

        `undo` gets what undoes what it takes to reach them; None leaves the module so.

        Raises:
            LayoutError: Nothing does.
        """
        if self.scores is None:
            raise LayoutError(
                f"{self.label} ({type(self.module).__name__}): attention weights and biases of heads are "
                "reached in torch.nn.MultiheadAttention, headwise.nn.MultiheadAttention and modules that call torch's "
                "scaled_dot_product_attention, a softmax between projections that are modules, or the attention "
                "interface of transformers, which this one does not."
            )
        self.make_visible(undo)
        return self.scores(self.module)

    def make_visible(self, undo: Undo | None) -> None:
        """Have the module call its output projection, if it has one, until what `undo` is given is called."""
        if self.prepare is not None:
            release = self.prepare(self.model, self.module)
            if undo is not None:
                undo(release)

    def gives(self, what: str) -> bool:
        """Whether values or outputs are read where the scores are computed, as they pass through no module."""
        return self.scores is not None and what in self.scores(self.module).gives

    @property
    def divided(self) -> bool:
        """Whether tensor parallel has each process compute some of the heads."""
        query = self.slices[0]
        return computes_part(query.owner, query.attribute, query.axes.heads)

    @property
    def _query_weight(self) -> tuple[Tensor | None, int]:
        """The weight of the queries, and its axis along which heads are."""
        query = self.slices[0]
        return query.owner._parameters.get(query.attribute), query.axes.heads

    def count_members(self) -> int:
        """Return how many query heads share a key/value head.

        Raises:
            LayoutError: Each has its own.
        """
        members = self.num_heads // self.key_value_heads
        if members < 2:
            raise LayoutError(
                f"{self.label} has {self.num_heads} query heads and as many key/value heads, so that no group of query "
                "heads shares one; leave out the grouping, or select other sites."
            )
        return members

    def list_members(self, group: int) -> range:
        """Return the query heads that share a key/value head."""
        members = self.num_heads // self.key_value_heads
        tiled = range(group, self.num_heads, self.key_value_heads)
        return tiled if self.tiled else range(group * members, (group + 1) * members)

    def group_queries(self, tensor: Tensor, axis: int = 0) -> Tensor:
        """Return a tensor of query heads along an axis with their groups apart, [..., G, H / G, ...]: a view."""
        if self.tiled:
            return tensor.unflatten(axis, (-1, self.key_value_heads)).transpose(axis, axis + 1)
        return tensor.unflatten(axis, (self.key_value_heads, -1))

    def gather_heads(self, tensor: Tensor, axis: int, size: int) -> Tensor:
        """Return `tensor`, of some heads in each process under tensor parallel, for all: `size` along `axis`."""
        return gather_features(tensor, axis, size, *self._query_weight)

    def select_own_heads(self, tensor: Tensor, axis: int, heads: int) -> Tensor:
        """Return the part of `tensor`, given for all heads along an axis, of the `heads` this process computes with."""
        return select_own_heads(tensor, axis, heads, *self._query_weight)

    def scale_heads(self, joined: Tensor, factors: Tensor) -> Tensor:
        """Return what W_O gets, [..., H * e] or this process's part of it, times one factor per head, [H]."""
        return scale_features(joined, factors.repeat_interleave(self.head_size), *self._query_weight)

    def count_all(self, computed: int, size: int) -> int:
        """Return `size` where the processes together compute that many heads or features, else what this one does."""
        return size if computed * count_parts(*self._query_weight) == size else computed

    @property
    def width(self) -> int:
        """Width d of the site's output: the rows of W_O, or H * e where W_O is unknown."""
        return self.num_heads * self.head_size if self.output is None else self.output.across


@dataclass(frozen=True, eq=False, repr=False)
class Heads:
    """The attention heads of a model: immutable, printable, selectable.

    Returned by `find_heads`. Every selector returns a new collection and refuses to return an empty one. Printed, it is
    a table of at most 40 lines: of a larger model the first and last sites.

    Example:
        >>> import headwise as hw
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 3,
        ...                               enable_nested_tensor=False)
        >>> heads = hw.find_heads(model)
        >>> len(heads.layers(0, 2)), heads.layer(1).projection("value").projections
        (2, ('value',))
    """

    model: nn.Module
    sites: tuple[Site, ...]
    projections: tuple[str, ...] = PROJECTIONS
    found: tuple[Site, ...] = ()
    replicated: bool = False
    grouping: str = ""
    left_out: bool = False

    def __post_init__(self) -> None:
        if not self.found:
            object.__setattr__(self, "found", self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Keep calls of output projections visible inside the block, for several things that are attached in turn."""
        with ExitStack() as undo:
            for site in self.sites:
                site.make_visible(undo.callback)
            yield

    def layer(self, index: int) -> Heads:
        """Return the heads of one layer, counted from 0; negative counts from the end of each stack.

        Raises:
            LayoutError: No site has that layer, or several kinds of attention have it: choose with `kind`.
        """
        return self.layers(index)

    def layers(self, *indices: int) -> Heads:
        """Return the heads of several layers; refuses as `layer` does."""
        if not indices:
            raise SettingError("layers() was given nothing; expected at least one layer, counted from 0.")
        for index in indices:
            if not isinstance(index, int) or isinstance(index, bool):
                raise SettingError(f"layer is {index!r}; expected an integer.")
        counts = {site.stack: 1 + max(s.layer for s in self.sites if s.stack == site.stack) for site in self.sites}
        # a negative index counts from the end of each stack
        numbers = {site: {site.layer, site.layer - counts[site.stack]} for site in self.sites}
        wanted = tuple(site for site in self.sites if numbers[site] & {*indices})
        places = sorted({(site.stack, site.kind) for site in wanted})
        if len(places) > 1:
            listed = ", ".join(f"{kind!r} in {stack or 'the model'}" for stack, kind in places)
            raise LayoutError(
                f"layer {', '.join(map(str, indices))} exists in several places ({listed}); "
                "select one first with .kind(...) or .where(...)."
            )
        missing = [index for index in indices if not any(index in numbers[site] for site in wanted)]
        if missing:
            have = sorted({site.layer for site in self.sites})
            raise LayoutError(f"no attention in layer {missing[0]}; there is attention in layers {have}.")
        return replace(self, sites=wanted)

    def kind(self, *kinds: str) -> Heads:
        """Return the heads of some kinds of attention: "self", "decoder", "cross", "pooling"."""
        if not kinds:
            raise SettingError(f"kind() was given nothing; expected some of {', '.join(KINDS)}.")
        for kind in kinds:
            require_choice("kind", kind, KINDS)
        return self._select(tuple(site for site in self.sites if site.kind in kinds), f"of kind {', '.join(kinds)}")

    def where(self, pattern: str) -> Heads:
        """Return the heads whose site name matches a shell pattern, for example "decoder.*"."""
        if not isinstance(pattern, str):
            raise SettingError(f"pattern is {pattern!r}; expected a shell pattern of site names, such as 'decoder.*'.")
        kept = tuple(site for site in self.sites if fnmatch.fnmatchcase(site.name, pattern))
        return self._select(kept, f"named like {pattern!r}")

    def projection(self, *projections: str) -> Heads:
        """Return the same sites with fewer projections: what repulsion acts on."""
        for projection in projections:
            require_choice("projection", projection, PROJECTIONS)
        if not projections:
            raise SettingError("projection() was given nothing; expected some of query, key, value.")
        return replace(self, projections=tuple(p for p in PROJECTIONS if p in projections))

    def grouped(self, grouping: str) -> Heads:
        """Return the same sites with query heads in groups, one for each key/value head, for repulsion.

        "within": heads of a group repel one another. "across": a group is one particle.

        Raises:
            SettingError: There is no such grouping.
            LayoutError: A site has no grouped queries.
        """
        require_choice("grouping", grouping, GROUPINGS)
        for site in self.sites:
            site.count_members()
        return replace(self, grouping=grouping)

    def slices(self) -> tuple[HeadView, ...]:
        """Return the slices of the selected projections, site by site."""
        return tuple(part for site in self.sites for part in site.slices if part.projection in self.projections)

    def _select(self, sites: tuple[Site, ...], description: str) -> Heads:
        if not sites:
            names = ", ".join(f"{site.shown} [{site.kind}]" for site in self.sites[:8])
            raise LayoutError(f"no attention {description} among {len(self.sites)} sites: {names}.")
        return replace(self, sites=sites)

    def __str__(self) -> str:
        obstacles = {part.obstacle: part.name for part in reversed(self.slices()) if part.obstacle is not None}
        notes = [f"no repulsion, for example in {name}: it {obstacle}" for obstacle, name in obstacles.items()][:8]
        first, left_out, last = shorten([_describe_row(site) for site in self.sites], LINES - 2 - len(notes))
        columns = ("site", "kind", "layer", "heads", "size", "layout", "output")
        lines = align([columns, *first, *last])
        if left_out:
            lines.insert(1 + len(first), f"... {left_out} more sites ...")
        total = sum(site.num_heads for site in self.sites)
        sites = f"{len(self)} site{'s' * (len(self) > 1)}"
        lines.append(f"{total} heads in {sites}; projections: {', '.join(self.projections)}")
        return "\n".join([*lines, *notes])

    # in a notebook or a debugger: every module of the model otherwise, once for each site
    __repr__ = __str__


def _describe_row(site: Site) -> tuple[str, ...]:
    heads = str(site.num_heads)
    heads += "" if site.num_heads == site.key_value_heads else f"/{site.key_value_heads}"
    output = site.output_projection
    shown = "-" if site.output is None else f"{site.output.attribute}: parameter"
    if output is not None:
        shown = f"{output.attribute}: {type(unwrap_compiled(output.module)).__name__}"
    return site.shown, site.kind, str(site.layer), heads, str(site.head_size), site.layout, shown


P = ParamSpec("P")
R = TypeVar("R")


def heads_first(before: str | None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function take heads second too, after an argument of this name, or one not needed any more, as before."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if len(args) > 1 and isinstance(args[1], Heads) and not isinstance(args[0], Heads):
                same: Any = function
                warn_renamed(f"{same.__name__}({before or 'model'}, heads, ...)", f"{same.__name__}(heads, ...)")
                return same(*args[1:], **kwargs, **({} if before is None else {before: args[0]}))
            return function(*args, **kwargs)

        return call

    return decorate


def require_heads(given: object) -> None:
    """Raise unless these are heads of a model that still holds them where they were found.

    Raises:
        SettingError: It is something else.
        LayoutError: The model was changed since, at one of the sites.
    """
    if not isinstance(given, Heads):
        what = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
        raise SettingError(f"heads is {what}; expected heads of a model: hw.find_heads(model).")
    present = {id(module) for module in given.model.modules()}
    for site in given:
        if id(site.module) not in present:
            raise LayoutError(
                f"{site.label} ({type(site.module).__name__}) is no longer part of the model, which "
                "was changed after its heads were found; call find_heads again."
            )
        _require_current(site)


def _require_current(site: Site) -> None:
    """Raise `LayoutError` unless the layers of a site are where they were when it was found."""
    for head_slice, before, now in zip(site.parts, site.found_at, site.paths(), strict=True):
        if before != now:
            place = next(b for b, n in zip(before, now, strict=True) if b != n)
            there = None if place is None else dict(site.module.named_modules()).get(place)
            taken = "" if there is None else f": a {type(there).__name__} has taken its place"
            raise LayoutError(
                f"{head_slice.name} is not where the model calls it anymore{taken}. Wrap (LoRA), prune, replace or "
                "quantize layers first, then call find_heads."
            )
        if head_slice.obstacle is None and head_slice.owner._parameters.get(head_slice.attribute) is None:
            raise LayoutError(head_slice.vanished)
        if head_slice.obstacle is None:
            # raises where the parameter has other sizes now
            _ = head_slice.parameter
        called = None if head_slice.module is head_slice.owner else read_projection(head_slice.module)
        if called is not None and called.owner is not head_slice.owner:
            raise LayoutError(
                f"{head_slice.name} is not what {type(head_slice.module).__name__} calls anymore: another adapter is "
                "active than when its heads were found; call find_heads again."
            )


def group_slices(site: Site, grouping: str) -> tuple[HeadView, ...]:
    """Return the M queries of a site as G slices ("within"), or as one slice of G wide heads ("across").

    A wide head is all M / G query heads of a group, one after another.

    Raises:
        LayoutError: The query heads of a group do not lie next to one another in one parameter.
    """
    query = next(part for part in site.slices if part.projection == "query")
    members, axes = site.count_members(), query.axes
    if query.pieces or axes.start != axes.heads:
        raise LayoutError(
            f"{site.label} ({site.layout}): its query heads do not lie in one run of rows, which groups of them are "
            "read from; leave out the grouping."
        )
    if grouping == "within":
        slices = []
        for run in range(site.key_value_heads):
            own = site.list_members(run)
            start, stride = query.start + own[0] * query.stride, own.step * query.stride
            slices.append(replace(query, heads=members, start=start, stride=stride, bias=None, run=run))
        return tuple(slices)
    if site.tiled or query.apart or query.step != 1 or query.stride != query.head_size:
        between = "rows of other projections lie between its query heads"
        between = "other query heads lie between those of a group" if site.tiled else between
        raise LayoutError(
            f"{site.label} ({site.layout}): {between}, which cannot be joined into one head for each group; use "
            "'within', or leave out the grouping."
        )
    size = members * query.head_size
    return (replace(query, heads=site.key_value_heads, head_size=size, stride=size, bias=None),)


def group_features(tensor: Tensor, site: Site, grouping: str, axis: int) -> Tensor:
    """Return outputs [B, L, H, e] (`axis` 2) or weights [B, H, Q, K] (1) with the groups apart, [G, ..., H / G, ...].

    Across groups they are joined: features of a group's heads follow one another, and weights become their mean.
    """
    site.count_members()
    apart = site.group_queries(tensor, axis)
    if grouping == "within":
        return apart.movedim(axis, 0)
    return apart.flatten(axis + 1, axis + 2) if axis == 2 else apart.mean(dim=axis + 1)


def list_sharing(found: Sequence[Site], site: Site) -> list[Site]:
    """Return the sites that compute with the same keys and values as a site, itself among them.

    In transformers the last layer of a kind that has keys hands them to all that have none.
    """

    def read_group(one: Site) -> tuple[str, object] | None:
        stores = getattr(one.module, "store_full_length_kv", None) is True
        known = (stores or one.borrows) and hasattr(one.module, "layer_type")
        return (one.stack, one.module.layer_type) if known else None

    group = read_group(site)
    return [site] if group is None else [other for other in found if read_group(other) == group]


# Attributes that count key/value heads, or query heads for each of them.
KEY_COUNTS = (
    *("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "n_kv_head", "n_head_kv", "key_value_heads"),
    *("num_query_groups", "n_query_groups", "num_groups", "num_kv", "n_local_kv_heads", "kv_n_heads"),
)
RATIOS = (GROUPS, "num_kv_groups", "n_rep", "q_per_kv", "group_size")
Reading = tuple[object, ...]

# Readings that a call has proved, by the class of the attention: its code and sizes are what makes them right.
_proved: weakref.WeakKeyDictionary[type, set[Reading]] = weakref.WeakKeyDictionary()


def note_proved(site: Site) -> None:
    """Remember that a reading was proved by calls of the module."""
    _proved.setdefault(type(site.module), set()).add(_as_reading(site))


def is_guess(site: Site) -> bool:
    """Return whether a site is read in one of several ways that its shapes allow, and nothing has shown which."""
    return site.guessed and _as_reading(site) not in _proved.get(type(site.module), ())


def _as_reading(site: Site) -> Reading:
    parts = [(part.projection, part.heads, part.head_size, part.start, part.stride, part.along) for part in site.parts]
    return (site.num_heads, site.key_value_heads, site.tiled, *parts)


def require_told(sites: Sequence[Site]) -> None:
    """Raise `LayoutError` for grouped queries that may as well be values wider than keys, where nothing tells."""
    for site in sites:
        heads, groups, size = site.num_heads, site.key_value_heads, site.head_size
        if not is_guess(site) or groups == heads:
            continue
        keys, over = divmod(groups * size, heads)
        fused = next(part for part in site.parts if part.projection == "key")
        # the module, or its configuration, may tell the number of key/value heads
        holders = (site.module, *(getattr(site.module, held, None) for held in ("config", "cfg", "args")))
        expected = dict.fromkeys(KEY_COUNTS, groups) | dict.fromkeys(RATIOS, heads // groups)
        held = ((getattr(holder, name, None), count) for name, count in expected.items() for holder in holders)
        counted = any(type(value) is int and value == count for value, count in held)
        if counted or over or site.slices[0].owner is not fused.owner:
            continue
        raise LayoutError(
            f"{site.label} ({type(site.module).__name__}): the {fused.along} rows of {fused.name} may be {heads} query "
            f"and {groups} key/value heads of {size}, or {heads} heads whose queries and keys have {keys} features and "
            f"whose values have {size}; nothing that it holds tells which, and it could not be called with tokens "
            f"alone. If queries are grouped, set module.num_key_value_heads = {groups}, or pass a row of your own: "
            f"FusedLinear('mine', fused=(...,), output=(...,), num_heads={heads}). If values are wider, no row "
            f"describes it; leave it out: exclude=({site.name!r},)."
        )


def require_proved(heads: Heads) -> None:
    """Raise `LayoutError` for a site whose shapes allow several readings, where no call showed which is right."""
    for site in heads:
        if is_guess(site):
            raise LayoutError(
                f"{site.label} ({type(site.module).__name__}): its fused projection is read by the layout "
                f"{site.layout!r}, and its shape allows others: blocks of queries, keys and values, or these of each "
                "head in turn. No call with tokens alone has shown which is right, and forces on other rows would "
                "train something else. Call hw.verify(heads, inputs) first, which proves it; or "
                "describe it with a row of your own."
            )
