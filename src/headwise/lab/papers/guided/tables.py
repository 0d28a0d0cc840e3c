"""Tables and figures of Wang et al. 2021, role-guided masks: classification, and translation with guided encoders.

Transformer of the paper is plain, Transformer-Guided-Attn is guided. The systems that the paper itself only quotes, and
marks with a star, are quoted here too and not run.
"""

from __future__ import annotations

from headwise.lab.experiment.guided import PARSED, ROLES
from headwise.lab.papers.claims import Claim, Contrast
from headwise.lab.papers.guided.role_pictures import draw_role_worth
from headwise.lab.papers.measures import StepTimes
from headwise.lab.papers.reproduction import Column, PaperRow, Part, Published, Reproduction
from headwise.lab.papers.sizes import Size, Sizes

# What the paper calls each set, and the name of its folder.
SETS = {"CR": "cr", "TREC": "trec", "SUBJ": "subj", "MPQA": "mpqa", "MR": "mr", "SST": "sst2"}
ALL = tuple(SETS)
FOLDS = 10
_MODELS = ("plain", "random-mask", "guided", "shuffled-parse", "bilstm", "cnn")
_DROPPED = tuple(f"guided:drop={role}" for role in ROLES)
_RANDOM = tuple(f"guided:random={role}" for role in ROLES)
_SHUFFLED = tuple(f"guided:shuffled={role}" for role in PARSED)

_TABLE_3 = {
    "Transformer": ("plain", ("82.0", "91.8", "93.2", "88.6", "77.7", "81.8")),
    "Multi-scale CNNs": ("cnn", ("81.2", "93.1", "93.3", "89.1", "77.8", "80.9")),
    "BiLSTM": ("bilstm", ("82.6", "92.4", "93.6", "88.9", "78.4", "81.1")),
    "DiSAN* (quoted, not run)": ("", ("84.1", "88.3", "92.2", "89.5", "79.7", "82.9")),
    "PSAN* (quoted, not run)": ("", ("84.2", "89.1", "91.9", "89.9", "80.0", "83.8")),
    "Transformer-Complex-Order* (quoted, not run)": ("", ("80.6", "89.6", "89.5", "86.3", "74.6", "81.3")),
    "Transformer-Guided-Attn": ("guided", ("84.4", "93.6", "93.8", "90.7", "80.0", "84.2")),
}


def sets(folder: str, scales: tuple[str, ...] = ("demo", "cpu", "paper"), folds: int | None = None) -> Sizes:
    """Return the sizes of one set: each scale as it is."""
    return {scale: Size(scale, corpus=folder, folds=folds) for scale in scales}


def _on_each(arm: str, against: str, parts: tuple[str, ...] = ALL) -> tuple[Contrast, ...]:
    return tuple(Contrast(arm, against, part=part) for part in parts)


def _rows(parts: tuple[str, ...]) -> tuple[PaperRow, ...]:
    places = [ALL.index(part) for part in parts]
    return tuple(
        PaperRow(name, arm, (cells[place],), part)
        for place, part in zip(places, parts, strict=True)
        for name, (arm, cells) in _TABLE_3.items()
    )


def _claims(parts: tuple[str, ...]) -> tuple[Claim, ...]:
    return (
        Claim("The guided Transformer improves on the Transformer on every set.", _on_each("guided", "plain", parts)),
        Claim(
            "It improves on the BiLSTM and on the multi-scale CNN on every set.",
            tuple(one for other in ("bilstm", "cnn") for one in _on_each("guided", other, parts)),
        ),
        Claim(
            "What the roles add is which words they choose, not that heads see few of them (our control; the paper has "
            "none).",
            (Contrast("guided", "random-mask", over=parts), *_on_each("guided", "random-mask", parts)),
        ),
        Claim(
            "What the roles of a parse add is the sentence's own parse (our control; the paper has none).",
            (Contrast("guided", "shuffled-parse", over=parts), *_on_each("guided", "shuffled-parse", parts)),
        ),
        Claim(
            "Guidance costs little (the paper gives no number).",
            shown=tuple(StepTimes(("guided", "random-mask"), part) for part in parts),
        ),
    )


_EXTRA = (
    "random-mask and shuffled-parse are the controls of guided; majority, and counts, a linear model of words and "
    "pairs of words, stand in every table"
)

TABLE_3 = Reproduction(
    id="guided/table-3",
    title="Classification: accuracy of guided heads on six sets",
    source="Wang et al. 2021, Table 3; its starred rows are quoted there from other papers",
    task="classification",
    parts=tuple(Part(_MODELS, sets(folder), name) for name, folder in SETS.items()),
    extra=_EXTRA,
    claims=_claims(ALL),
    published=Published(
        "10-fold cross-validation of CR, SUBJ, MPQA and MR, GloVe, layers and heads tuned",
        (Column("accuracy"),),
        _rows(ALL),
    ),
)

