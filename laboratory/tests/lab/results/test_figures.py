from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import pytest

from headwise.errors import DataError
from headwise.plots import heads
from headwise.plots.style import assign_styles, drawing
from headwise_lab.results import figures
from headwise_lab.results.figures import (
    Picture,
    choose_styles,
    draw_dev_by_epoch,
    draw_effective_heads,
    draw_figures,
    draw_head_costs,
    draw_means,
    draw_score_by_bin,
    draw_score_by_force,
    draw_score_by_similarity,
    name_data,
    span_a_point,
    write_figures,
)
from headwise_lab.results.statistics import Estimate
from headwise_lab.results.table import Table, read_table
from lab.results.synthetic_comparison import PAPER, Drawn, write_comparison, write_head_costs


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Table:
    return read_table(write_comparison(tmp_path_factory.mktemp("comparison"), items=30))


@pytest.fixture(scope="module")
def drawn(table) -> tuple[Picture, ...]:
    with mpl.rc_context({"font.size": 23.0, "text.parse_math": True}):
        before = dict(mpl.rcParams)
        found = draw_figures(table)
        assert dict(mpl.rcParams) == before, "drawing changes the user's settings"
    return found


def small(folder: Path, arms: tuple[Drawn, ...], **changed) -> Table:
    return read_table(write_comparison(folder, arms, items=10, **{"seeds": (0, 1), **changed}))


def measured(table: Table, *measures: dict[str, float]) -> Table:
    """The table with measures of its runs changed, run after run."""
    each, rows = iter(measures), []
    for row in table.rows:
        runs = tuple(replace(run, measures={**run.measures, **next(each)}) for run in row.runs)
        rows.append(replace(row, runs=runs, settings={"scale": {"heads": 8}}))
    return replace(table, rows=tuple(rows))


def test_each_figure_is_a_png_with_words_and_is_written_whole(drawn, table, tmp_path, monkeypatch):
    names = ["score-by-difficulty", "diversity-against-score", "score-against-force-ratio"]
    assert [picture.name for picture in drawn] == names
    for picture in drawn:
        assert picture.png.startswith(b"\x89PNG")
        assert "svgd:alpha=30" in picture.alt
        assert picture.caption.endswith(".")
    monkeypatch.setattr(figures, "draw_figures", lambda _: drawn)
    assert write_figures(table, tmp_path) == drawn
    assert {path.stem: path.read_bytes() for path in tmp_path.iterdir()} == {one.name: one.png for one in drawn}
    with pytest.raises(DataError, match="cannot be written"):
        write_figures(table, tmp_path / "missing")


@pytest.mark.full
def test_the_same_table_gives_the_same_bytes_under_any_settings_and_nothing_imports_pyplot(drawn, table):
    assert draw_figures(table) == drawn
    code = (
        "import sys, headwise_lab.results.figures; "
        "print([name for name in sys.modules if name.startswith('matplotlib')])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_names_with_mathematics_and_markup_are_drawn_as_text(tmp_path):
    arms = (PAPER[2], Drawn("$\\frac{$ <b>_x^", "plain", 0.4, force=0.1), Drawn("_hidden", force=0.2))
    assert draw_score_by_force(small(tmp_path, arms)) is not None


def test_a_figure_without_data_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "to_png", lambda _: b"")
    plain_only = small(tmp_path / "one", (PAPER[0], PAPER[2]), bins=(4,))
    assert draw_score_by_bin(plain_only) is None
    assert draw_score_by_force(plain_only) is None
    assert draw_score_by_similarity(plain_only) is not None
    baselines = small(tmp_path / "two", (PAPER[0], PAPER[1]))
    assert draw_score_by_similarity(baselines) is None
    assert draw_score_by_bin(baselines) is not None
    one_strength = small(tmp_path / "three", (PAPER[2], PAPER[3], PAPER[4]))
    assert draw_score_by_force(one_strength) is None


def test_forces_that_are_almost_equal_are_drawn_on_an_axis_whose_labels_differ(tmp_path, monkeypatch):
    labels = []

    def read(figure) -> bytes:
        (axes,) = figure.axes
        low, high = axes.get_xlim()
        for ticker, places in (
            (axes.xaxis.get_major_formatter(), axes.get_xticks()),
            (axes.xaxis.get_minor_formatter(), axes.get_xticks(minor=True)),
        ):
            labels.extend(ticker(place, 0) for place in places if low <= place <= high)
        return b""

    monkeypatch.setattr(figures, "to_png", read)
    arms = small(tmp_path, (PAPER[2], Drawn("svgd", force=0.1), Drawn("cka", force=0.1)))
    forces = (None, None, 0.1, 0.1 + 1e-7, 0.1 + 1e-7, 0.1 + 2e-7)
    draw_score_by_force(measured(arms, *({"force_ratio": force} for force in forces)))
    named = [label for label in labels if label]
    assert len(named) > 1
    assert len({*named}) == len(named)


