"""Tables and figures of Li et al. 2021, disagreement and routing."""

from __future__ import annotations

from headwise.lab.claims import Claim, Contrast
from headwise.lab.tables.reproduction import Reproduction

__all__ = ["FIGURE_4"]

SHORT, LONG, ALL = (1, 6), (7, 12), (1, 12)

FIGURE_4 = Reproduction(
    id="diversify/figure-4",
    title="Logical inference by number of operators",
    source="Li et al. 2021, Figure 4 (curves; the text gives no numbers)",
    task="logic",
    arms="plain,smooth,svgd,svgd-relative,output,trunk,em,output+em",
    extra="smooth, svgd and svgd-relative are not in the figure; trunk is the control of em, which has its parameters",
    claims=(
        Claim(
            "The combined model outperforms the baseline and both single ones in all cases.",
            tuple(Contrast("output+em", other, bins) for other in ("plain", "output", "em") for bins in (SHORT, LONG)),
        ),
        Claim("Disagreement performs better on short sequences than aggregation.", (Contrast("output", "em", SHORT),)),
        Claim("Aggregation performs better on long sequences than disagreement.", (Contrast("em", "output", LONG),)),
        Claim(
            "The lead of the combined model is larger on sequences longer than those of training.",
            tuple(Contrast("output+em", other, LONG, beyond=SHORT) for other in ("plain", "output", "em")),
        ),
        Claim("Output disagreement alone improves on the baseline.", (Contrast("output", "plain", ALL),)),
        Claim("EM routing alone improves on the baseline.", (Contrast("em", "plain", ALL),)),
        Claim(
            "What EM routing adds is the routing, not its parameters (our control; the paper has none).",
            (Contrast("em", "trunk", ALL),),
        ),
    ),
)
