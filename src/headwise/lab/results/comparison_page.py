"""The page of a comparison: what was found in a sentence, the tables, the figures, the settings and how it was judged.

Owns the words of the page and their order. Numbers come from `table`, their look from `grids`, the markup from `page`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from headwise.lab.results.cells import Grid
from headwise.lab.results.figures import OF_HEADS, Picture
from headwise.lab.results.grids import (
    bins_grid,
    cost_grid,
    diversity_grid,
    head_grids,
    paired_grids,
    plain_grid,
    signature_grid,
    verdict_grid,
)
from headwise.lab.results.statistics import MINIMUM_SEEDS
from headwise.lab.results.table import Row, Table
from headwise.report.html import Page

# What a reader cannot guess from the name of a column.
COLUMNS = (
    "Dist is the mean distance between the outputs of two heads (An et al. 2020), which grows with their size; the "
    "cosine and CKA between outputs do not depend on size, and 1 means alike. Attention JS is the Jensen-Shannon "
    "divergence between the attention rows of two heads, 0 where they are equal. Param. cosine is the mean absolute "
    "cosine between the parameters of two heads and norm the mean norm of a head's parameters: repulsion that only "
    "inflates the norm does not make heads differ. Force ratio is the norm of the repulsion over that of the drive."
)
PAIRED = (
    "sacreBLEU tests two trained systems against each other: would another draw of sentences turn their difference "
    "round? It knows nothing of another seed, so each seed has p-values of its own, of which the lowest and the "
    "highest are shown; ahead and behind count the seeds with a bootstrap p of at most 0.05. They are neither pooled "
    "nor adjusted. The verdict is about seeds and sentences at once."
)
HEADS = (
    "Each head is removed alone from the trained model, and the test set is scored without it: the task's metric with "
    "the cheapest search (greedy decoding), and the loss of the right answers. A head is redundant when that costs "
    "less than a hundredth of the score; raise counts the heads without which the score is better; no cost shown those "
    "whose cost has zero in its 95 % interval over test items, each by itself; heads of all seeds together. Nothing "
    "was chosen by these numbers; heads of two models have no partners, so no head is tested against another."
)
COST = (
    "An arrow points to the better side. Step time is the median time of a training step over plain's: of steps taken "
    "in turn in one process where they were measured so (--step-time; headwise reproduce does), else of the steps of "
    "the runs, which whatever ran beside them disturbs, as it does the time of decoding."
)


def write_report(table: Table, pictures: Sequence[Picture], path: Path, *, command: str = "") -> None:
    """Write the page of a comparison, one file with everything in it.

    Args:
        table: The comparison.
        pictures: Its figures.
        path: The HTML file.
        command: The command that made it, as it was typed.

    Raises:
        DataError: The file cannot be written.
    """
    report_page(table, pictures, command=command).write(path)


def report_page(table: Table, pictures: Sequence[Picture], *, command: str = "") -> Page:
    """Return the page of a comparison; arguments as for `write_report`."""
    page = Page(f"headwise compare {table.task}")
    page.paragraph(headline(table), kind="lead")
    if table.missing:
        page.paragraph(f"Not finished, and not in what follows: {_listed(table.missing)}.")
    _add_scores(page, table)
    page.heading(f"Score by {table.difficulty}")
    _add(page, bins_grid(table), caption=f"{table.axis}, with half a 95 % interval over seeds and test items")
    page.paragraph(f"Test items: {_items(table)}.", kind="note")
    of_heads = [picture for picture in pictures if picture.name.startswith(OF_HEADS)]
    _add_pictures(page, [picture for picture in pictures if picture not in of_heads])
    page.heading("How alike the heads are")
    _add(page, diversity_grid(table), caption="means over seeds")
    page.paragraph(COLUMNS, kind="note")
    if costs := head_grids(table):
        page.heading("What each head is worth")
        _add_all(page, costs)
        page.paragraph(HEADS, kind="note")
        _add_pictures(page, of_heads)
    page.heading("Settings of the arms")
    page.table(["arm", "settings"], [(row.arm, _settings(row)) for row in table.rows], align="ll")
    page.heading("How it was judged")
    page.paragraph(_protocol(table))
    if table.signatures:
        _add(page, signature_grid(table))
    page.heading("Made with")
    versions = ", ".join(f"{name} {version}" for name, version in table.versions.items())
    page.paragraph(f"{versions}. Data {table.data or 'unnamed'}; seeds {_listed(list(map(str, table.seeds)))}.")
    if command:
        page.code(command)
    return page


def headline(table: Table) -> str:
    """Return what was compared and what was found, in two or three sentences."""
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
        return f"{what} Each model answers a test of its own making, so which is better is not judged."
    return f"{what} {_found(arms)}"


def printed(record: object) -> str:
    """Return a value of a record as it is written in Python; None and empty parts of an arm are left out.

    >>> printed({"kind": "SVGD", "alpha": 0.01, "kernel": {"kind": "RBF"}, "layers": [0, 1]})
    'SVGD(alpha=0.01, kernel=RBF(), layers=(0, 1))'
    """
    if isinstance(record, Mapping):
        fields = ", ".join(f"{name}={printed(value)}" for name, value in record.items() if name != "kind")
        return f"{record.get('kind', 'dict')}({fields})"
    if isinstance(record, list | tuple):
        inside = ", ".join(map(printed, record))
        return f"({inside},)" if len(record) == 1 else f"({inside})"
    return repr(record)


def _found(arms: Sequence[Row]) -> str:
    better = [row.arm for row in arms if row.verdict.startswith("better")]
    worse = [row.arm for row in arms if row.verdict.startswith("worse")]
    open_ = [row for row in arms if row.verdict.startswith("no verdict")]
    if len(open_) == len(arms):
        reasons = ", ".join(dict.fromkeys(row.verdict.removeprefix("no verdict ").strip("()") for row in open_))
        drawn = next((row.to_control.estimate.drawn for row in open_ if row.to_control is not None), "seed")
        return f"No verdict is given ({reasons}): one needs the arm's control and {MINIMUM_SEEDS} {drawn}s of both."
    parts = []
    if better:
        parts.append(f"Better than the control: {_listed(better)}.")
    if worse:
        parts.append(f"Worse than the control: {_listed(worse)}.")
    silent = [row.arm for row in arms if row.verdict.startswith("no difference")]
    if silent:
        parts.append(f"No difference shown: {_listed(silent)}.")
    if open_:
        parts.append(f"No verdict: {_listed([row.arm for row in open_])}.")
    return " ".join(parts)


def _settings(row: Row) -> str:
    """Return what sets an arm apart, field by field; what is off is left out."""
    arm = row.settings.get("arm")
    if not isinstance(arm, Mapping):
        return "no heads" if row.baseline else printed(row.settings)
    fields = {name: value for name, value in arm.items() if name not in ("kind", "name", "control")}
    if fields.get("term") is None:
        fields.pop("penalty_weight", None)
    shown = [f"{name} = {printed(value)}" for name, value in fields.items() if value not in (None, 0.0)]
    return "; ".join(shown) or "the model as it is"


def _protocol(table: Table) -> str:
    drawn = {row.to_control.estimate.drawn for row in table.arms if row.to_control is not None} - {"seed"}
    shared = "".join(f" Runs that began with one {one} of their arm count as one." for one in sorted(drawn))
    return (
        f"Every arm was trained under the same seeds, with the same data in the same order and, where two models share "
        f"parameters, the same start; the metric, {table.primary}, was named before the first run. Each arm is "
        "compared with the arm that differs from it in the one thing it is about (repulsion with smoothing alone, "
        "routing with uniform weights over the same votes), paired by seed and test item, by a hierarchical bootstrap "
        "over seeds and test items that is never less careful than Student's t over the seeds. With fewer than "
        f"{MINIMUM_SEEDS} seeds no verdict is given; p-values are adjusted by Holm's method over the arms of the table."
        + shared
    )


def _items(table: Table) -> str:
    if len(set(table.items)) == 1:
        return f"{table.items[0]:,} of each {table.difficulty}"
    counted = zip(table.bins, table.items, strict=True)
    return f"by {table.difficulty}: " + ", ".join(f"{count:,} of {number}" for number, count in counted)


def _add_scores(page: Page, table: Table) -> None:
    page.heading("Verdicts")
    _add(page, verdict_grid(table))
    others = plain_grid(table)
    if others.rows:
        _add(page, others)
    page.paragraph(
        "± is half a 95 % interval over seeds and test items; differences are in percentage points; p-values are "
        "Holm-adjusted, each table by itself.",
        kind="note",
    )
    _add_all(page, paired_grids(table))
    if table.paired:
        page.paragraph(PAIRED, kind="note")
    _add(page, cost_grid(table))
    page.paragraph(COST, kind="note")


def _add_pictures(page: Page, pictures: Sequence[Picture]) -> None:
    for picture in pictures:
        page.figure(picture.png, caption=picture.caption, alt=picture.alt)


def _add_all(page: Page, every: Sequence[Grid]) -> None:
    for grid in every:
        _add(page, grid)


def _add(page: Page, grid: Grid, *, caption: str = "") -> None:
    header = [name.replace("\n", " ") for name in grid.header]
    page.table(header, grid.rows, align=grid.align, caption=caption or grid.title)


def _listed(words: Sequence[str]) -> str:
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
