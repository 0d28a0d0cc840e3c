"""The page of comparisons side by side, which a reader sorts and filters."""

from collections.abc import Mapping
from importlib.resources import files

from headwise.lab.results.side_by_side import list_rows, make_grid
from headwise.lab.results.table import Table
from headwise.report.html import ALIGNMENTS, Page

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
    script = files("headwise.lab.results").joinpath("side_by_side_view.js").read_text(encoding="utf-8")
    page.view("runs", {"columns": columns, "rows": rows}, script=script, style=STYLE)
    page.paragraph(
        "In parentheses 95 % intervals over seeds and test items. p is Holm's, over the arms of one comparison; scores "
        "of different tasks and scales are not comparable.",
        kind="note",
    )
    return page
