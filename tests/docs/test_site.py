"""The navigation of the documentation's site; `make docs` builds the site itself and runs its tutorials."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.pages import ROOT
from report.chromium import Chromium, find_chromium

SETTINGS = (ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8")
LISTED = set(re.findall(r"^ +- [^:]+: (\S+\.(?:md|py))$", SETTINGS, re.MULTILINE))


def test_every_page_and_tutorial_is_in_the_navigation_of_the_site():
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    tutorials = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "tutorials").glob("*.py")}
    results = {path.relative_to(ROOT).as_posix() for path in (ROOT / "laboratory" / "papers").glob("*/RESULTS.md")}
    assert LISTED - {"README.md", "laboratory/papers/README.md"} == pages | tutorials | results


def test_nothing_of_the_site_is_fetched():
    assert "font: false" in SETTINGS
    assert "http" not in SETTINGS


def test_a_page_from_disk_hears_a_script_that_runs_in_place_of_a_worker(tmp_path: Path):
    program = find_chromium()
    if program is None:
        pytest.skip("no chromium on the path; install Debian's, or name one in HEADWISE_CHROMIUM")
    (tmp_path / "shim.js").write_text((ROOT / "docs" / "iframe-worker.js").read_text())
    (tmp_path / "double.js").write_text('addEventListener("message", (event) => postMessage(2 * event.data));')
    (tmp_path / "page.html").write_text("""<!doctype html><script src="shim.js"></script><body><script>
const worker = new Worker("double.js"), missing = new Worker("none.js"), heard = [];
worker.addEventListener("message", (event) => heard.push(event.data));
missing.addEventListener("error", (event) => heard.push(event.message));
worker.postMessage(3);
addEventListener("load", () => setTimeout(() => worker.postMessage(5), 50));
</script>""")
    with Chromium(program, tmp_path / "profile") as browser:
        browser.open(tmp_path / "page.html")
        browser.run("new Promise((resolve) => setTimeout(resolve, 500))")
        for _ in range(200):
            if len(heard := browser.run("heard")) == 3:
                break
        assert sorted(map(str, heard)) == ["10", "6", "none.js was not loaded"]
