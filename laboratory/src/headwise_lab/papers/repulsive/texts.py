"""Figures of An et al. 2020 on texts, and, under `repulsive-v1/`, what only its first version on arXiv has."""

from functools import partial

from headwise_lab.papers.claims import Claim, Contrast, Least, Numbers, claim_control, compare_arms, compare_parts
from headwise_lab.papers.reproduction import Column, Part, Published, Reproduction, Size, Sizes, build_rows
from headwise_lab.papers.repulsive.figures import AttentionMaps, draw_entropies, draw_reliabilities
from headwise_lab.papers.repulsive.sentences import SMOOTH, on, regularizer, svgd
from headwise_lab.tasks.sentence.analyses import ATTENTION_MAPS, ENTROPY, RELIABILITY

ERROR = "error"
HEADS = (1, 5, 10, 20, 30, 40)
_AMONG = tuple(f"{heads} heads" for heads in HEADS[1:])
_RMA, _SMALL_STEP = svgd("Yelp"), "svgd:alpha=1,step_size=0.1"
_FEW, _BEST, _MANY = "5 heads", "20 heads", "40 heads"


_rise = partial(compare_parts, measure=ERROR)

FIGURE_3A = Reproduction(
    id="repulsive/figure-3a",
    title="Error by number of heads, of standard and of repulsive attention at two step sizes",
    source="An et al. 2020, Figure 3a and section 5.5 (curves; the text says that about 20 heads are best)",
    task="sentence",
    parts=(
        Part(("plain",), on("Yelp", "heads=1"), "1 head"),
        *(Part(("plain", _SMALL_STEP, _RMA), on("Yelp", f"heads={heads}"), f"{heads} heads") for heads in HEADS[1:]),
    ),
    extra=(
        "a second step size, a tenth of the first: the paper's bound says that the best number of heads falls as the "
        "step size grows. One head repels nothing and is run once"
    ),
    claims=(
        *(
            Claim(
                f"The error of {name} attention first falls, then rises with the number of heads; about 20 are best.",
                (_rise(arm, _FEW, _BEST), _rise(arm, _MANY, _BEST)),
                (Least(ERROR, arm, _AMONG),),
            )
            for name, arm in (("standard", "plain"), ("repulsive", _RMA))
        ),
        Claim("Repulsive attention errs less at every number of heads.", compare_arms("plain", _RMA, _AMONG, ERROR)),
        Claim(
            "Standard attention depends more on the number of heads: from 20 to 40 its error rises more.",
            (_rise("plain", _MANY, _BEST, less=_rise(_RMA, _MANY, _BEST)),),
        ),
        Claim(
            "The best number of heads falls as the step size grows (the bound's prediction, which the paper does not "
            "test).",
            (_rise(_RMA, _MANY, _FEW, less=_rise(_SMALL_STEP, _MANY, _FEW)),),
            (Least(ERROR, _SMALL_STEP, _AMONG), Least(ERROR, _RMA, _AMONG)),
        ),
    ),
    measures=(ERROR,),
)

FIGURE_4 = Reproduction(
    id="repulsive/figure-4",
    title="Calibration: reliability, expected calibration error and overconfidence error",
    source="An et al. 2020, Figure 4 and appendix C.4, on SNLI (a figure; the text gives no numbers)",
    task="sentence",
    parts=(Part(("plain", regularizer("SNLI"), SMOOTH, svgd("SNLI")), on("SNLI")),),
    extra="frobenius, and smooth, the control of svgd; 15 bins of equal width",
    claims=(
        Claim(
            "Standard attention is overconfident: its overconfidence error is above zero.",
            shown=(Numbers("OE", "OE", ("plain", svgd("SNLI")), digits=3),),
        ),
        Claim(
            "Repulsive attention has the lower expected calibration error.",
            (Contrast("plain", svgd("SNLI"), measure="ECE"),),
        ),
        Claim(
            "Repulsive attention has the lower overconfidence error.", (Contrast("plain", svgd("SNLI"), measure="OE"),)
        ),
        claim_control(
            "What improves calibration is the repulsion, not the smoothing",
            (Contrast(SMOOTH, svgd("SNLI"), measure="ECE"),),
        ),
    ),
    analysis=RELIABILITY,
    measures=("ECE", "OE"),
    drawn=draw_reliabilities,
)

