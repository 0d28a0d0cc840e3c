"""The grids of a comparison in a terminal, in Markdown and on its page, and its record."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from headwise.report.html import Page
from headwise_lab.experiment.run_folder import write_json
from headwise_lab.results.cells import NONE, Grid, show_percent
from headwise_lab.results.figures import Picture
from headwise_lab.results.grids import (
    bins_grid,
    cost_grid,
    diversity_grid,
    head_grids,
    list_grids,
    paired_grids,
    plain_grid,
    render_terminal,
    signature_grid,
    verdict_grid,
)
from headwise_lab.results.pages import fill_page, format_setting, write_headline, write_title
from headwise_lab.results.statistics import Estimate, Judgement, PairedTests, SystemTest
from headwise_lab.results.table import Table, make_record, make_table, read_table
from lab.results.synthetic_comparison import PAPER, Drawn, change, write_comparison, write_head_costs

HOSTILE = "[red]a|b[/red] <script>alert(1)</script> *c* `d` \"'&"
PICTURE = Picture("score-by-difficulty", b"\x89PNG\r\n\x1a\n" + bytes(20), "A caption.", "An alternative.")


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Table:
    return read_table(write_comparison(tmp_path_factory.mktemp("comparison"), items=40))


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Table:
    folder = tmp_path_factory.mktemp("wide")
    return read_table(write_comparison(folder, PAPER[:5], items=10, bins=range(1, 13), seeds=(0, 1)))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Table:
    arms = [PAPER[2], Drawn(HOSTILE, "plain", 0.3, force=0.3)]
    return read_table(write_comparison(tmp_path_factory.mktemp("hostile"), arms, items=10, seeds=(0, 1)))


def shown_at(width: int, shown: RenderableType) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def printed(table: Table, width: int) -> str:
    return shown_at(width, render_terminal(table))


def test_each_grid_has_a_row_an_arm_and_its_markdown_as_many_cells_as_columns(table):
    for grid in list_grids(table):
        assert all(len(row) == len(grid.header) == len(grid.align) for row in grid.text)
        lines = [line.replace(r"\|", "") for line in grid.to_markdown().splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) == 1
    for grid in (verdict_grid(table), bins_grid(table)):
        assert [row[0] for row in grid.text] == [row.arm for row in table.rows]
    for grid in (diversity_grid(table), cost_grid(table)):
        assert [row[0] for row in grid.text] == [row.arm for row in table.arms]
    assert cost_grid(table).header == ("arm", "params", "step\ntime")
    assert signature_grid(table) not in list_grids(table)
    assert "output" not in [row[0] for row in plain_grid(table).text]


def test_what_a_task_shows_of_its_answers_stands_beside_the_cost_with_the_better_side(tmp_path):
    shown = [
        {"kind": "Measure", "key": "chrF", "name": "chrF", "unit": "", "better": "higher"},
        {"kind": "Measure", "key": "seconds", "name": "decoding", "unit": "s", "better": "lower"},
    ]
    out = write_comparison(tmp_path, PAPER[1:4], items=10, seeds=(0, 1))
    change(out / "comparison.json", shown=shown)
    for number, path in enumerate(sorted(out.glob("*/seed-*/result.json"))):
        answers = {"chrF": 40.0 + number} | ({} if "counts" in str(path) else {"seconds": 3.26})
        change(path, answers=answers, signatures={"chrF": "nc:6|version:2.6.0"})
    table = read_table(out)
    assert cost_grid(table).header == ("arm", "chrF ↑", "decoding, s ↓", "params", "step\ntime")
    assert cost_grid(table).text[0] == ("counts", "40.0", NONE, NONE, NONE)
    assert cost_grid(table).text[1][:4] == ("plain", "41.5", "3.3", "181,319")
    assert signature_grid(table).text == (("chrF", "nc:6|version:2.6.0"),)
    assert signature_grid(table) in list_grids(table)
    assert "nc:6|version:2.6.0" in printed(table, 80)
    rows = make_record(table)["rows"]
    assert rows[1]["answered"] == {"chrF": 41.5, "seconds": 3.26}
    assert [run["answered"]["chrF"] for run in rows[1]["runs"]] == [41.0, 42.0]


def test_cells_say_what_the_table_says(table):
    row, grid = table.row("svgd:alpha=30"), verdict_grid(table)
    cells = dict(zip(grid.header, next(cells for cells in grid.text if cells[0] == row.arm), strict=True))
    assert list(cells)[:5] == ["arm", "verdict", "p", "difference,\npoints", "to"]
    judgement = row.to_control
    assert cells["verdict"] == row.verdict.partition(" (p")[0]
    assert (cells["p"], cells["to"], cells["seeds"]) == (f"{judgement.adjusted:.3f}", "smooth", "5")
    low, high = (f"{100 * one:.1f}" for one in (row.score.low, row.score.high))
    assert cells["accuracy,\n%"] == f"{100 * row.score.value:.1f} ({low} to {high})"
    ends = (judgement.estimate.low, judgement.estimate.value, judgement.estimate.high)
    low, value, high = (f"{100 * one:+.1f}".replace("-", "\N{MINUS SIGN}") for one in ends)
    assert low.startswith("\N{MINUS SIGN}")
    assert cells["difference,\npoints"] == f"{value} ({low} to {high})"
    detectable = f"{100 * judgement.detectable:.1f} to {100 * judgement.detectable_in_family:.1f}"
    assert cells["detectable"] == detectable


def test_paired_tests_of_the_arms_and_seeds_shown_stand_in_order_and_the_verdict_beside_the_tables_metric(table):
    each = tuple(SystemTest("", score, 30.0, p, 0.2) for score, p in ((31.0, 0.02), (28.0, 0.04), (35.0, 0.001)))
    tests = [PairedTests(arm, "plain", "chrF", (0, 1, 9), each) for arm in ("trunk", "output", "nobody")]
    tests += [replace(one, metric="accuracy") for one in tests]
    found = make_table(replace(table.results, paired=tuple(tests)))
    chrf, accuracy = paired_grids(found)
    rows = [(arm, "2", "\N{MINUS SIGN}0.5", "1, 1", "0.020 to 0.040", "0.200") for arm in ("output", "trunk")]
    assert [tuple(row) for row in chrf.text] == rows
    assert [tuple(row) for row in accuracy.text] == [(*row, found.row(row[0]).verdict) for row in rows]
    assert "would another sample of sentences reverse" in fill_page(Page("t"), found, ()).render()


def test_a_narrow_interval_has_as_many_decimals_as_tell_its_ends_apart():
    narrow = Estimate((0.00021, 0.00024, 0.00026, 0.00024))
    assert str(show_percent(narrow, signed=True)) == "+0.024 (+0.020 to +0.027)"
    assert str(show_percent(narrow)) == "0.024 (0.020 to 0.027)"
    assert str(show_percent(Estimate((0.021, 0.024, 0.029, 0.024)), signed=True)) == "+2.5 (+1.9 to +3.0)"


def test_bins_of_few_test_items_are_hidden_and_named(table):
    few = replace(table, items=(40, 7, 40))
    assert bins_grid(few).header == ("arm", "1", "3")
    assert bins_grid(few).text[0][2] == bins_grid(table).text[0][3]
    said = " ".join(printed(few, 80).split())
    assert "Not shown by number of operators, with fewer than 20 test items: 2 (7)." in said
    assert "Test items: by number of operators: 40 of 1, 7 of 2, 40 of 3." in fill_page(Page("t"), few, ()).render()
    # where nothing could be read, nothing is hidden
    assert bins_grid(replace(table, items=(4, 7, 4))).header == ("arm", "1", "2", "3")


def test_a_repulsion_that_drowns_the_gradient_is_flagged(table):
    assert "!" not in str(diversity_grid(table).text)
    svgd = table.row("svgd")
    strong = replace(table, rows=(table.rows[2], replace(svgd, measures=svgd.measures | {"force_ratio": 12.5})))
    assert diversity_grid(strong).text[1][-1] == "12.5 !"
    assert "!: a force ratio above 10" in printed(strong, 80)


def test_every_block_of_a_narrow_terminal_begins_with_the_columns_that_name_a_row():
    grid = Grid.of(
        "t", {"run": ["a", "a"], "arm": ["plain", "cka"], **{str(n): ["1" * 20] * 2 for n in range(4)}}, keys=2
    )
    rows = [line for line in shown_at(50, grid).splitlines() if "1" * 20 in line]
    assert len(rows) == 8
    assert all(row.split()[:2] in (["a", "plain"], ["a", "cka"]) for row in rows)


def test_the_terminal_form_fits_breaks_no_name_or_number_and_has_no_note_about_what_is_not_shown(table, wide):
    for shown in (table, wide):
        for width in (80, 120):
            text = printed(shown, width)
            lines = text.splitlines()
            assert max(map(len, lines)) <= width
            for row in shown.rows:
                starts = [line for line in lines if line.strip().startswith(f"{row.arm} ")]
                assert len(starts) >= 2 + (not row.baseline), row.arm
                verdict = row.verdict.partition(" (p ")[0]
                assert any(line.split()[0] == row.arm and verdict in line for line in starts), row.arm
    narrow = printed(table, 80)
    assert "181,319" in narrow
    assert f"{table.row('em').to_control.adjusted:.3f}" in narrow
    assert "Holm" in narrow
    assert "Not shown" not in narrow
    said = printed(wide, 80)
    assert "p" not in verdict_grid(wide).header
    assert "Holm" not in said
    assert "differences are in points" in " ".join(said.split())
    # many bins have no intervals in a terminal
    assert " to " not in said.split("number of operators")[1].split("how alike")[0]
    assert " to " in bins_grid(wide).text[0][1]


ARMS = ("plain", "output", "trunk:layers=0/1", "em:layers=0/1", "output+em:layers=0/1")
TASKS = ("SeLen", "WC", "Surface: mean", "BShif", "Syntactic: mean (TrDep, BShif)")


def table_7() -> Grid:
    """A grid of the form of diversify/table-7, each cell a number of its own."""
    header = ["task", "majority", *(f"{arm}, {whose}" for arm in ARMS for whose in ("paper", "here"))]
    rows = tuple(
        (task, *(f"({10 * row + column}.{row} ±{column}.{row})" for column in range(1, len(header))))
        for row, task in enumerate(TASKS, start=1)
    )
    return Grid("The paper's numbers", tuple(header), rows, "l" + "r" * (len(header) - 1))


def layers_of_twelve() -> Grid:
    """A grid of the form of a probe's by layer, of a model of twelve layers."""
    header = ("task", "classes", "majority", "emb", *map(str, range(12)), "±")
    rows = tuple((task, "1,000", *(f"({row}{column}.5)" for column in range(15))) for row, task in enumerate(TASKS[:2]))
    return Grid("accuracy by layer, %", header, rows, "l" + "r" * (len(header) - 1))


