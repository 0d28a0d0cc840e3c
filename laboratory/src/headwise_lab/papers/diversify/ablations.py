"""The ablations of Li et al. 2021 on translation: which terms, which attention, which routing, which layers."""

from headwise_lab.papers.claims import Claim, Contrast, Numbers, StepTimes, claim_control, compare_arms
from headwise_lab.papers.reproduction import Column, PaperRow, Part, Published, Reproduction, base

ZH_EN = "WMT17 Zh-En, Transformer-base; case-sensitive NIST BLEU"
EN_DE = "WMT14 En-De, Transformer-base; case-sensitive NIST BLEU"
SPEED = Column("Speed, steps/s", "step time", per_second=True)
BLEU = Column("BLEU")
PARAMETERS = Column("Para.", "parameters")

_SUBSPACE, _POSITION, _OUTPUT = (f"{term}:kinds=self" for term in ("subspace", "position", "output"))
_SUMS = (f"{_SUBSPACE}+{_OUTPUT}", f"{_SUBSPACE}+{_POSITION}", f"{_SUBSPACE}+{_POSITION}+{_OUTPUT}")
_TERMS = (_SUBSPACE, _POSITION, _OUTPUT)

TABLE_1 = Reproduction(
    id="diversify/table-1",
    title="Disagreement by term and by sum of terms, on the encoder's self-attention",
    source="Li et al. 2021, Table 1",
    task="translation",
    parts=(Part(("plain", *_TERMS, *_SUMS), base("wmt17")),),
    extra="nothing; a sum of terms has each with weight 1, which the paper leaves unsaid",
    claims=(
        Claim("Each term alone improves on the baseline.", compare_arms(_TERMS, "plain")),
        Claim("The output term is the best.", compare_arms(_OUTPUT, (_SUBSPACE, _POSITION))),
        Claim("The position term is less effective than the other two.", compare_arms((_SUBSPACE, _OUTPUT), _POSITION)),
        Claim(
            "Sums of terms do not improve further on the output term alone.", compare_arms(_SUMS, _OUTPUT), tested=False
        ),
        Claim("No term slows training much.", shown=(StepTimes((*_TERMS, *_SUMS)),)),
    ),
    published=Published(
        ZH_EN,
        (SPEED, BLEU),
        (
            PaperRow("1: none", "plain", ("1.21", "24.13")),
            PaperRow("2: subspace", _SUBSPACE, ("1.15", "24.64")),
            PaperRow("3: position", _POSITION, ("1.14", "24.42")),
            PaperRow("4: output", _OUTPUT, ("1.15", "24.78")),
            PaperRow("5: subspace, output", _SUMS[0], ("1.12", "24.73")),
            PaperRow("6: subspace, position", _SUMS[1], ("1.11", "24.38")),
            PaperRow("7: all", _SUMS[2], ("1.05", "24.60")),
        ),
    ),
)

_ENCODER, _WITH_CROSS, _WITH_DECODER = (f"output:kinds={kinds}" for kinds in ("self", "self/cross", "self/decoder"))
_RELEASED = "output:kind_weights=1/0.5/0.5"
_PLACES = (_ENCODER, _WITH_CROSS, _WITH_DECODER, "output")

TABLE_2 = Reproduction(
    id="diversify/table-2",
    title="Output disagreement by kind of attention",
    source="Li et al. 2021, Table 2",
    task="translation",
    parts=(Part(("plain", *_PLACES, _RELEASED), base("wmt17")),),
    extra=(
        f"{_RELEASED}, the weights that the released code has for encoder, decoder and cross-attention; the paper "
        "states one weight for all, which is ours in the other rows"
    ),
    claims=(
        Claim("Disagreement improves on the baseline in every row.", compare_arms(_PLACES, "plain")),
        Claim("All three kinds of attention together are best.", compare_arms("output", _PLACES[:-1])),
        Claim(
            "The released weights change little (ours; the paper does not compare them).",
            compare_arms("output", _RELEASED),
            tested=False,
        ),
        Claim("All three slow training by 12 %.", shown=(StepTimes(_PLACES),)),
    ),
    published=Published(
        ZH_EN,
        (SPEED, BLEU),
        (
            PaperRow("none", "plain", ("1.21", "24.13")),
            PaperRow("encoder", _ENCODER, ("1.15", "24.78")),
            PaperRow("encoder, encoder-decoder", _WITH_CROSS, ("1.10", "24.67")),
            PaperRow("encoder, decoder", _WITH_DECODER, ("1.11", "24.69")),
            PaperRow("all three", "output", ("1.06", "24.85")),
        ),
    ),
)

