from __future__ import annotations

import dataclasses
import json

import pytest
from rich.console import Console, RenderableType

from headwise_lab.experiment.run_folder import write_json
from headwise_lab.results.cells import Grid, show_percent, show_points
from headwise_lab.results.grids import (
    bins_grid,
    cost_grid,
    diversity_grid,
    head_grids,
    list_grids,
    plain_grid,
    render_terminal,
    signature_grid,
    verdict_grid,
)
from headwise_lab.results.statistics import Estimate
from headwise_lab.results.table import Table, make_record
from headwise_lab.results.tabulate import read_table
from lab.results.synthetic_comparison import PAPER, Drawn, change, write_comparison, write_head_costs

HOSTILE = "[red]a|b[/red] <script>x</script> *c* `d`"


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Table:
    return read_table(write_comparison(tmp_path_factory.mktemp("comparison"), items=40))


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Table:
    folder = tmp_path_factory.mktemp("wide")
    return read_table(write_comparison(folder, PAPER[:5], items=10, bins=range(1, 13), seeds=(0, 1)))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Table:
    arms = [PAPER[2], Drawn(HOSTILE, "plain", 0.3)]
    return read_table(write_comparison(tmp_path_factory.mktemp("hostile"), arms, items=10, seeds=(0, 1)))


def printed(table: Table, width: int) -> str:
    return shown_at(width, render_terminal(table))


def shown_at(width: int, shown: RenderableType) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def test_each_grid_has_a_row_an_arm_and_as_many_cells_as_columns(table):
    for grid in list_grids(table):
        assert all(len(row) == len(grid.header) == len(grid.align) for row in grid.text)
    assert [row[0] for row in verdict_grid(table).text] == [row.arm for row in table.rows]
    assert [row[0] for row in bins_grid(table).text] == [row.arm for row in table.rows]
    assert [row[0] for row in diversity_grid(table).text] == [row.arm for row in table.arms]
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
        signatures = {"chrF": "nc:6|version:2.6.0"}
        change(path, answers=answers, signatures=signatures)
    table = read_table(out)
    assert cost_grid(table).header == ("arm", "chrF ↑", "decoding, s ↓", "params", "step\ntime")
    assert cost_grid(table).text[0] == ("counts", "40.0", "–", "–", "–")  # noqa: RUF001
    assert cost_grid(table).text[1][:4] == ("plain", "41.5", "3.3", "181,319")
    assert signature_grid(table).text == (("chrF", "nc:6|version:2.6.0"),)
    assert signature_grid(table) in list_grids(table)
    assert "nc:6|version:2.6.0" in printed(table, 80)
    written = tmp_path / "results.json"
    write_json(written, make_record(table))
    rows = json.loads(written.read_text())["rows"]
    assert rows[1]["answered"] == {"chrF": 41.5, "seconds": 3.26}
    assert [run["answered"]["chrF"] for run in rows[1]["runs"]] == [41.0, 42.0]


def test_without_further_scores_the_grid_of_costs_has_arms_alone(table):
    assert cost_grid(table).header == ("arm", "params", "step\ntime")
    assert [row[0] for row in cost_grid(table).text] == [row.arm for row in table.arms]
    assert signature_grid(table) not in list_grids(table)


def test_cells_say_what_the_table_says(table):
    row = next(row for row in table.rows if row.arm == "svgd:alpha=30")
    grid = verdict_grid(table)
    cells = dict(zip(grid.header, next(cells for cells in grid.text if cells[0] == row.arm), strict=True))
    assert list(cells)[:5] == ["arm", "verdict", "p", "difference,\npoints", "to"]
    assert row.to_control is not None
    judgement = row.to_control.judgement
    assert judgement.adjusted is not None
    assert cells["verdict"] == row.verdict.partition(" (p")[0]
    assert (cells["p"], cells["to"], cells["seeds"]) == (f"{judgement.adjusted:.3f}", "smooth", "5")
    low, high = (f"{100 * one:.1f}" for one in (row.score.low, row.score.high))
    assert cells["accuracy,\n%"] == f"{100 * row.score.value:.1f} ({low} to {high})"
    low, value, high = (
        f"{100 * one:+.1f}".replace("-", "−")  # noqa: RUF001
        for one in (judgement.estimate.low, judgement.estimate.value, judgement.estimate.high)
    )
    assert low.startswith("−")  # noqa: RUF001
    assert cells["difference,\npoints"] == f"{value} ({low} to {high})"
    detectable = f"{100 * judgement.detectable:.1f} to {100 * judgement.detectable_in_family:.1f}"
    assert cells["detect-\nable"] == detectable