@pytest.mark.parametrize("grid", [table_7(), layers_of_twelve()], ids=lambda grid: grid.title)
def test_what_is_too_wide_stands_in_blocks_each_with_the_first_column_and_nothing_is_cut(grid):
    for width in (40, 60, 80, 100, 120, 300):
        text = shown_at(width, grid)
        lines = text.splitlines()
        assert "\u2026" not in text
        assert max(map(len, lines)) <= width
        said = " ".join(text.split())
        assert not [cell for row in grid.text for cell in row[1:] if cell not in said]
        assert not [word for name in grid.header for word in name.split() if word not in said]
        # each block has one rule, below its header
        blocks = sum("─" in line for line in lines)
        assert blocks > 1 or width in (120, 300)
        starts = Counter(line.split()[0] for line in lines if line.strip())
        assert {starts[first] for first in ("task", *(row[0].split()[0] for row in grid.text))} == {blocks}


def test_words_are_broken_only_where_the_room_is_less():
    grid = Grid("claims", ("claim", "verdict"), (("a claim of several words", "better, on average"),), "ll")
    assert all(word in shown_at(30, grid) for word in ("several", "average"))
    long = Grid("signature", ("score", "signature"), (("BLEU", "x" * 70),), "ll")
    assert "".join(shown_at(40, long).split()).count("x") == 70


