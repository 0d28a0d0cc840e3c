"""Finding the heads of a model: each module is compared with a table of layout rows.

The message about modules that are not read says what to do. `headwise.verify` proves what a row claims.
"""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from headwise.errors import LayoutError, SettingError, require_integer
from headwise.heads.adapters import find_saved, has_adapters, is_peft_layer
from headwise.heads.experiments.arrangement import can_run, drop_hooks, is_known, require_arranged
from headwise.heads.experiments.replay import draw_noise
from headwise.heads.heads import Heads, Site, require_told
from headwise.heads.layouts.functional import call_projections, hands_weights
from headwise.heads.layouts.known import LAYOUTS
from headwise.heads.layouts.parameters import FusedParameter
from headwise.heads.layouts.rows import FusedLinear, Layout
from headwise.heads.layouts.steps import ATTENTION, attends, find_irregularity, find_letters, find_mixing, projects
from headwise.heads.layouts.suggestion import list_parameters, list_projections, suggest_rows
from headwise.heads.record import copy_deeply
from headwise.heads.scores.sdpa import connect_called_scores
from headwise.heads.view import HeadView, check_head_views
from headwise.nn.hooks import unwrap_compiled, without_wrappers

# Numbers of sequences and tokens: two that are no size of the heads are told from these in a shape.
COUNTS = (5, 7, 11, 13, 17, 19, 23, 29)
PLAIN = ("torch.", "transformers.", "headwise.", "headwise_lab.", "peft.")


def _read_returned(site: Site) -> Site:
    """Return the site with the axes that its projections return, where these are no features along the last axis.

    Each projection that is a user's own is called once, on random tokens, in a copy that shares its parameters. Nothing
    is said of one that cannot be called so.
    """
    module = None if site.output is None else site.output.module
    if module is not None and _is_own(module):
        joined = _draw(*COUNTS[:2], site.num_heads * site.head_size)
        apart = joined.unflatten(-1, (site.num_heads, site.head_size))
        taken = [_call(module, one) is not None for one in (joined, apart, apart.transpose(1, 2))]
        if any(taken) and not taken[0]:
            raise LayoutError(
                f"{site.label} ({type(site.module).__name__}): its output projection, a {type(module).__name__}, takes "
                f"heads along an axis of their own; expected the concatenated heads, (batch, tokens, "
                f"{joined.shape[-1]}). Have the attention flatten them, or leave it out: find_heads(model, "
                f"exclude=({site.name!r},))."
            )
    return replace(site, slices=tuple(head_slice.map(partial(_read, site)) for head_slice in site.slices))


def _read(site: Site, part: HeadView) -> HeadView:
    module = part.module
    if module is None or not _is_own(module):
        return part
    counts = [count for count in COUNTS if count not in {part.heads, part.head_size, part.along, site.num_heads}][:2]
    tokens = _draw(*counts, part.across)
    output = _call(module, tokens)
    if output is None or (isinstance(output, Tensor) and output.shape == (*counts, part.along)):
        return part
    if isinstance(output, Tensor):
        shape = tuple(output.shape)
        rest = [axis for axis, size in enumerate(shape) if size not in counts]
        if len(shape) == len(rest) + 2 and {*counts} <= {*shape} and prod(shape[axis] for axis in rest) == part.along:
            read = replace(part, returned=(*map(shape.index, counts), *rest))
            # refuses what has no axis of heads
            read.features(output)
            return read
    given = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
    raise LayoutError(
        f"{site.label} ({type(site.module).__name__}): its {part.projection} projection, a {type(module).__name__}, "
        f"returns {given} for tokens of shape {tuple(tokens.shape)}; expected {part.along} features along the last "
        "axis or along axes of their own, such as (batch, tokens, heads, features). Have it return these, or leave the "
        f"attention out: find_heads(model, exclude=({site.name!r},))."
    )


def _draw(*shape: int) -> Tensor:
    return draw_noise(torch.empty(shape, device="cpu"))


def _is_own(module: nn.Module) -> bool:
    return (
        type(module).forward is not nn.Linear.forward
        and not type(module).__module__.startswith(PLAIN)
        and not any(has_adapters(part) or is_peft_layer(part) for part in module.modules())
        and can_run(module)
    )