@pytest.mark.full
def test_effective_heads_are_drawn_arm_by_arm_and_the_score_by_them_where_they_were_measured(tmp_path, monkeypatch):
    named = []
    monkeypatch.setattr(figures, "name_data", lambda axes, _: named.append(axes))
    monkeypatch.setattr(figures, "to_png", lambda _: b"")
    table = small(tmp_path, (PAPER[2], PAPER[3]))
    assert draw_effective_heads(table) is None
    assert draw_score_by_similarity(table).alt.startswith("Output cosine and accuracy")
    numbers = [(2.5, 1.5), (3.5, 2.5), (5.0, 4.0), (6.0, 5.5)]
    known = measured(table, *({"effective_heads": one, "effective_heads_weighted": two} for one, two in numbers))
    drawn = draw_effective_heads(known)
    first, second = (row.arm for row in table.rows)
    assert drawn.alt == f"Effective heads, and by variance: {first} 3.00, 2.00; {second} 5.50, 4.75"
    assert drawn.caption.endswith("The dashed line is the number of heads, 8.")
    assert draw_score_by_similarity(known).alt.startswith(f"Effective heads and accuracy: {first} 3.00")
    assert len(named) == 3


def test_every_arm_looks_different_the_same_in_every_comparison_and_plain_is_black(table, tmp_path):
    arms = (PAPER[2], *(Drawn(f"arm-{index}") for index in range(30)))
    many = choose_styles(small(tmp_path / "many", arms, seeds=(0,), bins=(1,)))
    whole = choose_styles(table)
    few = choose_styles(small(tmp_path / "few", (PAPER[2], PAPER[7], PAPER[9])))
    for found in (many, whole):
        assert len({(look.color, look.marker, str(look.dash)) for look in found.values()}) == len(found)
    assert many["plain"].color == "#000000"
    assert few == {arm: whole[arm] for arm in ("plain", "output", "em")}
    assert list(whole) == [row.arm for row in table.arms]


def test_the_legend_of_means_names_each_arm_outside_the_axes_and_plain_is_named_at_its_level():
    dots = {"svgd:step_size=1.0": [(1.0, 63.1), (1.0, 63.3)], "spos:step_size=1.0": [(3.0, 62.0), (3.0, 65.0)]}
    with drawing(7.2, 4.8) as figure:
        axes = figure.subplots()
        plain = Estimate((0.62, 0.64, 0.636))
        draw_means(axes, dots, assign_styles(list(dots), reference="plain"), plain)
        figure.draw_without_rendering()
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == list(dots)
        assert legend.get_window_extent().x0 > axes.get_window_extent().x1
        assert [text.get_text() for text in axes.texts] == ["plain"]


def test_a_picture_says_task_data_scale_and_seeds(table):
    for named, said in (("trec", "logic on trec, scale demo, 5 seeds"), ("", "logic, scale demo, 5 seeds")):
        with drawing(4.0, 3.0) as figure:
            axes = figure.subplots()
            name_data(axes, replace(table, results=replace(table.results, named=named)))
            assert axes.get_title(loc="left") == said


@pytest.mark.full
def test_scores_of_arms_at_chance_are_not_drawn_far_apart():
    for scores, span in (
        ((50.01, 50.03), (49.52, 50.52)),
        ((0.0, 0.0), (0.0, 1.0)),
        ((0.1, 0.2), (0.0, 1.0)),
        ((20.0, 30.0), (20, 30)),
    ):
        with drawing(4, 3) as figure:
            axes = figure.subplots()
            axes.plot([0, 1], scores)
            span_a_point(axes)
            low, high = axes.get_ylim()
        margin = (0.05 * (scores[1] - scores[0]) or 0.06) + 1e-9
        assert (low, high) == (pytest.approx(span[0], abs=margin), pytest.approx(span[1], abs=margin))
        assert low <= scores[0] <= scores[1] <= high