def test_the_record_is_strict_json_with_a_stable_order(table, tmp_path):
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    for path in (one, other):
        write_json(path, make_record(table))
    assert one.read_bytes() == other.read_bytes()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    record = json.loads(one.read_text(), parse_constant=refuse)
    assert list(record)[:5] == ["task", "scale", "primary", "data", "seeds"]
    svgd = next(row for row in record["rows"] if row["arm"] == "svgd")
    assert svgd["to_control"]["against"] == "smooth"
    assert svgd["to_control"]["p"] <= svgd["to_control"]["p_holm"] <= 1
    assert [run["score"] for run in svgd["runs"]] == svgd["score"]["by_seed"]
    assert len(svgd["runs"]) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.json", "other.json"]


def test_names_are_broken_after_signs_and_never_inside_a_word():
    arm, verdict = "cka-target:effective_heads=5.5", "no verdict (plain is not shown to beat counts)"
    grid = Grid.of("t", {"arm": [arm], "verdict": [verdict], "points": ["+2.76 (+0.11 to +4.59)"]}, "llr")
    lines = shown_at(60, grid).splitlines()
    cells = [line.split()[0] for line in lines[-5:] if line.strip()]
    assert cells[:3] == ["cka-target:", "effective_heads=", "5.5"]
    assert "arm" in lines[2]


