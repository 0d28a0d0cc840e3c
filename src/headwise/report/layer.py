"""The measures of the heads of one attention module, as plain numbers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from headwise.errors import require_choice
from headwise.metrics.intervals import Interval

Matrix = tuple[tuple[float, ...], ...]
# Measures of pairs of heads, in the order of the tables, with their descriptions.
PAIRS = {
    "contribution_cka": "debiased CKA of contributions",
    "output_cosine": "cosine of outputs",
    "output_cka": "linear CKA of outputs",
    "output_distance": "distance of outputs",
    "value_cosine": "cosine of values",
    "value_distance": "distance of values",
    "attention_js": "Jensen-Shannon divergence of attention, nats",
    "query_cosine": "cosine of query parameters",
    "query_distance": "distance of query parameters",
    "key_cosine": "cosine of key parameters",
    "key_distance": "distance of key parameters",
    "value_parameter_cosine": "cosine of value parameters",
    "value_parameter_distance": "distance of value parameters",
    "query_span": "overlap of query subspaces",
    "key_span": "overlap of key subspaces",
    "value_span": "overlap of value subspaces",
    "output_span": "overlap of the subspaces of W_O",
}
TERMS = ("output", "subspace", "position")


class SiteName(str):
    """Dotted name of an attention module; has it as `name` too, as the sites of `find_heads` do.

    >>> SiteName("layers.0.self_attn").name
    'layers.0.self_attn'
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        """The name itself."""
        return str(self)


@dataclass(frozen=True)
class LayerReport:
    """The heads of one attention module.

    Attributes:
        site: Dotted name of the module, by which `hw.prune` and `Heads.where` take it; `site.name` is the same.
        kind: "self", "decoder" or "cross".
        stack: Dotted name of the stack of layers it is in.
        layer: Index of its layer in the stack, from 0.
        heads: Number of heads H.
        pairs: For each measure in `PAIRS` that could be read, a symmetric matrix [H, H] ([G, G] for values and keys
            with grouped queries).
        terms: The similarities that the penalties of Li et al. 2021 minimize: "output", "subspace", "position".
        entropy: Mean entropy of each head's attention in nats, [H]; empty if the weights could not be read.
        first: Mean share of each head's attention on the first token, [H]; empty if the weights could not be read.
        drops: Drop of the score without each head, [H]; empty without a score.
        roles: For each role, the share of each head's attention on its pairs, R rows of [H].
        chance: The share for a random mask as sparse as the role, [R].
        effective_heads: Effective number of heads, of contributions W_O,h o_h; None if they could not be read.
        effective_heads_weighted: The same with each head weighted by the variance it contributes.
    """

    site: SiteName
    kind: str
    stack: str
    layer: int
    heads: int
    pairs: Mapping[str, Matrix] = field(default_factory=dict)
    terms: Mapping[str, float] = field(default_factory=dict)
    entropy: tuple[float, ...] = ()
    drops: tuple[Interval, ...] = ()
    roles: Matrix = ()
    chance: tuple[float, ...] = ()
    effective_heads: float | None = None
    effective_heads_weighted: float | None = None
    first: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.site, str):
            object.__setattr__(self, "site", SiteName(self.site))

    def mean(self, measure: str) -> float | None:
        """Return the mean over pairs of different heads, or None if it was not measured.

        >>> LayerReport("attn", "self", "", 0, 2, {"output_cosine": ((1.0, 0.25), (0.25, 1.0))}).mean("output_cosine")
        0.25
        """
        others = self.of_heads(measure)
        return sum(others) / len(others) if others else None

    def of_heads(self, measure: str) -> tuple[float, ...]:
        """Return for each head its mean over the other heads; empty if it was not measured."""
        require_choice("measure", measure, PAIRS)
        matrix = self.pairs.get(measure, ())
        if len(matrix) < 2:
            return ()
        return tuple((math.fsum(row) - row[head]) / (len(matrix) - 1) for head, row in enumerate(matrix))

    @property
    def heads_on_first(self) -> int:
        """How many heads put more than half of their attention on the first token."""
        return sum(share > 0.5 for share in self.first)

    @property
    def drop(self) -> float | None:
        """Mean drop of the score over heads, or None if it was not measured."""
        return sum(drop.value for drop in self.drops) / len(self.drops) if self.drops else None