def with_epochs(out: Path, epochs: int) -> Path:
    """The comparison with curves of dev: seed s of every arm reaches (10 + e + s) / 100 after epoch e."""
    for path in out.glob("*/seed-*/result.json"):
        if path.parent.parent.name not in ("majority", "counts"):
            seed = int(path.parent.name[-1])
            records = [{"epoch": e, "dev": {"pooled": (10 + e + seed) / 100}} for e in range(1, epochs + 1)]
            path.with_name("epochs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return out


@pytest.mark.full
def test_every_axis_of_scores_spans_a_point(table, monkeypatch):
    spans = []
    monkeypatch.setattr(figures, "to_png", lambda _: b"")
    monkeypatch.setattr(figures, "span_a_point", lambda axes: spans.append(axes.get_ylim()))
    with drawing(7.2, 4.8) as figure:
        draw_means(figure.subplots(), {"plain": [(0.5, 50.01), (0.6, 50.02)]}, assign_styles(["plain"]))
    draw_score_by_bin(table)
    assert len(spans) == 2


def test_dev_by_epoch_is_drawn_from_three_epochs_on_with_a_band_from_lowest_to_highest_seed(tmp_path, monkeypatch):
    drawn, spans, draw = [], [], figures.draw_range

    def watched(axes, *numbers, **label):
        drawn.append(numbers[:4])
        draw(axes, *numbers, **label)

    monkeypatch.setattr(figures, "to_png", lambda _: b"")
    monkeypatch.setattr(figures, "draw_range", watched)
    monkeypatch.setattr(figures, "span_a_point", spans.append)
    out = write_comparison(tmp_path, PAPER[:4], items=10, seeds=(0, 1, 3))
    assert draw_dev_by_epoch(read_table(with_epochs(out, 2))) is None
    table = read_table(with_epochs(out, 4))
    assert table.rows[2].runs[1].dev == (0.12, 0.13, 0.14, 0.15)
    picture = draw_dev_by_epoch(table)
    assert picture.alt == "accuracy on dev, first epoch to last: plain 12.3 to 15.3; smooth 12.3 to 15.3"
    places, low, middle, high = drawn[0]
    assert list(places) == [1, 2, 3, 4]
    assert low == pytest.approx([11, 12, 13, 14])
    assert middle == pytest.approx([12 + 1 / 3, 13 + 1 / 3, 14 + 1 / 3, 15 + 1 / 3])
    assert high == pytest.approx([14, 15, 16, 17])
    assert len(spans) == 1
    path = out / "plain" / "seed-0" / "epochs.jsonl"
    path.write_text(path.read_text().replace('"pooled": 0.12', '"pool": 0.12'))
    with pytest.raises(DataError, match=r"epochs\.jsonl, line 2 is not the record of an epoch; delete the folder"):
        read_table(out)


@pytest.mark.full
def test_the_costs_of_heads_are_drawn_for_each_score_an_arm_against_its_control(tmp_path, monkeypatch):
    out = write_comparison(tmp_path, PAPER[2:6], items=10, seeds=(0, 1))
    assert draw_head_costs(read_table(out)) == ()
    costs = {"plain": (0.0, 0.01, -0.02), "smooth": (0.01, 0.02, 0.03), "svgd": (0.02, 0.03, 0.9)}
    write_head_costs(out, costs)
    drawn, draw = [], heads.draw_counts

    def watched(axes, values, edges, models, style, *, filled, label):
        drawn.append((label, sorted(values), edges, models, filled))
        draw(axes, values, edges, models, style, filled=filled, label=label)
        heights = [patch.get_path().vertices[:, 1].max() for patch in axes.patches[-1:]]
        assert max(heights) <= 3

    monkeypatch.setattr(heads, "draw_counts", watched)
    monkeypatch.setattr(figures, "to_png", lambda _: b"")
    accuracy, loss = draw_head_costs(read_table(out))
    assert (accuracy.name, loss.name) == ("heads-by-accuracy", "heads-by-loss")
    assert "by fall in accuracy on the test set" in accuracy.caption
    assert "by rise in loss on the test set" in loss.caption
    # the control of smooth was not measured
    pairs = [("smooth", True), ("plain", False), ("svgd", True), ("smooth", False)]
    assert [(label, filled) for label, *_, filled in drawn] == pairs * 2
    assert drawn[1][1] == pytest.approx([-2, -2, 0, 0, 1, 1])
    assert drawn[2][1] == pytest.approx([2, 2, 3, 3, 90, 90])
    assert drawn[3][1] == pytest.approx([1, 1, 2, 2, 3, 3])
    assert drawn[6][1] == pytest.approx([0.002, 0.002, 0.003, 0.003, 0.09, 0.09])
    assert all(models == 2 for *_, models, _ in drawn)
    edges = drawn[0][2]
    assert 0.0 in edges
    assert edges[0] <= -2
    assert "svgd 32 on average, 2 to 90" in accuracy.alt


def test_bars_reach_from_the_lowest_cost_to_beyond_most_of_them():
    edges = heads._find_edges([-0.4, *[0.1 * step for step in range(39)], 100.0])
    assert edges[0] <= -0.4
    assert 3.7 <= edges[-1] < 5
    assert 0.0 in edges
    # heads that cost nothing at all still make a bar
    assert heads._find_edges([0.0, 0.0]) == [0.0, 1.0]
    assert heads._find_edges([-0.5, -0.1])[-1] > 0


def test_bins_of_a_few_test_items_are_left_out_of_the_figure_and_named(table, monkeypatch):
    monkeypatch.setattr(figures, "to_png", lambda _: b"")
    picture = draw_score_by_bin(replace(table, items=(*table.items[:-1], 9)))
    assert f"Not shown, with fewer than 20 test items: {table.bins[-1]} (9)." in picture.caption
    assert f"from {table.bins[0]} to {table.bins[-2]}: " in picture.alt
    assert draw_score_by_bin(replace(table, items=(30, *[9] * (len(table.items) - 1)))) is None