def _call(module: nn.Module, tokens: Tensor) -> object:
    """Return what a copy of a module makes of tokens; None where it cannot be called with them alone."""
    memo = drop_hooks(module) | {id(held): held for held in (*module.parameters(), *module.buffers())}
    first = next(module.parameters())
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return copy_deeply(module, memo).eval()(tokens.to(first))
    except Exception:
        return None


# A row to copy.
ROW = (
    "find_heads(model, (SeparateLinears(query=('wq',), key=('wk',), value=('wv',), output=('wo',), "
    "num_heads=('heads',)), *headwise.layouts.LAYOUTS))"
)
Named = tuple[str, nn.Module]


def describe_failure(
    model: nn.Module, layouts: Sequence[str], found: int, unread: Sequence[Named], clauses: Mapping[str, str]
) -> str:
    """Return which modules are not read, what is not regular in them (`clauses`, by name), and what to do.

    Rows of the names `layouts` were tried, and read `found` attentions. `unread` modules look like attention.
    """
    tried, kind = ", ".join(dict.fromkeys(layouts)), type(model).__name__
    seen = unread or _find_candidates(model)
    alike: dict[str, list[str]] = defaultdict(list)
    for name, part in seen:
        alike[_describe(part, clauses.get(name))].append(name or "(model)")
    more = {what: f" and {len(names) - 1} more like it" if len(names) > 1 else "" for what, names in alike.items()}
    lines = [f"  {names[0]}{more[what]}: {what}" for what, names in alike.items()]
    listed = "\n".join(lines[:12]) or "  none whose name or class mentions attention, query or projections"
    listed += f"\n  and {len(lines) - 12} more" if len(lines) > 12 else ""
    beside = f", in addition to {found} that are" if found else ""
    if unread and all(name in clauses for name, _ in unread):
        leave_out = f"Leave them out: {_suggest_exclude(model, unread)}. " if found else ""
        return (
            f"{len(unread)} attentions of {kind} have no regular heads{beside}:\n{listed}\n"
            f"{leave_out}To read their projections all the same, describe them with a row of your own: {ROW}."
        )
    rows = suggest_rows(model, [(name, part) for name, part in seen if name not in clauses])
    if found:
        said = f"{len(unread)} modules of {kind} look like attention and fit no layout (tried: {tried}){beside}:"
    else:
        said = f"no attention heads found in {kind} (layouts tried: {tried}). Candidates seen:"
    return (
        f"{said}\n{listed}\n{rows or f'Describe yours with a row: {ROW}.'}\nOr exclude what is not softmax attention: "
        f"{_suggest_exclude(model, seen)}."
    )


def _find_candidates(model: nn.Module) -> list[Named]:
    looks_like = re.compile(r"att(ention|n)|qkv|query|_proj$|to_q", re.IGNORECASE)
    named = [
        (name, module)
        for name, module in model.named_modules()
        if looks_like.search(type(module).__name__) or looks_like.search(name.rpartition(".")[2])
    ]
    # else a user's own modules that hold something to project with, those whose code attends if some does
    own = [(name, module) for name, module in model.named_modules() if not is_known(module)]
    held = [(name, module) for name, module in own if len(list_projections(module)) + len(list_parameters(module)) > 1]
    attending = {id(module) for _, module in own if attends(module)}
    return named or [
        (name, module)
        for name, module in held
        if not attending
        or id(module) in attending
        or any(isinstance(child, nn.ModuleList) and {*map(id, child)} & attending for child in module.children())
    ]


def _describe(module: nn.Module, clause: str | None) -> str:
    if clause is not None:
        return f"{type(module).__name__} {clause}"
    shapes = [
        f"{name} {'of no shape yet' if is_lazy(parameter) else list(parameter.shape)}"
        for name, parameter in module.named_parameters()
    ]
    listed = ", ".join(shapes[:6]) + (", ..." if len(shapes) > 6 else "") or "no parameters"
    return f"{type(module).__name__} with {listed}"