ENTROPIES = "other_entropy"

FIGURE_5 = Reproduction(
    id="repulsive/figure-5",
    title="Uncertainty: entropy of the answers to texts of another kind",
    source="An et al. 2020, Figure 5 and appendix C.5: trained on Yelp, asked about Age (curves)",
    task="sentence",
    parts=(Part(("plain", "frobenius", SMOOTH, _RMA), on("Yelp")),),
    extra=(
        "smooth, the control of svgd. The other texts are those of --out-of-domain, which the caption names; the "
        "paper's are tweets"
    ),
    claims=(
        Claim(
            "Repulsive attention is less sure of texts it knows nothing of than standard attention.",
            (Contrast(_RMA, "plain", measure=ENTROPIES),),
        ),
        Claim("It is less sure of them than under regularization.", (Contrast(_RMA, "frobenius", measure=ENTROPIES),)),
        claim_control(
            "What makes it less sure is the repulsion, not the smoothing", (Contrast(_RMA, SMOOTH, measure=ENTROPIES),)
        ),
    ),
    analysis=ENTROPY,
    measures=(ENTROPIES,),
    drawn=draw_entropies,
)

ON_ONE, DIFFERENT = "heads_on_one_word", "different_words"
_COLLAPSE = (
    Claim(
        "Standard attention collapses: almost all heads look at one word.",
        shown=(Numbers(ON_ONE, "heads with one favorite word, %", ("plain", _RMA), digits=0, scale=100),),
    ),
    Claim(
        "The heads of repulsive attention look at more different words.",
        (Contrast(_RMA, "plain", measure=DIFFERENT),),
        (Numbers(DIFFERENT, "favorite words a text", ("plain", _RMA), digits=1),),
    ),
)


def _map(number: str, title: str, arms: tuple[str, ...], drawn: AttentionMaps) -> Reproduction:
    paper, _, figure = number.rpartition("/")
    first = paper != "repulsive"
    source = "An et al. 2020, first version on arXiv" if first else "An et al. 2020"
    return Reproduction(
        id=number,
        title=title,
        source=f"{source}, {figure.replace('-', ' ').capitalize()}",
        task="sentence",
        parts=(Part(arms, on("Yelp")),),
        extra=(
            "texts of the test set in the place of the paper's reviews: the first of 20 to 40 words, of four stars "
            "where there is one. The numbers are means over 500 test "
            f"texts{' of any length' if first else ''}"
        ),
        claims=_COLLAPSE if {"plain", _RMA} <= set(arms) else (_SHOWN,),
        analysis=ATTENTION_MAPS,
        measures=(ON_ONE, DIFFERENT),
        drawn=drawn,
    )


_SHOWN = Claim(
    "Where all heads look (the paper shows it without a claim).",
    shown=(Numbers(ON_ONE, "heads with one favorite word, %", ("plain",), digits=0, scale=100),),
)
_BOTH = ("plain", _RMA)

FIGURES_OF_ATTENTION = (
    _map(
        "repulsive/figure-1",
        "Attention over a review: five heads and all together",
        _BOTH,
        AttentionMaps(_BOTH, heads=5),
    ),
    _map("repulsive/figure-6", "Attention of every head: standard", ("plain",), AttentionMaps(("plain",))),
    _map(
        "repulsive/figure-7",
        "Attention of every head: Frobenius regularization",
        ("plain", "frobenius"),
        AttentionMaps(("frobenius",)),
    ),
    _map("repulsive/figure-8", "Attention of every head: repulsive", _BOTH, AttentionMaps((_RMA,))),
    _map(
        "repulsive-v1/figure-9",
        "Overall attention over three reviews: standard",
        ("plain",),
        AttentionMaps(("plain",), texts=3, heads=0),
    ),
    _map(
        "repulsive-v1/figure-10",
        "Overall attention over three reviews: repulsive",
        _BOTH,
        AttentionMaps((_RMA,), texts=3, heads=0),
    ),
)