def test_seeds_that_were_not_asked_for_are_left_out_and_named(tmp_path):
    out = write_comparison(tmp_path, PAPER[:5], items=10, seeds=(0, 1, 2))
    few = read_table(out, (0,))
    assert {row.seeds for row in few.arms} == {(0,)}
    assert "left out here: seeds 1, 2; --seeds 3 has them too." in " ".join(printed(few, 80).split())
    assert "left out" not in printed(read_table(out), 80)


def test_the_page_leads_with_what_was_found_then_verdicts_then_the_rest(table):
    html = fill_page(Page("t"), table, [PICTURE], command="headwise compare logic --seeds 5").render()
    parts = [
        write_headline(table),
        ">Verdicts<",
        "the others against plain",
        ">Score by number of operators<",
        "data:image/png",
        ">How alike the heads are",
        ">Settings of the arms<",
        "Repel(rule=SVGD(alpha=0.004, kernel=RBF()))",
        ">How it was judged<",
        f"method over {table.row('em').to_control.family} contrasts",
        ">Made with<",
        "torch 2.13.0",
        "headwise compare logic --seeds 5",
    ]
    places = [html.index(part) for part in parts]
    assert places == sorted(places)
    assert "What each head is worth" not in html
    assert html.count(">no heads<") == 2
    apart = Judgement(Estimate((0.01, 0.02, 0.015, 0.012, -0.3)), 1, 0.9)
    noted = fill_page(Page("t"), replace(table, rows=(replace(table.row("svgd"), to_control=apart),)), ()).render()
    assert "svgd against smooth: one seed stands apart: p of flipped signs 1.000." in noted
    title = "headwise reproduce diversity/dose-logic 1x"
    assert write_title(table) == f"{len(table.arms)} arms compared on the task logic"
    assert f"<title>{title}" in fill_page(Page(title), table, ()).render()


def test_the_headline_says_who_was_better_worse_and_undecided(table):
    text = write_headline(table)
    assert text.startswith("8 ways of making heads differ on the task logic at scale demo, 5 seeds each")
    assert "120 test items" in text
    for word, sentence in (("better", "Better than the control: "), ("worse", "Worse than the control: ")):
        arms = [row.arm for row in table.rows if row.verdict.startswith(word)]
        assert bool(arms) == (sentence in text)
        assert all(arm in text.split(sentence)[1].split(". ")[0] for arm in arms)
    assert "No verdict: smooth." in text


def test_few_seeds_one_arm_plain_alone_baselines_alone_and_unfinished_runs_are_put_in_words(tmp_path):
    def read(name: str, arms: tuple[Drawn, ...], seeds: tuple[int, ...] = (0, 1)) -> Table:
        return read_table(write_comparison(tmp_path / name, arms, items=10, seeds=seeds))

    few = read("few", PAPER[2:5])
    needed = "No verdict is given (scaled not run, 2 seeds): one needs the arm's control and 5 seeds of both."
    assert write_headline(few).endswith(needed)
    assert write_headline(read("one", PAPER[2:4], (0,))).startswith(
        "1 way of making heads differ on the task logic at scale demo, 1 seed each"
    )
    alone = read("alone", PAPER[:3])
    said = "Nothing was compared with plain on the task logic at scale demo (2 seeds, 30"
    assert write_headline(alone).startswith(said)
    for found in (alone, read("baselines", PAPER[:2])):
        assert "Nothing was compared" in fill_page(Page("t"), found, ()).render()
    (tmp_path / "few" / "svgd" / "seed-1" / "result.json").unlink()
    unfinished = read_table(tmp_path / "few")
    assert "not finished: svgd seed 1" in printed(unfinished, 80)
    assert "svgd seed 1" in fill_page(Page("t"), unfinished, []).render()


