"""Every figure of the pages on methods and on studies is in a record that its section or its row names."""

from __future__ import annotations

import json
import re

from docs.pages import ROOT

DOCS = ROOT / "docs"
ARMS = ("plain", "scaled", "output-relative", "CKA", "SVGD-span", "CKA-together")
# digits with a point, such as -0.327, that are no part of a word, a version or a call
FIGURE = re.compile(r"(?<![\w.(=])[-+]?\d+\.\d+(?![\w.)])")


def split_page(name: str) -> list[str]:
    return re.split(r"^## ", (DOCS / name).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]


def read_figures(text: str) -> set[str]:
    return set(FIGURE.findall(re.sub(r"version \d+\.\d+", "", text.replace("\N{MINUS SIGN}", "-"))))


def test_every_figure_is_in_a_record_that_its_section_names():
    titles = {"shrinking.md": "Do diverse heads prune better?", "lm.md": "What was found"}
    studies = [part for page, title in titles.items() for part in split_page(page) if part.startswith(title)]
    assert len(studies) == 2
    missing, seen = [], 0
    for section in (*split_page("which-method.md"), *studies):
        prose = re.sub(r"```.*?```", "", section, flags=re.DOTALL)
        links = re.findall(r"\]\(([^)#]+\.md)\)", prose)
        # settings of arms, as in ratio=0.113, may be named in prose
        known = {one for link in links for one in read_figures((DOCS / link).read_text("utf-8").replace("=", " "))}
        for link in re.findall(r"\]\(([^)#]+\.json)\)", prose):
            record = json.loads((DOCS / link).read_text(encoding="utf-8"))
            known |= {f"{ratio:.2f}" for ratio in record["ratio to plain"].values()}
        # prose may give a difference without its sign
        known |= {figure.lstrip("+-") for figure in known}
        missing += [(section[:40], figure, links) for figure in sorted(read_figures(prose) - known)]
        seen += len(read_figures(section))
    assert not missing
    assert seen > 40


def test_each_number_of_the_table_of_shrinking_is_the_records():
    page = (DOCS / "shrinking.md").read_text(encoding="utf-8")
    rows = re.search(r"^\| task \|.*?\n\n", page, re.MULTILINE | re.DOTALL)[0].splitlines()[2:-1]
    assert len(rows) == 5
    for place, row in enumerate(rows):
        title, *shown = row.strip("| ").split(" | ")
        merged = "merged" in title
        # what is merged are the heads of the row above
        (link,) = re.findall(r"\((\S+)\.md\)", rows[place - 1] if merged else title)
        grids = json.loads((DOCS / f"{link}.json").read_text(encoding="utf-8"))["grids"]
        grid = next(grid for grid in grids if grid["title"].startswith("loss on the test set"))
        column = grid["header"].index("50% of key/value heads" if merged else "50% of heads")
        kept = {row[0]: row[column]["value"] for row in grid["rows"]}
        assert [number.strip("*") for number in shown] == [f"{kept[arm]:.3f}" for arm in ARMS], title
