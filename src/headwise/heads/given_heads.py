"""What every function that takes heads asks of them: that they are `Heads`, and of the model as it is now.

A layer that is wrapped, replaced or parametrised after `find_heads` leaves the heads found before with a part of what
the model calls: they would be read and written without a word, and wrongly.
"""

from __future__ import annotations

from headwise.errors import LayoutError, SettingError
from headwise.heads.heads import Heads, Site


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
        raise SettingError(f"heads is {_described(given)}; expected heads of a model: hw.find_heads(model).")
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
            there = None if place is None else _at(site, place)
            raise LayoutError(
                f"{head_slice.name} is not where the model calls it any more"
                f"{f': a {type(there).__name__} has taken its place' if there is not None else ''}. Wrap (LoRA), "
                "prune, replace or quantise layers first, then call find_heads."
            )
        if head_slice.obstacle is None and head_slice.owner._parameters.get(head_slice.attribute) is None:
            raise LayoutError(head_slice.vanished)


def _at(site: Site, place: str) -> object:
    try:
        return site.module.get_submodule(place)
    except AttributeError:
        return None


def _described(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
