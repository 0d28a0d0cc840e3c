"""Readings that shapes alone do not determine: what settles them, and the refusal to act on a guess."""

import weakref
from collections.abc import Sequence

from headwise.errors import LayoutError
from headwise.heads.heads import Heads, Site
from headwise.nn.resized import GROUPS

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
    """Return whether a site is read in one of several ways that its shapes allow, and nothing has told which."""
    return site.guessed and _as_reading(site) not in _proved.get(type(site.module), ())


def _as_reading(site: Site) -> Reading:
    parts = [(part.projection, part.heads, part.head_size, part.start, part.stride, part.along) for part in site.parts]
    return (site.num_heads, site.key_value_heads, site.tiled, *parts)


def require_told(sites: Sequence[Site]) -> None:
    """Raise `LayoutError` for grouped queries that may as well be values wider than keys, where nothing tells."""
    for site in sites:
        if not is_guess(site) or site.key_value_heads == site.num_heads or _counts_groups(site):
            continue
        keys, over = divmod(site.key_value_heads * site.head_size, site.num_heads)
        fused = next(part for part in site.parts if part.projection == "key")
        if over or site.slices[0].owner is not fused.owner:
            continue
        heads, size = site.num_heads, site.head_size
        raise LayoutError(
            f"{site.label} ({type(site.module).__name__}): the {fused.along} rows of {fused.name} may be {heads} query "
            f"and {site.key_value_heads} key/value heads of {size}, or {heads} heads whose queries and keys have "
            f"{keys} features and whose values have {size}; nothing that it holds tells which, and it could not be "
            "called with tokens alone. If queries are grouped, set module.num_key_value_heads = "
            f"{site.key_value_heads}, or pass a row of your own: FusedLinear('mine', fused=(...,), output=(...,), "
            f"num_heads={heads}). If values are wider, no row describes it; leave it out: exclude=({site.name!r},)."
        )


def _counts_groups(site: Site) -> bool:
    """Return whether the module, or its configuration, tells the number of key/value heads."""
    told = {name: count for name in KEY_COUNTS for count in _read(site, name)}
    ratios = {name: count for name in RATIOS for count in _read(site, name)}
    return site.key_value_heads in told.values() or site.num_heads // site.key_value_heads in ratios.values()


def _read(site: Site, name: str) -> list[int]:
    holders = (site.module, *(getattr(site.module, held, None) for held in ("config", "cfg", "args")))
    found = (getattr(holder, name, None) for holder in holders)
    return [count for count in found if type(count) is int]


def require_proved(heads: Heads) -> None:
    """Raise `LayoutError` for a site that is read in one of several ways its shapes allow, where nothing told which."""
    for site in heads:
        if is_guess(site):
            raise LayoutError(
                f"{site.label} ({type(site.module).__name__}): its fused projection is read by the layout "
                f"{site.layout!r}, and its shape allows others: blocks of queries, keys and values, or these of each "
                "head in turn. No call with tokens alone has told which is right, and forces on other rows would "
                "train something else. Call hw.verify(heads, inputs) first, which proves it; or "
                "describe it with a row of your own."
            )
