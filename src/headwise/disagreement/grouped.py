"""Terms on the query heads of grouped attention: inside each group, or between groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headwise.disagreement.similarities import Arithmetic, Similarity, SiteSimilarity
from headwise.errors import SettingError, require_choice
from headwise.heads.heads import GROUPINGS, Site
from headwise.heads.query_groups import group_features

# Axis of the heads in what a term reads.
AXES = {"outputs": 2, "weights": 1}


@dataclass(frozen=True)
class GroupedQueries(Arithmetic):
    """A term on the query heads of one group, or on groups, under grouped queries.

    With H query heads, G key/value heads and groups g of H / G query heads that share one,

        within: (1/G) sum_g s(heads of g)        across: s(g_1, ..., g_G)

    where a group as a whole puts out the outputs of its heads one after another, and attends with the mean of their
    weights (`Position` across is therefore `Position`, an overlap of means). Terms on values compare the G key/value
    heads as they are, without this.

    Args:
        term: A term on outputs or weights: `CKA()`, `Output()`, `Position()`, ...
        grouping: "within" or "across".

    Raises:
        SettingError: The term reads something else, or contributions, or there is no such grouping.

    Example:
        >>> import headwise as hw
        >>> GroupedQueries(hw.CKA(), "within") + 0.5 * GroupedQueries(hw.CKA(), "across")
        Sum(parts=((1.0, GroupedQueries(term=CKA(debiased=True, of='outputs', sketch=0), grouping='within')), (0.5, \
GroupedQueries(term=CKA(debiased=True, of='outputs', sketch=0), grouping='across'))))
    """

    term: Similarity | SiteSimilarity
    grouping: Literal["within", "across"] = "within"

    def __post_init__(self) -> None:
        require_choice("grouping", self.grouping, GROUPINGS)
        if not isinstance(self.term, Similarity | SiteSimilarity) or self.term.reads not in AXES:
            raise SettingError(
                f"term is {self.term!r}; expected one on the outputs or the weights of heads, such as CKA() or "
                "Position()."
            )
        if getattr(self.term, "of", "outputs") != "outputs":
            raise SettingError(f"term is {self.term!r}; groups are compared by outputs: leave out of='contributions'.")

    @property
    def reads(self) -> str:
        """What the term reads."""
        return self.term.reads

    def count_heads(self, site: Site) -> int:
        """Return how many heads of a group, or how many groups, are compared."""
        return site.key_value_heads if self.grouping == "across" else site.num_heads // site.key_value_heads

    def sum_and_count_at(self, site: Site, tensor: Tensor | None, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return sum and number over valid tokens, or over calls, as the term does.

        Raises:
            LayoutError: The site has no grouped queries.
        """
        assert tensor is not None  # captured, as `reads` asks
        found = group_features(tensor, site, self.grouping, AXES[self.reads])
        parts = [self._measure(site, part, keep) for part in (found if self.grouping == "within" else found[None])]
        own, count = (torch.stack(column) for column in zip(*parts, strict=True))
        return own.mean(), count.to(own.dtype).mean()

    def _measure(self, site: Site, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        if isinstance(self.term, SiteSimilarity):
            return self.term.sum_and_count_at(site, tensor, keep)
        return self.term.sum_and_count(tensor, keep)