def _suggest_exclude(model: nn.Module, seen: Sequence[Named]) -> str:
    """Return a call that leaves modules out: by patterns of their names where these match no others."""
    names = [name for name, _ in seen if name] or ["..."]
    every = [name for name, _ in model.named_modules()]
    chosen: dict[str, None] = {}
    for name in names:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        alone = all(other in names for other in every if fnmatch.fnmatchcase(other, pattern))
        chosen[pattern if alone else name] = None
    shown = [repr(name) for name in chosen][:4]
    return f"find_heads(model, exclude=({', '.join(shown)}{', ...' if len(chosen) > 4 else ','}))"


SCRIPTED = "is compiled by torch.jit, which no hook and no layout reaches; compile it after find_heads, or leave it out"


def find_heads(
    model: nn.Module,
    layouts: Layout | Sequence[Layout] = LAYOUTS,
    *,
    exclude: str | Sequence[str] = (),
    num_heads: int | None = None,
) -> Heads:
    """Return the attention heads of a model.

    Every module is compared with the layout rows in order; the first that fits gives its site. Nothing is guessed: if
    no row fits, or if some modules fit and others that project queries, keys and values do not, those are listed in the
    error, with a row for them that was tried and proved on random tokens. A user's own attention that can be called
    with tokens alone is called on four of them, in a copy that shares its parameters: heads that are "(d h)" and not
    "(h d)" are refused. A module shared between layers is one site. For a model wrapped in DistributedDataParallel or
    by torch.compile, the heads and names are those of the wrapped model; modules that were compiled inside a model keep
    their names too.

    Args:
        model: Any module that holds attention modules, or is one.
        layouts: Rows to try, or one. Put your own first: `find_heads(model, (my_row, *headwise.layouts.LAYOUTS))`.
        exclude: Shell patterns of module names to leave out, with their submodules, for example ("*.linear_attn",).
        num_heads: Number of query heads of the modules that do not tell it themselves.

    Returns:
        The heads of all sites found, in the order of the model's modules.

    Raises:
        LayoutError: No module fits a row; a row fits but its sizes, or the order of its heads, do not; a module looks
            like attention and fits no row, is compiled by torch.jit, or is lazy and has no shape yet; or a pattern of
            `exclude` matches nothing, or `num_heads` no module.
        SettingError: `model` is not a module, or `layouts` holds something that is not a row.

    Example:
        >>> model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
        >>> [site.kind for site in find_heads(model)]
        ['self', 'decoder', 'cross']
    """
    if not isinstance(model, nn.Module):
        name = model.__name__ if isinstance(model, type) else f"a {type(model).__name__}"
        raise SettingError(f"model is {name}; expected a torch.nn.Module, the loaded model itself.")
    rows = _check_layouts(layouts)
    found, _ = _find_unwrapped(model, rows, exclude, num_heads)
    return replace(found, left_out=bool(_list_given(exclude)))


def find_regular_heads(model: nn.Module) -> tuple[Heads, dict[str, str]]:
    """Return what `find_heads` does, and the attentions without regular heads, which it refuses: name, what they are.

    For methods that need no attention weights, such as optimizers.

    Raises:
        LayoutError: No attention has regular heads, or one fits no row and nothing in it says why.
    """
    return _find_unwrapped(model, LAYOUTS, (), None, skip=True)


def _find_unwrapped(
    model: nn.Module, rows: Sequence[Layout], exclude: Any, num_heads: int | None, *, skip: bool = False
) -> tuple[Heads, dict[str, str]]:
    inner, replicated = unwrap_model(model)
    if isinstance(inner, torch.jit.ScriptModule):
        raise LayoutError(
            f"{inner.original_name} is compiled by torch.jit, which no hook and no layout reaches; give the model that "
            "torch.jit.script or torch.jit.trace was given."
        )
    with without_wrappers(inner):
        found, skipped = _find(inner, rows, exclude, num_heads, skip)
        return replace(found, replicated=replicated, left_out=bool(skipped)), skipped


def unwrap_model(model: nn.Module) -> tuple[nn.Module, bool]:
    """Return the model inside torch.compile and DistributedDataParallel, and whether the latter was there."""
    replicated = False
    while (inner := unwrap_compiled(model)) is not model or isinstance(model, DistributedDataParallel):
        if isinstance(model, DistributedDataParallel):
            inner, replicated = model.module, True
        model = inner
    return model, replicated


