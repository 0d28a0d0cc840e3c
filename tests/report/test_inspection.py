from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cases import cases
from headwise.errors import SettingError
from headwise.metrics.intervals import Interval
from headwise.report.html import Page
from headwise.report.inspection import Sentence, make_inspection_page
from headwise.report.layer import LayerReport
from headwise.report.report import Report
from report.chromium import Chromium, find_chromium

HOSTILE = (
    "</script><img src=x onerror=\"document.title='broken'\">",
    "<!--<script>",
    "&lt;b&gt;",
    "\u2028",
    "'\"` ${1}",
)


def layer(number: int, heads: int) -> LayerReport:
    matrix = tuple(tuple(1.0 if i == j else 0.1 * (i + j) - 0.2 for j in range(heads)) for i in range(heads))
    return LayerReport(
        site=f"layers.{number}",
        kind="self",
        stack="layers",
        layer=number,
        heads=heads,
        pairs={"output_cosine": matrix, "attention_js": matrix},
        entropy=(1.0,) * heads,
        drops=tuple(Interval(0.02 * head - 0.01, 0.02 * head - 0.02, 0.02 * head) for head in range(heads)),
        roles=((0.5, 0.25, 0.125, 0.0625)[:heads],),
        chance=(0.2,),
    )


def grouped(number: int) -> LayerReport:
    """A layer of four query heads with two key/value heads."""
    found = layer(number, 4)
    return replace(found, pairs={**found.pairs, "value_cosine": ((1.0, 0.25), (0.25, 1.0))})


REPORT = Report(
    "Encoder",
    1,
    9,
    (layer(0, 2), layer(1, 3), grouped(2)),
    "accuracy",
    7,
    Interval(0.9, 0.8, 1.0),
    True,
    ("<i>role</i>",),
    ("a <note>",),
)


def sentences() -> list[Sentence]:
    weights = []
    for heads in (2, 3):
        rows = torch.full((heads, 5, 5), 0.1)
        for head in range(heads):
            rows[head, :, head] = 0.6
        weights.append(rows)
    return [Sentence(HOSTILE, (*weights, None)), Sentence(("one", "two"), (None, torch.full((3, 2, 2), 0.5), None))]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "heads.html"
    make_inspection_page(REPORT, sentences(), title="Heads <of> a model").write(path)
    return path


@pytest.fixture
def browser(page: Path, tmp_path: Path):
    program = find_chromium()
    if program is None:
        pytest.skip("no chromium on the path; install Debian's, or name one in HEADWISE_CHROMIUM")
    with Chromium(program, tmp_path) as opened:
        opened.look()
        opened.open(page)
        yield opened


def pick(browser: Chromium, name: str, value: str) -> None:
    browser.run(
        f"(() => {{ const found = document.getElementById('pick-{name}'); found.value = {value!r};"
        " found.dispatchEvent(new Event('change')); })()"
    )


def texts(browser: Chromium, selector: str) -> list[str]:
    return browser.run(f"[...document.querySelectorAll('#inspection {selector}')].map((e) => e.textContent)")


def test_no_text_of_the_data_can_end_its_block_and_only_the_pages_script_may_run(page: Path):
    html = page.read_text(encoding="utf-8")
    (block,) = [part for part in html.split("<script") if part.startswith(' type="application/json"')]
    assert "<" not in block.partition(">")[2].partition("</script>")[0]
    assert html.count("<script") == html.count("</script>") == 2
    assert "script-src 'sha256-" in html
    assert "unsafe-eval" not in html
    assert "script-src 'unsafe-inline'" not in html
    assert "<of>" not in html
    assert "<note>" not in html


def test_weights_of_another_shape_are_refused():
    wrong = Sentence(("one", "two"), (torch.ones(2, 3, 3), None, None))
    with pytest.raises(SettingError, match=r"weights of layers\.0 have shape \(2, 3, 3\); expected \(2, 2, 2\)"):
        make_inspection_page(REPORT, [wrong])
    with pytest.raises(SettingError, match="weights of 1 layers"):
        make_inspection_page(REPORT, [Sentence(("one",), (None,))])


@pytest.mark.full
def test_hostile_tokens_stay_text_in_a_browser(browser: Chromium):
    assert texts(browser, ".token") == list(HOSTILE)
    assert browser.run("document.title") == "Heads <of> a model"
    assert browser.run("document.images.length") == 0
    assert browser.run("document.scripts.length") == 2
    assert browser.said == []


