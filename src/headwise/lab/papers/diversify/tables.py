"""Tables and figures of Li et al. 2021, disagreement and routing: logic, and translation without its ablations.

Disagreement of the paper's later tables is output on all three kinds of attention, Aggregation is EM routing in the
first two layers of the encoder.
"""

from __future__ import annotations

from headwise.lab.papers.claims import Claim, Contrast
from headwise.lab.papers.diversify.ablations import ABLATIONS
from headwise.lab.papers.diversify.probing import TABLE_7
from headwise.lab.papers.measures import Numbers
from headwise.lab.papers.reproduction import Column, PaperRow, Part, Published, Reproduction
from headwise.lab.papers.sizes import base, big, big_few_heads, logic

SHORT, LONG, ALL = (1, 6), (7, 12), (1, 12)

FIGURE_4 = Reproduction(
    id="diversify/figure-4",
    title="Logical inference by number of operators",
    source="Li et al. 2021, Figure 4 (curves; the text gives no numbers)",
    task="logic",
    parts=(Part(("plain", "smooth", "svgd", "svgd-relative", "output", "trunk", "em", "output+em"), logic()),),
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

_AGGREGATION = "em:layers={two},kinds=self"
_TRUNK = "trunk:layers={two},kinds=self"
_BOTH = f"output+{_AGGREGATION}"
_MAIN = ("plain", "output", _TRUNK, _AGGREGATION, _BOTH)
_PARTS = ("base", "big", "zh-en base", "zh-en big")
BLEU = Column("BLEU")
PARAMETERS = Column("# Para.", "parameters")


def _rows(model: str, part: str, *cells: tuple[str, str]) -> tuple[PaperRow, ...]:
    names = (model, "+ Disagreement", "+ Aggregation", "+ Both")
    arms = ("plain", "output", _AGGREGATION, _BOTH)
    return tuple(PaperRow(name, arm, pair, part) for name, arm, pair in zip(names, arms, cells, strict=True))


TABLE_5 = Reproduction(
    id="diversify/table-5",
    title="Main results: disagreement, aggregation and both, on base and big models",
    source="Li et al. 2021, Table 5; its rows of other systems are left out",
    task="translation",
    parts=(
        Part(_MAIN, base("wmt14"), "base"),
        Part(_MAIN, big("wmt14"), "big"),
        # any corpus will do at the smaller scales, which a second one only repeats: name it with --data
        Part(_MAIN, {"paper": base("wmt17")["paper"]}, "zh-en base"),
        Part(_MAIN, {"paper": big("wmt17")["paper"]}, "zh-en big"),
    ),
    extra="trunk in the same two layers is the control of routing: its votes and parameters without agreement",
    claims=(
        Claim(
            "Disagreement and aggregation each improve on the baseline, base and big, in both language pairs.",
            tuple(Contrast(arm, "plain", part=part) for part in _PARTS for arm in ("output", _AGGREGATION)),
        ),
        Claim(
            "Both together improve further on each alone.",
            tuple(Contrast(_BOTH, arm, part=part) for part in _PARTS for arm in ("output", _AGGREGATION)),
        ),
        Claim(
            "The base model with both is about as good as the big model, with far fewer parameters.",
            tuple(
                Contrast("plain", _BOTH, part=big_part, against_part=base_part)
                for base_part, big_part in (("base", "big"), ("zh-en base", "zh-en big"))
            ),
            (
                Numbers("parameters", "parameters", (_BOTH,), "base", digits=0),
                Numbers("parameters", "parameters", ("plain",), "big", digits=0),
            ),
            tested=False,
        ),
        Claim(
            "The big model gains less from both than the base model does.",
            (Contrast(_BOTH, "plain", part="base", less=Contrast(_BOTH, "plain", part="big")),),
        ),
        Claim(
            "What aggregation adds is the routing, not its parameters (our control; the paper has none).",
            tuple(Contrast(_AGGREGATION, _TRUNK, part=part) for part in _PARTS),
        ),
    ),
    published=Published(
        "WMT14 En-De and WMT17 Zh-En with Transformer-base and big; case-sensitive NIST BLEU",
        (PARAMETERS, BLEU),
        (
            *_rows(
                "Transformer-Base", "base", ("88 M", "27.31"), ("88 M", "28.20"), ("92 M", "28.26"), ("92 M", "28.41")
            ),
            *_rows(
                "Transformer-Big", "big", ("264 M", "28.58"), ("264 M", "28.96"), ("297 M", "28.96"), ("297 M", "29.09")
            ),
            *_rows(
                "Transformer-Base, Zh-En",
                "zh-en base",
                *(("108 M", "24.13"), ("108 M", "24.85"), ("112 M", "24.68"), ("112 M", "24.90")),
            ),
            *_rows(
                "Transformer-Big, Zh-En",
                "zh-en big",
                *(("304 M", "24.56"), ("304 M", "25.08"), ("337 M", "25.00"), ("337 M", "25.12")),
            ),
        ),
    ),
)

TABLE_6 = Reproduction(
    id="diversify/table-6",
    title="The big model with as few heads as the base model",
    source="Li et al. 2021, Table 6 (8 heads), with the rows of 16 heads from its Table 5",
    task="translation",
    parts=(
        Part(_MAIN, big_few_heads("wmt14"), "few heads"),
        Part(_MAIN, big("wmt14"), "many heads"),
    ),
    extra="trunk in the same two layers is the control of routing; the runs with many heads are those of table 5",
    claims=(
        Claim(
            "With few heads both methods, and both together, improve on the baseline.",
            tuple(Contrast(arm, "plain", part="few heads") for arm in ("output", _AGGREGATION, _BOTH)),
        ),
        Claim(
            "With few heads both together improve further on each alone.",
            tuple(Contrast(_BOTH, arm, part="few heads") for arm in ("output", _AGGREGATION)),
        ),
        Claim(
            "The gain of both together is larger with few heads than with many.",
            (Contrast(_BOTH, "plain", part="few heads", less=Contrast(_BOTH, "plain", part="many heads")),),
        ),
        Claim(
            "Aggregation in two layers adds parameters (the paper's + 24 M with 8 heads fits none of the forms of its "
            "votes; ours count + 16.8 M there).",
            shown=tuple(
                Numbers("parameters", "parameters", ("plain", _AGGREGATION), part, digits=0)
                for part in ("few heads", "many heads")
            ),
        ),
        Claim(
            "What aggregation adds is the routing, not its parameters (our control; the paper has none).",
            (Contrast(_AGGREGATION, _TRUNK, part="few heads"),),
        ),
    ),
    published=Published(
        "WMT14 En-De, Transformer-big; case-sensitive NIST BLEU",
        (PARAMETERS, BLEU),
        (
            *_rows(
                "Transformer-Big (8 heads)",
                "few heads",
                *(("264 M", "28.10"), ("264 M", "28.63"), ("288 M", "28.65"), ("288 M", "28.94")),
            ),
            *_rows(
                "Transformer-Big",
                "many heads",
                ("264 M", "28.58"),
                ("264 M", "28.96"),
                ("297 M", "28.96"),
                ("297 M", "29.09"),
            ),
        ),
    ),
)

DIVERSIFY = (*ABLATIONS, TABLE_5, TABLE_6, TABLE_7, FIGURE_4)
