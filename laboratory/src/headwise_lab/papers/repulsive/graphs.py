"""Tables and figures of An et al. 2020, repulsive attention: text from knowledge graphs.

GW of the paper is plain, + R is cosine-penalty, + RMA is svgd, all on the six blocks of the graph encoder. The released
+ R computed its cosine on detached weights and so had no gradient: as an arm that is `RELEASED_R`, which trains as
plain does, bit for bit, and is therefore in no table.
"""

from dataclasses import dataclass
from pathlib import Path

from headwise_lab.experiment.arm import escape_arm_name
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.papers.claims import Claim, Contrast, Numbers, claim_control, compare_arms
from headwise_lab.papers.reproduction import Column, PaperRow, Part, Published, Reproduction, Size, Sizes
from headwise_lab.results.evidence import Evidence
from headwise_lab.tasks.graph2text.ratings import make_outputs_page, read_items, write_rating

READ, RATED = 10, 50
OUTPUTS = "outputs.html"


@dataclass(frozen=True)
class OutputPages:
    """A page with texts of two arms, graph and reference, and perhaps a form on which raters compare the texts.

    Attributes:
        arms: The arm that is judged and the one it is judged against.
        form: Whether the form is written too.
    """

    arms: tuple[str, str]
    form: bool = False

    def __call__(self, place: Path, folder: Path, data: Path | None, evidence: Evidence) -> tuple[Path, ...]:
        """Write the pages of the runs that are there; see `reproduction.WritePages`."""
        one, other = (parse_arm(text).name for text in self.arms)
        seeds = {arm: {run.seed for run in evidence.results.runs if run.arm == arm} for arm in (one, other)}
        shared = sorted(seeds[one] & seeds[other])
        if data is None or not shared:
            return ()
        first, second = (folder / escape_arm_name(arm) / f"seed-{shared[0]}" for arm in (one, other))
        items = read_items(first, second, data)
        pages = [place / OUTPUTS]
        make_outputs_page(items[:READ], (one, other), title=f"Texts of {one} and {other}").write(pages[0])
        if self.form:
            pages += write_rating(place, items, (first, second), (one, other), count=RATED, seed=0)
        return tuple(pages)


R, RMA = "cosine-penalty:alpha=0.01,step_size=1", "svgd"
RELEASED_R = "cosine-penalty:alpha=0,step_size=1"
NEAREST, BLIND = "nearest", "no-graph"
SIZES: Sizes = {**{name: Size(name) for name in ("demo", "cpu", "gpu")}, "paper": Size("paper", corpus="agenda")}
SCORES = ("BLEU-1", "BLEU-2", "BLEU-3", "METEOR", "ROUGE-1", "ROUGE-2", "ROUGE-L")
TEXTS = (RMA, "plain")
REPEATS = (Contrast("plain", RMA, measure="free_repeated"),)


def _compare_scores(arm: str, against: str) -> tuple[Contrast, ...]:
    """An arm over another in BLEU-4 and in every other score of the table."""
    return tuple(one for score in (None, *SCORES) for one in compare_arms(arm, against, measure=score))


_COLUMNS = (
    *(Column(score, "measure", measure=score) for score in SCORES[:3]),
    Column("BLEU-4"),
    *(Column(score, "measure", measure=score) for score in SCORES[3:]),
)
_TABLE_4 = {
    ("GW", "plain"): ("42.56", "27.64", "19.27", "13.75", "18.11", "35.80", "16.83", "27.21"),
    ("+ R", R): ("42.25", "27.98", "19.77", "14.21", "18.61", "37.24", "17.78", "26.90"),
    ("+ RMA", RMA): ("45.60", "29.96", "21.07", "15.12", "19.52", "38.23", "18.39", "28.55"),
}