@pytest.mark.full
def test_a_reader_picks_layer_head_sentence_and_token(browser: Chromium):
    shares = "[...document.querySelectorAll('#inspection .token')].map((e) => e.style.getPropertyValue('--share'))"
    # the square root of a share of 0.6
    assert browser.run(shares)[0] == "62%"  # head 0 looks at the first token
    pick(browser, "head", "1")
    assert browser.run(shares).index("62%") == 1
    browser.run("document.querySelectorAll('#inspection .token')[2].click()")
    assert browser.run("document.querySelectorAll('#inspection .token')[2].getAttribute('aria-pressed')") == "true"
    assert HOSTILE[2] in texts(browser, ".said")[1]
    pick(browser, "sentence", "1")
    assert texts(browser, ".said")[1] == "The attention weights of this layer cannot be read."
    pick(browser, "layer", "1")
    assert texts(browser, ".token") == ["one", "two"]
    assert len(texts(browser, "#pick-head option")) == 3
    assert browser.said == []


@pytest.mark.full
def test_similarity_worth_and_roles_are_those_of_the_report(browser: Chromium):
    pick(browser, "layer", "1")
    cells = texts(browser, "table.matrix td")
    assert cells == ["", "\N{MINUS SIGN}0.10", "0.00", "\N{MINUS SIGN}0.10", "", "0.10", "0.00", "0.10", ""]
    bars = texts(browser, ".bars button")
    assert bars == ["head 0\N{MINUS SIGN}0.0100", "head 1+0.0100", "head 2+0.0300"]
    browser.run("document.querySelector('#inspection .bars [data-head=\"2\"]').click()")
    assert browser.run("document.getElementById('pick-head').value") == "2"
    assert browser.run("document.activeElement.dataset.head") == "2"
    assert texts(browser, ".bars div")[-1] == "<i>role</i>13 % (20 %)"


@pytest.mark.full
def test_the_map_of_all_heads_comes_first_on_one_scale_and_selects_a_head(browser: Chromium):
    assert browser.run("document.querySelector('#inspection').firstChild.querySelector('.map') !== null")
    cells = "[...document.querySelectorAll('#inspection button.cell')]"
    shares = f"{cells}.map((e) => (e.className === 'cell' ? '' : '-') + e.style.getPropertyValue('--share'))"
    # costs of -0.01, 0.01, 0.03 and 0.05, whatever the page's largest is
    assert browser.run(shares) == ["-70%", "70%", "-70%", "70%", "100%", "-70%", "70%", "100%", "100%"]
    browser.run(f"{cells}[4].click()")
    assert [browser.run(f"document.getElementById('pick-{name}').value") for name in ("layer", "head")] == ["1", "2"]
    assert browser.run("document.activeElement.title") == "layer 1, head 2: +0.0300 (+0.0200 to +0.0400)"


@pytest.mark.full
def test_under_grouped_queries_the_key_value_head_that_a_head_reads_is_marked(browser: Chromium):
    pick(browser, "layer", "2")
    titles = "[...document.querySelectorAll('#inspection h3')].map((e) => e.textContent)"
    marked = "[...document.querySelectorAll('#inspection table.matrix td')].map((e) => e.className === 'picked')"
    assert "Similarity of heads" in browser.run(titles)
    pick(browser, "measure", "value_cosine")
    assert "Similarity of key/value heads" in browser.run(titles)
    for head, expected in ((1, [True, True, True, False]), (2, [False, True, True, True])):
        pick(browser, "head", str(head))
        assert browser.run(marked) == expected


@pytest.mark.full
@cases(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_the_page_fits_its_window(browser: Chromium, page: Path, width: int, dark: bool):
    browser.look(width=width, height=1000, dark=dark)
    browser.open(page)
    assert browser.run("document.documentElement.scrollWidth") <= width
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) < 128 * 3) == dark
    picture = browser.picture()
    assert struct.unpack(">II", picture[16:24]) == (width, 1000)


def test_a_table_with_long_texts_fits_a_narrow_window_and_its_cells_name_their_columns(browser: Chromium, tmp_path):
    page = Page("Claims")
    page.table(["claim", "here", "difference"], [["Heads differ.", "seed by seed, " * 9, "+0.1"]], align="llr")
    page.table(["arm", "score"], [["plain", "98.1"]])
    page.write(tmp_path / "claims.html")
    browser.look(width=390)
    browser.open(tmp_path / "claims.html")
    top = "[...document.querySelectorAll('.blocks tbody tr > *')].map((e) => e.getBoundingClientRect().top)"
    claim, here, difference = browser.run(top)
    assert claim < difference < here
    assert browser.run("document.querySelector('.blocks').scrollWidth") <= 390
    assert browser.run("document.querySelector('.blocks td').dataset.label") == "here"
    assert browser.run("document.querySelectorAll('table:not(.blocks)').length") == 1
    browser.look(width=1280)
    claim, here, difference = browser.run(top)
    assert claim == here == difference
