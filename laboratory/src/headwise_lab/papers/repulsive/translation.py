"""Tables and figures of An et al. 2020, repulsive attention: translation.

MA of the paper is plain, RMA is svgd (its translation runs are SVGD), R is output: "a cosine similarity penalty on
attention outputs" after Li et al. 2018.
"""

from functools import partial

from headwise_lab.papers.claims import (
    Claim,
    Contrast,
    Least,
    Numbers,
    StepTimes,
    claim_control,
    compare_arms,
    compare_parts,
)
from headwise_lab.papers.reproduction import Column, PaperRow, Part, Published, Reproduction, base, big, small

BLEU = Column("BLEU")
TIME = Column("Time", "step time")
IWSLT = "IWSLT14 De-En, Transformer-small"

_SIZES = ("small", "base")
# scaled, the control of smooth and sgld, is left out: without clipping Adam divides a constant factor out again
_RMA = ("plain", "smooth", "svgd", "svgd-relative", "output")
_CONTROL = claim_control(
    "What repulsive attention adds is the repulsion, not the smoothing that SVGD brings with it",
    compare_arms("svgd", "smooth", _SIZES),
)

TABLE_2 = Reproduction(
    id="repulsive/table-2",
    title="Translation: BLEU and time of repulsive attention, of regularization and of a larger model",
    source="An et al. 2020, Table 2; sacreBLEU of two rows in appendix B.2",
    task="translation",
    parts=(
        # at the smaller scales Transformer-small and Transformer-base are one model
        Part(_RMA, {"paper": small()["paper"]}, "small"),
        Part(_RMA, base("wmt14"), "base"),
        Part(("plain",), big("wmt14"), "big"),
    ),
    extra=(
        "smooth is the control of svgd; svgd-relative is ours: its repulsion is always a tenth as long as its drive"
    ),
    claims=(
        Claim("Repulsive attention improves BLEU over standard attention.", compare_arms("svgd", "plain", _SIZES)),
        Claim(
            "Repulsive attention improves BLEU over the regularization of outputs.",
            compare_arms("svgd", "output", _SIZES),
        ),
        Claim(
            "The regularization of outputs improves BLEU over standard attention (the table's numbers).",
            compare_arms("output", "plain", _SIZES),
        ),
        Claim(
            "Repulsive attention on the base model is about as good as the big model with standard attention.",
            (
                Contrast("svgd", "plain", part="base", against_part="big"),
                Contrast("plain", "plain", part="big", against_part="base"),
            ),
            (
                Numbers("parameters", "parameters", ("plain",), "base", digits=0),
                Numbers("parameters", "parameters", ("plain",), "big", digits=0),
            ),
            tested=False,
        ),
        Claim(
            "Repulsive attention takes slightly more time a step than standard attention, and less than "
            "regularization.",
            shown=tuple(StepTimes(("svgd", "output"), part) for part in _SIZES),
        ),
        _CONTROL,
    ),
    published=Published(
        "IWSLT14 De-En with Transformer-small, WMT14 En-De with base and big",
        (BLEU, TIME, Column("sacreBLEU")),
        (
            PaperRow("Transformer-small-MA", "plain", ("34.4", "1", ""), "small"),
            PaperRow("Transformer-small-MA + R", "output", ("34.9", "1.29", ""), "small"),
            PaperRow("Transformer-small-RMA", "svgd", ("35.2", "1.13", ""), "small"),
            PaperRow("Transformer-base-MA", "plain", ("27.3", "1", "26.2"), "base"),
            PaperRow("Transformer-base-MA + R", "output", ("28.2", "1.35", ""), "base"),
            PaperRow("Transformer-big-MA", "plain", ("28.4", "", ""), "big"),
            PaperRow("Transformer-base-RMA", "svgd", ("28.4", "1.18", "27.1"), "base"),
        ),
    ),
)

