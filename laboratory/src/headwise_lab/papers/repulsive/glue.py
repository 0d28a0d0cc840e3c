"""An et al. 2020, section 5.3: ELECTRA pre-trained with repulsive heads, and fine-tuned on GLUE.

ELECTRA of the paper is plain, ELECTRA + RMA is svgd on the discriminator's first layer, in pre-training alone.
"""

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from headwise_lab.papers.claims import Claim, Contrast, Numbers, StepTimes, claim_control, compare_arms
from headwise_lab.papers.reproduction import Column, Part, Published, Reproduction, Size, Sizes, build_rows
from headwise_lab.papers.repulsive.figures import draw_training_curves
from headwise_lab.results.cells import NONE, Cell, Grid, Number
from headwise_lab.results.evidence import Evidence
from headwise_lab.results.statistics import Estimate, estimate
from headwise_lab.results.table import Table

# A set fine-tuned from the model that was fine-tuned on another set, and the column it takes the place of.
AFTER = {"RTE after MNLI": "RTE"}


def build_glue_grid(evidence: Mapping[str, Evidence], tables: Mapping[str, Table]) -> Grid:
    """Return arms by sets: mean with its 95 % interval, and the median over fine-tunings; last the averages."""
    sets = list(evidence)
    arms = list(dict.fromkeys(row.arm for table in tables.values() for row in table.rows))
    ways = average_sets(sets)
    rows = []
    for arm in arms:
        cells = [_show_cell(tables[name], arm) for name in sets]
        for chosen in ways.values():
            found = _read_scores(evidence, chosen, arm)
            means = np.array([[statistics.fmean(values)] for values in zip(*found, strict=True)]) if found else None
            if means is None:
                cells.append(NONE)
            else:
                cells.append(_show_average(estimate(means, least=-1.0, most=1.0), means[:, 0].tolist()))
        rows.append((arm, *cells))
    title = "Fine-tuning, times 100: mean (95 % interval), median over seeds"
    return Grid(title, ("arm", *sets, *ways), tuple(rows), "l" + "r" * (len(sets) + len(ways)))


