"""The message of `find_heads` about modules it does not read."""

import fnmatch
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import nn
from torch.nn.parameter import is_lazy

from headwise.heads.arrangement import is_known
from headwise.heads.irregular import attends
from headwise.heads.suggestion import list_parameters, list_projections, suggest_rows

# A row to copy.
ROW = (
    "find_heads(model, (SeparateLinears(query=('wq',), key=('wk',), value=('wv',), output=('wo',), "
    "num_heads=('heads',)), *headwise.LAYOUTS))"
)
Named = tuple[str, nn.Module]


def describe_failure(
    model: nn.Module, layouts: Sequence[str], found: int, unread: Sequence[Named], clauses: Mapping[str, str]
) -> str:
    """Return which modules are not read, what is not regular in them, and what to do.

    Args:
        model: The model.
        layouts: Names of the rows tried.
        found: How many attentions were read.
        unread: Names and modules that look like attention and are not read; none where nothing looks like it.
        clauses: What is not regular, for the names of some of them.
    """
    tried, kind = ", ".join(dict.fromkeys(layouts)), type(model).__name__
    seen = unread or _find_candidates(model)
    said_of: dict[str, list[str]] = defaultdict(list)
    for name, part in seen:
        said_of[_describe(part, clauses.get(name))].append(name or "(model)")
    lines = [f"  {_join(names)}: {what}" for what, names in said_of.items()]
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
    return [
        (name, module)
        for name, module in model.named_modules()
        if looks_like.search(type(module).__name__) or looks_like.search(name.rpartition(".")[2])
    ] or _find_computing(model)


def _find_computing(model: nn.Module) -> list[Named]:
    """Return the modules of one's own that hold something to project with, those whose code attends if some does."""
    own = [(name, module) for name, module in model.named_modules() if not is_known(module)]
    held = [(name, module) for name, module in own if len(list_projections(module)) + len(list_parameters(module)) > 1]
    attending = {id(module) for _, module in own if attends(module)}
    return [
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


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more like it"


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