_EM, _EM_CROSS, _EM_DECODER, _EM_TWO = (f"em:kinds={kinds}" for kinds in ("self", "cross", "decoder", "self/cross"))
_SIMPLE, _TRUNK = "simple:kinds=self", "trunk:kinds=self"
_ROUTED = (_SIMPLE, _EM, _EM_CROSS, _EM_DECODER, _EM_TWO, "em")

TABLE_3 = Reproduction(
    id="diversify/table-3",
    title="Routing by algorithm and by kind of attention",
    source="Li et al. 2021, Table 3",
    task="translation",
    parts=(Part(("plain", _TRUNK, *_ROUTED), base("wmt14")),),
    extra=(
        f"{_TRUNK}, the control of both algorithms in the encoder; the controls of the other kinds of attention are "
        "left out"
    ),
    claims=(
        Claim("Routing improves on the linear map in every row.", compare_arms(_ROUTED, "plain")),
        Claim("EM routing is better than simple routing.", compare_arms(_EM, _SIMPLE)),
        Claim(
            "Self-attention, of encoder and decoder, gains more than the attention between them.",
            compare_arms((_EM, _EM_DECODER), _EM_CROSS),
        ),
        Claim(
            "Several kinds of attention together improve a little further.",
            (Contrast(_EM_TWO, _EM), Contrast("em", _EM_TWO)),
        ),
        Claim(
            "Both algorithms have about as many parameters and take about as long.",
            shown=(Numbers("parameters", "parameters", ("plain", _SIMPLE, _EM), digits=0), StepTimes((_SIMPLE, _EM))),
        ),
        Claim("Routing in several kinds of attention slows training a lot.", shown=(StepTimes((_EM, _EM_TWO, "em")),)),
        Claim(
            "Routing in the encoder hardly slows decoding; elsewhere it does (seconds for the test set).",
            shown=(Numbers("decoding_seconds", "decoding, s", ("plain", _EM, _EM_DECODER, "em"), digits=1),),
        ),
        claim_control("What routing adds is the agreement, not its parameters", compare_arms((_EM, _SIMPLE), _TRUNK)),
    ),
    published=Published(
        EN_DE,
        (PARAMETERS, SPEED, BLEU),
        (
            PaperRow("2: none", "plain", ("88.0M", "1.92", "27.31")),
            PaperRow("3: Enc, simple", _SIMPLE, ("+12.6M", "1.23", "27.98")),
            PaperRow("4: Enc, EM", _EM, ("+12.6M", "1.20", "28.28")),
            PaperRow("5: E-D, EM", _EM_CROSS, ("+12.6M", "1.20", "27.94")),
            PaperRow("6: Dec, EM", _EM_DECODER, ("+12.6M", "1.21", "28.15")),
            PaperRow("7: Enc, E-D, EM", _EM_TWO, ("+25.2M", "0.87", "28.45")),
            PaperRow("8: all, EM", "em", ("+37.8M", "0.66", "28.47")),
        ),
    ),
)

_ITERATIONS = tuple(f"em:iterations={count},kinds=self" for count in (1, 2, 4, 5))
_CAPSULES = tuple(f"em:capsules={count},kinds=self" for count in ("{heads}", "{sixty-four}"))

SECTION_4_1 = Reproduction(
    id="diversify/section-4.1",
    title="EM routing by number of iterations and of capsules",
    source="Li et al. 2021, section 4.1.1, which states the settings it took and gives no numbers of others",
    task="translation",
    parts=(Part(("plain", _TRUNK, _EM, *_ITERATIONS, *_CAPSULES), base("wmt14")),),
    extra=(
        "one setting is varied at a time, from T = 3 iterations and as many capsules as the model is wide: T from 1 "
        "to 5, capsules as many as heads and 64. The sweep itself is ours: the paper reports its outcome alone"
    ),
    claims=(
        Claim("Three iterations are better than 1, 2, 4 or 5.", compare_arms(_EM, _ITERATIONS)),
        Claim(
            "As many capsules as the model is wide are better than as many as heads, or than 64.",
            compare_arms(_EM, _CAPSULES),
        ),
        Claim("Each iteration takes time.", shown=(StepTimes((*_ITERATIONS[:2], _EM, *_ITERATIONS[2:])),)),
    ),
)

