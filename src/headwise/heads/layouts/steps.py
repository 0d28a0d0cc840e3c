"""Shared steps of the layout rows: reading names and sizes, finding W_O, building slices and sites.

Also the signs that the heads of an attention are not regular, read from what its module holds.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from types import FunctionType
from typing import Annotated, Any, NoReturn

from torch import nn
from torch.nn.parameter import is_lazy

from headwise.errors import LayoutError, SettingError, require_integer, require_names
from headwise.heads.heads import Site
from headwise.heads.view import COLUMNS, ROWS, HeadView, OutputProjection, Projection, read_projection
from headwise.nn.resized import GROUPS

NUM_HEADS = (
    *("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "head_count", "num_head", "nheads"),
    *("n_attention_heads", "num_attn_heads", "attention_heads", "n_local_heads", "nb_heads", "nb_head", "h"),
)
HEAD_SIZE = (
    *("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_head", "d_head"),
    "hidden_size_per_attention_head",
)
# Attributes of a module that may hold its configuration.
CONFIGS = ("config", "cfg", "args")
KEY_COUNTS = (
    *("num_key_value_heads", "num_global_key_value_heads", "key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads"),
    "n_head_kv",
)
# How many query heads share a key/value head.
RATIOS = (GROUPS, "n_rep", "num_kv_groups")
# Norms over the concatenated heads, before W_O: heads enter there.
NORMS = ("attn_sub_norm", "inner_attn_ln")
# Biases of a fused projection that the attention holds itself; a separate projection has `q_bias`, `k_bias`, `v_bias`.
FUSED_BIASES = ("qkv_bias", "kv_bias")
# Projections of positions: they have no heads, and are no reason to refuse the module.
BESIDE = ("pos_key_proj", "pos_query_proj", "pos_proj", "pos_q_proj", "relative_k_proj", "linear_pos")
# A module of this name may be W_O, or a block that holds it, a norm and a sum: only a projection is taken.
AMBIGUOUS = ("output", "..output")
CROSS = re.compile(r"cross|encoder_attn|encdec|enc_dec|src_attn|context_attn", re.IGNORECASE)
LETTERS = ("q", "k", "v", "qk", "kv", "qkv", "qv", "kvq", "qvk", "qkvz", "qkvg")


def _require_count(name: str, given: object) -> None:
    several = given if isinstance(given, tuple | list) else (given,)
    if ... in several:
        raise SettingError(f"{name} is ..., a place to fill in: put the number of query heads there, num_heads=8.")
    for number in several:
        if isinstance(number, int):
            require_integer(name, number, low=1)
    if not isinstance(given, int):
        names: Any = tuple(one for one in several if not isinstance(one, int)) if several is given else given
        require_names(name, names)


# Settings of rows.
Names = Annotated[tuple[str, ...], require_names]
# Attribute names of the number of heads, or this number itself.
HeadCount = Annotated[tuple[str | int, ...] | int, _require_count]
# Attributes, and the values that each may have: None where it may be absent, ... where it may be anything.
Conditions = tuple[tuple[str, tuple[object, ...]], ...]


def projects(module: nn.Module) -> bool:
    """Return whether a module may be a projection: it holds a matrix and is not an embedding."""
    return not isinstance(module, nn.Embedding) and (
        any(is_lazy(parameter) or parameter.dim() > 1 for parameter in module.parameters())
        or read_projection(module) is not None
    )


def find_letters(name: str) -> set[str]:
    """Return which of q, k, v an attribute name mentions: all for "query_key_value", k and v for "to_kv"."""
    if name in ("c_attn", "att_proj", "attn_proj"):
        return set("qkv")
    letters: set[str] = set()
    for word in re.split(r"_|\d+|(?<=[a-z])(?=[A-Z])", name):
        lower = word.lower().removeprefix("w")
        if lower in LETTERS:
            letters |= set(lower) & set("qkv")
        if lower in ("query", "queries", "key", "keys", "value", "values"):
            letters.add(lower[0])
    return letters


def find_module(module: nn.Module, path: str) -> nn.Module | None:
    """Return the module at a dotted path, through lists and dicts of modules; None where there is none."""
    found: nn.Module | None = module
    for part in path.split(".") if path else ():
        found = found._modules.get(part) if isinstance(found, nn.Module) else None
    return found


def read_attribute(module: nn.Module, path: str) -> object:
    """Return what is at a dotted path of attributes, keys and indices; None where nothing is.

    >>> module = nn.Module()
    >>> module.sizes = {"heads": [4, 8]}
    >>> read_attribute(module, "sizes.heads.1"), read_attribute(module, "sizes.layers")
    (8, None)
    """
    found: object = module
    for part in path.split("."):
        if isinstance(found, Mapping):
            found = found.get(part)
        elif isinstance(found, list | tuple) and part.isdigit():
            found = found[int(part)] if int(part) < len(found) else None
        else:
            found = getattr(found, part, None)
    return found


def find_attribute(module: nn.Module, names: Sequence[str]) -> str | None:
    """Return the first of these dotted paths at which a module holds a projection."""
    return next((name for name in names if read_projection(find_module(module, name)) is not None), None)


def read_child(module: nn.Module, path: str) -> Projection:
    """Return the projection at a path at which there is one."""
    projection = read_projection(find_module(module, path))
    assert projection is not None
    return projection


def read_integer(module: nn.Module, names: Sequence[str | int] | int) -> int | None:
    """Return the first of these attributes that is an integer, of the module or else of its configuration.

    A number among the names is returned where no attribute is one.
    """
    names = (names,) if isinstance(names, int) else names
    for holder in ("", *(f"{config}." for config in CONFIGS)):
        for name in (name for name in names if isinstance(name, str)):
            value = read_attribute(module, holder + name)
            if isinstance(value, Integral) and not isinstance(value, bool):
                return int(value)
    return next((name for name in names if isinstance(name, int)), None)


def count_heads(name: str, rows: int, size: int) -> int:
    """Return `rows / size`, and refuse a remainder."""
    if size < 1 or rows % size:
        raise LayoutError(f"{name}: {rows} rows do not divide into heads of {size} rows.")
    return rows // size


def list_unused(module: nn.Module, used: Collection[str], prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Return the paths and modules in a module but those used; of a module that holds one of these, its parts."""
    found: list[tuple[str, nn.Module]] = []
    for child, held in module._modules.items():
        path = f"{prefix}{child}"
        if held is None or path in used:
            continue
        holds = any(other.startswith(f"{path}.") for other in used)
        found += list_unused(held, used, f"{path}.") if holds else [(path, held)]
    return found


