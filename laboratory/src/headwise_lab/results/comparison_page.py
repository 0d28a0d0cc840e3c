"""The HTML page of a comparison: the findings in a sentence, tables, figures, settings and methods."""

from collections.abc import Mapping, Sequence

from headwise.report.html import Page
from headwise_lab.results.cells import Grid
from headwise_lab.results.figures import HALVES_NAME, HEADS_PREFIX, Picture
from headwise_lab.results.grids import (
    bins_grid,
    cost_grid,
    describe_halving,
    diversity_grid,
    halving_grid,
    head_grids,
    list_notes,
    paired_grids,
    plain_grid,
    signature_grid,
    verdict_grid,
)
from headwise_lab.results.statistics import MINIMUM_SEEDS
from headwise_lab.results.table import Row, Table

# Explanations of the columns.
COLUMNS = (
    "Effective heads are how many different things the heads of an attention contribute to its output, from 1 for "
    "copies to their number; by variance, a head that says next to nothing does not count. CKA is their mean debiased "
    "alignment, 0 for independent heads and 1 for copies in any basis, and attention JS the Jensen-Shannon divergence "
    "between the attention rows of two heads, 0 if they are equal. The others are under their papers' names and can be "
    "met by copies: Dist is the mean distance between the outputs of two heads (An et al. 2020), which grows with "
    "their size; their cosine (Li et al. 2021) is least for copies of opposite sign; of runs of version 0.1 also their "
    "linear CKA and the mean absolute cosine of heads' parameters. Norm is the mean norm of a head's "
    "parameters: repulsion that only inflates it does not make heads differ. Force ratio is the norm of the repulsion "
    "over that of the driving term."
)
PAIRED = (
    "sacreBLEU tests two trained systems against each other: would another sample of sentences reverse their "
    "difference? Each seed has separate p-values, of which the lowest and the highest are shown; ahead and behind "
    "count the seeds with a bootstrap p of at most 0.05. They are neither pooled nor adjusted. The verdict covers both "
    "seeds and sentences."
)
HEADS = (
    "Each head is removed alone from the trained model, and the test set is scored without it: the task's metric with "
    "the cheapest search (greedy decoding), and the loss of the correct answers. A head is redundant when that costs "
    "less than a hundredth of the score; raise counts the heads whose removal improves the score; no cost shown those "
    "whose 95 % interval over test items contains zero, without adjustment. Heads of all seeds are pooled. Nothing "
    "was chosen by these numbers, and heads of different models are not tested against each other."
)
HALVES = (
    "Of each trained model every attention keeps the half of its heads that matters most, by first-order importance on "
    "dev. The recovery trains all that is left on the task's loss alone, for a tenth of the run's steps; the whole "
    "model is not trained any further, so a gain over it may be that of longer training. Scores are those of the "
    "cheapest search. The differences are one family of tests."
)
COST = (
    "An arrow points to the better side. Step time is the median time of a training step over plain's: of steps timed "
    "in turn in one process if measured so (--step-time; headwise reproduce does), else of the steps of the runs, "
    "which other processes may have disturbed, like the time of decoding."
)


def make_page(table: Table, pictures: Sequence[Picture], *, title: str = "", command: str = "") -> Page:
    """Return the page of a comparison, with its figures, its title unless it is that of `compare`, and the command."""
    page = Page(title or f"headwise compare {table.task}")
    page.paragraph(write_headline(table), kind="lead")
    if table.missing:
        page.paragraph(f"Not finished, and not included below: {_join_words(table.missing)}.")
    _add_scores(page, table)
    page.heading(f"Score by {table.bin_words}")
    _add_grids(page, bins_grid(table), caption=f"{table.axis}, with 95 % intervals over seeds and test items")
    page.paragraph(f"Test items: {_describe_items(table)}.", kind="note")
    of_heads = [picture for picture in pictures if picture.name.startswith(HEADS_PREFIX)]
    of_halves = [picture for picture in pictures if picture.name == HALVES_NAME]
    _add_pictures(page, [picture for picture in pictures if picture not in (*of_heads, *of_halves)])
    page.heading("How alike the heads are")
    _add_grids(page, diversity_grid(table), caption="means over seeds")
    page.paragraph(COLUMNS, kind="note")
    if costs := head_grids(table):
        page.heading("What each head is worth")
        _add_grids(page, *costs)
        page.paragraph(HEADS, kind="note")
        _add_pictures(page, of_heads)
    if table.halved:
        page.heading("With half of the heads")
        page.paragraph(describe_halving(table))
        _add_grids(page, halving_grid(table))
        page.paragraph(HALVES, kind="note")
        _add_pictures(page, of_halves)
    page.heading("Settings of the arms")
    page.table(["arm", "settings"], [(row.arm, _describe_settings(row)) for row in table.rows], align="ll")
    page.heading("How it was judged")
    page.paragraph(_describe_protocol(table))
    if table.signatures:
        _add_grids(page, signature_grid(table))
    page.heading("Made with")
    versions = ", ".join(f"{name} {version}" for name, version in table.versions.items())
    page.paragraph(f"{versions}. Data {table.data or 'unnamed'}; seeds {_join_words(list(map(str, table.seeds)))}.")
    if command:
        page.code(command)
    return page


