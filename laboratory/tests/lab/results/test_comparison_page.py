from __future__ import annotations

import re
from pathlib import Path

import pytest

from headwise_lab.results.comparison_page import format_setting, make_page, write_headline
from headwise_lab.results.figures import draw_figures
from headwise_lab.results.table import Table
from headwise_lab.results.tabulate import read_table
from lab.results.synthetic_comparison import PAPER, Drawn, write_comparison, write_head_costs

HOSTILE = "<script>alert(1)</script>\"'&"


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Table:
    return read_table(write_comparison(tmp_path_factory.mktemp("comparison"), items=300))


def test_the_page_leads_with_what_was_found_then_verdicts_then_the_rest(table):
    html = make_page(table, draw_figures(table), command="headwise compare logic --seeds 5").render()
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
        ">Made with<",
        "torch 2.13.0",
        "headwise compare logic --seeds 5",
    ]
    places = [html.index(part) for part in parts]
    assert places == sorted(places)
    assert html.count("data:image/png") == 3


def test_the_page_names_the_size_of_the_family_and_its_command(table):
    (family,) = {row.to_control.judgement.family for row in table.arms if row.to_control is not None} - {0}
    assert family > 1
    assert f"method over {family} contrasts" in make_page(table, ()).render()
    title = "headwise reproduce diversity/dose-logic 1x"
    assert f"<title>{title}" in make_page(table, (), title=title).render()


def test_the_headline_says_who_was_better_worse_and_undecided(table):
    verdicts = {row.arm: row.verdict for row in table.arms}
    text = write_headline(table)
    assert text.startswith("8 ways of making heads differ on the task logic at scale demo, 5 seeds each")
    assert "900 test items" in text
    for word, sentence in (("better", "Better than the control: "), ("worse", "Worse than the control: ")):
        arms = [arm for arm, verdict in verdicts.items() if verdict.startswith(word)]
        assert bool(arms) == (sentence in text)
        for arm in arms:
            assert arm in text.split(sentence)[1].split(". ")[0]
    assert "No verdict: smooth." in text


def test_too_few_seeds_are_said_in_the_headline(tmp_path):
    table = read_table(write_comparison(tmp_path, PAPER[2:5], items=10, seeds=(0, 1)))
    assert write_headline(table).endswith(
        "No verdict is given (scaled not run, 2 seeds): one needs the arm's control and 5 seeds of both."
    )


def test_one_arm_one_seed_and_plain_alone_are_put_in_words_that_agree(tmp_path):
    one = read_table(write_comparison(tmp_path / "one", PAPER[2:4], items=10, seeds=(0,)))
    assert write_headline(one).startswith("1 way of making heads differ on the task logic at scale demo, 1 seed each")
    alone = read_table(write_comparison(tmp_path / "alone", PAPER[:3], items=10, seeds=(0, 1)))
    assert write_headline(alone).startswith(
        "Nothing was compared with plain on the task logic at scale demo (2 seeds, 30"
    )
    make_page(alone, []).render()


def test_baselines_alone_still_make_a_page(tmp_path):
    table = read_table(write_comparison(tmp_path, PAPER[:2], items=10))
    assert "Nothing was compared" in make_page(table, draw_figures(table)).render()


def test_hostile_names_settings_and_commands_stay_text(tmp_path):
    arms = [PAPER[2], Drawn(HOSTILE, "plain", 0.4, force=0.3)]
    table = read_table(write_comparison(tmp_path / "out", arms, items=10, seeds=(0, 1)))
    path = tmp_path / "report.html"
    make_page(table, draw_figures(table), command=f"headwise compare logic --arms '{HOSTILE}'").write(path)
    html = path.read_text(encoding="utf-8")
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;&#34;&#39;&amp;") >= 6
    tags = set(re.findall(r"<(\w+)", html))
    assert tags <= {
        *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "p", "div", "table", "caption"),
        *("thead", "tbody", "tr", "th", "td", "figure", "img", "figcaption", "pre", "code"),
    }


def test_unfinished_runs_are_said_on_the_page(tmp_path: Path):
    out = write_comparison(tmp_path, PAPER[2:5], items=10, seeds=(0, 1))
    (out / "svgd" / "seed-1" / "result.json").unlink()
    assert "svgd seed 1" in make_page(read_table(out), []).render()


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"kind": "SVGD", "alpha": {"kind": "Relative", "ratio": 0.1}}, "SVGD(alpha=Relative(ratio=0.1))"),
        ({"kind": "Sum", "parts": [[1.0, {"kind": "Output"}]]}, "Sum(parts=((1.0, Output()),))"),
        ([0], "(0,)"),
        ("text", "'text'"),
        (None, "None"),
    ],
)
def test_records_are_printed_as_the_values_they_record(record, text):
    assert format_setting(record) == text


def test_the_worth_of_heads_has_a_part_of_its_own_with_its_figures(tmp_path):
    out = write_comparison(tmp_path, PAPER[2:5], items=10, seeds=(0, 1))
    table = read_table(out)
    assert "What each head is worth" not in make_page(table, draw_figures(table)).render()
    write_head_costs(out, {"plain": (0.0, 0.1), "smooth": (0.2, 0.1), "svgd": (0.2, 0.1)})
    table = read_table(out)
    html = make_page(table, draw_figures(table)).render()
    places = [
        html.index(part)
        for part in (
            ">How alike the heads are<",
            ">What each head is worth<",
            "without one head: fall in accuracy, points",
            "A head is redundant when",
            "by fall in accuracy on the test set",
            "by rise in loss on the test set",
            ">Settings of the arms<",
        )
    ]
    assert places == sorted(places)
