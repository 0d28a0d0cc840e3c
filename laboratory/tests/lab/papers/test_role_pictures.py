"""The figure of the role ablation shows the leads that the claims are about, and stands in the record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headwise_lab.papers.claims import judge
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.guided.roles import draw_role_worth
from headwise_lab.papers.records import Reproduced, write_records
from headwise_lab.results.cells import show_signed
from headwise_lab.results.evidence import Evidence
from headwise_lab.results.runs import read_results
from headwise_lab.results.table import make_table
from lab.results.synthetic_comparison import Drawn, write_comparison

FIGURE_2 = REPRODUCTIONS["guided/figure-2"]
ALL = tuple(part.name for part in FIGURE_2.parts)
# A higher effect of the replacement is a lower worth of the role.
EFFECTS = {"plain": -0.4, "guided": 0.0, "guided:drop=rare": 0.8, "guided:random=rare": 0.2, "guided:drop=major": -0.9}


@pytest.fixture
def evidence(tmp_path: Path) -> dict[str, Evidence]:
    arms = tuple(Drawn(name, None if name == "plain" else "plain", effect) for name, effect in EFFECTS.items())
    return {
        part: Evidence(read_results(write_comparison(tmp_path / part, arms, items=60 + 10 * place, seed=place)))
        for place, part in enumerate(ALL)
    }


def test_each_mark_is_the_mean_over_sets_of_the_lead_over_what_replaced_the_role(evidence):
    picture = draw_role_worth(judge(FIGURE_2.claims, evidence))
    assert picture is not None
    assert picture.png.startswith(b"\x89PNG")
    assert f"mean of {', '.join(ALL)}" in picture.caption

    def mean(arm: str) -> float:
        rows = [make_table(one.results).row(arm) for one in evidence.values()]
        return sum(100 * row.score.value for row in rows if row is not None) / len(rows)

    leads = {arm: mean("guided") - mean(arm) for arm in EFFECTS if arm != "guided"}
    assert leads["plain"] > 3
    assert leads["guided:drop=rare"] < -3
    assert leads["guided:drop=major"] > leads["plain"]
    assert picture.alt.split("; ") == [
        f"all five replaced by the padding mask: {show_signed(leads['plain'])} points",
        f"rare replaced by the padding mask: {show_signed(leads['guided:drop=rare'])} points",
        f"major replaced by the padding mask: {show_signed(leads['guided:drop=major'])} points",
        f"rare replaced by a random mask as sparse: {show_signed(leads['guided:random=rare'])} points",
    ]


def test_without_all_sets_there_is_nothing_to_draw(evidence):
    del evidence["MR"]
    assert draw_role_worth(judge(FIGURE_2.claims, evidence)) is None


def test_the_figure_stands_in_the_record_and_on_its_page(evidence, tmp_path):
    tables = {part: make_table(one.results) for part, one in evidence.items()}
    found = Reproduced(FIGURE_2, "demo", dict.fromkeys(ALL, ""), evidence, tables)
    (picture,) = found.pictures
    page = write_records(found, tmp_path / "paper", "headwise reproduce guided/figure-2")
    record = json.loads((tmp_path / "paper" / "results" / "figure-2-demo.json").read_text())
    assert record["pictures"][0]["file"] == "figure-2-demo-roles.png"
    assert (tmp_path / "paper" / "results" / "figure-2-demo-roles.png").read_bytes() == picture.png
    assert f"![{picture.alt}](results/figure-2-demo-roles.png)" in Path(page).read_text()
    without = replace(found, reproduction=replace(FIGURE_2, overview=None))
    assert without.pictures == ()