_CROSS_VALIDATED = ("CR", "MR")

TABLE_3_FOLDS = Reproduction(
    id="guided/table-3-folds",
    title="Classification: accuracy of guided heads by cross-validation",
    source="Wang et al. 2021, Table 3, two of its four cross-validated sets",
    task="classification",
    parts=tuple(Part(_MODELS, sets(SETS[name], ("demo", "cpu"), FOLDS), name) for name in _CROSS_VALIDATED),
    extra=f"{_EXTRA}. Each text is answered once, by the model of its fold, in each of the seeds",
    claims=_claims(_CROSS_VALIDATED),
    published=Published(
        "10-fold cross-validation, GloVe, layers and heads tuned", (Column("accuracy"),), _rows(_CROSS_VALIDATED)
    ),
)


def _per_role(arms: tuple[str, ...]) -> tuple[Contrast, ...]:
    return tuple(Contrast("guided", arm, over=ALL) for arm in arms)


FIGURE_2 = Reproduction(
    id="guided/figure-2",
    title="Each role in turn replaced",
    source="Wang et al. 2021, Figure 2 (bars; the text gives no numbers)",
    task="classification",
    parts=tuple(
        Part(("plain", "guided", *_DROPPED, *_RANDOM, *_SHUFFLED), sets(folder), name) for name, folder in SETS.items()
    ),
    extra=(
        "beside the padding mask of the figure, each role is replaced by a random mask with as many keys in each row, "
        "and the two roles of a parse by those of another sentence's; means are over the six sets, which count alike"
    ),
    overview=draw_role_worth,
    claims=(
        Claim("The guided Transformer improves on the Transformer, on average over the sets.", _per_role(("plain",))),
        Claim("Removing any role lowers the accuracy, on average over the sets.", _per_role(_DROPPED)),
        Claim(
            "The major relations matter most.",
            tuple(Contrast(other, "guided:drop=major", over=ALL) for other in _DROPPED if other != "guided:drop=major"),
        ),
        Claim(
            "Each role is better than a random mask as sparse in its place (our control; the paper has none).",
            _per_role(_RANDOM),
        ),
        Claim(
            "Each role of a parse is better with the sentence's own parse than with another's (our control; the paper "
            "has none).",
            _per_role(_SHUFFLED),
        ),
    ),
)

# Five roles and three free heads at every scale; the smaller scales have four heads of their own.
_EIGHT_HEADS: Sizes = {
    **{scale: Size(scale, heads=8) for scale in ("demo", "cpu", "gpu")},
    "paper": Size("paper-base", corpus="wmt14"),
}

TABLE_2 = Reproduction(
    id="guided/table-2",
    title="Translation with role masks in the encoder",
    source="Wang et al. 2021, Table 2; its starred rows are quoted there from other papers",
    task="translation",
    parts=(Part(("plain", "random-mask", "guided", "shuffled-parse"), _EIGHT_HEADS),),
    extra=(
        "random-mask and shuffled-parse are the controls of guided. The masks are kept during beam search, as they are "
        "not in the released code"
    ),
    claims=(
        Claim("The guided Transformer improves on the Transformer.", (Contrast("guided", "plain"),)),
        Claim(
            "What the roles add is which words they choose, not that heads see few of them (our control; the paper has "
            "none).",
            (Contrast("guided", "random-mask"),),
        ),
        Claim(
            "What the roles of a parse add is the sentence's own parse (our control; the paper has none).",
            (Contrast("guided", "shuffled-parse"),),
        ),
    ),
    published=Published(
        "WMT 2016 English-German; BLEU with gold prefixes, as the released code has it, is no BLEU of decoded text",
        (Column("BLEU"),),
        (
            PaperRow("Transformer", "plain", ("34.3",)),
            PaperRow("AED + Linguistic* (quoted, not run)", "", ("28.4",)),
            PaperRow("AED + BPE* (quoted, not run)", "", ("34.2",)),
            PaperRow("Tensorized Transformer* (quoted, not run)", "", ("34.9",)),
            PaperRow("Transformer-Complex-Order* (quoted, not run)", "", ("35.8",)),
            PaperRow("Transformer-Guided-Attn", "guided", ("38.8",)),
        ),
    ),
)

GUIDED = (TABLE_2, TABLE_3, TABLE_3_FOLDS, FIGURE_2)