def test_hostile_names_settings_and_commands_stay_text_everywhere(hostile, tmp_path):
    assert "[red]a|b[/red]" in printed(hostile, 200)
    written = "\n".join(grid.to_markdown() for grid in list_grids(hostile))
    lines = [line for line in written.splitlines() if "script" in line]
    assert lines
    for line in lines:
        assert "<script>" not in line
        assert r"\[red\]a\|b" in line
        assert line.replace(r"\|", "").count("|") in (4, 5, 7, 9)
    path = tmp_path / "report.html"
    picture = replace(PICTURE, caption=HOSTILE, alt=HOSTILE)
    fill_page(Page("t"), hostile, [picture], command=f"headwise compare logic --arms '{HOSTILE}'").write(path)
    html = path.read_text(encoding="utf-8")
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt; *c* `d` &#34;&#39;&amp;") >= 6
    assert set(re.findall(r"<(\w+)", html)) <= {
        *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "p", "div", "table", "caption"),
        *("thead", "tbody", "tr", "th", "td", "figure", "img", "figcaption", "pre", "code"),
    }


def test_records_are_printed_as_the_values_they_record():
    for record, text in (
        ({"kind": "SVGD", "alpha": {"kind": "Relative", "ratio": 0.1}}, "SVGD(alpha=Relative(ratio=0.1))"),
        ({"kind": "Sum", "parts": [[1.0, {"kind": "Output"}]]}, "Sum(parts=((1.0, Output()),))"),
        ([0], "(0,)"),
        ("text", "'text'"),
        (None, "None"),
    ):
        assert format_setting(record) == text


def test_the_costs_of_heads_are_pooled_over_seeds_split_by_kind_and_a_part_of_the_page(tmp_path: Path):
    out = write_comparison(tmp_path, PAPER[2:5], items=10, seeds=(0, 1))
    assert head_grids(read_table(out)) == ()
    write_head_costs(out, {"plain": (0.004, -0.02, 0.05, 0.3)})
    write_head_costs(out, {"svgd": (0.2, 0.1)}, seeds=(1,))
    table = read_table(out)
    accuracy, loss = head_grids(table)
    assert accuracy.title == "without one head: fall in accuracy, points"
    assert loss.title == "without one head: rise in loss, nats"
    assert accuracy.header[-2:] == ("encoder", "cross")
    assert accuracy.text == (
        ("plain", "2", "8", "50 %", "25 %", "25 %", "8.350", "2.700", "14.0"),
        ("svgd", "1", "2", "0 %", "0 %", "0 %", "15.0", "20.0", "10.0"),
    )
    assert loss.text[0] == ("plain", "2", "8", "50 %", "25 %", "75 %", "0.0083", "0.0027", "0.014")
    assert {accuracy, loss} <= set(list_grids(table))
    rows = {row["arm"]: row["heads"] for row in make_record(table)["rows"]}
    assert rows["smooth"] == {}
    assert rows["plain"]["accuracy"]["redundant_share"] == 0.5
    assert rows["svgd"]["loss"] == pytest.approx(
        {"seeds": 1, "heads": 2, "redundant_share": 0.0, "raising_share": 0.0, "unshown_share": 0.5, "mean_cost": 0.015}
    )
    of_heads = replace(PICTURE, name="heads-by-loss", caption="Number of heads by rise in loss.")
    html = fill_page(Page("t"), table, [of_heads, PICTURE]).render()
    parts = (
        "A caption.",
        ">How alike the heads are<",
        ">What each head is worth<",
        "without one head: fall in accuracy, points",
        "A head is redundant when",
        "Number of heads by rise in loss.",
        ">Settings of the arms<",
    )
    places = [html.index(part) for part in parts]
    assert places == sorted(places)
