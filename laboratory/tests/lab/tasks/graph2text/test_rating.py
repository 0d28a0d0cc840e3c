"""Ratings of two runs' texts: the form and how it is used in a browser, its key, and what the saved files count."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwise.errors import DataError
from headwise_lab.experiment import run_folder
from headwise_lab.tasks.graph2text.ratings import (
    CRITERIA,
    FORM,
    KEY,
    Item,
    draw_ratings,
    make_outputs_page,
    read_items,
    read_ratings,
    record_ratings,
    rows,
    write_rating,
)
from lab.command import call, refused
from lab.tasks.graph2text.graph_sets import write_triples
from lab.tasks.graph2text.rated import HOSTILE, shown, write_answers, write_pair
from report.chromium import Chromium, find_chromium


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path, Path]:
    return write_pair(tmp_path / "comparison", tmp_path / "mine.tsv")


def write_texts(pair: tuple[Path, Path, Path], place: Path, count: int = 4, seed: int = 1) -> tuple[Path, Path]:
    place.mkdir(exist_ok=True)
    one, other, data = pair
    return write_rating(place, read_items(one, other, data), (one, other), ("svgd", "plain"), count=count, seed=seed)


def favors(arm: str):
    return lambda item: "A" if item["A"].startswith(arm) else "B"


def test_the_form_is_blind_and_escaped_and_the_key_tells(pair, tmp_path):
    form, key = write_texts(pair, tmp_path / "rating", count=6)
    page = form.read_text(encoding="utf-8")
    assert HOSTILE not in page
    data, told = shown(form), json.loads(key.read_text())
    assert len(data["items"]) == 6
    assert "svgd" not in page.replace("svgd writes", "")
    assert str(pair[0].parent.parent) not in page
    assert sorted(told["sides"].values()) == ["AB"] * 3 + ["BA"] * 3
    for item in data["items"]:
        first, second = ("svgd", "plain") if told["sides"][str(item["id"])] == "AB" else ("plain", "svgd")
        assert item["A"].startswith(first)
        assert item["B"].startswith(second)
        assert item["triples"][0].startswith("(")
    assert [item["id"] for item in data["items"]] != sorted(item["id"] for item in data["items"])


def test_a_form_for_other_texts_does_not_overwrite_a_key(pair, tmp_path):
    write_texts(pair, tmp_path / "rating")
    write_texts(pair, tmp_path / "rating")
    with pytest.raises(DataError, match="belongs to other texts"):
        write_texts(pair, tmp_path / "rating", seed=2)


def test_wins_losses_and_ties_are_the_arms_on_whichever_side_it_stood(pair, tmp_path):
    form, key = write_texts(pair, tmp_path / "rating")
    files = [
        write_answers(tmp_path / "a.json", form, "Ann", favors("svgd")),
        write_answers(tmp_path / "b.json", form, "Bea", favors("svgd")),
        write_answers(
            tmp_path / "c.json", form, "Cem", lambda item: favors("plain")(item) if item["id"] % 2 else "tie"
        ),
    ]
    found = read_ratings(key, files)
    odd = sum(item["id"] % 2 for item in shown(form)["items"])
    assert found.shares("overall") == {"win": 2 / 3, "lose": odd / 12, "tie": (4 - odd) / 12}
    assert found.agreement("grammar") == pytest.approx(1 / 3)
    lead = found.lead("structure")
    assert lead.value == pytest.approx(2 / 3 - odd / 12)
    assert (lead.seeds, lead.items) == (3, 4)
    assert draw_ratings(found).rows[3][:2] == ("Overall", "67%")
    kept = json.loads(record_ratings(found).read_text())
    assert kept["numbers"]["overall_win"] == pytest.approx(200 / 3)
    assert kept["numbers"]["raters"] == 3


def test_unfinished_items_are_left_out_and_damaged_files_are_refused(pair, tmp_path):
    form, key = write_texts(pair, tmp_path / "rating")
    whole = write_answers(tmp_path / "a.json", form, "Ann", favors("svgd"))
    answers = json.loads(whole.read_text())
    del answers["answers"][0]["grammar"]
    part = tmp_path / "part.json"
    part.write_text(json.dumps({**answers, "rater": "Bea"}))
    assert len(read_ratings(key, [whole, part]).values) == 7
    with pytest.raises(DataError, match="a second file of rater Ann"):
        read_ratings(key, [whole, whole])
    for changed, said in (
        ({"set": "other"}, "rates another form"),
        ({"answers": [{"item": 999}]}, "rates no text of the form"),
        ({"answers": [{**answers["answers"][1], "overall": "C"}]}, "rated 'C'; expected A, B or tie"),
        ({"answers": []}, "no item is rated"),
    ):
        part.write_text(json.dumps({**json.loads(whole.read_text()), **changed}))
        with pytest.raises(DataError, match=said):
            read_ratings(key, [part])
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(DataError, match=r"broken\.json is not readable as JSON .*; ask the rater for the file again"):
        read_ratings(key, [tmp_path / "broken.json"])
    with pytest.raises(DataError, match=r"no-key\.json does not exist; give the rating-key\.json that headwise"):
        read_ratings(tmp_path / "no-key.json", [part])
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(DataError, match="is no file of ratings"):
        read_ratings(key, [tmp_path / "list.json"])
    with pytest.raises(DataError, match="is not the key of a rating form"):
        read_ratings(whole, [whole])


def test_the_commands_write_the_form_and_count(pair, tmp_path, capsys):
    out = tmp_path / "pages"
    run, other, data = map(str, pair)
    assert call("rate", run, other, "--data", data, "--out", str(out), "--items", "3") == 0
    answers = write_answers(tmp_path / "a.json", out / FORM, "Ann", favors("svgd"))
    page = (out / "outputs.html").read_text()
    assert HOSTILE not in page
    # all texts, however many are on the form
    fewer = tmp_path / "fewer"
    assert call("rate", run, other, "--data", data, "--out", str(fewer), "--items", "1") == 0
    assert (fewer / "outputs.html").read_text() == page
    capsys.readouterr()
    assert call("ratings", str(out / KEY), str(answers), "--record") == 0
    assert "100%" in capsys.readouterr().out
    assert run_folder.analysis_file(pair[0], "ratings").exists()
    other_data = write_triples(tmp_path / "other.tsv", 40)
    assert "was tested on other graphs" in refused(capsys, "rate", run, other, "--data", str(other_data))
    assert "holds no finished run" in refused(capsys, "rate", str(tmp_path), other, "--data", data)


def test_the_page_of_outputs_has_graph_texts_and_reference(pair):
    one, other, data = pair
    items = read_items(one, other, data)
    assert [name for name, _ in rows(items[0], ("x", "y"))] == ["Title", "Knowledge", "x", "y", "Gold"]
    page = make_outputs_page(items[:2], ("x", "y"), title="Texts").render()
    assert HOSTILE not in page
    assert "svgd writes 0" in page
    assert items[1].reference.split()[0] in page


MARKUP = "</script><img src=x onerror=\"document.title='broken'\"><b>"


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
            f"Title {MARKUP}",
            (f"(a, USED-FOR, {MARKUP})",),
            ("a (method)",),
            MARKUP,
            (f"mine {MARKUP}", "theirs"),
        )
        for number in range(3)
    ]


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.parametrize("width", [1280, 390])
def test_the_form_fits_its_window(browser: Chromium, tmp_path: Path, width: int):
    form, _ = write_rating(tmp_path, items(), (tmp_path, tmp_path), ("mine", "theirs"), count=3, seed=0)
    browser.look(width=width)
    browser.open(form)
    assert browser.run("document.documentElement.scrollWidth") <= width
