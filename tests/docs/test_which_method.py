"""Every figure on choosing a method, and of two studies, is in one of the records that its section names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
# digits with a point, such as -0.327, that are no part of a word, a version or a call
FIGURE = re.compile(r"(?<![\w.(=])[-+]?\d+\.\d+(?![\w.)])")


def split_page(name: str) -> list[str]:
    return re.split(r"^## ", (DOCS / name).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]


STUDIES = [
    section
    for page, title in (("shrinking.md", "Do diverse heads prune better?"), ("lm.md", "What was found"))
    for section in split_page(page)
    if section.startswith(title)
]
SECTIONS = [*split_page("which-method.md"), *STUDIES]


def read_figures(text: str) -> set[str]:
    text = re.sub(r"version \d+\.\d+", "", text.replace("\N{MINUS SIGN}", "-"))
    return set(FIGURE.findall(text))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section[0])
def test_every_figure_is_in_a_record_that_its_section_names(section: str):
    prose = re.sub(r"```.*?```", "", section, flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#]+\.md)\)", prose)
    # settings of arms, as in ratio=0.113, may be named in prose
    records = [(DOCS / link).read_text(encoding="utf-8").replace("=", " ") for link in links]
    known = set[str]().union(*map(read_figures, records))
    for link in re.findall(r"\]\(([^)#]+\.json)\)", prose):
        record = json.loads((DOCS / link).read_text(encoding="utf-8"))
        known |= {f"{ratio:.2f}" for ratio in record["ratio to plain"].values()}
    # prose may give a difference without its sign
    known |= {figure.lstrip("+-") for figure in known}
    missing = read_figures(prose) - known
    assert not missing, f"{sorted(missing)} are in none of {sorted(set(links))}"


def test_there_are_figures_to_check():
    assert len(STUDIES) == 2
    assert sum(len(read_figures(section)) for section in SECTIONS) > 40