def read_output_width(output_projection: OutputProjection | None) -> int | None:
    """Return the input features of the module that plays W_O, where it is a projection."""
    projection = None if output_projection is None else read_projection(output_projection.module)
    return None if projection is None else projection.columns


@dataclass(frozen=True, eq=False, repr=False)
class Candidate:
    """A module of a model that is compared with a row."""

    model: nn.Module
    name: str
    module: nn.Module

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.name or "the model"

    @property
    def described(self) -> str:
        """Its name and class in messages."""
        return f"{self.label} ({type(self.module).__name__})"

    def join(self, path: str) -> str:
        """Return the dotted name in the model of something at a path in the module."""
        return f"{self.name}.{path}" if self.name else path

    def fits(self, conditions: Conditions) -> bool:
        """Return whether the attributes of the module have values that are allowed."""
        values = [(read_attribute(self.module, attribute), allowed) for attribute, allowed in conditions]
        return all(value in allowed or (value is not None and ... in allowed) for value, allowed in values)

    def find_output(self, candidates: Sequence[str], width: int | None = None) -> OutputProjection | None:
        """Return the first candidate for W_O that can take concatenated heads of this width, or of any.

        A projection of another width cannot. A module that is not a projection, such as an aggregator, can. Candidates
        are dotted paths from the attention module; from its parent with a leading "..".
        """
        for candidate in candidates:
            owner, path = self.module, candidate
            if candidate.startswith(".."):
                if not self.name:
                    continue
                owner, path = self.model.get_submodule(self.name.rpartition(".")[0]), candidate[2:]
            middle, _, attribute = path.rpartition(".")
            owner = find_module(owner, middle)
            found = None if owner is None else owner._modules.get(attribute)
            if owner is None or found is None:
                continue
            projection = read_projection(found)
            fits = candidate not in AMBIGUOUS if projection is None else width in (None, projection.columns)
            if fits:
                return OutputProjection(owner, attribute)
        return None

    def refuse_uncounted(self, num_heads: Sequence[str | int] | int, head_size: Sequence[str]) -> NoReturn:
        """Refuse a module whose number of heads is unknown."""
        raise LayoutError(
            f"{self.described} holds query, key and value projections but neither "
            f"{', '.join(NUM_HEADS if isinstance(num_heads, int) else map(str, num_heads))} nor "
            f"{', '.join(head_size)}; give its number of heads, find_heads(model, num_heads=8), or name the attribute "
            "that holds it in a layout row (num_heads=('...',))."
        )

    def refuse_others(self, row: str, used: set[str], beside: Sequence[str]) -> None:
        """Refuse a module with more projections of queries, keys or values than the row describes."""
        rows = max(read_child(self.module, child).rows for child in used)

        def scales(held: nn.Module) -> bool:
            # at most a number for each feature of a projection: a norm of heads, [H, e]
            return read_projection(held) is None and all(
                not is_lazy(parameter) and parameter.numel() <= rows for parameter in held.parameters()
            )

        others = [
            path
            for path, held in list_unused(self.module, {*used, *beside})
            if (find_letters(path.rpartition(".")[2]) and projects(held) and not scales(held))
            or isinstance(held, nn.Conv1d)
        ]
        if others:
            raise LayoutError(
                f"{self.described} holds {', '.join(others)} in addition to {', '.join(sorted(used))}, which the "
                f"layout {row!r} does not describe. If they have no heads, name them in a row (beside=...); if this "
                "is not softmax attention, leave it out with find_heads(model, exclude=('...',))."
            )

    def slice(self, kind: str, path: str, heads: int, size: int, start: int = 0, stride: int = 0) -> HeadView:
        """Return the heads of one of query, key and value in the projection at a path."""
        projection = read_child(self.module, path)
        axes = COLUMNS if projection.axis else ROWS
        sizes = {"start": start, "stride": stride, "along": projection.rows, "across": projection.columns}
        return _build_view(kind, self.join(path), projection, heads, size, axes=axes, bias=projection.bias, **sizes)

    def site(
        self,
        layout: str,
        slices: Sequence[HeadView],
        output_projection: OutputProjection | None,
        groups: int | None = None,
        **settings: Any,
    ) -> Site:
        """Return the site with slices of query, key and value; of fewer, with another layer's keys, in `groups`."""
        slices = [self._add_bias(head_slice) for head_slice in slices]
        query, value = slices[0], slices[-1]
        output, projection = None, None if output_projection is None else read_projection(output_projection.module)
        width = query.heads * value.head_size
        if output_projection is not None and projection is not None and projection.columns == width:
            owner = next((name for name, one in self.model.named_modules() if one is output_projection.owner), "")
            output = _build_view(
                "output",
                f"{owner}.{output_projection.attribute}".removeprefix("."),
                projection,
                query.heads,
                value.head_size,
                axes=ROWS if projection.axis else COLUMNS,
                along=projection.columns,
                across=projection.rows,
            )
        return Site(
            model=self.model,
            name=self.name,
            module=self.module,
            **locate(self.model, self.name),
            layout=layout,
            num_heads=query.heads,
            key_value_heads=value.heads if groups is None else groups,
            head_size=value.head_size,
            slices=tuple(slices),
            output=output,
            output_projection=output_projection,
            value_module=None if value is query else value.module,
            **settings,
        )

    def _add_bias(self, head_slice: HeadView) -> HeadView:
        """Return the slice with a bias that the attention module holds and adds itself.

        It belongs to one projection (DeBERTa's `q_bias`) or to a fused one, in the order of its weight. Keys need none,
        and theirs may be a buffer of zeros (EVA-02).
        """
        if head_slice.bias is not None or head_slice.pieces:
            return head_slice
        rows, module = head_slice.heads * head_slice.head_size, self.module
        own = {"bias_start": 0, "bias_stride": head_slice.head_size}
        places = [(f"{head_slice.projection[0]}_bias", rows, own)]
        places += [(name, head_slice.along, {}) for name in FUSED_BIASES]
        for name, size, place in places:
            held = {**module._buffers, **module._parameters}.get(name)
            if held is not None and held.is_floating_point() and held.numel() == size:
                return replace(head_slice, bias=name, bias_owner=module, **place)
        return head_slice