def _find(
    model: nn.Module, rows: Sequence[Layout], exclude: Any, num_heads: int | None, skip: bool
) -> tuple[Heads, dict[str, str]]:
    own = [row not in LAYOUTS for row in rows]
    modules = _exclude(model, exclude)
    flagged, found, clauses = list(zip(_give_count(rows, num_heads), own, strict=True)), [], {}
    # a head in a list of heads is part of the attention that holds the list
    parts: set[int] = set()
    for name, module in modules:
        site, clause = (None, None) if id(module) in parts else _match(model, name, module, flagged)
        clauses |= {} if clause is None else {name: clause}
        if site is not None:
            found.append(site)
            stacks = (head_slice for head_slice in site.slices if head_slice.stacked)
            parts |= {id(part) for stack in stacks for part in stack.owner.modules()}
    sites, outer = _take_inner(found)
    unread = _find_unread(modules, sites, outer, clauses)
    _require_shapes([*((site.name, site.module) for site in sites), *unread])
    others = [(name, part) for name, part in unread if name not in clauses]
    clauses |= {name: clause for name, part in others if (clause := find_irregularity(part)) is not None}
    skipped = {name: f"{type(part).__name__} {clauses[name]}" for name, part in unread if skip and name in clauses}
    if not sites or len(skipped) < len(unread):
        raise LayoutError(describe_failure(model, [row.name for row in rows], len(sites), unread, clauses))
    if num_heads is not None and not any(site.num_heads == num_heads for site in sites):
        counts = ", ".join(sorted({str(site.num_heads) for site in sites}))
        raise LayoutError(f"num_heads={num_heads} fits no attention: the modules found say {counts} heads themselves.")
    sites = [_read_returned(site) for site in sites]
    require_arranged(model, sites, partial(_advise, model))
    require_told(sites)
    crossed = {site.stack for site in sites if site.kind == "cross"}
    sites = [replace(site, kind="decoder") if site.kind == "self" and site.stack in crossed else site for site in sites]
    origins = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    if any(origin.startswith("transformers.") for origin in origins):
        from headwise.heads.scores import huggingface

        sites = [huggingface.connect_scores(site) for site in sites]
    return Heads(model, tuple(connect_called_scores(site) for site in sites)), skipped


def _match(
    model: nn.Module, name: str, module: nn.Module, rows: Sequence[tuple[Layout, bool]]
) -> tuple[Site | None, str | None]:
    """Return the site of a module by the first row that fits it, or else what is not regular in it.

    Whoever describes a module with a row of their own (the flag beside it) knows it.
    """
    if isinstance(module, torch.jit.ScriptModule):
        attention = "attention" in module.original_name.lower() or _looks_like_attention(module, set())
        return None, SCRIPTED if attention else None
    if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
        return None, None
    clause = find_irregularity(module)
    for row, own in rows:
        try:
            site = row.site(model, name, module)
        except LayoutError as error:
            if clause is None or own:
                raise LayoutError(f"{error}{_advise(model, name, module)}") from None
            return None, clause
        if site is None:
            continue
        site = _mark_adapted(model, site)
        if site.prepare is None and hands_weights(module, known=is_known(module)):
            site = replace(site, prepare=call_projections)
        check_head_views(site.slices, site.name)
        if site.output is not None:
            check_head_views([site.output])
        clause = None if own else clause or find_mixing(site)
        if isinstance(row, FusedLinear | FusedParameter) and not own and not is_known(module):
            # only the forward tells blocks from alternating heads, where these share an axis
            site = replace(site, guessed=any(part.parameter.dim() == 2 for part in site.parts))
        return (site, None) if clause is None else (None, clause)
    return None, None


def _advise(model: nn.Module, name: str, module: nn.Module) -> str:
    """Return what follows the refusal of a module: a row for it, where one is found."""
    advice = suggest_rows(model, [(name, module)])
    return f"\n{advice}" if advice else ""


def _mark_adapted(model: nn.Module, site: Site) -> Site:
    """Return the site with its own parameters marked where LoRA wraps the attention itself and adds to them."""
    path, _, attribute = site.name.rpartition(".")
    around = model.get_submodule(path)
    if attribute != "base_layer" or not has_adapters(around):
        return site
    reason = (
        f"is adapted by a {type(around).__module__}.{type(around).__name__} around its attention, which puts W + B A "
        "in its place at each call, so that no force is carried to A and B; merge the adapter, or use a penalty"
    )

    def mark(part: HeadView) -> HeadView:
        return replace(part, obstacle=reason) if part.owner is site.module else part

    return replace(site, slices=tuple(head_slice.map(mark) for head_slice in site.slices))


