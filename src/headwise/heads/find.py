"""Finding the heads of a model: each module is compared with a table of layout rows.

`headwise.verify` proves what a row claims.
"""

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headwise.errors import LayoutError, SettingError
from headwise.heads.head_slice import check_head_slice
from headwise.heads.heads import Heads, Site
from headwise.heads.layout_steps import find_letters, projects
from headwise.heads.layouts import AdditiveQueries, FusedLinear, Layout, SeparateLinears, TorchMultihead

# Falcon and GPT-BigCode store the same attribute in several ways; these flags tell which.
_PLAIN_FALCON = ("new_decoder_architecture", (None, False))

LAYOUTS: tuple[Layout, ...] = (
    TorchMultihead(),
    AdditiveQueries(),
    SeparateLinears(),
    FusedLinear("fused", ("qkv",), ("proj", "projection", "..output.dense")),
    FusedLinear("fused", ("Wqkv",), ("Wo", "out_proj")),
    FusedLinear("fused", ("qkv_proj",), ("o_proj",)),
    FusedLinear("fused", ("to_qkv",), ("to_out.0", "to_out")),
    FusedLinear("fused", ("att_proj",), ("out_proj",)),
    FusedLinear("fused", ("qkv_linear",), ("..output.dense",)),
    FusedLinear(
        "fused key-value",
        ("c_attn", "to_kv", "kv", "kv_proj"),
        ("c_proj", "to_out.0", "to_out", "proj", "o_proj", "out_proj"),
        order=("key", "value"),
        query=("q_attn", "to_q", "q", "q_proj"),
    ),
    FusedLinear("fused", ("c_attn",), ("c_proj",), when=(("multi_query", (None, True)),)),
    FusedLinear("interleaved", ("c_attn",), ("c_proj",), interleaved=True, when=(("multi_query", (False,)),)),
    FusedLinear("fused", ("query_key_value",), ("dense",), when=(_PLAIN_FALCON, ("multi_query", (True,)))),
    FusedLinear(
        "interleaved",
        ("query_key_value",),
        ("dense",),
        interleaved=True,
        when=(_PLAIN_FALCON, ("multi_query", (None, False))),
    ),
    FusedLinear("interleaved", ("in_proj",), ("..output.dense",), interleaved=True),
)

ROW = (
    "find_heads(model, (SeparateLinears(query=('wq',), key=('wk',), value=('wv',), output=('wo',), "
    "num_heads=('heads',)), *headwise.LAYOUTS))"
)


def find_heads(
    model: nn.Module, layouts: Layout | Sequence[Layout] = LAYOUTS, *, exclude: str | Sequence[str] = ()
) -> Heads:
    """Return the attention heads of a model.

    Every module is compared with the layout rows in order; the first that fits gives its site. Nothing is
    guessed: if no row fits, or if some modules fit and others that project queries, keys and values
    do not, those are listed in the error. A module shared between layers is one site. For a model wrapped in
    DistributedDataParallel, the heads and names are those of the wrapped model.

    Args:
        model: Any module that holds attention modules, or is one.
        layouts: Rows to try, or one. Put your own first: `find_heads(model, (my_row, *headwise.LAYOUTS))`.
        exclude: Shell patterns of module names to leave out, with their submodules, for example ("*.linear_attn",).

    Returns:
        The heads of all sites found, in the order of the model's modules.

    Raises:
        LayoutError: No module fits a row; a row fits but its sizes do not; a module looks like attention and fits
            no row; or a pattern of `exclude` matches nothing.
        SettingError: `model` is not a module, or `layouts` holds something that is not a row.

    Example:
        >>> model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
        >>> [site.kind for site in find_heads(model)]
        ['self', 'decoder', 'cross']
    """
    if not isinstance(model, nn.Module):
        name = model.__name__ if isinstance(model, type) else f"a {type(model).__name__}"
        raise SettingError(f"model is {name}; expected a torch.nn.Module, the loaded model itself.")
    replicated = isinstance(model, DistributedDataParallel)
    model = model.module if isinstance(model, DistributedDataParallel) else model
    layouts = _check_layouts(layouts)
    modules = _exclude(model, exclude)
    sites = [site for name, module in modules if (site := _match(model, name, module, layouts)) is not None]
    unread = _find_unread(modules, sites)
    if not sites or unread:
        raise LayoutError(_describe_failure(model, layouts, sites, unread or _find_candidates(modules)))
    crossed = {site.stack for site in sites if site.kind == "cross"}
    sites = [replace(site, kind="decoder") if site.kind == "self" and site.stack in crossed else site for site in sites]
    return Heads(model, _connect_scores(model, sites), replicated=replicated)