def test_every_p_value_that_is_spoken_of_is_shown_and_no_note_is_about_what_is_not(table, wide):
    grid = verdict_grid(table)
    judged = {row.arm: row.to_control.judgement.adjusted for row in table.rows if row.to_control is not None}
    shown = {cells[0]: cells[2] for cells in grid.text}
    assert judged["em"] is not None
    assert shown["em"] == f"{judged['em']:.3f}"
    assert "Holm" in printed(table, 80)
    assert "p" not in verdict_grid(wide).header
    assert "Holm" not in printed(wide, 80)
    assert "differences are in points" in " ".join(printed(wide, 80).split())


def test_a_verdict_stands_on_one_line_in_a_terminal_of_80_columns(table, wide):
    for shown in (table, wide):
        lines = printed(shown, 80).splitlines()
        for row in shown.rows:
            verdict = row.verdict.partition(" (p ")[0]
            assert any(line.split()[:1] == [row.arm] and verdict in line for line in lines), row.arm


def test_bins_of_few_test_items_are_hidden_and_named(table):
    few = dataclasses.replace(table, items=(40, 7, 40))
    assert bins_grid(few).header == ("arm", "1", "3")
    assert bins_grid(few).text[0][2] == bins_grid(table).text[0][3]
    said = " ".join(printed(few, 80).split())
    assert "Not shown by number of operators, with fewer than 20 test items: 2 (7)." in said
    assert "Not shown" not in printed(table, 80)
    # where nothing could be read, nothing is hidden
    assert bins_grid(dataclasses.replace(table, items=(4, 7, 4))).header == ("arm", "1", "2", "3")


def test_a_repulsion_that_drowns_the_gradient_is_flagged(table):
    assert "!" not in str(diversity_grid(table).text)
    rows = tuple(
        dataclasses.replace(row, measures=row.measures | {"force_ratio": 12.5}) if row.arm == "svgd" else row
        for row in table.rows
    )
    strong = dataclasses.replace(table, rows=rows)
    assert next(cells for cells in diversity_grid(strong).text if cells[0] == "svgd")[-1] == "12.5 !"
    assert "!: a force ratio above 10" in printed(strong, 80)


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_form_fits_and_breaks_no_name_or_number(table, wide, width):
    for shown in (table, wide):
        lines = printed(shown, width).splitlines()
        assert max(map(len, lines)) <= width
        for row in shown.rows:
            starts = sum(line.strip().startswith(f"{row.arm} ") for line in lines)
            assert starts >= 2 + (not row.baseline), row.arm
    assert "181,319" in printed(table, width)


ARMS = ("plain", "output", "trunk:layers=0/1", "em:layers=0/1", "output+em:layers=0/1")
TASKS = ("SeLen", "WC", "Surface: mean", "BShif", "Syntactic: mean (TrDep, BShif)")


def table_7() -> Grid:
    """A grid of the form of diversify/table-7, each cell a number of its own."""
    header = ["task", "majority"]
    for arm in ARMS:
        header += [f"{arm}, paper", f"{arm}, here"]
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


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 300])
@pytest.mark.parametrize("grid", [table_7(), layers_of_twelve()], ids=lambda grid: grid.title)
def test_what_is_too_wide_stands_in_blocks_each_with_the_first_column_and_nothing_is_cut(grid, width):
    text = shown_at(width, grid)
    lines = text.splitlines()
    assert "\u2026" not in text
    assert max(map(len, lines)) <= width
    said = " ".join(text.split())
    for cell in {cell for row in grid.text for cell in row[1:]}:
        assert cell in said
    for word in {word for name in grid.header for word in name.split()}:
        assert word in said
    # each block has one rule, below its header
    blocks = sum("─" in line for line in lines)
    assert blocks > 1 or width in (120, 300)
    assert sum(line.split()[:1] == ["task"] for line in lines) == blocks
    for row in grid.text:
        assert sum(line.split()[:1] == [row[0].split()[0]] for line in lines) == blocks