TABLE_6 = Reproduction(
    id="repulsive/table-6",
    title="Sampling methods on translation: none, SGLD, SVGD, and SPOS",
    source="An et al. 2020, Table 6, its column IWSLT14 De-En",
    task="translation",
    parts=(Part(("plain", "sgld", "smooth", "svgd", "spos"), small()),),
    extra=(
        "spos, which the table leaves out; scaled is the control of sgld, smooth that of svgd and spos. The paper "
        "states no temperature for SGLD or SPOS; ours makes the noise about as large as the drive at the start"
    ),
    claims=(
        Claim("SVGD is better than standard attention.", compare_arms("svgd", "plain")),
        Claim("The noise of SGLD alone helps over standard attention.", compare_arms("sgld", "plain")),
        Claim("Repulsion between particles helps more than the noise of SGLD.", compare_arms("svgd", "sgld")),
        claim_control("What SVGD adds is the repulsion, not the smoothing", compare_arms("svgd", "smooth")),
    ),
    published=Published(
        IWSLT,
        (BLEU,),
        (
            PaperRow("None", "plain", ("34.4",)),
            PaperRow("SGLD", "sgld", ("34.7",)),
            PaperRow("SVGD", "svgd", ("35.2",)),
        ),
    ),
)

_PROJECTIONS = tuple(f"svgd:projections={name}" for name in ("query", "key", "value"))
_KINDS = tuple(f"svgd:kinds={name}" for name in ("self", "decoder", "cross"))
_LAYERS = ("svgd:layers={first}", "svgd:layers={last}")
_SOME = (*_PROJECTIONS, *_KINDS, *_LAYERS)

TABLE_8 = Reproduction(
    id="repulsive/table-8",
    title="Which attention modules to make repulsive: projection, kind of attention, layer",
    source="An et al. 2020, Table 8 and appendix C.3; its times are one number for Q, K and V and one for the kinds",
    task="translation",
    parts=(Part(("plain", "smooth", *_SOME, "svgd"), small()),),
    extra="smooth, the control of svgd; the controls of the parts would double the runs and are left out",
    claims=(
        Claim("Repulsion improves BLEU wherever it is applied.", compare_arms((*_SOME, "svgd"), "plain")),
        Claim("Of the projections, the value's helps most.", compare_arms(_PROJECTIONS[2], _PROJECTIONS[:2])),
        Claim(
            "Of the kinds of attention, that between encoder and decoder helps most.",
            compare_arms(_KINDS[2], _KINDS[:2]),
        ),
        Claim("The first layer alone helps more than the last.", (Contrast(*_LAYERS),)),
        Claim(
            "The first layer alone is about as good as all layers.",
            (Contrast("svgd", "svgd:layers={first}"),),
            tested=False,
        ),
        Claim("Part of the model costs less time a step than all of it.", shown=(StepTimes((*_SOME, "svgd")),)),
    ),
    published=Published(
        IWSLT,
        (BLEU, TIME),
        (
            PaperRow("MA", "plain", ("34.4", "1")),
            PaperRow("RMA (Q)", "svgd:projections=query", ("34.7", "1.06")),
            PaperRow("RMA (K)", "svgd:projections=key", ("34.7", "")),
            PaperRow("RMA (V)", "svgd:projections=value", ("34.9", "")),
            PaperRow("RMA (En)", "svgd:kinds=self", ("34.6", "1.06")),
            PaperRow("RMA (De)", "svgd:kinds=decoder", ("34.7", "")),
            PaperRow("RMA (En-De)", "svgd:kinds=cross", ("34.9", "")),
            PaperRow("RMA (first layer)", "svgd:layers={first}", ("35.1", "1.03")),
            PaperRow("RMA (last layer)", "svgd:layers={last}", ("34.7", "")),
            PaperRow("RMA (All)", "svgd", ("35.2", "1.13")),
        ),
    ),
)

