"""The HTML page of a comparison, and finished comparisons side by side: as rows, a grid, CSV and a page to sort."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from headwise.errors import DataError, HeadwiseError
from headwise.report.html import ALIGNMENTS, Page
from headwise_lab.results.cells import NONE, Cell, Grid, Number, show_number, show_p, show_percent
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
    show_lead,
    show_verdict,
    signature_grid,
    verdict_grid,
)
from headwise_lab.results.runs import COMPARISON
from headwise_lab.results.statistics import MINIMUM_SEEDS, omit_p
from headwise_lab.results.table import Row, Table, read_table

# A title names the arms up to this many.
MOST_NAMED = 4
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


def write_title(table: Table) -> str:
    """Return the title of a comparison in words."""
    arms = _join_words([row.arm for row in table.arms]) if len(table.arms) <= MOST_NAMED else f"{len(table.arms)} arms"
    return f"{arms} compared on the task {table.results.task}"


def fill_page(page: Page, table: Table, pictures: Sequence[Picture], command: str = "") -> Page:
    """Add a comparison to a page, with its figures and the command; return the page."""
    page.paragraph(write_headline(table), kind="lead")
    if table.results.missing:
        page.paragraph(f"Not finished, and not included below: {_join_words(table.results.missing)}.")
    _add_verdicts(page, table)
    page.heading(f"Score by {table.bin_words}")
    caption = f"{table.axis}, with 95 % intervals over seeds and test items"
    add_grids(page, bins_grid(table), caption=caption, note=f"Test items: {_describe_items(table)}.")
    of_heads = [picture for picture in pictures if picture.name.startswith(HEADS_PREFIX)]
    of_halves = [picture for picture in pictures if picture.name == HALVES_NAME]
    add_pictures(page, [picture for picture in pictures if picture not in (*of_heads, *of_halves)])
    page.heading("How alike the heads are")
    add_grids(page, diversity_grid(table), caption="means over seeds", note=COLUMNS)
    if costs := head_grids(table):
        page.heading("What each head is worth")
        add_grids(page, *costs, note=HEADS)
        add_pictures(page, of_heads)
    if table.halved:
        page.heading("With half of the heads")
        page.paragraph(describe_halving(table))
        add_grids(page, halving_grid(table), note=HALVES)
        add_pictures(page, of_halves)
    page.heading("Settings of the arms")
    page.table(["arm", "settings"], [(row.arm, _describe_settings(row)) for row in table.rows], align="ll")
    page.heading("How it was judged")
    page.paragraph(_describe_protocol(table))
    if table.signatures:
        add_grids(page, signature_grid(table))
    page.heading("Made with")
    versions = ", ".join(f"{name} {version}" for name, version in table.versions.items())
    seeds = _join_words(list(map(str, table.results.seeds)))
    page.paragraph(f"{versions}. Data {table.results.data or 'unnamed'}; seeds {seeds}.")
    if command:
        page.code(command)
    return page


def _add_verdicts(page: Page, table: Table) -> None:
    page.heading("Verdicts")
    add_grids(page, *(grid for grid in (verdict_grid(table), plain_grid(table)) if grid.rows))
    for note in list_notes(table):
        page.paragraph(note, kind="note")
    for row in table.arms:
        if row.to_control is not None and row.to_control.note:
            page.paragraph(f"{row.arm} against {row.control}: {row.to_control.note}.", kind="note")
    add_grids(page, *paired_grids(table), note=PAIRED if table.paired else "")
    add_grids(page, cost_grid(table), note=COST)


def add_grids(page: Page, *grids: Grid, caption: str = "", note: str = "") -> None:
    """Add grids to a page, with the caption of each unless one is given, and a note below them."""
    for grid in grids:
        page.table(grid.words, grid.text, align=grid.align, caption=caption or grid.title)
    if note:
        page.paragraph(note, kind="note")


def add_pictures(page: Page, pictures: Sequence[Picture]) -> None:
    """Add figures to a page."""
    for picture in pictures:
        page.figure(picture.png, caption=picture.caption, alt=picture.alt)


def write_headline(table: Table) -> str:
    """Return the findings of a comparison in two or three sentences."""
    arms = [row for row in table.arms if row.control is not None]
    seeds = sorted({len(row.seeds) for row in table.arms or table.rows})
    each = f"{seeds[0]} seed{'s' * (seeds != [1])}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    items = f"{sum(table.items):,} test items"
    if not arms:
        what = f"Nothing was compared with plain on the task {table.results.task} at scale {table.results.scale}"
        return f"{what} ({each}, {items})."
    what = (
        f"{len(arms)} way{'s' * (len(arms) > 1)} of making heads differ on the task {table.results.task} at scale "
        f"{table.results.scale}, {each} each, judged by {table.results.primary} ({items})."
    )
    if table.results.metric.own_test:
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
    if not any(row.verdict for row in arms):
        return "No claim is about a difference to a control here, so there are no verdicts."
    open_ = [row for row in arms if row.verdict.startswith("no verdict")]
    if len(open_) == len(arms):
        reasons = ", ".join(dict.fromkeys(row.verdict.removeprefix("no verdict ").strip("()") for row in open_))
        drawn = next((row.to_control.estimate.drawn for row in open_ if row.to_control is not None), "seed")
        needed = f"the arm's control and {MINIMUM_SEEDS} {drawn}s of both"
        needed += ", and a plain model that beats every baseline" if doubted else ""
        return f"No verdict is given ({reasons}): one needs {needed}."
    said = {
        "Better than the control": "better",
        "Worse than the control": "worse",
        "No difference shown": "no difference",
        "No verdict": "no verdict",
    }
    found = {words: [row.arm for row in arms if row.verdict.startswith(begin)] for words, begin in said.items()}
    return " ".join(f"{words}: {_join_words(names)}." for words, names in found.items() if names)


def _describe_settings(row: Row) -> str:
    """Return the settings of an arm, without those that are off."""
    arm = row.settings.get("arm")
    if not isinstance(arm, Mapping):
        return "no heads" if row.baseline else format_setting(row.settings)
    changed = [f"{name} = {arm[name]}" for name in ("learning_rate", "dropout") if arm.get(name) is not None]
    return "; ".join([*map(format_setting, arm.get("methods", [])), *changed]) or "the unmodified model"


def _describe_protocol(table: Table) -> str:
    judged = [row.to_control for row in table.arms if row.to_control is not None]
    drawn = {one.estimate.drawn for one in judged} - {"seed"}
    shared = "".join(f" Runs that started from the same {one} of their arm count as one." for one in sorted(drawn))
    size = max((one.family for one in judged), default=0)
    adjusted = f"; p-values are adjusted by Holm's method over {size} contrast{'s' * (size != 1)}" if size else ""
    return (
        "Every arm was trained under the same seeds, with the same data in the same order and the same initial values "
        f"of shared parameters; the metric, {table.results.primary}, was fixed before the first run. Each arm is "
        "compared with its control, which differs in one thing (repulsion with smoothing alone, routing with uniform "
        "weights over the same votes), paired by seed and test item. Its interval is the wider one of Student's t over "
        "the means of seeds and of crossed random effects of seeds and test items. With fewer than "
        f"{MINIMUM_SEEDS} seeds no verdict is given{adjusted}." + shared
    )


def _describe_items(table: Table) -> str:
    if len(set(table.items)) == 1:
        return f"{table.items[0]:,}{' in each bin' * (len(table.bins) > 1)}"
    counted = zip(table.bins, table.items, strict=True)
    return f"by {table.bin_words}: " + ", ".join(f"{count:,} of {number}" for number, count in counted)


def _join_words(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def read_comparisons(folders: list[Path], tell: Callable[[str], object]) -> dict[str, Table]:
    """Return the tables of the comparisons that are, or lie inside, folders, by folder.

    Args:
        folders: The folders.
        tell: Called with a sentence for each comparison inside a folder that is left out, as it cannot be judged.

    Raises:
        HeadwiseError: A folder holds no comparison, a comparison that was named cannot be judged, or none can.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        inside = sorted(path.parent for path in folder.rglob(COMPARISON)) if folder.is_dir() else []
        if not inside:
            raise DataError(
                f"{folder} holds no comparison; expected an --out folder of headwise compare, or one above."
            )
        found |= dict.fromkeys(inside)
    tables: dict[str, Table] = {}
    for folder in found:
        try:
            tables[str(folder)] = read_table(folder)
        except HeadwiseError as error:
            if folder in folders or (folder == list(found)[-1] and not tables):
                raise
            tell(f"left out: {error}")
    return tables