def _match(model: nn.Module, name: str, module: nn.Module, layouts: Sequence[Layout]) -> Site | None:
    """Return the site of a module by the first row that fits it."""
    site = next((site for layout in layouts if (site := layout.site(model, name, module)) is not None), None)
    if site is not None:
        for head_slice in (*site.slices, *(() if site.output is None else (site.output,))):
            check_head_slice(head_slice)
    return site


def _connect_scores(model: nn.Module, sites: Sequence[Site]) -> tuple[Site, ...]:
    """Return the sites with their scores reachable where the model comes from transformers."""
    origins = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    if not any(origin.startswith("transformers.") for origin in origins):
        return tuple(sites)
    from headwise.heads import huggingface

    return tuple(huggingface.connect_scores(site) for site in sites)


def _list_given(given: Any) -> tuple[Any, ...]:
    several = isinstance(given, Iterable) and not isinstance(given, str)
    return tuple(given) if several else (given,)


def _check_layouts(layouts: Any) -> tuple[Layout, ...]:
    rows = _list_given(layouts)
    for row in rows:
        if isinstance(row, type) or not callable(getattr(row, "site", None)):
            raise SettingError(f"layouts holds {row!r}; expected layout rows, for example {ROW}.")
    if not rows:
        raise SettingError(f"layouts is empty; expected at least one layout row, for example {ROW}.")
    return rows


def _exclude(model: nn.Module, exclude: Any) -> list[tuple[str, nn.Module]]:
    """Return the names and modules of a model without those that match a pattern, and without their submodules."""
    patterns, modules = _list_given(exclude), list(model.named_modules())
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise SettingError(f"exclude holds {pattern!r}; expected shell patterns of names, such as '*.linear_attn'.")
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name, _ in modules):
            raise LayoutError(f"exclude has {pattern!r}, which matches no module name of {type(model).__name__}.")

    def matches(name: str) -> bool:
        parts = name.split(".")
        above = [".".join(parts[: i + 1]) for i in range(len(parts))]
        return any(fnmatch.fnmatchcase(place, pattern) for place in above for pattern in patterns)

    return [(name, module) for name, module in modules if not matches(name)]


def _find_unread(modules: Sequence[tuple[str, nn.Module]], sites: Sequence[Site]) -> list[tuple[str, nn.Module]]:
    """Return the modules that look like attention and are neither a site nor part of one."""
    found = {id(site.module) for site in sites}
    read = {id(part) for site in sites for part in site.module.modules()}
    return [
        (name, module) for name, module in modules if id(module) not in read and _looks_like_attention(module, found)
    ]


def _looks_like_attention(module: nn.Module, found: set[int]) -> bool:
    """Return whether a module holds projections of q, k and v; of any of them, if its class is called attention."""
    mentioned: set[str] = set()
    for name, child in module._modules.items():
        # a "query" that holds attention itself is an encoder of queries
        if child is not None and projects(child) and not any(id(part) in found for part in child.modules()):
            mentioned |= find_letters(name)
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.dim() > 1:
            mentioned |= find_letters(name)
    called_attention = re.search("attention|attn", type(module).__name__, re.IGNORECASE) is not None
    return mentioned == set("qkv") or (bool(mentioned) and called_attention)


def _find_candidates(modules: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    looks_like = re.compile(r"att(ention|n)|qkv|query|_proj$|to_q", re.IGNORECASE)
    return [
        (name, module)
        for name, module in modules
        if looks_like.search(type(module).__name__) or looks_like.search(name.rpartition(".")[2])
    ]


def _describe_failure(
    model: nn.Module, layouts: Sequence[Layout], sites: Sequence[Site], seen: Sequence[tuple[str, nn.Module]]
) -> str:
    tried = ", ".join(dict.fromkeys(layout.name for layout in layouts))
    lines = [f"  {name or '(model)'}: {type(part).__name__} with {_describe_shapes(part)}" for name, part in seen]
    listed = "\n".join(lines[:12]) or "  none whose name or class mentions attention, query or projections"
    listed += f"\n  and {len(lines) - 12} more" if len(lines) > 12 else ""
    if not sites:
        found = f"no attention heads found in {type(model).__name__} (layouts tried: {tried}). Candidates seen:"
    else:
        found = (
            f"{len(seen)} modules of {type(model).__name__} look like attention and fit no layout (tried: {tried}), "
            f"in addition to {len(sites)} that do:"
        )
    return (
        f"{found}\n{listed}\nDescribe yours with a row: {ROW}. "
        f"Or exclude what is not softmax attention: find_heads(model, exclude=({(seen[0][0] if seen else '...')!r},))."
    )


def _describe_shapes(module: nn.Module) -> str:
    shapes = [f"{name} {list(parameter.shape)}" for name, parameter in module.named_parameters()]
    return ", ".join(shapes[:6]) + (", ..." if len(shapes) > 6 else "") or "no parameters"
