"""Finished comparisons side by side: one row per arm of each, as values, as a grid, as CSV and as LaTeX.

The page of comparisons side by side, which a reader sorts and filters.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from headwise.errors import DataError, HeadwiseError
from headwise.report.html import ALIGNMENTS, Page
from headwise_lab.results.cells import NONE, Grid, Number, show_number, show_p, show_percent, show_points
from headwise_lab.results.runs import COMPARISON
from headwise_lab.results.statistics import omit_p
from headwise_lab.results.table import Row, Table
from headwise_lab.results.tabulate import read_table

LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\N{MINUS SIGN}": "$-$"}
LATEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"} | {"\N{EN DASH}": "--", "<": r"\textless{}", ">": r"\textgreater{}"}


def find_comparisons(folders: list[Path]) -> list[Path]:
    """Return the folders of comparisons that are, or lie inside, the given ones.

    Raises:
        DataError: A folder holds none.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        inside = sorted(path.parent for path in folder.rglob(COMPARISON)) if folder.is_dir() else []
        if not inside:
            raise DataError(
                f"{folder} holds no comparison; expected an --out folder of headwise compare, or one above."
            )
        found |= dict.fromkeys(inside)
    return list(found)


def read_comparisons(folders: list[Path], tell: Callable[[str], object]) -> dict[str, Table]:
    """Return the tables of the comparisons that are, or lie inside, folders, by folder.

    Args:
        folders: The folders.
        tell: Called with a sentence for each comparison inside a folder that is left out, as it cannot be judged.

    Raises:
        HeadwiseError: A folder holds no comparison, a comparison that was named cannot be judged, or none can.
    """
    tables: dict[str, Table] = {}
    found = find_comparisons(folders)
    for folder in found:
        try:
            tables[str(folder)] = read_table(folder)
        except HeadwiseError as error:
            if folder in folders or (folder == found[-1] and not tables):
                raise
            tell(f"left out: {error}")
    return tables


def list_rows(tables: Mapping[str, Table]) -> list[dict[str, Any]]:
    """Return one row of values per arm and baseline of comparisons by name; numbers as fractions, None for none."""
    return [_make_row(name, table, row) for name, table in tables.items() for row in table.rows]


def make_grid(tables: Mapping[str, Table]) -> Grid:
    """Return comparisons as one grid, the verdict next to the arm."""
    header = ("comparison", "arm", "verdict", "p", "difference, points", "to", "score, %")
    header += ("effective heads", "by variance", "seeds")
    rows = tuple(
        (
            name,
            row.arm,
            "baseline" if row.baseline else omit_p(row.verdict) or NONE,
            show_p(None if row.to_control is None else row.to_control.judgement.adjusted),
            show_points(row.to_control and row.to_control.estimate),
            row.control or NONE,
            show_percent(row.score),
            show_number(row.measures["effective_heads"], 2),
            show_number(row.measures["effective_heads_weighted"], 2),
            Number(len(row.seeds), digits=0),
        )
        for name, table in tables.items()
        for row in table.rows
    )
    return Grid("comparisons side by side", header, rows, "lllrrlrrrr")


def format_csv(tables: Mapping[str, Table]) -> str:
    """Return the rows as CSV, with numbers as they are and nothing where there is none."""
    rows = list_rows(tables)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def format_latex(grid: Grid) -> str:
    r"""Return a grid as a LaTeX table with the rules of booktabs.

    >>> print(format_latex(Grid("t", ("arm", "score, %"), (("a_b", "81.5"),), "lr")))
    \begin{tabular}{lr}
    \toprule
    arm & score, \% \\
    \midrule
    a\_b & 81.5 \\
    \bottomrule
    \end{tabular}
    """
    lines = [" & ".join(_escape_latex(cell) for cell in row) + r" \\" for row in (grid.header, *grid.text)]
    top, *others = lines
    rules = rf"\begin{{tabular}}{{{grid.align}}}", r"\toprule", top, r"\midrule"
    return "\n".join([*rules, *others, r"\bottomrule", r"\end{tabular}"])


def _make_row(name: str, table: Table, row: Row) -> dict[str, Any]:
    found = row.to_control
    difference = None if found is None else found.estimate
    return {
        "comparison": name,
        "task": table.task,
        "scale": table.scale,
        "arm": row.arm,
        "verdict": "baseline" if row.baseline else omit_p(row.verdict),
        "p_holm": None if found is None else found.judgement.adjusted,
        "control": row.control,
        "difference": None if difference is None else difference.value,
        "difference_low": None if difference is None else difference.low,
        "difference_high": None if difference is None else difference.high,
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


def _escape_latex(text: str) -> str:
    return re.sub("|".join(map(re.escape, LATEX)), lambda found: LATEX[found[0]], " ".join(text.split()))


# The value that each column of the grid is sorted by.
KEYS = ("comparison", "arm", "verdict", "p_holm", "difference", "control", "score")
KEYS += ("effective_heads", "effective_heads_weighted", "seeds")
STYLE = """
main { max-width: 78rem; }
#runs button { all: unset; cursor: pointer; }
#runs button:focus-visible { outline: 2px solid var(--accent); }
#runs th[aria-sort=ascending] button::after { content: " \\2191"; }
#runs th[aria-sort=descending] button::after { content: " \\2193"; }
#runs input { font: inherit; max-width: 100%; }
"""


def make_side_by_side_page(tables: Mapping[str, Table]) -> Page:
    """Return a page with one row per arm of each comparison by name; a click sorts, words in a field filter.

    A verdict of one comparison is adjusted for the arms of that comparison alone.
    """
    grid = make_grid(tables)
    # first the arm and its verdict, which a narrow window then shows without scrolling
    order = [grid.header.index(name) for name in ("arm", "verdict")]
    order += [place for place in range(len(grid.header)) if place not in order]
    rows = [
        {"text": [text[place] for place in order], "keys": [values[KEYS[place]] for place in order]}
        for text, values in zip(grid.text, list_rows(tables), strict=True)
    ]
    columns = [{"name": grid.header[place], "kind": ALIGNMENTS[grid.align[place]]} for place in order]
    page = Page("Comparisons side by side")
    page.paragraph(
        "One row per arm of each comparison. A click on a heading sorts by it, another one the other way round."
    )
    script = files("headwise_lab.results").joinpath("side_by_side_view.js").read_text(encoding="utf-8")
    page.view("runs", {"columns": columns, "rows": rows}, script=script, style=STYLE)
    page.paragraph(
        "In parentheses 95 % intervals over seeds and test items. p is Holm's, over the arms of one comparison; scores "
        "of different tasks and scales are not comparable.",
        kind="note",
    )
    return page