def list_rows(tables: Mapping[str, Table]) -> list[dict[str, Any]]:
    """Return one row of values per arm and baseline of comparisons by name; numbers as fractions, None for none."""
    return [_make_row(name, table, row) for name, table in tables.items() for row in table.rows]


def _make_row(name: str, table: Table, row: Row) -> dict[str, Any]:
    found = row.to_control
    lead = found and found.estimate
    return {
        "comparison": name,
        "task": table.results.task,
        "scale": table.results.scale,
        "arm": row.arm,
        "verdict": "baseline" if row.baseline else omit_p(row.verdict),
        "p_holm": found and found.adjusted,
        "control": row.control,
        "difference": lead and lead.value,
        "difference_low": lead and lead.low,
        "difference_high": lead and lead.high,
        "score": row.score.value,
        "score_low": row.score.low,
        "score_high": row.score.high,
        "seeds": len(row.seeds),
        "effective_heads": row.measures["effective_heads"],
        "effective_heads_weighted": row.measures["effective_heads_weighted"],
        "force_ratio": row.measures["force_ratio"],
        "parameters": row.parameters,
        "step_ratio": row.step_ratio,
    }


def format_csv(tables: Mapping[str, Table]) -> str:
    """Return the rows as CSV, with numbers as they are and nothing where there is none."""
    # slow to import; as objects, whole numbers stay whole beside nothing
    import pandas as pd

    return pd.DataFrame(list_rows(tables), dtype=object).to_csv(index=False, lineterminator="\n")


