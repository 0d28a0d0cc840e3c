"""Layout rows of attention that holds its weights as parameters of its own and uses them in its forward itself.

Axes say where heads lie in a parameter: "h d e", "p d h e", "(p h e) d".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from math import prod
from typing import Annotated, Any, NoReturn

from torch import nn

from headwise.errors import LayoutError, SettingError
from headwise.heads.heads import PROJECTIONS, Site
from headwise.heads.layouts.rows import require_order
from headwise.heads.layouts.steps import (
    HEAD_SIZE,
    NUM_HEADS,
    Candidate,
    HeadCount,
    Names,
    find_module,
    read_integer,
    read_output_width,
)
from headwise.heads.view import HeadAxes, HeadView, find_obstacle
from headwise.settings import check_fields

# Patterns by number of axes, where heads may lie: "h" heads, "e" their features, "d" inputs, "p" projections.
_SEPARATE = {2: ("(h e) d", "d (h e)"), 3: tuple(" ".join(order) for order in permutations("hde"))}
_PACKED = {
    2: ("(p h e) d", "d (p h e)"),
    3: ("p (h e) d", "p d (h e)", "d p (h e)"),
    4: tuple(" ".join(order) for order in permutations("phde")),
}


@dataclass(frozen=True)
class Axes:
    """The axes of a parameter, each made of one or several letters, the last of which changes fastest.

    The letters are "h" heads, "e" features of a head, "d" inputs (outputs, of W_O), and "p" projections where one
    parameter has several. So "(p h e) d" is the [3 d, d] of torch, "(h p e) d" has query, key and value of head 0
    first, "d (h e)" is multiplied from the right, and in "(e h) d" heads alternate feature by feature.

    Raises:
        SettingError: There are other letters, one is missing or written twice, or "d" shares an axis.
    """

    groups: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        letters = sorted(letter for group in self.groups for letter in group)
        alone = all(len(group) == 1 for group in self.groups if "d" in group)
        if letters not in (list("deh"), list("dehp")) or not alone:
            raise SettingError(
                f"axes is {str(self)!r}; expected h (heads), e (features of a head) and d (inputs, an axis of its own) "
                "once each, and p (projections) where one parameter has several: 'h d e', 'p d h e', '(p h e) d'."
            )

    @staticmethod
    def read(pattern: str) -> Axes:
        """Return the axes of a pattern such as "d (h e)".

        >>> Axes.read("d (h e)").groups
        (('d',), ('h', 'e'))
        """
        if not isinstance(pattern, str):
            raise SettingError(f"axes is {pattern!r}; expected a pattern such as 'h d e' or '(h e) d'.")
        found = re.findall(r"\(([^()]*)\)|([^\s()]+)", pattern)
        return Axes(tuple(tuple(inside.split()) if inside else (alone,) for inside, alone in found))

    def __str__(self) -> str:
        return " ".join(group[0] if len(group) == 1 else f"({' '.join(group)})" for group in self.groups)

    @property
    def packed(self) -> bool:
        """Whether one of the axes counts projections."""
        return any("p" in group for group in self.groups)

    def bind(self, shape: tuple[int, ...], known: Mapping[str, int]) -> dict[str, int] | None:
        """Return the size of each letter, None where the shape does not fit them or leaves two of an axis open.

        >>> Axes.read("(p h e) d").bind((24, 8), {"p": 3, "h": 2})
        {'p': 3, 'h': 2, 'e': 4, 'd': 8}
        """
        if len(shape) != len(self.groups):
            return None
        sizes = dict(known)
        for group, size in zip(self.groups, shape, strict=True):
            unknown = [letter for letter in group if letter not in sizes]
            rest = prod(sizes[letter] for letter in group if letter in sizes)
            if len(unknown) > 1 or rest < 1 or size % rest or (not unknown and rest != size):
                return None
            sizes |= dict.fromkeys(unknown, size // rest)
        return sizes

    def drop_projections(self) -> Axes:
        """Return the axes of a parameter with one projection: without "p"."""
        kept = (tuple(letter for letter in group if letter != "p") for group in self.groups)
        return Axes(tuple(group for group in kept if group))

    def place(self, sizes: Mapping[str, int], start: int = 0) -> dict[str, Any]:
        """Return where heads lie, as settings of a `HeadView`; the projection of number `start` along "p", or heads."""
        axis: dict[str, int] = {}
        unit: dict[str, int] = {}
        for index, group in enumerate(self.groups):
            for place, letter in enumerate(group):
                axis[letter], unit[letter] = index, prod(sizes[after] for after in group[place + 1 :])
        along = "p" if self.packed else "h"
        axes = HeadAxes(axis["h"], axis["e"], axis["d"], axis[along])
        return {"start": start * unit[along], "stride": unit["h"], "step": unit["e"], "axes": axes}


def list_patterns(count: int, *, packed: bool) -> tuple[str, ...]:
    """Return the orders in which a parameter of so many axes may hold heads whose features follow one another."""
    return (_PACKED if packed else _SEPARATE).get(count, ())


def _list_readings(
    shape: tuple[int, ...], known: Mapping[str, int], width: int | None, *, packed: bool
) -> list[tuple[Axes, dict[str, int]]]:
    """Return the ways in which a parameter may hold heads, whose h * e is `width`, or d where that is unknown."""
    every = [Axes.read(pattern) for pattern in list_patterns(len(shape), packed=packed)]
    bound = [(axes, sizes) for axes in every if (sizes := axes.bind(shape, known)) is not None]
    return [(axes, sizes) for axes, sizes in bound if sizes["h"] * sizes["e"] == (width or sizes["d"])]


def _require_axes(name: str, axes: object, *, packed: bool | None = False) -> None:
    """Raise `SettingError` unless these are axes, with or without "p"; None allows both."""
    if axes == "":
        return
    if not isinstance(axes, str):
        raise SettingError(f"{name} is {axes!r}; expected a pattern such as 'h d e'.")
    if Axes.read(axes).packed and packed is False:
        raise SettingError(f"{name} is {axes!r}; p is for one parameter of several projections, a FusedParameter.")


Pattern = Annotated[str, _require_axes]
FusedPattern = Annotated[str, partial(_require_axes, packed=None)]
_OUTPUT = ("W_O", "w_o", "Wo", "wo", "out_proj", "o_proj", "proj", "c_proj", "out", "output", "dense", "to_out")


@dataclass(frozen=True)
class SeparateParameters:
    """Query, key and value weights as three parameters: [H, d, e], [d, H, e], [d, H * e] or another order of axes.

    Where the number of heads and the shapes leave one reading only, `axes` need not be given. Parameters are used by
    the attention's own forward, so nothing can be read at a call of them: repulsion acts on them, and what heads
    compute is read where they are handed on (the output projection, `scaled_dot_product_attention`).

    Args:
        name: Name of the row in tables and messages.
        query, key, value: Attribute names of the weights, tried in order; "q.weight" is a parameter of a submodule.
            Fewer key and value heads are grouped queries.
        output: Likewise for W_O, a parameter or a module.
        axes: Axes of the three: "h" heads, "e" features of a head, "d" inputs, for example "h d e" or "(h e) d", the
            last letter of an axis changing fastest. Read from the shapes where empty.
        output_axes: Axes of W_O where it is a parameter, "d" being its outputs, for example "h e d".
        num_heads: Number of query heads, or attribute names of it on the module or its `config`.
        head_size: Attribute names of the width of one head.
        tiled: Whether query head h uses key/value head h mod G, and not h // (H / G).

    Raises:
        SettingError: Names are not a tuple of strings, or the axes are none.

    Example:
        >>> row = SeparateParameters(query=("wq",), key=("wk",), value=("wv",), output=("wo",), axes="h d e")
    """

    name: str = "parameters"
    query: Names = ("W_Q", "w_q", "Wq", "wq", "q_weight", "weight_q", "query_weight", "w_query")
    key: Names = ("W_K", "w_k", "Wk", "wk", "k_weight", "weight_k", "key_weight", "w_key")
    value: Names = ("W_V", "w_v", "Wv", "wv", "v_weight", "weight_v", "value_weight", "w_value")
    output: Names = _OUTPUT
    axes: Pattern = ""
    output_axes: Pattern = ""
    num_heads: HeadCount = NUM_HEADS
    head_size: Names = HEAD_SIZE
    tiled: bool = False
    __post_init__ = check_fields

    def site(self, model: nn.Module, name: str, module: nn.Module) -> Site | None:
        """Return the site of a module that holds the three parameters."""
        found = {kind: find_parameter(module, getattr(self, kind)) for kind in PROJECTIONS}
        held = {kind: parameter for kind, parameter in found.items() if parameter is not None}
        if len(held) < len(PROJECTIONS):
            return None
        reader = _Reader(model, name, module, self)
        axes, sizes = reader.read_axes(held["query"], packed=False)
        slices = [
            reader.read_slice(kind, parameter, axes, sizes if kind == "query" else {"e": sizes["e"]})
            for kind, parameter in held.items()
        ]
        return reader.join_slices(slices)


@dataclass(frozen=True)
class FusedParameter:
    """Query, key and value weights in one parameter: [3, d, H, e], [3 * d, d], [d, 3, H, e] or another order of axes.

    Args:
        name: Name of the row in tables and messages.
        fused: Attribute names of the parameter, tried in order.
        output: Likewise for W_O, a parameter or a module.
        axes: Its axes: as in `SeparateParameters`, and "p" counts the projections in `order`: "p d h e", "(p h e) d",
            "(h p e) d" where query, key and value of a head follow one another. Without "p" the heads of the first
            projection come first along "h", then those of the second: grouped queries. Read from the shape where empty.
        order: What it holds, in order.
        query: Attribute names of the query weights where they are not in `order`; they have the same axes without "p".
        output_axes, num_heads, head_size, tiled: As in `SeparateParameters`.

    Raises:
        SettingError: Names are not a tuple of strings, the axes are none, or `order` is not made of query, key, value.

    Example:
        >>> row = FusedParameter("mine", fused=("w_qkv",), output=("w_out",), axes="p d h e", output_axes="h e d")
    """

    name: str = "parameter"
    fused: Names = (
        *("in_proj_weight", "qkv_weight", "W_QKV", "w_qkv", "Wqkv", "wqkv", "W_qkv", "qkv", "qkv_proj", "to_qkv"),
    )
    output: Names = _OUTPUT
    axes: FusedPattern = ""
    order: Names = PROJECTIONS
    query: Names = ()
    output_axes: Pattern = ""
    num_heads: HeadCount = NUM_HEADS
    head_size: Names = HEAD_SIZE
    tiled: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        require_order(self.order, self.query)

    def site(self, model: nn.Module, name: str, module: nn.Module) -> Site | None:
        """Return the site of a module that holds the parameter."""
        fused, query = find_parameter(module, self.fused), find_parameter(module, self.query)
        if fused is None or (self.query and query is None):
            return None
        reader = _Reader(model, name, module, self)
        axes, sizes = reader.read_axes(fused, packed=True)
        slices: dict[str, HeadView] = {}
        if query is not None:
            slices["query"] = reader.read_slice("query", query, axes.drop_projections(), {"e": sizes["e"]})
        counts: dict[str, int] = dict.fromkeys(PROJECTIONS, sizes["h"])
        if not axes.packed:
            # heads of the projections one after another
            heads, total = reader.heads, sizes["h"]
            rest = total - (0 if self.query or heads is None else heads)
            if heads is None or rest < 2 or rest % 2 or heads % (rest // 2):
                expected = f"{heads} of the queries and as many keys as values"
                reader.refuse(fused, f"has {total} heads along h, not {expected}")
            counts = {"query": heads, "key": rest // 2, "value": rest // 2}
        first = 0
        for index, kind in enumerate(self.order):
            own = {**sizes, "h": counts[kind]}
            slices[kind] = reader.view(kind, fused, axes, own, index if axes.packed else first)
            first += counts[kind]
        return reader.join_slices([slices[kind] for kind in PROJECTIONS])


@dataclass(frozen=True, eq=False, repr=False)
class OwnParameter:
    """A parameter of an attention module: the module that holds it, its attribute there, its path and its shape."""

    owner: nn.Module
    attribute: str
    path: str
    shape: tuple[int, ...]


def find_parameter(module: nn.Module, names: Sequence[str]) -> OwnParameter | None:
    """Return the first of these names under which a module holds a parameter of two axes or more."""
    for name in names:
        middle, _, attribute = name.rpartition(".")
        owner = find_module(module, middle)
        held = None if owner is None else owner._parameters.get(attribute)
        if owner is not None and held is not None and held.dim() > 1:
            return OwnParameter(owner, attribute, name, tuple(held.shape))
    return None


@dataclass(frozen=True, eq=False, repr=False)
class _Reader(Candidate):
    """An attention module whose parameters are read for a row."""

    row: SeparateParameters | FusedParameter

    @property
    def heads(self) -> int | None:
        """The number of query heads, where the row or the module tells it."""
        return read_integer(self.module, self.row.num_heads)

    def find_width(self) -> int | None:
        """Return H * e where W_O tells it: a module, or a parameter whose axes are given."""
        projection, parameter = self.find_output(self.row.output), find_parameter(self.module, self.row.output)
        if projection is not None or parameter is None or not self.row.output_axes:
            return read_output_width(projection)
        known = {} if self.heads is None else {"h": self.heads}
        sizes = Axes.read(self.row.output_axes).bind(parameter.shape, known)
        return None if sizes is None else sizes["h"] * sizes["e"]

    def read_axes(self, parameter: OwnParameter, *, packed: bool) -> tuple[Axes, dict[str, int]]:
        """Return the axes of a parameter, given or the only ones that fit, and the sizes of their letters."""
        heads, size, width = self.heads, read_integer(self.module, self.row.head_size), self.find_width()
        if size is None and heads is not None and width is not None and width % heads == 0:
            size = width // heads
        written = Axes.read(self.row.axes) if self.row.axes else None
        blocks = packed and written is not None and not written.packed
        parts = len(self.row.order) if isinstance(self.row, FusedParameter) else None
        known = {"p": None if blocks else parts, "e": size, "h": None if blocks else heads}
        sizes = {letter: number for letter, number in known.items() if number is not None}
        if written is not None:
            found = written.bind(parameter.shape, sizes)
            if found is None and not {"h", "e"} & set(sizes):
                self.refuse(parameter, "tells neither the number of heads nor their size; name num_heads in the row")
            if found is None:
                given = ", ".join(f"{letter} = {number}" for letter, number in sizes.items())
                self.refuse(parameter, f"does not have the axes {self.row.axes!r} with {given}")
            return written, found
        if heads is None:
            counts = ", ".join(map(str, NUM_HEADS))
            self.refuse(
                parameter, f"has heads, but the module has none of {counts}; name its axes, or num_heads, in the row"
            )
        readings = _list_readings(parameter.shape, sizes, width, packed=packed)
        if not readings:
            self.refuse(parameter, f"fits no order of axes with {heads} heads; name its axes in the row (axes='h d e')")
        if len(readings) > 1:
            several = " and ".join(repr(str(axes)) for axes, _ in readings)
            self.refuse(parameter, f"can be read with {heads} heads as {several}; name its axes in the row")
        return readings[0]

    def read_slice(self, kind: str, parameter: OwnParameter, axes: Axes, known: Mapping[str, int]) -> HeadView:
        """Return the heads of one projection in a parameter of its own."""
        sizes = axes.bind(parameter.shape, known)
        if sizes is None:
            self.refuse(parameter, f"does not hold {kind} heads of {known['e']} features as {str(axes)!r}")
        return self.view(kind, parameter, axes, sizes)

    def view(
        self, kind: str, parameter: OwnParameter, axes: Axes, sizes: Mapping[str, int], start: int = 0
    ) -> HeadView:
        """Return the heads of one projection in a parameter."""
        return HeadView(
            kind,
            self.join(parameter.path),
            parameter.owner,
            parameter.attribute,
            sizes["h"],
            sizes["e"],
            obstacle=find_obstacle(parameter.owner, parameter.attribute, axes=len(axes.groups)),
            called=False,
            **axes.place(sizes, start),
            **({} if kind == "output" else _place_bias(kind, parameter, axes, sizes, start)),
        )

    def join_slices(self, slices: Sequence[HeadView]) -> Site:
        """Return the site with these slices and W_O, a module or a parameter."""
        query, key, value = slices
        if key.heads != value.heads or query.heads % key.heads:
            raise LayoutError(
                f"{self.label}: {query.heads} query, {key.heads} key and {value.heads} value heads do not group; the "
                f"layout row {self.row.name!r} does not describe this module."
            )
        width, axes = query.heads * query.head_size, self.row.output_axes
        projection = self.find_output(self.row.output, width)
        site = self.site(self.row.name, slices, projection, tiled=self.row.tiled)
        output = find_parameter(self.module, self.row.output) if projection is None else None
        if output is None:
            return site
        known = {"h": query.heads, "e": query.head_size}
        readings = _list_readings(output.shape, known, width, packed=False)
        if axes:
            sizes = Axes.read(axes).bind(output.shape, known)
            if sizes is None:
                self.refuse(output, f"does not have the axes {axes!r} with {query.heads} heads of {query.head_size}")
            readings = [(Axes.read(axes), sizes)]
        # several readings leave W_O unknown: repulsion of the others does not need it
        return replace(site, output=self.view("output", output, *readings[0])) if len(readings) == 1 else site

    def refuse(self, parameter: OwnParameter, why: str) -> NoReturn:
        """Raise `LayoutError` about one parameter."""
        raise LayoutError(
            f"{self.join(parameter.path)} of shape {parameter.shape} {why}. The layout row is {self.row.name!r}; write "
            "one for this module, for example SeparateParameters(query=('wq',), key=('wk',), value=('wv',), "
            "output=('wo',), axes='h d e'), or FusedParameter(fused=('w',), axes='p d h e')."
        )


def _place_bias(kind: str, weight: OwnParameter, axes: Axes, sizes: Mapping[str, int], start: int) -> dict[str, Any]:
    """Return where the bias of a projection is: a parameter named after its weight or its kind, in the same order."""
    letters = [letter for group in axes.groups for letter in group if letter != "d"]
    unit = {letter: prod(sizes[after] for after in letters[place + 1 :]) for place, letter in enumerate(letters)}
    if unit["e"] != 1:
        return {}
    own, whole, name = sizes["h"] * sizes["e"], prod(sizes[letter] for letter in letters), weight.attribute
    candidates = (f"b{name[1:]}", name.replace("weight", "bias"), f"{kind[0]}_bias", f"{kind}_bias", f"b_{kind[0]}")
    for candidate in candidates:
        held = weight.owner._parameters.get(candidate) if candidate != name else None
        if held is None or not held.is_contiguous() or held.numel() not in (own, whole):
            continue
        packed = held.numel() == whole
        first = start * unit["p" if axes.packed else "h"] if packed else 0
        return {"bias": candidate, "bias_start": first, "bias_stride": unit["h"] if packed else sizes["e"]}
    return {}