def test_words_are_broken_only_where_the_room_is_less():
    grid = Grid("claims", ("claim", "verdict"), (("a claim of several words", "better, on average"),), "ll")
    said = shown_at(30, grid)
    assert all(word in said for word in ("several", "average"))
    long = Grid("signature", ("score", "signature"), (("BLEU", "x" * 70),), "ll")
    assert "".join(shown_at(40, long).split()).count("x") == 70


def test_many_bins_are_shown_without_intervals_in_a_terminal_alone(wide):
    section = printed(wide, 80).split("number of operators")[1].split("how alike")[0]
    assert " to " not in section
    assert " to " in bins_grid(wide).text[0][1]


def test_markup_in_an_arms_name_is_text_everywhere(hostile):
    assert "[red]a|b[/red]" in printed(hostile, 200)
    written = "\n".join(grid.to_markdown() for grid in list_grids(hostile))
    lines = [line for line in written.splitlines() if "script" in line]
    assert lines
    for line in lines:
        assert "<script>" not in line
        assert r"\[red\]a\|b" in line
        assert line.replace(r"\|", "").count("|") in (4, 5, 7, 9)


def test_markdown_tables_are_rectangular(table):
    for grid in list_grids(table):
        lines = [line.replace(r"\|", "") for line in grid.to_markdown().splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) <= 1


def test_unfinished_runs_are_named(tmp_path):
    out = write_comparison(tmp_path, PAPER[2:5], items=10, seeds=(0, 1))
    (out / "svgd" / "seed-1" / "result.json").unlink()
    assert "not finished: svgd seed 1" in printed(read_table(out), 80)


def test_the_record_is_strict_json_with_a_stable_order(table, tmp_path):
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    write_json(one, make_record(table))
    write_json(other, make_record(table))
    assert one.read_bytes() == other.read_bytes()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    record = json.loads(one.read_text(), parse_constant=refuse)
    assert list(record)[:5] == ["task", "scale", "primary", "data", "seeds"]
    svgd = next(row for row in record["rows"] if row["arm"] == "svgd")
    assert svgd["to_control"]["against"] == "smooth"
    assert svgd["to_control"]["p"] <= svgd["to_control"]["p_holm"] <= 1
    assert len(svgd["runs"]) == 5
    assert [found.name for found in tmp_path.iterdir()] == ["one.json", "other.json"] or len(
        list(tmp_path.iterdir())
    ) == 2


def test_the_costs_of_heads_are_pooled_over_seeds_and_split_by_kind(tmp_path):
    out = write_comparison(tmp_path, PAPER[2:5], items=10, seeds=(0, 1))
    assert head_grids(read_table(out)) == ()
    write_head_costs(out, {"plain": (0.004, -0.02, 0.05, 0.3)})
    write_head_costs(out, {"svgd": (0.2, 0.1)}, seeds=(1,))
    accuracy, loss = head_grids(read_table(out))
    assert accuracy.title == "without one head: fall in accuracy, points"
    assert loss.title == "without one head: rise in loss, nats"
    assert accuracy.header[-2:] == ("encoder", "cross")
    assert accuracy.text == (
        ("plain", "2", "8", "50 %", "25 %", "25 %", "8.350", "2.700", "14.0"),
        ("svgd", "1", "2", "0 %", "0 %", "0 %", "15.0", "20.0", "10.0"),
    )
    assert loss.text[0][-3:] == ("0.0083", "0.0027", "0.014")
    assert {accuracy, loss} <= set(list_grids(read_table(out)))
    write_json(tmp_path / "results.json", make_record(read_table(out)))
    rows = {row["arm"]: row["heads"] for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    assert rows["smooth"] == {}
    assert rows["plain"]["accuracy"]["redundant_share"] == 0.5
    assert rows["svgd"]["loss"] == pytest.approx(
        {"seeds": 1, "heads": 2, "redundant_share": 0.0, "raising_share": 0.0, "unshown_share": 0.5, "mean_cost": 0.015}
    )


def test_a_narrow_interval_has_as_many_decimals_as_tell_its_ends_apart():
    narrow = Estimate((0.00021, 0.00024, 0.00026, 0.00024))
    assert str(show_points(narrow)) == "+0.024 (+0.020 to +0.027)"
    assert str(show_percent(narrow)) == "0.024 (0.020 to 0.027)"
    assert str(show_points(Estimate((0.021, 0.024, 0.029, 0.024)))) == "+2.5 (+1.9 to +3.0)"