_ALL, _UPPER, _LOWER, _TWO, _LAST, _FIRST = (
    f"em:{layers}kinds=self"
    for layers in ("", "layers={upper},", "layers={lower},", "layers={two},", "layers={last},", "layers={first},")
)
_TRUNK_TWO = "trunk:layers={two},kinds=self"

TABLE_4 = Reproduction(
    id="diversify/table-4",
    title="EM routing by layers of the encoder",
    source="Li et al. 2021, Table 4",
    task="translation",
    parts=(Part(("plain", _TRUNK_TWO, _ALL, _UPPER, _LOWER, _TWO, _LAST, _FIRST), base("wmt14")),),
    extra=(
        f"{_TRUNK_TWO}, the control of the paper's choice. With fewer than six layers the halves are halves of what "
        "there is, and rows may fall together"
    ),
    claims=(
        Claim(
            "Half of the layers, or the first two, are about as good as all.",
            compare_arms(_ALL, (_UPPER, _LOWER, _TWO)),
            tested=False,
        ),
        Claim("One layer alone is worse than the first two.", compare_arms(_TWO, (_LAST, _FIRST))),
        Claim(
            "Every choice of layers improves on the baseline.",
            compare_arms((_ALL, _UPPER, _LOWER, _TWO, _LAST, _FIRST), "plain"),
        ),
        Claim(
            "Fewer layers cost less time and fewer parameters.",
            shown=(
                StepTimes((_ALL, _UPPER, _LOWER, _TWO, _LAST, _FIRST)),
                Numbers("parameters", "parameters", ("plain", _ALL, _TWO, _FIRST), digits=0),
            ),
        ),
        claim_control("What routing in the first two layers adds is the agreement", compare_arms(_TWO, _TRUNK_TWO)),
    ),
    published=Published(
        EN_DE,
        (PARAMETERS, Column("Train, steps/s", "step time", per_second=True), BLEU),
        (
            PaperRow("1: none", "plain", ("88.0M", "1.92", "27.31")),
            PaperRow("2: [1-6]", _ALL, ("+12.6M", "1.20", "28.28")),
            PaperRow("3: [4-6]", _UPPER, ("+6.3M", "1.54", "28.26")),
            PaperRow("4: [1-3]", _LOWER, ("+6.3M", "1.54", "28.27")),
            PaperRow("5: [1,2]", _TWO, ("+4.2M", "1.67", "28.26")),
            PaperRow("6: [6]", _LAST, ("+2.1M", "1.88", "27.68")),
            PaperRow("7: [1]", _FIRST, ("90.1M", "1.88", "27.75")),
        ),
    ),
)

FIGURE_3 = Reproduction(
    id="diversify/figure-3",
    title="Head outputs of the encoder under each disagreement term",
    source=(
        "Li et al. 2021, Figure 3 (t-SNE of one vector a head: its output, averaged over words and layers; the text "
        "gives no numbers)"
    ),
    task="translation",
    parts=(Part(("plain", *_TERMS), base("wmt17")),),
    extra=(
        "plain, which the figure leaves out; the mean cosine between the vectors, which says in one number how far "
        "apart they point: t-SNE keeps neighbors and not distances, so a claim cannot rest on the picture"
    ),
    claims=(
        Claim(
            "The output term disperses the heads most.",
            tuple(Contrast(other, _OUTPUT, measure="head_vector_cosine") for other in (_SUBSPACE, _POSITION)),
        ),
        Claim(
            "The position term hardly disperses them.",
            (Contrast("plain", _POSITION, measure="head_vector_cosine"),),
            (Numbers("head_vector_cosine", "mean cosine between heads", ("plain", *_TERMS)),),
            tested=False,
        ),
        Claim(
            "The output term disperses them more than training without a term (ours; the paper does not plot it).",
            (Contrast("plain", _OUTPUT, measure="head_vector_cosine"),),
        ),
    ),
    analysis="head-vectors",
    measures=("head_vector_cosine",),
)

ABLATIONS = (TABLE_1, TABLE_2, TABLE_3, SECTION_4_1, TABLE_4, FIGURE_3)
