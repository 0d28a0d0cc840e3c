"""The pages a reader sees: links, code, figures that are in records, and what a program writes.

`make docs-check` runs these; they are no part of `make test`.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import headwise
from cases import cases
from heads.families import FAMILIES, REACHED
from heads.refused import REFUSED
from heads.written import WRITTEN
from report.chromium import Chromium, find_chromium

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "laboratory" / "papers").rglob("*.md")])
EXECUTED = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(?P<language>[\w-]*)[^\n]*\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)[^)]*\)")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
SETTINGS = (ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8")
README = ROOT / "README.md"
ARMS = ("plain", "scaled", "output-relative", "cka", "svgd-span", "cka-together")
# digits with a point, such as -0.327, that are no part of a word, a version or a call
FIGURE = re.compile(r"(?<![\w.(=])[-+]?\d+\.\d+(?![\w.)])")


def name_of(page: Path) -> str:
    """The page's path from the root of the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of one language: line of the first line, and text."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start("body")) + 1, match["body"])
        for match in FENCE.finditer(text)
        if match["language"] == language
    ]


def generator(name: str) -> ModuleType:
    """A module in docs/ that writes pages: its render() returns the text of its PAGE, or of each page by its path."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prose(page: Path) -> str:
    """The page without its fenced blocks and code spans."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ +(.+?)\s*$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_relative_link_leads_somewhere():
    broken = []
    for page in PAGES:
        for match in LINK.finditer(prose(page)):
            path, _, anchor = match["target"].partition("#")
            target = (page.parent / path) if path else page
            led = re.match(r"[a-z]+:", path) or (target.exists() and not (anchor and anchor not in anchors(target)))
            if not led:
                broken.append((name_of(page), match["target"]))
    assert not broken


def test_every_page_tutorial_and_example_is_reached_from_the_index_and_the_navigation_of_the_site():
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / match["target"].partition("#")[0]).resolve() for match in LINK.finditer(prose(index))}
    tutorials = {*index.parent.glob("tutorials/*.py")}
    expected = {*index.parent.rglob("*.md"), *tutorials, *ROOT.glob("examples/*.py")} - {index}
    assert not expected - linked, [name_of(page) for page in sorted(expected - linked)]
    listed = {ROOT / name for name in re.findall(r"^ +- [^:]+: (\S+\.(?:md|py))$", SETTINGS, re.MULTILINE)}
    results = {*(ROOT / "laboratory" / "papers").glob("*/RESULTS.md")}
    assert listed - {README, ROOT / "laboratory/papers/README.md"} == {*index.parent.glob("*.md")} | tutorials | results


def test_every_make_target_that_is_named_exists_and_every_fence_says_its_language():
    targets = set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE))
    named = {
        (name_of(page), target)
        for page in PAGES
        for target in re.findall(r"(?:^|`)make ([a-z][\w-]*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert not {(page, target) for page, target in named if target not in targets}
    assert not [name_of(page) for page in PAGES if blocks(page, "")]


@cases("page", [page for page in EXECUTED if page == README or blocks(page, "python")])
def test_every_python_block_of_a_page_runs_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "__page__"}
    for line, text in blocks(page, "python"):
        # blank lines before the code make a traceback name the line of the page
        exec(compile("\n" * (line - 1) + text, str(page), "exec"), namespace)


def test_a_written_page_is_up_to_date_and_written_by_make():
    names = sorted(path.stem for path in (ROOT / "docs").glob("generate_*.py"))
    assert names
    assert all(f"docs/{name}.py" in MAKEFILE for name in names)
    old = []
    for module in map(generator, names):
        made = module.render()
        pages = made if isinstance(made, dict) else {module.PAGE: made}
        old += [name_of(page) for page, text in pages.items() if page.read_text(encoding="utf-8") != text]
    assert not old, f"{old}: run `make api` and look at the change."


def test_every_public_name_is_on_the_page_with_a_sentence():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    public = [name for name in headwise.__all__ if not name.startswith("_")]
    assert not [name for name in public if not re.search(rf"^\| `hw\.{name}` \| \S.+ \|$", page, re.MULTILINE)]
    assert not [line for line in page.splitlines() if line.endswith("|  |")]


def test_every_family_form_and_refusal_has_a_row_that_says_what_is_reached():
    lines = generator("generate_any_model").PAGE.read_text(encoding="utf-8").splitlines()
    named = [entry.name for entry in (*FAMILIES, *WRITTEN, *REFUSED)]
    assert not [name for name in named if sum(line.startswith(f"| {name} |") for line in lines) != 1]
    rows = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in lines}
    wrong = [one.name for one in FAMILIES if (rows[one.name][4] == "yes") != (one in REACHED)]
    assert not wrong