# The columns of comparisons side by side: the value that each is sorted by on the page, and how it is shown.
SIDE_BY_SIDE: dict[str, tuple[str, Callable[[str, Row], Cell]]] = {
    "comparison": ("comparison", lambda name, _: name),
    "arm": ("arm", lambda _, row: row.arm),
    "verdict": ("verdict", lambda _, row: show_verdict(row)),
    "p": ("p_holm", lambda _, row: show_p(row.to_control and row.to_control.adjusted)),
    "difference, points": ("difference", lambda _, row: show_lead(row.to_control)),
    "to": ("control", lambda _, row: row.control or NONE),
    "score, %": ("score", lambda _, row: show_percent(row.score)),
    "effective heads": ("effective_heads", lambda _, row: show_number(row.measures["effective_heads"], 2)),
    "by variance": (
        "effective_heads_weighted",
        lambda _, row: show_number(row.measures["effective_heads_weighted"], 2),
    ),
    "seeds": ("seeds", lambda _, row: Number(len(row.seeds), digits=0)),
}


def make_grid(tables: Mapping[str, Table]) -> Grid:
    """Return comparisons as one grid, the verdict next to the arm."""
    known = [(name, row) for name, table in tables.items() for row in table.rows]
    columns = {title: [show(name, row) for name, row in known] for title, (_, show) in SIDE_BY_SIDE.items()}
    return Grid.of("comparisons side by side", columns, "lllrrlrrrr", keys=2)


STYLE = """
main { max-width: 78rem; }
#runs button { all: unset; cursor: pointer; }
#runs button:focus-visible { outline: 2px solid var(--accent); }
#runs th[aria-sort=ascending] button::after { content: " \\2191"; }
#runs th[aria-sort=descending] button::after { content: " \\2193"; }
#runs input { font: inherit; max-width: 100%; }
"""


SIDE_BY_SIDE_NOTE = (
    "In parentheses 95 % intervals over seeds and test items. p is Holm's, over the arms of one comparison; scores of "
    "different tasks and scales are not comparable."
)


def make_side_by_side_page(tables: Mapping[str, Table]) -> Page:
    """Return a page with one row per arm of each comparison by name; a click sorts, words in a field filter.

    A verdict of one comparison is adjusted for the arms of that comparison alone.
    """
    grid = make_grid(tables)
    # first the arm and its verdict, which a narrow window then shows without scrolling
    places = [1, 2, 0, *range(3, len(grid.header))]
    keys = [key for key, _ in SIDE_BY_SIDE.values()]
    rows = [
        {"text": [text[place] for place in places], "keys": [values[keys[place]] for place in places]}
        for text, values in zip(grid.text, list_rows(tables), strict=True)
    ]
    columns = [{"name": grid.header[place], "kind": ALIGNMENTS[grid.align[place]]} for place in places]
    page = Page("Comparisons side by side")
    page.paragraph(
        "One row per arm of each comparison. A click on a heading sorts by it, another one the other way round."
    )
    script = files("headwise_lab.results").joinpath("side_by_side_view.js").read_text(encoding="utf-8")
    page.view("runs", {"columns": columns, "rows": rows}, script=script, style=STYLE)
    page.paragraph(SIDE_BY_SIDE_NOTE, kind="note")
    return page
