"""Tables and figures of Wang et al. 2021, role-guided masks: classification, and translation with guided encoders.

Transformer of the paper is plain, Transformer-Guided-Attn is guided. The systems that the paper itself only quotes, and
marks with a star, are quoted here too and not run.
"""

import re
from collections.abc import Mapping, Sequence

from headwise.plots.style import assign_styles, drawing, to_png
from headwise_lab.experiment.arm import PARSED, ROLES
from headwise_lab.papers.claims import Claim, Contrast, Judged, StepTimes, claim_control, compare_arms
from headwise_lab.papers.reproduction import (
    Column,
    PaperRow,
    Part,
    Published,
    Reproduction,
    Size,
    Sizes,
    base_eight_heads,
)
from headwise_lab.results.cells import show_signed
from headwise_lab.results.figures import Picture
from headwise_lab.results.statistics import Estimate
from headwise_lab.results.table import PLAIN

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


def _compare(arm: str, against: str, parts: tuple[str, ...] = ALL) -> tuple[Contrast, ...]:
    return compare_arms(arm, against, parts)


def _make_rows(parts: tuple[str, ...]) -> tuple[PaperRow, ...]:
    places = [ALL.index(part) for part in parts]
    return tuple(
        PaperRow(name, arm, (cells[place],), part)
        for place, part in zip(places, parts, strict=True)
        for name, (arm, cells) in _TABLE_3.items()
    )


def _make_claims(parts: tuple[str, ...]) -> tuple[Claim, ...]:
    return (
        Claim("The guided Transformer improves on the Transformer on every set.", _compare("guided", "plain", parts)),
        Claim(
            "It improves on the BiLSTM and on the multi-scale CNN on every set.",
            tuple(one for other in ("bilstm", "cnn") for one in _compare("guided", other, parts)),
        ),
        claim_control(
            "What the roles add is which words they choose, not that heads see few of them",
            (Contrast("guided", "random-mask", over=parts), *_compare("guided", "random-mask", parts)),
        ),
        claim_control(
            "What the roles of a parse add is the sentence's own parse",
            (Contrast("guided", "shuffled-parse", over=parts), *_compare("guided", "shuffled-parse", parts)),
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
    claims=_make_claims(ALL),
    published=Published(
        "10-fold cross-validation of CR, SUBJ, MPQA and MR, GloVe, layers and heads tuned",
        (Column("accuracy"),),
        _make_rows(ALL),
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
    claims=_make_claims(_CROSS_VALIDATED),
    published=Published(
        "10-fold cross-validation, GloVe, layers and heads tuned", (Column("accuracy"),), _make_rows(_CROSS_VALIDATED)
    ),
)


WHOLE = "all five"
REPLACED = {
    "drop": "by the padding mask",
    "random": "by a random mask as sparse",
    "shuffled": "by the role in another parse",
}
# Distance between the marks of a row, as a share of that between rows.
APART = 0.2


def draw_role_worth(judged: Sequence[Judged]) -> Picture | None:
    """Return guided's mean lead over itself with a role replaced, a row a role, and over plain; None without any.

    Args:
        judged: Claims whose contrasts are guided over `guided:drop=ROLE` and its like, and over plain.
    """
    found: dict[str, dict[str, Estimate]] = {}
    over: tuple[str, ...] = ()
    for one in (one for claim in judged for one in claim.found):
        what = _parse_replaced(one.contrast.against)
        if one.contrast.arm == "guided" and what is not None and one.estimate is not None:
            role, kind = what
            found.setdefault(kind, {})[role] = one.estimate
            over = one.contrast.over
    if not found:
        return None
    rows, style = [WHOLE, *ROLES], assign_styles([*REPLACED])
    with drawing(7.2, 4.6) as figure:
        axes = figure.subplots()
        axes.axvline(0, color="black", linewidth=1.2)
        for kind in (kind for kind in REPLACED if kind in found):
            of = found[kind]
            axes.errorbar(
                [100 * one.value for one in of.values()],
                [rows.index(role) + _shift_mark(role, kind, found) for role in of],
                xerr=[
                    [100 * (one.value - one.low) for one in of.values()],
                    [100 * (one.high - one.value) for one in of.values()],
                ],
                color=style[kind].color,
                marker=style[kind].marker,
                linestyle="none",
                markersize=6,
                elinewidth=1.5,
                label=REPLACED[kind],
            )
        axes.set_yticks(range(len(rows)), rows)
        axes.invert_yaxis()
        axes.set_xlabel("accuracy lost when the role is replaced, points")
        figure.legend(loc="outside upper left", ncols=3, frameon=False)
        png = to_png(figure)
    alt = "; ".join(
        f"{role} replaced {REPLACED[kind]}: {show_signed(100 * one.value)} points"
        for kind, of in found.items()
        for role, one in of.items()
    )
    caption = (
        "What each role is worth: guided's accuracy less that of the same model with one role replaced, or with all "
        f"five (plain), mean of {', '.join(over)}, with 95 % intervals over seeds and test items. Right of zero the "
        "role helps."
    )
    return Picture("roles", png, caption, alt)


def _shift_mark(role: str, kind: str, found: Mapping[str, Mapping[str, Estimate]]) -> float:
    """Return how far below the middle of its row a mark is."""
    there = [one for one in REPLACED if role in found.get(one, {})]
    return APART * (there.index(kind) - (len(there) - 1) / 2)


def _parse_replaced(against: str) -> tuple[str, str] | None:
    """Return the role that an arm of the ablation lacks, and how it was replaced.

    >>> _parse_replaced("guided:random=rare"), _parse_replaced("plain"), _parse_replaced("cnn")
    (('rare', 'random'), ('all five', 'drop'), None)
    """
    if against == PLAIN:
        return WHOLE, "drop"
    found = re.fullmatch(r"guided:(drop|random|shuffled)=(\w+)", against)
    return None if found is None else (found[2], found[1])


def _average(arms: tuple[str, ...]) -> tuple[Contrast, ...]:
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
        Claim("The guided Transformer improves on the Transformer, on average over the sets.", _average(("plain",))),
        Claim("Removing any role lowers the accuracy, on average over the sets.", _average(_DROPPED)),
        Claim(
            "The major relations matter most.",
            tuple(Contrast(other, "guided:drop=major", over=ALL) for other in _DROPPED if other != "guided:drop=major"),
        ),
        claim_control("Each role is better than a random mask as sparse in its place", _average(_RANDOM)),
        claim_control(
            "Each role of a parse is better with the sentence's own parse than with another's", _average(_SHUFFLED)
        ),
    ),
)

TABLE_2 = Reproduction(
    id="guided/table-2",
    title="Translation with role masks in the encoder",
    source="Wang et al. 2021, Table 2; its starred rows are quoted there from other papers",
    task="translation",
    # five roles and three free heads
    parts=(Part(("plain", "random-mask", "guided", "shuffled-parse"), base_eight_heads("wmt14")),),
    extra=(
        "random-mask and shuffled-parse are the controls of guided. The masks are kept during beam search, as they "
        "are not in the released code"
    ),
    claims=(
        Claim("The guided Transformer improves on the Transformer.", compare_arms("guided", "plain")),
        claim_control(
            "What the roles add is which words they choose, not that heads see few of them",
            compare_arms("guided", "random-mask"),
        ),
        claim_control(
            "What the roles of a parse add is the sentence's own parse", compare_arms("guided", "shuffled-parse")
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