def _build_view(kind: str, name: str, projection: Projection, heads: int, size: int, **settings: Any) -> HeadView:
    return HeadView(
        kind,
        f"{name}.{projection.path}weight",
        projection.owner,
        "weight",
        heads,
        size,
        module=projection.module,
        obstacle=projection.obstacle,
        lora=projection.lora,
        **settings,
    )


def locate(model: nn.Module, name: str) -> dict[str, Any]:
    """Return kind ("self" or "cross"), layer and stack of an attention module.

    The layer is its index in the innermost list of modules of one class. A T5 block, a list of an attention and a
    feed-forward layer, is therefore no stack. Without such a list the innermost index counts.
    """
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    stacks = [i for i in numbers if len({*map(type, model.get_submodule(".".join(parts[:i])).children())}) == 1]
    last = (stacks or numbers or [None])[-1]
    own = parts if last is None else parts[max(last - 1, 0) :]
    module, parent = model.get_submodule(name), model.get_submodule(".".join(parts[:-1]))
    torch_cross = isinstance(parent, nn.TransformerDecoderLayer) and parts[-1] == "multihead_attn"
    flagged = getattr(module, "is_cross_attention", None) is True
    kind = "cross" if torch_cross or flagged or CROSS.search(".".join(own)) else "self"
    if last is None:
        return {"kind": kind, "layer": 0, "stack": ""}
    return {"kind": kind, "layer": int(parts[last]), "stack": ".".join(parts[:last])}