def _take_inner(sites: Sequence[Site]) -> tuple[list[Site], set[int]]:
    """Return the sites that hold no other site, and the ids of the modules of those that do.

    Raises:
        LayoutError: One that holds another computes attention itself, so both may have heads.
    """
    found = {id(site.module): site for site in sites}
    within = {site: [found[id(part)] for part in site.module.modules() if id(part) in found][1:] for site in sites}
    for site, (inner, *_) in ((site, inside) for site, inside in within.items() if inside and attends(site.module)):
        raise LayoutError(
            f"{site.label} ({type(site.module).__name__}) holds query, key and value projections and computes "
            f"attention, and {inner.label} ({type(inner.module).__name__}) inside it does too; find the heads of one "
            f"of them: exclude=({inner.name!r},), or find_heads of the inner module alone."
        )
    outer = {id(site.module) for site, inside in within.items() if inside}
    return [site for site in sites if id(site.module) not in outer], outer


def _give_count(layouts: Sequence[Layout], num_heads: int | None) -> Sequence[Layout]:
    """Return the rows with a number of heads for modules that do not tell theirs."""
    if num_heads is None:
        return layouts
    require_integer("num_heads", num_heads, low=1)

    def counts(row: Any) -> bool:
        return is_dataclass(row) and isinstance(getattr(row, "num_heads", None), tuple)

    rows: list[Any] = list(layouts)
    return [replace(row, num_heads=(*row.num_heads, num_heads)) if counts(row) else row for row in rows]


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


def _list_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the names and modules of a model, without the copies that peft keeps of modules and does not call."""
    modules = list(model.named_modules())
    idle: set[int] = set()
    for _, module in modules:
        called = find_saved(module)
        if called is not None:
            copies = [module.get_submodule("original_module"), *module.get_submodule("modules_to_save").children()]
            unused = [copy for copy in copies if copy is not module.get_submodule(called)]
            idle |= {id(part) for copy in unused for part in copy.modules()}
    return [(name, module) for name, module in modules if id(module) not in idle]


def _exclude(model: nn.Module, exclude: Any) -> list[tuple[str, nn.Module]]:
    """Return the names and modules of a model without those that match a pattern, and without their submodules."""
    patterns, modules = _list_given(exclude), _list_modules(model)
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


def _require_shapes(attentions: Sequence[Named]) -> None:
    """Raise `LayoutError` for an attention with lazy parameters, which have no shape before its first forward."""
    for name, module in attentions:
        lazy = next((path for path, parameter in module.named_parameters() if is_lazy(parameter)), None)
        if lazy is not None:
            raise LayoutError(
                f"{name or 'the model'} ({type(module).__name__}): its {lazy} has no shape before the first forward "
                "pass; run the model once, then call find_heads."
            )


def _find_unread(
    modules: Sequence[Named], sites: Sequence[Site], outer: set[int], clauses: Mapping[str, str]
) -> list[Named]:
    """Return the modules that are irregular, or look like attention and are neither a site nor a part of one."""
    found = {id(site.module) for site in sites}
    read = outer | {id(part) for site in sites for part in site.module.modules()}
    return [
        (name, module)
        for name, module in modules
        if name in clauses or (id(module) not in read and _looks_like_attention(module, found))
    ]


def _looks_like_attention(module: nn.Module, found: set[int]) -> bool:
    """Return whether a module holds projections of q, k and v; of any of them, if its class is called attention."""
    mentioned: set[str] = set()
    for name, child in module._modules.items():
        # a "query" that holds attention itself is an encoder of queries
        if child is not None and projects(child) and not any(id(part) in found for part in child.modules()):
            mentioned |= find_letters(name)
    for name, parameter in module._parameters.items():
        if parameter is not None and (is_lazy(parameter) or parameter.dim() > 1):
            mentioned |= find_letters(name)
    called_attention = ATTENTION.search(type(module).__name__) is not None
    return mentioned == set("qkv") or (bool(mentioned) and called_attention)
