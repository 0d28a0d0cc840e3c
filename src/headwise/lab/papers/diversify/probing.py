"""Table 7 of Li et al. 2021: ten probing tasks in three categories, trained end to end.

Which layers the paper's EM routing stood in here it does not say; as in its table 5 they are the first two.
"""

from __future__ import annotations

from headwise.lab.data.probing_files import CATEGORIES, PROBES
from headwise.lab.papers.claims import Claim, Contrast
from headwise.lab.papers.reproduction import Column, PaperRow, Part, Published, Reproduction
from headwise.lab.papers.sizes import Size

AGGREGATION, TRUNK = "em:layers={two}", "trunk:layers={two}"
COMBINED = f"output+{AGGREGATION}"
SCALES = ("demo", "cpu", "gpu", "paper")
ALL = tuple(probe.title for probe in PROBES.values())
ARMS = {"Baseline": "plain", "Disagreement": "output", "Aggregation": AGGREGATION, "Combine": COMBINED}
CELLS = {
    "SeLen": ("95.35", "96.47", "96.02", "96.55"),
    "WC": ("98.03", "98.65", "98.31", "98.87"),
    "TrDep": ("44.40", "46.54", "45.77", "46.93"),
    "ToCo": ("83.48", "84.24", "84.05", "84.17"),
    "BShif": ("51.45", "53.54", "50.97", "54.26"),
    "Tense": ("84.57", "85.03", "85.56", "86.07"),
    "SubNm": ("82.80", "83.15", "85.47", "85.84"),
    "ObjNm": ("80.31", "80.49", "82.46", "83.38"),
    "SOMO": ("49.87", "49.58", "50.09", "50.13"),
    "CoIn": ("69.39", "68.48", "70.21", "69.99"),
}


def _mean(arm: str, against: str, category: str, less: Contrast | None = None) -> Contrast:
    return Contrast(arm, against, over=CATEGORIES[category], less=less)


TABLE_7 = Reproduction(
    id="diversify/table-7",
    title="Ten probing tasks: what sentence representations hold",
    source="Li et al. 2021, Table 7",
    task="probing",
    parts=tuple(
        Part(
            ("plain", "output", TRUNK, AGGREGATION, COMBINED),
            {scale: Size(scale, corpus=probe.file) for scale in SCALES},
            probe.title,
        )
        for probe in PROBES.values()
    ),
    extra=(
        "trunk in the same two layers is the control of routing; majority, and counts, a linear model of words and "
        "pairs of words, stand in every table. Where the files are X-Probe's, the sentences are Wikipedia's and not "
        "those of SentEval, which are from books: compare arms, and no number with the paper's. These files lack tr: "
        "nine tenths of va are trained on and one is dev, by a hash of the sentence, and te is test; of tree_depth, "
        "which has va alone, all is cut into tenths, eight to train, dev and test; scales demo and cpu train on 3,000 "
        "and 10,000 sentences at most. BShif and SOMO are at chance in the paper itself. SOMO is one of the five tasks "
        "of the Semantic mean and of the claims about it, as in the paper, and tells nothing in X-Probe: most of its "
        "sentences stand there with two labels and are left out, and of the test sentences left 92.5 % have one label, "
        "so that it adds next to nothing to a difference of means"
    ),
    claims=(
        Claim(
            "Each of the three models improves on the baseline, on average over the tasks.",
            tuple(Contrast(arm, "plain", over=ALL) for arm in ("output", AGGREGATION, COMBINED)),
        ),
        Claim(
            "Disagreement does better than aggregation on surface and on syntactic tasks.",
            tuple(_mean("output", AGGREGATION, category) for category in ("Surface", "Syntactic")),
        ),
        Claim(
            "Aggregation does better than disagreement on semantic tasks.", (_mean(AGGREGATION, "output", "Semantic"),)
        ),
        Claim(
            "It does so on the number of the subject and of the object in particular.",
            tuple(Contrast(AGGREGATION, "output", part=part) for part in ("SubNm", "ObjNm")),
        ),
        Claim(
            "The combination has the best average of each category.",
            tuple(
                _mean(COMBINED, other, category)
                for category in CATEGORIES
                for other in ("plain", "output", AGGREGATION)
            ),
        ),
        Claim(
            "The combination gains most on syntactic tasks.",
            tuple(
                _mean(COMBINED, "plain", "Syntactic", less=_mean(COMBINED, "plain", category))
                for category in ("Surface", "Semantic")
            ),
        ),
        Claim(
            "What aggregation adds is the routing, not its parameters (our control; the paper has none).",
            (Contrast(AGGREGATION, TRUNK, over=ALL),),
        ),
    ),
    published=Published(
        "SentEval's ten tasks, 100,000 training sentences each, 250 epochs",
        (Column("accuracy"),),
        tuple(
            PaperRow(name, arm, (cell,), part)
            for part, cells in CELLS.items()
            for (name, arm), cell in zip(ARMS.items(), cells, strict=True)
        ),
    ),
    groups=CATEGORIES,
    partial=True,
)