def write_headline(table: Table) -> str:
    """Return the findings of a comparison in two or three sentences."""
    arms = [row for row in table.arms if row.control is not None]
    seeds = sorted({len(row.seeds) for row in table.arms or table.rows})
    each = f"{seeds[0]} seed{'s' * (seeds != [1])}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    items = f"{sum(table.items):,} test items"
    if not arms:
        what = f"Nothing was compared with plain on the task {table.task} at scale {table.scale}"
        return f"{what} ({each}, {items})."
    what = (
        f"{len(arms)} way{'s' * (len(arms) > 1)} of making heads differ on the task {table.task} at scale "
        f"{table.scale}, {each} each, judged by {table.primary} ({items})."
    )
    if table.metric.own_test:
        return f"{what} Each model answers a test that it generated itself, so there are no verdicts."
    return f"{what} {_summarize_verdicts(arms, doubted=bool(table.doubt))}"


def format_setting(record: object) -> str:
    """Return a value of a record written as in Python.

    >>> format_setting({"kind": "SVGD", "alpha": 0.01, "kernel": {"kind": "RBF"}, "layers": [0, 1]})
    'SVGD(alpha=0.01, kernel=RBF(), layers=(0, 1))'
    """
    if isinstance(record, Mapping):
        fields = ", ".join(f"{name}={format_setting(value)}" for name, value in record.items() if name != "kind")
        return f"{record.get('kind', 'dict')}({fields})"
    if isinstance(record, list | tuple):
        inside = ", ".join(map(format_setting, record))
        return f"({inside},)" if len(record) == 1 else f"({inside})"
    return repr(record)


def _summarize_verdicts(arms: Sequence[Row], *, doubted: bool) -> str:
    better = [row.arm for row in arms if row.verdict.startswith("better")]
    worse = [row.arm for row in arms if row.verdict.startswith("worse")]
    open_ = [row for row in arms if row.verdict.startswith("no verdict")]
    if not any(row.verdict for row in arms):
        return "No claim is about a difference to a control here, so there are no verdicts."
    if len(open_) == len(arms):
        reasons = ", ".join(dict.fromkeys(row.verdict.removeprefix("no verdict ").strip("()") for row in open_))
        drawn = next((row.to_control.estimate.drawn for row in open_ if row.to_control is not None), "seed")
        needed = f"the arm's control and {MINIMUM_SEEDS} {drawn}s of both"
        needed += ", and a plain model that beats every baseline" if doubted else ""
        return f"No verdict is given ({reasons}): one needs {needed}."
    parts = []
    if better:
        parts.append(f"Better than the control: {_join_words(better)}.")
    if worse:
        parts.append(f"Worse than the control: {_join_words(worse)}.")
    silent = [row.arm for row in arms if row.verdict.startswith("no difference")]
    if silent:
        parts.append(f"No difference shown: {_join_words(silent)}.")
    if open_:
        parts.append(f"No verdict: {_join_words([row.arm for row in open_])}.")
    return " ".join(parts)


def _describe_settings(row: Row) -> str:
    """Return the settings of an arm, without those that are off."""
    arm = row.settings.get("arm")
    if not isinstance(arm, Mapping):
        return "no heads" if row.baseline else format_setting(row.settings)
    changed = [f"{name} = {arm[name]}" for name in ("learning_rate", "dropout") if arm.get(name) is not None]
    return "; ".join([*map(format_setting, arm.get("methods", [])), *changed]) or "the unmodified model"


def _describe_protocol(table: Table) -> str:
    drawn = {row.to_control.estimate.drawn for row in table.arms if row.to_control is not None} - {"seed"}
    shared = "".join(f" Runs that started from the same {one} of their arm count as one." for one in sorted(drawn))
    families = sorted({row.to_control.judgement.family for row in table.arms if row.to_control is not None} - {0})
    size = families[-1] if families else 0
    adjusted = f"; p-values are adjusted by Holm's method over {size} contrast{'s' * (size != 1)}" if families else ""
    return (
        f"Every arm was trained under the same seeds, with the same data in the same order and the same initial values "
        f"of shared parameters; the metric, {table.primary}, was fixed before the first run. Each arm is compared with "
        "its control, which differs in one thing (repulsion with smoothing alone, routing with uniform weights over "
        "the same votes), paired by seed and test item. Its interval is the wider one of Student's t over the means "
        "of seeds and of crossed random effects of seeds and test items. With fewer than "
        f"{MINIMUM_SEEDS} seeds no verdict is given{adjusted}." + shared
    )


def _describe_items(table: Table) -> str:
    if len(table.bins) == 1:
        return f"{table.items[0]:,}"
    if len(set(table.items)) == 1:
        return f"{table.items[0]:,} in each bin"
    counted = zip(table.bins, table.items, strict=True)
    return f"by {table.bin_words}: " + ", ".join(f"{count:,} of {number}" for number, count in counted)


def _add_scores(page: Page, table: Table) -> None:
    page.heading("Verdicts")
    others = plain_grid(table)
    _add_grids(page, verdict_grid(table), *([others] if others.rows else []))
    for note in list_notes(table):
        page.paragraph(note, kind="note")
    for row in table.arms:
        if row.to_control is not None and row.to_control.judgement.note:
            page.paragraph(f"{row.arm} against {row.to_control.against}: {row.to_control.judgement.note}.", kind="note")
    _add_grids(page, *paired_grids(table))
    if table.paired:
        page.paragraph(PAIRED, kind="note")
    _add_grids(page, cost_grid(table))
    page.paragraph(COST, kind="note")


def _add_pictures(page: Page, pictures: Sequence[Picture]) -> None:
    for picture in pictures:
        page.figure(picture.png, caption=picture.caption, alt=picture.alt)


def _add_grids(page: Page, *grids: Grid, caption: str = "") -> None:
    for grid in grids:
        page.table(grid.words, grid.text, align=grid.align, caption=caption or grid.title)


def _join_words(words: Sequence[str]) -> str:
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
