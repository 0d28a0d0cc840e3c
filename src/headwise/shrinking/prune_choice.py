"""Which heads are removed when a share of them stays: the same number in every attention, the least important first."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headwise.errors import HeadwiseError, SettingError, ShapeError, require_range
from headwise.heads.heads import Heads, Site
from headwise.heads.importance import Importance
from headwise.heads.query_groups import list_sharing
from headwise.shrinking.prune_refusals import find_table_owner


def choose_heads(heads: Heads, keep: float, importance: Importance | Mapping[str, Any] | None) -> dict[str, list[int]]:
    """Return the query heads that each attention loses when a share of its heads stays.

    Attentions of one size keep equally many heads, round(keep H) and at least one, so that a configuration can say it.
    Where queries are grouped whole groups go, by the sum of their importances, and round(keep G) stay; of multi-query
    attention single query heads go. Layers that share a table of position biases lose the same heads, and those that
    compute with the same keys and values the same groups.

    Args:
        heads: The sites.
        keep: The share that stays, above 0.
        importance: What `hw.importance` returned, or a number for each head, by the name of the attention; the larger,
            the longer it stays.

    Raises:
        SettingError: `keep` is no such share, or no importance was given for an attention.
        ShapeError: There is not one number for each head.
        HeadwiseError: A number is not finite.
    """
    require_range("keep", keep, low=0.0, high=1.0, low_open=True)
    if importance is None:
        raise SettingError(
            "keep needs importance=..., what each head is worth: hw.importance(heads, score), or {name: numbers}."
        )
    numbers = {site: _read(site, importance) for site in heads}
    chosen = {}
    for site in heads:
        owner = find_table_owner(heads, site)
        alike = [other for other in heads if owner is not None and find_table_owner(heads, other) is owner]
        if site.key_value_heads > 1:
            alike += [other for other in list_sharing(heads.sites, site) if other not in alike]
        worth = [_sum_units(other, numbers[other]) for other in alike or [site]]
        chosen[site.name] = _choose(site, torch.stack(worth).sum(0), keep)
    return {name: gone for name, gone in chosen.items() if gone}


def _sum_units(site: Site, numbers: Tensor) -> Tensor:
    """Return what the units of a site are worth that go together: groups, or query heads where there is one group."""
    return site.group_queries(numbers).sum(1) if _is_grouped(site) else numbers


def _is_grouped(site: Site) -> bool:
    return 1 < site.key_value_heads < site.num_heads


def _choose(site: Site, units: Tensor, keep: float) -> list[int]:
    left = max(1, round(keep * len(units)))
    # of equal ones the first stays
    gone = sorted(units.argsort(descending=True, stable=True)[left:].tolist())
    return sorted(head for unit in gone for head in (site.list_members(unit) if _is_grouped(site) else (unit,)))


def _read(site: Site, importance: Importance | Mapping[str, Any]) -> Tensor:
    held: Any = importance.drops if isinstance(importance, Importance) else importance
    name = site.shown
    if not isinstance(held, Mapping) or not {site, site.name, name} & {*held}:
        raise SettingError(f"importance has no entry {name!r}; expected one number for each head of each attention.")
    given = next(held[key] for key in (site, site.name, name) if key in held)
    if isinstance(given, list | tuple):
        # the drops of a report have intervals
        given = [getattr(one, "value", one) for one in given]
    try:
        numbers = torch.as_tensor(given, dtype=torch.float64).cpu()
    except (TypeError, ValueError, RuntimeError):
        raise SettingError(
            f"importance of {name} is {given!r:.80}; expected {site.num_heads} numbers, one for each head."
        ) from None
    if numbers.shape != (site.num_heads,):
        raise ShapeError(f"importance of {name} has shape {tuple(numbers.shape)}; expected ({site.num_heads},).")
    if not bool(numbers.isfinite().all()):
        raise HeadwiseError(f"importance of {name} holds NaN or infinity; expected finite numbers.")
    return numbers