FIGURE_2 = Reproduction(
    id="repulsive/figure-2",
    title="Redundancy: how much BLEU falls when one head is removed at test time",
    source="An et al. 2020, Figure 2 (histograms; the text gives no numbers)",
    task="translation",
    parts=(Part(("plain", "smooth", "svgd"), small()),),
    extra="smooth, which tells repulsion from the smoothing that comes with it",
    claims=(
        Claim(
            "Most heads of standard attention are redundant: without them the score hardly falls.",
            shown=(Numbers("redundant_share", "redundant heads, %", ("plain", "smooth", "svgd"), digits=0, scale=100),),
        ),
        Claim(
            "Fewer heads are redundant under repulsive attention.",
            (Contrast("plain", "svgd", measure="redundant_share"),),
        ),
        Claim(
            "Removing a head raises the score of standard attention more often than that of repulsive attention.",
            (Contrast("plain", "svgd", measure="raising_share"),),
            (
                Numbers(
                    "raising_share", "heads whose removal raises the score, %", ("plain", "svgd"), digits=0, scale=100
                ),
            ),
        ),
        claim_control(
            "What lowers redundancy is the repulsion, not the smoothing",
            (Contrast("smooth", "svgd", measure="redundant_share"),),
        ),
    ),
    analysis="redundancy",
    measures=("redundant_share", "raising_share"),
)

LOSS = "NLL"
SMALL_STEP = "svgd:step_size=0.01"
HEADS = (1, 2, 4, 8, 16)
_AMONG = tuple(f"{heads} heads" for heads in HEADS[1:])
_FEW, _BEST, _MANY = "2 heads", "4 heads", "16 heads"


_rise = partial(compare_parts, measure=LOSS)

FIGURE_3B = Reproduction(
    id="repulsive/figure-3b",
    title="Loss by number of heads, of standard and of repulsive attention at two step sizes",
    source=(
        "An et al. 2020, Figure 3b and sections 4.2 and 5.5 (curves; the text says that 4 heads are best for both); "
        "the loss is the negative log likelihood of a target token on the test set, without label smoothing"
    ),
    task="translation",
    parts=(
        Part(("plain",), small(heads=1), "1 head"),
        *(Part(("plain", SMALL_STEP, "svgd"), small(heads=heads), f"{heads} heads") for heads in HEADS[1:]),
    ),
    extra=(
        "a second step size, 0.01, that of the released script beside the paper's 0.1: the paper's bound 1/sqrt(M) + "
        "M sqrt(eps) says that the best number of heads falls as the step size grows. Adam divides a constant factor "
        "of the gradient out again, down to its epsilon, so that little of the step size is left to see. One head "
        "repels nothing and is run once"
    ),
    claims=(
        *(
            Claim(
                f"The loss of {name} attention first falls and then rises with the number of heads; 4 are best.",
                (_rise(arm, _FEW, _BEST), _rise(arm, _MANY, _BEST)),
                (Least(LOSS, arm, _AMONG),),
            )
            for name, arm in (("standard", "plain"), ("repulsive", "svgd"))
        ),
        Claim(
            "The loss of repulsive attention is lower at every number of heads.",
            compare_arms("plain", "svgd", _AMONG, LOSS),
        ),
        Claim(
            "Standard attention depends more on the number of heads: from 4 to 16 its loss rises more.",
            (_rise("plain", _MANY, _BEST, less=_rise("svgd", _MANY, _BEST)),),
        ),
        Claim(
            "The best number of heads falls as the step size grows (the bound's prediction; the paper does not test "
            "it): from 2 to 16 heads the loss rises more at step size 0.1 than at 0.01.",
            (_rise("svgd", _MANY, _FEW, less=_rise(SMALL_STEP, _MANY, _FEW)),),
            (Least(LOSS, SMALL_STEP, _AMONG), Least(LOSS, "svgd", _AMONG)),
        ),
    ),
    measures=(LOSS,),
)

REPULSIVE = (TABLE_2, TABLE_6, TABLE_8, FIGURE_2, FIGURE_3B)
