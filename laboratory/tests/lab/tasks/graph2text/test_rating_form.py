"""The form for raters in a browser: it is answered, remembered and saved, and texts stay text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwise_lab.tasks.graph2text.ratings import CRITERIA, Item, read_ratings, write_rating
from report.chromium import Chromium, find_chromium

HOSTILE = "</script><img src=x onerror=\"document.title='broken'\"><b>"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chromium]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium: name one with HEADWISE_CHROMIUM")
    with Chromium(program, tmp_path / "profile") as found:
        found.look()
        yield found


def items() -> list[Item]:
    return [
        Item(
            number,
            f"Title {HOSTILE}",
            (f"(a, USED-FOR, {HOSTILE})",),
            ("a (method)",),
            HOSTILE,
            (f"mine {HOSTILE}", "theirs"),
        )
        for number in range(3)
    ]


def test_a_rater_answers_goes_on_and_saves(browser: Chromium, tmp_path: Path):
    form, key = write_rating(tmp_path, items(), (tmp_path, tmp_path), ("mine", "theirs"), count=3, seed=0)
    browser.open(form)
    assert browser.run("document.images.length") == 0
    assert browser.run("document.title") == "Which text is better?"
    # what the button would hand to the browser is kept, as a page has no other way to show it
    browser.run("window.kept = []; window.Made = Blob")
    browser.run("window.Blob = function (parts) { kept.push(parts[0]); return new Made(parts); }")
    browser.run("document.getElementById('save').click()")
    assert "name" in browser.run("document.querySelector('.said').textContent")
    browser.run("const r = document.getElementById('rater'); r.value = 'Ann'; r.dispatchEvent(new Event('input'))")
    for _ in range(3):
        mine = "[...document.querySelectorAll('.pair .text')].findIndex((e) => e.textContent.includes('mine'))"
        side = "AB"[browser.run(mine)]
        for name, _ in CRITERIA:
            browser.run(f"document.querySelector('input[name={name}][value={side}]').click()")
        browser.run("document.getElementById('next').click()")
    assert browser.run("document.querySelector('.said').textContent") == "3 of 3 texts rated"
    browser.run("document.getElementById('back').click()")
    assert browser.run("document.querySelectorAll('input:checked').length") == 4
    browser.run("document.getElementById('save').click()")
    saved = tmp_path / "ratings-Ann.json"
    saved.write_text(browser.run("kept[kept.length - 1]"), encoding="utf-8")
    assert json.loads(saved.read_text())["rater"] == "Ann"
    assert read_ratings(key, [saved]).shares("overall") == {"win": 1, "lose": 0, "tie": 0}
    assert browser.said == []


@pytest.mark.parametrize("width", [1280, 390])
def test_the_form_fits_its_window(browser: Chromium, tmp_path: Path, width: int):
    form, _ = write_rating(tmp_path, items(), (tmp_path, tmp_path), ("mine", "theirs"), count=3, seed=0)
    browser.look(width=width)
    browser.open(form)
    assert browser.run("document.documentElement.scrollWidth") <= width
