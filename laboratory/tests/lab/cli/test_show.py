"""Finished comparisons shown again without training, and comparisons as files of options."""

from __future__ import annotations

import csv
import io
import json
import shutil
import tomllib
from pathlib import Path

import pytest

from headwise_lab.cli.comparing import format_config
from headwise_lab.results.cells import NONE
from headwise_lab.results.table import read_table
from lab.command import call, refused
from lab.results.synthetic_comparison import PAPER, write_comparison
from lab.tasks.logic.logic_toy import TOY
from report.chromium import Chromium, find_chromium


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with two comparisons in "runs"."""
    monkeypatch.chdir(tmp_path)
    write_comparison(Path("runs/one"), PAPER[1:8], items=40)
    write_comparison(Path("runs/two"), PAPER[2:4], items=40, seeds=(0, 1))
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_one_comparison_is_shown_whole_and_several_side_by_side(capsys):
    assert call("show", "runs/one") == 0
    assert "how alike the heads are" in capsys.readouterr().out
    assert call("show", "runs") == 0
    shown = capsys.readouterr().out
    assert "how alike" not in shown
    assert "runs/one" in shown
    assert "runs/two" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.usefixtures("folder")
def test_csv_has_all_digits_and_json_the_same_rows(capsys):
    assert call("show", "runs", "--csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    table = read_table(Path("runs/one"))
    svgd = next(row for row in rows if (row["comparison"], row["arm"]) == ("runs/one", "svgd"))
    expected = table.row("svgd")
    assert expected is not None
    assert expected.to_control is not None
    assert float(svgd["difference_low"]) == expected.to_control.estimate.low
    assert float(svgd["p_holm"]) == expected.to_control.adjusted
    assert (svgd["verdict"], svgd["seeds"]) == (expected.verdict.partition(" (p")[0], "5")
    assert len(rows) == len(table.rows) + 2
    assert list(rows[0]).index("effective_heads") + 1 == list(rows[0]).index("effective_heads_weighted")
    assert call("show", "runs", "--json") == 0
    assert [row["arm"] for row in json.loads(capsys.readouterr().out)] == [row["arm"] for row in rows]


@pytest.mark.usefixtures("folder")
def test_latex_and_markdown_have_a_row_an_arm(capsys):
    assert call("show", "runs/two", "--latex") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == r"\begin{tabular}{lllrrlrrrr}"
    assert sum(line.endswith(r"\\") for line in lines) == 3
    assert r"score, \%" in lines[2]
    assert call("show", "runs/two", "--markdown") == 0
    assert "| runs/two | smooth |" in capsys.readouterr().out


@pytest.mark.usefixtures("folder")
def test_a_comparison_that_cannot_be_judged_is_named_and_the_others_are_shown(capsys):
    (Path("runs/one") / "svgd" / "seed-0" / "predictions.npz").write_bytes(b"nothing")
    assert call("show", "runs") == 0
    shown = capsys.readouterr()
    assert "smooth" in shown.out
    assert "output+em" not in shown.out
    assert "headwise: left out: runs/one/svgd/seed-0/predictions.npz" in shown.err
    assert "runs/one/svgd/seed-0/predictions.npz" in refused(capsys, "show", "runs/one", "runs/two")
    assert "runs/one/svgd/seed-0/predictions.npz" in refused(capsys, "show", "runs/one")


# ---- a comparison as a file ----

SIZES = ("--set", "width=12", "--set", "train_examples=40", "--set", "epochs=1")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: list[str]) -> list[str]:
    """An empty folder in which the demo of logic is small; the runs that were done."""
    monkeypatch.chdir(tmp_path)
    from headwise_lab.tasks.logic import task

    monkeypatch.setattr(task.LogicTask, "scales", {"demo": TOY})
    return inline


@pytest.mark.full
def test_a_comparison_writes_its_options_and_runs_again_with_changes(toy: list[str], capsys):
    asked = ("compare", "logic", "--arms", "plain", "--seeds", "1", "--workers", "1")
    assert call(*asked, "--set", "epochs=1", "--set", "train_examples=40", "--out", "first") == 0
    options = tomllib.loads(Path("first/run.toml").read_text())
    assert options["set"] == ["epochs=1", "train_examples=40"]
    assert (options["task"], options["arms"], options["seeds"], options["out"]) == ("logic", "plain", 1, "first")
    assert not toy.clear()
    # as it was: everything is finished
    assert call("compare", "--config", "first/run.toml") == 0
    assert toy == []
    assert call("compare", "--config", "first/run.toml", "--set", "epochs=2", "--seeds", "2", "--out", "next") == 0
    assert toy[-1] == "plain seed 1"
    changed = tomllib.loads(Path("next/run.toml").read_text())
    assert changed["set"] == ["epochs=2", "train_examples=40"]
    assert (changed["seeds"], changed["arms"]) == (2, "plain")
    capsys.readouterr()
    # another comparison in the same folder is refused, and its options stay
    assert "choose another --out" in refused(capsys, "compare", "--config", "first/run.toml", "--set", "epochs=3")
    assert tomllib.loads(Path("first/run.toml").read_text()) == options


def test_any_text_survives_toml():
    options = {"arms": 'svgd:alpha=0.5,"x\\', "data": Path("Ä/\U0001f600\n"), "set": ["a=1"], "controls": True}
    assert tomllib.loads(format_config(options)) == options | {"data": str(options["data"])}


def test_a_reporter_that_is_missing_is_refused(toy, capsys, monkeypatch):  # noqa: ARG001
    few = ("compare", "logic", "--arms", "plain", "--seeds", "1")
    monkeypatch.setattr("headwise_lab.compare.importlib.util.find_spec", lambda _name: None)
    assert "report_to is wandb, which is not installed; pip install wandb" in refused(
        capsys, *few, "--report-to", "wandb"
    )


@pytest.mark.full
def test_epochs_are_lines_of_the_log_and_written_for_tensorboard(toy):  # noqa: ARG001
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    few = ("--arms", "svgd:alpha=1", "--seeds", "1", "--workers", "1", "--set", "epochs=3", "--out", "o")
    assert call("compare", "logic", *few) == 0
    run = Path("o/svgd@alpha=1.0/seed-0")
    events = EventAccumulator(str(run / "events"))
    events.Reload()
    epochs = [json.loads(line) for line in (run / "epochs.jsonl").read_text().splitlines()]
    lines = (run / "log.txt").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["epoch 1", "epoch 2", "epoch 3"]
    assert f"train_loss {epochs[1]['train_loss']:.4g}, dev/pooled {epochs[1]['dev']['pooled']:.4g}" in lines[1]
    curve = [scalar.value for scalar in events.Scalars("train/dev/pooled")]
    assert curve == pytest.approx([epoch["dev"]["pooled"] for epoch in epochs])
    assert len(curve) == 3
    assert len(events.Scalars("train/force_ratio")) == 3
    # the events are no part of what is sealed
    shutil.rmtree(run / "events")
    assert call("show", "o") == 0


@pytest.mark.usefixtures("folder")
def test_a_page_of_several_comparisons_is_written_with_every_row_and_only_its_own_script(capsys):
    assert call("show", "runs", "--csv", "--page", "runs.html") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    html = Path("runs.html").read_text(encoding="utf-8")
    data = json.loads(html.partition('id="runs-data">')[2].partition("</script>")[0])
    assert [column["name"] for column in data["columns"]][:3] == ["arm", "verdict", "comparison"]
    assert [row["text"][0] for row in data["rows"]] == [row["arm"] for row in rows]
    place = [column["name"] for column in data["columns"]].index("difference, points")
    assert [row["keys"][place] for row in data["rows"]] == [
        float(row["difference"]) if row["difference"] else None for row in rows
    ]
    assert "script-src 'sha256-" in html
    assert "http" not in html.replace("http-equiv", "")


@pytest.mark.full
@pytest.mark.usefixtures("folder")
def test_a_click_on_a_heading_sorts_the_page_and_words_filter_it(tmp_path: Path):
    program = find_chromium()
    if program is None:
        pytest.skip("no chromium on the path; install Debian's, or name one in HEADWISE_CHROMIUM")
    assert call("show", "runs", "--page", "runs.html", "--csv") == 0
    with Chromium(program, tmp_path / "profile") as browser:
        browser.look(width=390)
        browser.open(Path("runs.html"))

        def column(name: str) -> list[str]:
            return browser.run(
                "(() => { const place = [...document.querySelectorAll('#runs thead th')]"
                f".findIndex((e) => e.textContent === {name!r});"
                " return [...document.querySelectorAll('#runs tbody tr')].map((e) => e.cells[place].textContent); })()"
            )

        def click(name: str) -> None:
            browser.run(
                f"[...document.querySelectorAll('#runs th button')].find((e) => e.textContent === {name!r}).click()"
            )

        def read(texts: list[str]) -> list[float]:
            return [float(text.partition(" (")[0].replace("\N{MINUS SIGN}", "-")) for text in texts]

        every = column("arm")
        for descending in (False, True):
            click("difference, points")
            cells = column("difference, points")
            numbers = read([cell for cell in cells if cell != NONE])
            assert numbers == sorted(numbers, reverse=descending)
            assert len(set(numbers)) > 2
            assert set(cells[len(numbers) :]) == {NONE}
        browser.run(
            "(() => { const field = document.getElementById('filter'); field.value = 'SMOOTH runs/two';"
            " field.dispatchEvent(new Event('input')); })()"
        )
        kept = column("arm")
        assert 0 < len(kept) < len(every)
        assert set(column("comparison")) == {"runs/two"}
        assert all("smooth" in arm for arm in kept)
        assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
        assert not browser.said
