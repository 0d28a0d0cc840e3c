"""The pages a reader sees: links lead somewhere, code runs, and what a program writes is what it writes now."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import headwise
from docs.pages import EXECUTED, FENCE, PAGES, ROOT, blocks, generator, name_of, prose
from heads.families import FAMILIES, REACHED
from heads.refused import REFUSED
from heads.written import WRITTEN
from report.chromium import Chromium, find_chromium

LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)[^)]*\)")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
SETTINGS = (ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8")
README = ROOT / "README.md"
# They read every record, and build every family.
SLOW_GENERATORS = ("generate_any_model", "generate_pages")
# Pages whose blocks take more than a second.
SLOW_PAGES = {"any-model.md", "gpu.md", "measure.md", "strength.md"}


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


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.full] if page.name in SLOW_PAGES else [])
        for page in EXECUTED
        if page == README or blocks(page, "python")
    ],
    ids=name_of,
)
def test_every_python_block_of_a_page_runs_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "__page__"}
    for line, text in blocks(page, "python"):
        # blank lines before the code make a traceback name the line of the page
        exec(compile("\n" * (line - 1) + text, str(page), "exec"), namespace)
    if page == README:
        printed, shown = capsys.readouterr().out, [text for _, text in blocks(page, "text")]
        assert shown
        assert [text for text in shown if text not in printed] == []


def test_the_page_of_public_names_is_up_to_date_and_every_generator_is_run_by_make():
    names = {path.stem for path in (ROOT / "docs").glob("generate_*.py")}
    assert names == {"generate_api", *SLOW_GENERATORS}
    assert all(f"docs/{name}.py" in MAKEFILE for name in names)
    require_up_to_date(generator("generate_api"))


@pytest.mark.full
@pytest.mark.parametrize("name", SLOW_GENERATORS)
def test_a_page_of_records_or_families_is_up_to_date(name: str):
    require_up_to_date(generator(name))


def require_up_to_date(module: ModuleType) -> None:
    made = module.render()
    pages = made if isinstance(made, dict) else {module.PAGE: made}
    old = [name_of(page) for page, text in pages.items() if page.read_text(encoding="utf-8") != text]
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
