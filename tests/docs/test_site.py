"""The navigation of the documentation's site; `make docs` builds the site itself and runs its tutorials."""

from __future__ import annotations

import re

from docs.pages import ROOT

SETTINGS = (ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8")
LISTED = set(re.findall(r"^ +- [^:]+: (\S+\.(?:md|py))$", SETTINGS, re.MULTILINE))


def test_every_page_and_tutorial_is_in_the_navigation_of_the_site():
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    tutorials = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "tutorials").glob("*.py")}
    results = {path.relative_to(ROOT).as_posix() for path in (ROOT / "papers").glob("*/RESULTS.md")}
    assert LISTED - {"README.md", "papers/README.md"} == pages | tutorials | results


def test_nothing_of_the_site_is_fetched():
    assert "font: false" in SETTINGS
    assert "http" not in SETTINGS