def average_sets(sets: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the columns of averages, name to the sets each is over, as far as the sets are there.

    >>> average_sets(["CoLA", "RTE", "RTE after MNLI"])
    {'Avg. of 2': ('CoLA', 'RTE'), 'Avg. of 2, RTE after MNLI': ('CoLA', 'RTE after MNLI')}
    >>> average_sets(["CoLA"])
    {}
    """
    single = tuple(name for name in sets if name not in AFTER)
    if len(single) < 2:
        return {}
    found: dict[str, tuple[str, ...]] = {f"Avg. of {len(single)}": single}
    for name, replaced in AFTER.items():
        if name in sets and replaced in single:
            found[f"Avg. of {len(single)}, {name}"] = tuple(name if one == replaced else one for one in single)
    return found


def _show_cell(table: Table, arm: str) -> Cell:
    row = table.row(arm)
    if row is None:
        return NONE
    return _show_average(row.score, [point.score for point in row.points])


def _read_scores(evidence: Mapping[str, Evidence], chosen: Sequence[str], arm: str) -> list[list[float]]:
    """Return the scores of an arm on each of some sets, under the seeds that all of them have."""
    scores = []
    for name in chosen:
        results = evidence[name].results
        runs = [run for run in results.runs if run.arm == arm]
        scores.append({run.seed: float(results.metric.values(run.statistics).mean()) for run in runs})
    seeds = sorted(set.intersection(*(set(found) for found in scores)))
    return [[found[seed] for seed in seeds] for found in scores] if seeds else []


def _show_average(found: Estimate, values: Sequence[float]) -> Number:
    if found.seeds < 2:
        return Number(found.value, digits=1, factor=100)
    return Number(found.value, found.low, found.high, digits=1, factor=100, median=statistics.median(values))


SCALES = ("demo", "cpu", "gpu")
# Appendix B.3; the layer is the task's own choice.
SVGD = "svgd:alpha=0.1,step_size=0.01"
SMOOTH = "smooth:step_size=0.01"
_ARMS = ("plain", SMOOTH, SVGD)
_LOSS = "discriminator_loss"
# The one layer that is repelled: a mean over all layers would thin its change by their number.
_FIRST = "electra.encoder.layer.0.attention.self"
_CKA, _COSINE = f"output_cka of {_FIRST}", f"output_cosine of {_FIRST}"

PRETRAINING = Reproduction(
    id="repulsive/pretraining",
    title="ELECTRA pre-trained with repulsive heads: losses, force and diversity",
    source="An et al. 2020, section 5.3; the paper prints no number of pre-training itself",
    task="pretraining",
    parts=(Part(_ARMS, {name: Size(name) for name in (*SCALES, "paper")}),),
    extra=(
        "smooth is the control of svgd. Accuracies and losses are those of each model's own discriminator on what its "
        "own generator replaced: a better generator makes a harder test"
    ),
    claims=(
        Claim(
            "The training time with and without repulsive attention is almost the same.",
            shown=(StepTimes((SMOOTH, SVGD)),),
        ),
        Claim(
            "Repulsion makes what the heads put out less alike (section 5.2, of which the choice of the first layer "
            "follows).",
            (Contrast("plain", SVGD, measure=_CKA), Contrast("plain", SVGD, measure=_COSINE)),
            (Numbers("force_ratio", "repulsion over drive", (SVGD,), digits=4),),
        ),
        claim_control(
            "What makes them less alike is the repulsion, not the smoothing", (Contrast(SMOOTH, SVGD, measure=_CKA),)
        ),
        Claim(
            "Losses after equal steps, beside one another.",
            shown=(
                Numbers(_LOSS, "discriminator loss", _ARMS, digits=4),
                Numbers("generator_loss", "generator loss", _ARMS, digits=3),
            ),
            tested=False,
        ),
    ),
    measures=(_LOSS, "generator_loss", _CKA, _COSINE, "output_cka", "parameter_cosine"),
    drawn=draw_training_curves,
)

_TABLE_3 = {
    "CoLA": ("56.2", "59.4"),
    "SST-2": ("88.3", "87.1"),
    "MRPC": ("87.5", "87.9"),
    "STS-B": ("86.8", "87.0"),
    "QQP": ("88.1", "88.6"),
    "MNLI": ("78.6", "79.3"),
    "QNLI": ("87.4", "87.8"),
    "RTE": ("67.3", "64.9"),
    "RTE after MNLI": ("71.4", "73.1"),
}
# Small sets are passed over ten times (Clark et al. 2020, appendix B), where there is time.
_SMALL = ("RTE", "STS-B", "RTE after MNLI")
_LONGER = {"demo": None, "cpu": "epochs=5"}
_SETS = tuple(_TABLE_3)
_RISING = sum(float(after) > float(before) for before, after in _TABLE_3.values())


def _choose_sizes(name: str) -> Sizes:
    kept = ("keep_model=true",) if name == "MNLI" else ()
    corpus = AFTER.get(name, name)
    found = {}
    for scale in (*SCALES, "paper"):
        longer = _LONGER.get(scale, "epochs=10") if name in _SMALL else None
        found[scale] = Size(scale, corpus=corpus, sets=(*([longer] if longer else []), *kept))
    return found


def _make_claims(sets: tuple[str, ...]) -> tuple[Claim, ...]:
    """Return the paper's claims as far as some of its sets can speak of them."""
    ways = average_sets(sets)
    # the paper counts RTE by its second column; fine-tuned alone it falls
    rising = tuple(name for name in sets if float(_TABLE_3[name][1]) > float(_TABLE_3[name][0]))
    here = "" if len(rising) == _RISING else f" ({len(rising)} of these seven are here: {', '.join(rising)})"
    return (
        Claim(
            f"Repulsive attention improves the average over the sets ({' and '.join(ways) or 'fewer than two here'}).",
            tuple(Contrast(SVGD, "plain", over=way) for way in ways.values()),
        ),
        Claim(
            f"Repulsive attention improves seven of eight sets, RTE after MNLI among them: all but SST-2{here}.",
            compare_arms(SVGD, "plain", rising),
        ),
        Claim(
            "The gains are larger on MNLI, the largest set, and on CoLA (shown, with RTE and SST-2, which fall in the "
            "paper's table).",
            tuple(Contrast(SVGD, "plain", part=name) for name in ("MNLI", "CoLA", "SST-2", "RTE") if name in sets),
            tested=False,
        ),
        claim_control(
            "What repulsive pre-training adds is the repulsion, not the smoothing",
            tuple(Contrast(SVGD, SMOOTH, over=way) for way in ways.values()),
        ),
    )


TABLE_3 = Reproduction(
    id="repulsive/table-3",
    title="GLUE after pre-training ELECTRA with repulsive heads",
    source="An et al. 2020, Table 3 and appendix B.3; GLUE's test server, mean of 50 fine-tunings",
    task="glue",
    parts=tuple(Part(_ARMS, _choose_sizes(name), name, after="MNLI" if name in AFTER else "") for name in _SETS),
    extra=(
        "smooth, the control of svgd. Ours are on GLUE's dev files, which nothing is chosen by. The method acts in "
        "pre-training, so arms are judged over pre-trainings: fine-tunings of one count as one, and intervals of a "
        "score are over fine-tunings and test items"
    ),
    claims=_make_claims(_SETS),
    published=Published(
        "ELECTRA-small on OpenWebText, GLUE's test server",
        (Column("score"),),
        build_rows(("ELECTRA", "ELECTRA + RMA"), lambda _: ("plain", SVGD), _TABLE_3),
    ),
    after="repulsive/pretraining",
    folder="glue",
    made=_make_claims,
    summed=build_glue_grid,
)

REPULSIVE_GLUE = (PRETRAINING, TABLE_3)
