from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.pages import FENCE, PAGES, name_of, prose

LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)[^)]*\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ +(.+?)\s*$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_leads_somewhere(page: Path):
    broken = []
    for match in LINK.finditer(prose(page)):
        path, _, anchor = match["target"].partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = (page.parent / path) if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(match["target"])
    assert not broken


def test_every_page_tutorial_and_example_is_reached_from_the_index_of_the_documentation():
    index = next(page for page in PAGES if name_of(page) == "docs/index.md")
    linked = {(index.parent / match["target"].partition("#")[0]).resolve() for match in LINK.finditer(prose(index))}
    scripts = [*index.parent.glob("tutorials/*.py"), *index.parents[1].glob("examples/*.py")]
    expected = {*index.parent.rglob("*.md"), *scripts} - {index}
    assert not expected - linked, [name_of(page) for page in sorted(expected - linked)]