SCORES = ("AUC-ROC", "AUC-PR", "MCC", "F1")
_BULLYING = {
    "Twitter": ("cyberbullying/twitter.tsv", ("heads=15",)),
    "Wikipedia": ("cyberbullying/wikipedia_jigsaw_balanced.tsv.gz", ("heads=15", "positive=0.117")),
}
_V1_TABLE_6 = {
    "Twitter": (
        ("0.8247", "0.7174", "0.5041", "0.6264"),
        ("0.9105", "0.8454", "0.6280", "0.7116"),
        ("0.9020", "0.7999", "0.6391", "0.7403"),
        ("0.9275", "0.8552", "0.6832", "0.7819"),
    ),
    "Wikipedia": (
        ("0.9526", "0.8202", "0.7058", "0.7304"),
        ("0.9687", "0.8674", "0.7389", "0.7533"),
        ("0.9720", "0.8642", "0.7506", "0.7790"),
        ("0.9732", "0.8713", "0.7646", "0.7896"),
    ),
}
# No setting was published; those of Yelp.
_BULLYING_ARMS = ("cnn", "nb-lr", "plain", _RMA)


def _choose_sizes(name: str) -> Sizes:
    file, sets = _BULLYING[name]
    reduced = {scale: Size(scale, corpus=file, sets=sets) for scale in ("demo", "cpu")}
    return {**reduced, "paper": Size("paper", corpus=file, sets=sets)}


V1_TABLE_6 = Reproduction(
    id="repulsive-v1/table-6",
    title="Cyberbullying: ranking and classification of abusive comments",
    source="An et al. 2020, first version on arXiv, Table 6 and appendix B.1",
    task="sentence",
    parts=tuple(Part(("plain", SMOOTH, _RMA, "cnn"), _choose_sizes(name), name) for name in _BULLYING),
    extra=(
        "smooth, the control of svgd; nb-lr, naive Bayes logistic regression, stands in every table of the task. "
        "Wikipedia's comments are another collection, of which abusive ones are left out until they are the paper's "
        "11.7 %"
    ),
    claims=(
        Claim(
            "Repulsive attention ranks abusive comments better than standard attention (area under the "
            "precision-recall curve, the paper's most telling number).",
            compare_arms(_RMA, "plain", _BULLYING, "AUC-PR"),
        ),
        Claim(
            "It is better by each of the other numbers.",
            tuple(
                Contrast(_RMA, "plain", part=name, measure=score)
                for name in _BULLYING
                for score in SCORES
                if score != "AUC-PR"
            ),
        ),
        Claim("It is better than the temporal CNN.", compare_arms(_RMA, "cnn", _BULLYING, "AUC-PR")),
        claim_control(
            "What repulsive attention adds is the repulsion, not the smoothing",
            compare_arms(_RMA, SMOOTH, _BULLYING, "AUC-PR"),
        ),
    ),
    published=Published(
        "Twitter 16,090 tweets, Wikipedia 115,864 comments, 15 heads",
        tuple(Column(score, "measure", measure=score) for score in SCORES),
        build_rows(("CNN", "NBLR", "BiLSTM + MA", "BiLSTM + RMA"), lambda _: _BULLYING_ARMS, _V1_TABLE_6),
    ),
    measures=SCORES,
)

SENTENCE_FIGURES = (FIGURE_3A, FIGURE_4, FIGURE_5, *FIGURES_OF_ATTENTION, V1_TABLE_6)
