"""How attention sites are found: a small table of structural layouts, one row each.

A layout recognises an attention module by the parameters it holds, never by its class name. Users pass rows of
their own to `find_heads`. What a row claims is proved by `headwise.verify`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from headwise import nn as headwise_nn
from headwise.checks import LayoutError
from headwise.heads import Heads, Seam, Site, Slab, check_slab

__all__ = ["LAYOUTS", "Layout", "SeparateLinears", "TorchMultihead", "find_heads"]


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
        slabs = tuple(
            Slab(
                projection,
                _join(name, "in_proj_weight" if packed else f"{projection[0]}_proj_weight"),
                module,
                "in_proj_weight" if packed else f"{projection[0]}_proj_weight",
                heads,
                size,
                start=index * module.embed_dim if packed else 0,
                bias=bias,
                bias_start=index * module.embed_dim,
            )
            for index, projection in enumerate(("query", "key", "value"))
        )
        return Site(
            model=model,
            name=name,
            module=module,
            **_place(model, name),
            layout=f"{self.name} {'packed' if packed else 'separate'}",
            num_heads=heads,
            key_value_heads=heads,
            head_size=size,
            slabs=slabs,
            output=_output_slab(name, "out_proj", module.out_proj, heads, size),
            seam=Seam(module, "out_proj"),
            prepare=headwise_nn.adopt,
        )


@dataclass(frozen=True)
class SeparateLinears:
    """Query, key and value projections as three `nn.Linear` whose output rows are heads x head size.

    Args:
        name: What the row is called in tables and messages.
        query: Attribute names of the query projection, tried in order.
        key: Likewise for the key projection.
        value: Likewise for the value projection.
        output: Likewise for W_O; a leading ".." names an attribute path from the parent module.
        num_heads: Attribute names of the number of query heads, on the module or its `config`.
        head_size: Attribute names of the width of one head; tried before `num_heads`.

    Example:
        >>> row = SeparateLinears(query=("wq",), key=("wk",), value=("wv",), output=("wo",), num_heads=("nh",))
    """

    name: str = "separate"
    query: tuple[str, ...] = ("q_proj", "query", "q_lin", "query_proj", "q", "to_q", "wq")
    key: tuple[str, ...] = ("k_proj", "key", "k_lin", "key_proj", "k", "to_k", "wk")
    value: tuple[str, ...] = ("v_proj", "value", "v_lin", "value_proj", "v", "to_v", "wv")
    output: tuple[str, ...] = (
        "o_proj",
        "out_proj",
        "out_lin",
        "o",
        "to_out",
        "wo",
        "proj",
        "dense",
        "..output.dense",
    )
    num_heads: tuple[str, ...] = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
    head_size: tuple[str, ...] = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")

    def site(self, model: nn.Module, name: str, module: nn.Module) -> Site | None:
        """Return the site of a module that holds the three projections as Linears."""
        paths = [_first_linear(module, candidates) for candidates in (self.query, self.key, self.value)]
        if any(path is None for path in paths):
            return None
        linears = {p: getattr(module, str(a)) for p, a in zip(("query", "key", "value"), paths, strict=True)}
        size = _head_size(self, name, module, linears["query"].weight.shape[0])
        counts = {p: _head_count(_join(name, str(a)), linears[p], size) for p, a in zip(linears, paths, strict=True)}
        if counts["key"] != counts["value"] or counts["query"] % counts["key"]:
            raise LayoutError(
                f"{name}: {counts['query']} query, {counts['key']} key and {counts['value']} value heads of {size} "
                "rows do not group; the layout row does not describe this module."
            )
        slabs = tuple(
            Slab(
                projection,
                _join(name, f"{path}.weight"),
                linears[projection],
                "weight",
                counts[projection],
                size,
                bias=None if linears[projection].bias is None else "bias",
            )
            for projection, path in zip(linears, paths, strict=True)
        )
        seam = _find_seam(model, name, module, self.output, counts["query"] * size)
        return Site(
            model=model,
            name=name,
            module=module,
            **_place(model, name),
            layout=self.name,
            num_heads=counts["query"],
            key_value_heads=counts["key"],
            head_size=size,
            slabs=slabs,
            output=None if seam is None else _output_slab(name, seam.attribute, seam.module, counts["query"], size),
            seam=seam,
            value_module=linears["value"],
        )


LAYOUTS: tuple[Layout, ...] = (TorchMultihead(), SeparateLinears())


def find_heads(model: nn.Module, layouts: Sequence[Layout] = LAYOUTS) -> Heads:
    """Return the attention heads of a model.

    Every module is compared with the layouts in order; the first that fits gives its site. Nothing is guessed:
    where no row fits, the candidates seen are listed. A module shared between layers is one site.

    Args:
        model: Any module that holds attention modules, or is one.
        layouts: Rows to try. Put your own first: `find_heads(model, (MyRow, *headwise.LAYOUTS))`.

    Returns:
        The heads of all sites found, in the order of the model's modules.

    Raises:
        LayoutError: No module fits a row, or a row fits but its numbers do not.

    Example:
        >>> model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
        >>> [site.kind for site in find_heads(model)]
        ['self', 'decoder', 'cross']
    """
    sites: list[Site] = []
    for name, module in model.named_modules():
        for layout in layouts:
            site = layout.site(model, name, module)
            if site is not None:
                for slab in (*site.slabs, *(() if site.output is None else (site.output,))):
                    check_slab(slab)
                sites.append(site)
                break
    if not sites:
        raise LayoutError(_nothing_found(model, layouts))
    return Heads(model, tuple(sites))


def _nothing_found(model: nn.Module, layouts: Sequence[Layout]) -> str:
    looks_like = re.compile(r"att(ention|n)|qkv|query|_proj$|to_q", re.IGNORECASE)
    seen = [
        f"  {name or '(model)'}: {type(module).__name__} with {_parameter_shapes(module)}"
        for name, module in model.named_modules()
        if looks_like.search(type(module).__name__) or looks_like.search(name.rpartition(".")[2])
    ]
    tried = ", ".join(layout.name for layout in layouts)
    listed = "\n".join(seen[:12]) if seen else "  none whose name or class mentions attention, query or projections"
    return (
        f"no attention heads found in {type(model).__name__} (layouts tried: {tried}). Candidates seen:\n{listed}\n"
        "Describe yours with a row: find_heads(model, (SeparateLinears(query=('wq',), key=('wk',), value=('wv',), "
        "output=('wo',), num_heads=('heads',)), *headwise.LAYOUTS))."
    )


def _parameter_shapes(module: nn.Module) -> str:
    shapes = [f"{name} {list(parameter.shape)}" for name, parameter in module.named_parameters()]
    return ", ".join(shapes[:6]) or "no parameters"


def _join(name: str, attribute: str) -> str:
    return f"{name}.{attribute}" if name else attribute


def _place(model: nn.Module, name: str) -> dict:
    """Return kind, layer and stack of a site from its path: the last number in it is the layer."""
    parts = name.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdigit()), default=None)
    layer = 0 if last is None else int(parts[last])
    stack = "" if last is None else ".".join(parts[:last])
    own = parts[-1].lower()
    parent = model.get_submodule(".".join(parts[:-1]))
    torch_cross = isinstance(parent, nn.TransformerDecoderLayer) and own == "multihead_attn"
    if torch_cross or re.search(r"cross|encoder_attn|encdec|enc_dec", own):
        kind = "cross"
    elif isinstance(parent, nn.TransformerDecoderLayer) or "decoder" in parts[:-1]:
        kind = "decoder"
    else:
        kind = "self"
    return {"kind": kind, "layer": layer, "stack": stack}


def _output_slab(name: str, attribute: str, module: nn.Module, heads: int, size: int) -> Slab | None:
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or weight.shape[1] != heads * size:
        return None
    return Slab("output", _join(name, f"{attribute}.weight"), module, "weight", heads, size, axis=1)


def _first_linear(module: nn.Module, candidates: Sequence[str]) -> str | None:
    return next((name for name in candidates if isinstance(getattr(module, name, None), nn.Linear)), None)


def _integer(module: nn.Module, names: Sequence[str]) -> int | None:
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _head_size(row: SeparateLinears, name: str, module: nn.Module, rows: int) -> int:
    size = _integer(module, row.head_size)
    if size is not None:
        return size
    heads = _integer(module, row.num_heads)
    if heads is None:
        raise LayoutError(
            f"{name or 'the model'} ({type(module).__name__}) holds query, key and value projections but neither "
            f"{', '.join(row.num_heads)} nor {', '.join(row.head_size)}; name its number of heads in a layout row "
            "(num_heads=('...',))."
        )
    if heads < 1 or rows % heads:
        raise LayoutError(f"{name or 'the model'}: {rows} query rows do not divide into {heads} heads.")
    return rows // heads


def _head_count(name: str, linear: nn.Linear, size: int) -> int:
    rows = linear.weight.shape[0]
    if size < 1 or rows % size:
        raise LayoutError(f"{name}: {rows} rows do not divide into heads of {size} rows.")
    return rows // size


def _find_seam(model: nn.Module, name: str, module: nn.Module, candidates: Sequence[str], width: int) -> Seam | None:
    for candidate in candidates:
        owner, path = module, candidate
        if candidate.startswith(".."):
            if "." not in name:
                continue
            owner, path = model.get_submodule(name.rpartition(".")[0]), candidate[2:]
        *middle, attribute = path.split(".")
        for part in middle:
            owner = getattr(owner, part, None)
        found = getattr(owner, attribute, None)
        if isinstance(owner, nn.Module) and isinstance(found, nn.Linear) and found.in_features == width:
            return Seam(owner, attribute)
    return None