TABLE_4 = Reproduction(
    id="repulsive/table-4",
    title="Text from knowledge graphs: BLEU, METEOR and ROUGE of GraphWriter, regularized and repulsive",
    source="An et al. 2020, Table 4 and section 5.4",
    task="graph2text",
    parts=(Part(("plain", R, "smooth", RMA, "svgd-relative", BLIND), SIZES),),
    extra=(
        "smooth is the control of svgd; svgd-relative is ours: its repulsion is always a tenth as long as its drive. "
        "no-graph is the same model with every node zeroed, nearest the text of the nearest training graph with the "
        "entities filled in: what does not beat these does not read its graph"
    ),
    claims=(
        Claim("Repulsive attention is better than GraphWriter in every score.", _compare_scores(RMA, "plain")),
        Claim("Repulsive attention is better than the cosine regularization in every score.", _compare_scores(RMA, R)),
        Claim(
            "More of the reference's n-grams are found in its texts: the recall of ROUGE is higher.",
            tuple(Contrast(RMA, "plain", measure=f"ROUGE-{order} recall") for order in (1, 2)),
        ),
        Claim(
            "It covers more of the knowledge graph (by ten percent, the text says).",
            (Contrast(RMA, "plain", measure="coverage"),),
        ),
        Claim("It repeats fewer clauses (greedily written, free to repeat).", REPEATS),
        claim_control(
            "What repulsive attention adds is the repulsion, not the smoothing that SVGD brings with it",
            compare_arms(RMA, "smooth"),
        ),
        claim_control(
            "GraphWriter writes better than the nearest training text with entities filled in, and than itself without "
            "the graph",
            compare_arms("plain", (NEAREST, BLIND)),
        ),
    ),
    published=Published(
        "AGENDA, 38,720 texts to train on, 6 blocks of 4 heads",
        _COLUMNS,
        tuple(PaperRow(name, arm, cells) for (name, arm), cells in _TABLE_4.items()),
    ),
    baselines=(NEAREST,),
)

_TABLE_5 = {
    "structure": ("51%", "12%", "37%"),
    "informativeness": ("66%", "13%", "21%"),
    "grammar": ("37%", "17%", "46%"),
    "overall": ("65%", "14%", "21%"),
}

TABLE_5 = Reproduction(
    id="repulsive/table-5",
    title="People's judgement of GraphWriter with and without repulsive attention",
    source="An et al. 2020, Table 5: 50 texts, 5 raters",
    task="graph2text",
    parts=(Part(("plain", RMA), SIZES),),
    extra=(
        "the form for raters and its key are written beside the page; `headwise ratings KEY FILE... --record` counts "
        "what they saved, and the same command then shows it here. Nobody is asked by this command"
    ),
    claims=tuple(
        Claim(
            f"Raters prefer texts of repulsive attention in {criterion} (paper: win {win}, lose {lose}, tie {tie}).",
            shown=tuple(
                Numbers(f"{criterion}_{kind}", f"{kind}, %", (RMA,), digits=0) for kind in ("win", "lose", "tie")
            ),
            tested=False,
        )
        for criterion, (win, lose, tie) in _TABLE_5.items()
    ),
    pages=OutputPages(TEXTS, form=True),
)

FIGURE_9 = Reproduction(
    id="repulsive/figure-9",
    title="What GraphWriter writes with and without repulsive attention, beside the graph and the authors' text",
    source="An et al. 2020, Figure 9 and appendix E: one text, chosen by hand",
    task="graph2text",
    parts=(Part(("plain", RMA), SIZES),),
    extra="the first ten texts of the test split, chosen before looking, on the page outputs.html",
    claims=(
        Claim("It repeats fewer clauses (greedily written, free to repeat).", REPEATS),
        Claim("It names more of the graph's entities.", (Contrast(RMA, "plain", measure="coverage"),)),
    ),
    measures=("coverage", "free_repeated"),
    pages=OutputPages(TEXTS),
)

GRAPHS = (TABLE_4, TABLE_5, FIGURE_9)
