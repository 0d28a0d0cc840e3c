"""Records of reproductions and the RESULTS.md of each paper, which a test holds together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from headwise.checks import DataError
from headwise.lab.arm_text import parse_arms
from headwise.lab.reproduce import REPRODUCTIONS, report
from headwise.lab.tables.reproduction import render
from lab.synthetic_comparison import PAPER, write_comparison

PAPERS = Path(__file__).parents[2] / "papers"


def test_a_reproduction_writes_its_record_and_the_page_of_the_paper(tmp_path):
    runs = write_comparison(tmp_path / "runs", PAPER, bins=range(1, 13), items=60)
    console = Console(record=True, width=100)
    report(REPRODUCTIONS["diversify/figure-4"], runs, tmp_path / "paper", console, "headwise reproduce it")
    page = (tmp_path / "paper" / "RESULTS.md").read_text()
    record = json.loads((tmp_path / "paper" / "results" / "figure-4-demo.json").read_text())
    assert "Aggregation performs better on long sequences" in console.export_text()
    assert page == render(tmp_path / "paper")
    for claim in record["claims"]:
        assert claim["statement"] in page
        assert claim["verdict"] in page
    assert "headwise reproduce it" in page
    assert "svgd-relative seed 0" not in page


def test_a_damaged_record_is_named(tmp_path):
    with pytest.raises(DataError, match="holds no record"):
        render(tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "figure-9-cpu.json").write_text("{}")
    with pytest.raises(DataError, match=r"figure-9-cpu\.json is not the record of a reproduction"):
        render(tmp_path)


@pytest.mark.parametrize("paper", sorted(path.parent.parent for path in PAPERS.glob("*/results/*.json")), ids=str)
def test_the_results_page_of_each_paper_is_what_its_records_say(paper):
    assert (paper / "RESULTS.md").read_text() == render(paper)


@pytest.mark.parametrize("reproduction", REPRODUCTIONS.values(), ids=lambda reproduction: reproduction.id)
def test_every_contrast_is_between_arms_that_are_run(reproduction):
    arms = {arm.name for arm in parse_arms(reproduction.arms)}
    for claim in reproduction.claims:
        for contrast in claim.contrasts:
            assert {contrast.arm, contrast.against} <= arms