# What the names of attentions mention.
ATTENTION = re.compile("attention|attn", re.IGNORECASE)
RECURRENT = "is linear attention: it keeps a state and has no attention weights"
# Names that a module holds (or that its forward takes), and what is not regular then: a clause that follows its name.
IRREGULAR = {
    "lambda_q1": "is differential attention: two heads share their values, and one is subtracted from the other",
    "dt_proj": "masks the keys of a head by the values of all heads (a dynamic mask)",
    "autocorrelation_factor": "is no softmax attention: all heads together choose delays, by which values are shifted",
    "approx_mode": "averages blocks of queries and keys, so that tokens have no attention weights of their own",
    "global_hidden_states": "projects two sequences with the same weights in each call, and has two outputs",
    "quant_mode": "calls quantized projections, which return a scale besides the tensor",
    "query_key": "has one projection for queries and keys",
    "A_log": RECURRENT,
    "slope_rate": RECURRENT,
}


def find_irregularity(module: nn.Module) -> str | None:
    """Return what is not regular in an attention module, a clause that follows its name; None without a sign."""
    forward = inspect.unwrap(type(module).forward)
    code = forward.__code__ if isinstance(forward, FunctionType) else None
    arguments = () if code is None else code.co_varnames[: code.co_argcount]
    held = {*vars(module), *module._modules, *module._parameters, *module._buffers, *arguments}
    for name, clause in IRREGULAR.items():
        if name in held:
            return clause
    for name, child in module._modules.items():
        parts = child.modules() if child is not None and find_letters(name) else ()
        if any(isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d) for part in parts):
            return "projects with convolutions, and heads are read from matrices"
    return None


def find_mixing(site: Site) -> str | None:
    """Return what mixes the heads of a site with one another, a clause that follows its name; None without it."""
    heads, used = site.num_heads, {id(head_slice.module) for head_slice in site.slices}
    for name, child in site.module.named_children() if heads > 1 < site.head_size else ():
        projection = None if id(child) in used else read_projection(child)
        if projection is not None and projection.rows == projection.columns == heads:
            return f"mixes its {heads} heads by {name}, a matrix of heads by heads (talking heads)"
    return None


def attends(module: nn.Module) -> bool:
    """Return whether the code of a module's own class computes attention, and not only a module inside it."""
    names = {name for function in list_functions(module) for name in function.__code__.co_names}
    return any(
        re.search("softmax|attend|attention|attn|sdpa", name, re.IGNORECASE) for name in names - {*module._modules}
    )


def list_functions(module: nn.Module) -> list[FunctionType]:
    """Return the methods of a module's own classes but `__init__`, without decorators."""
    return [
        function
        for base in type(module).__mro__
        if base not in (nn.Module, object)
        for name, member in vars(base).items()
        if name != "__init__"
        and isinstance(function := inspect.unwrap(member) if callable(member) else None, FunctionType)
    ]