def test_the_table_of_costs_has_the_figures_of_its_record():
    page = generator("generate_pages")
    now = page.read(page.NOW)
    assert f"{now['python']['microseconds per layer']['svgd']:.0f} us" in page.make_table(now, now)
    now["bytes"]["rows"]["svgd, 54 groups"]["times the floor"] = 123.4
    assert "123.4 times" in page.make_table(now, now)


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


def split_page(name: str) -> list[str]:
    return re.split(r"^## ", (ROOT / "docs" / name).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]


def read_figures(text: str) -> set[str]:
    return set(FIGURE.findall(re.sub(r"version \d+\.\d+", "", text.replace("\N{MINUS SIGN}", "-"))))


def test_every_figure_is_in_a_record_that_its_section_names():
    titles = {"shrinking.md": "Do diverse heads prune better?", "lm.md": "What was found"}
    studies = [part for page, title in titles.items() for part in split_page(page) if part.startswith(title)]
    titles = ("Does it help?", "The three papers")
    studies += [part.replace("](", "](../") for part in split_page("../README.md") if part.startswith(titles)]
    assert len(studies) == 4
    missing, seen = [], 0
    for section in (*split_page("which-method.md"), *split_page("results.md"), *studies):
        text = re.sub(r"```.*?```", "", section, flags=re.DOTALL)
        links = re.findall(r"\]\(([^)#]+\.md)\)", text)
        # settings of arms, as in ratio=0.113, may be named in prose
        known = {
            one for link in links for one in read_figures((ROOT / "docs" / link).read_text("utf-8").replace("=", " "))
        }
        for link in re.findall(r"\]\(([^)#]+\.json)\)", text):
            record = json.loads((ROOT / "docs" / link).read_text(encoding="utf-8"))
            known |= {f"{ratio:.2f}" for ratio in record["ratio to plain"].values()}
        # prose may give a difference without its sign
        known |= {figure.lstrip("+-") for figure in known}
        missing += [(section[:40], figure, links) for figure in sorted(read_figures(text) - known)]
        seen += len(read_figures(section))
    assert not missing
    assert seen > 40


def test_each_number_of_the_table_of_shrinking_is_the_records():
    page = (ROOT / "docs" / "shrinking.md").read_text(encoding="utf-8")
    rows = re.search(r"^\| task \|.*?\n\n", page, re.MULTILINE | re.DOTALL)[0].splitlines()[2:-1]
    assert len(rows) == 5
    for place, row in enumerate(rows):
        title, *shown = row.strip("| ").split(" | ")
        merged = "merged" in title
        # what is merged are the heads of the row above
        (link,) = re.findall(r"\((\S+)\.md\)", rows[place - 1] if merged else title)
        grids = json.loads((ROOT / "docs" / f"{link}.json").read_text(encoding="utf-8"))["grids"]
        grid = next(grid for grid in grids if grid["title"].startswith("loss on the test set"))
        column = grid["header"].index("50% of key/value heads" if merged else "50% of heads")
        kept = {row[0]: row[column]["value"] for row in grid["rows"]}
        assert [number.strip("*") for number in shown] == [f"{kept[arm]:.3f}" for arm in ARMS], title
