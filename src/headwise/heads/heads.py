"""The attention heads of a model: the collection a user holds, and the check that the model still fits it."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from headwise.errors import LayoutError, SettingError, require_choice
from headwise.heads.head_slice import HeadSlice
from headwise.heads.site import KINDS, PROJECTIONS, Site


@dataclass(frozen=True, eq=False)
class Heads:
    """The attention heads of a model: immutable, printable, selectable.

    Returned by `find_heads`. Every selector returns a new collection and refuses to return an empty one.

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

    def __post_init__(self) -> None:
        if not self.found:
            object.__setattr__(self, "found", self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

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
        last = {site.stack: max(s.layer for s in self.sites if s.stack == site.stack) for site in self.sites}
        wanted = tuple(
            site
            for site in self.sites
            if any(site.layer == (i if i >= 0 else last[site.stack] + 1 + i) for i in indices)
        )
        places = sorted({(site.stack, site.kind) for site in wanted})
        if len(places) > 1:
            listed = ", ".join(f"{kind!r} in {stack or 'the model'}" for stack, kind in places)
            raise LayoutError(
                f"layer {', '.join(map(str, indices))} exists in several places ({listed}); "
                "select one first with .kind(...) or .where(...)."
            )
        missing = [i for i in indices if not any(s.layer == (i if i >= 0 else last[s.stack] + 1 + i) for s in wanted)]
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

    def slices(self) -> tuple[HeadSlice, ...]:
        """Return the slices of the selected projections, site by site."""
        return tuple(part for site in self.sites for part in site.slices if part.projection in self.projections)

    def slabs(self) -> tuple[HeadSlice, ...]:
        """Return `slices()`, under its name in version 0.1."""
        return self.slices()

    def _select(self, sites: tuple[Site, ...], description: str) -> Heads:
        if not sites:
            names = ", ".join(f"{site.name or '(model)'} [{site.kind}]" for site in self.sites[:8])
            raise LayoutError(f"no attention {description} among {len(self.sites)} sites: {names}.")
        return replace(self, sites=sites)

    def __str__(self) -> str:
        header = ("site", "kind", "layer", "heads", "size", "layout", "output")
        rows = [
            (
                site.name or "(model)",
                site.kind,
                str(site.layer),
                str(site.num_heads)
                if site.num_heads == site.key_value_heads
                else f"{site.num_heads}/{site.key_value_heads}",
                str(site.head_size),
                site.layout,
                "-"
                if site.output_projection is None
                else f"{site.output_projection.attribute}: {type(site.output_projection.module).__name__}",
            )
            for site in self.sites
        ]
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [header, *rows]
        ]
        total = sum(site.num_heads for site in self.sites)
        lines.append(f"{total} heads in {len(self.sites)} sites; projections: {', '.join(self.projections)}")
        obstacles = {
            head_slice.obstacle: head_slice.name
            for head_slice in reversed(self.slices())
            if head_slice.obstacle is not None
        }
        lines += [f"no repulsion, for example in {name}: it {obstacle}" for obstacle, name in obstacles.items()]
        return "\n".join(lines)


def require_heads(given: object) -> None:
    """Raise unless these are heads of a model that still holds them where they were found.

    Raises:
        SettingError: It is something else.
        LayoutError: The model was changed since, at one of the sites.

    Example:
        >>> import headwise as hw
        >>> from torch import nn
        >>> require_heads(hw.find_heads(nn.MultiheadAttention(8, 2)))
    """
    if not isinstance(given, Heads):
        raise SettingError(f"heads is {_describe(given)}; expected heads of a model: hw.find_heads(model).")
    present = {id(module) for module in given.model.modules()}
    for site in given:
        if id(site.module) not in present:
            raise LayoutError(
                f"{site.name or 'the attention'} ({type(site.module).__name__}) is no longer part of the model, which "
                "was changed after its heads were found; call find_heads again."
            )
        _require_current(site)


def _require_current(site: Site) -> None:
    """Raise `LayoutError` unless the layers of a site stand where they stood when it was found."""
    for head_slice, before, now in zip(site.slices, site.found_at, site.paths(), strict=True):
        if before != now:
            place = next(b for b, n in zip(before, now, strict=True) if b != n)
            there = None if place is None else _find_module(site, place)
            raise LayoutError(
                f"{head_slice.name} is not where the model calls it any more"
                f"{f': a {type(there).__name__} has taken its place' if there is not None else ''}. Wrap (LoRA), "
                "prune, replace or quantize layers first, then call find_heads."
            )
        if head_slice.obstacle is None and head_slice.owner._parameters.get(head_slice.attribute) is None:
            raise LayoutError(head_slice.vanished)


def _find_module(site: Site, place: str) -> object:
    try:
        return site.module.get_submodule(place)
    except AttributeError:
        return None


def _describe(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
