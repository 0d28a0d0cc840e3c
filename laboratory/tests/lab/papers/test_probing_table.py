"""Table 7 of Li et al. 2021: its numbers, the parts there is data for, averages by category, and a run of it."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
from rich.console import Console

from headwise.errors import DataError
from headwise_lab.data.probing_files import PROBES
from headwise_lab.experiment.scale import ScaleOptions
from headwise_lab.papers import run
from headwise_lab.papers.data import with_data
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.recomputed import recompute
from headwise_lab.papers.records import record as make_record
from headwise_lab.results.cells import NONE, Grid
from headwise_lab.tasks.classification.scales import PROBING_SCALES
from lab.tasks.classification.probing_toy import write_probing

TABLE_7 = REPRODUCTIONS["diversify/table-7"]
TINY = ("width=12", "heads=3", "head_size=4", "hidden=12", "epochs=1", "train_examples=48")
THERE = ("sentence_length", "tree_depth", "bigram_shift", "subj_number")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sets").mkdir()
    for number, name in enumerate(THERE):
        write_probing(tmp_path / "sets" / f"{name}.txt", {"va": 120, "te": 60}, seed=number)
    return tmp_path / "sets"


def test_the_papers_means_follow_from_its_cells():
    printed = {
        "Surface": ("96.69", "97.56", "97.15", "97.71"),
        "Syntactic": ("59.77", "61.44", "60.26", "61.78"),
        "Semantic": ("73.38", "73.34", "74.76", "75.08"),
    }
    cells_of: dict[str, list[float]] = {}
    for row in TABLE_7.published.rows:
        cells_of.setdefault(row.part, []).append(float(row.cells[0]))
    assert {name: len(parts) for name, parts in TABLE_7.groups.items()} == {"Surface": 2, "Syntactic": 3, "Semantic": 5}
    assert [part.name for part in TABLE_7.parts] == list(PROBES.values())
    for category, means in printed.items():
        for place, mean in enumerate(means):
            cells = [cells_of[part][place] for part in TABLE_7.groups[category]]
            # the paper cuts some digits off
            assert fmean(cells) == pytest.approx(float(mean), abs=0.016)
    rows = {(row.part, row.name): (row.arm, *row.cells) for row in TABLE_7.published.rows}
    assert len(rows) == 40
    assert rows["TrDep", "Combine"] == ("output+em:layers={two}", "46.93")


def test_a_part_without_data_is_left_out_of_parts_claims_and_means(folder):
    found = with_data(TABLE_7, "cpu", folder)
    assert [part.name for part in found.parts] == ["SeLen", "TrDep", "BShif", "SubNm"]
    assert found.left_out == tuple(f"{name} (not there)" for name in ("WC", "ToCo", "Tense", "ObjNm", "SOMO", "CoIn"))
    claims = found.claims_at("cpu", PROBING_SCALES)
    over = {contrast.over for claim in claims for contrast in claim.contrasts}
    assert over == {("SeLen", "TrDep", "BShif", "SubNm"), ("SeLen",), ("TrDep", "BShif"), ("SubNm",), ()}
    single = [contrast for claim in claims for contrast in claim.contrasts if not contrast.over]
    assert [contrast.part for contrast in single] == ["SubNm"]
    assert with_data(TABLE_7, "cpu", None) is TABLE_7
    with pytest.raises(DataError, match=r"no data that diversify/table-7 .* expected some of sentence_length, word"):
        with_data(TABLE_7, "cpu", folder.parent)


def test_all_ten_tasks_are_parts_at_every_scale():
    for scale in ("demo", "cpu", "gpu", "paper"):
        assert [part.sizes[scale].corpus for part in TABLE_7.parts_at(scale)] == list(PROBES)
    arms = TABLE_7.arms_at("cpu", PROBING_SCALES)["ToCo"]
    assert arms == ("plain", "output", "trunk:layers=0/1", "em:layers=0/1", "output+em:layers=0/1")


@pytest.mark.usefixtures("inline")
def test_the_table_is_run_judged_and_shown_by_category(folder, tmp_path):
    found = with_data(TABLE_7, "demo", folder)
    out = tmp_path / "out"
    plans = run.make_plans(
        found, "demo", seeds=1, data=folder, out=out, workers=1, options=ScaleOptions("demo", sizes=TINY)
    )
    assert [plan.comparison.data.name for plan in plans] == list(THERE)
    # three of four: the last part is not run yet
    console = Console(record=True, width=240)
    assert run.do_plans(found, plans[:3], console) == []
    reproduced = run.report(found, "demo", plans, out, tmp_path / "paper", console, "headwise reproduce")
    record = json.loads(next((tmp_path / "paper" / "results").glob("*.json")).read_text())
    grid = record["published"]
    assert grid["header"] == [
        *("task", "majority", "plain, paper", "plain, here", "output, paper", "output, here", "trunk, here"),
        *("em, paper", "em, here", "output+em, paper", "output+em, here"),
    ]
    rows = {row[0]: list(row[1:]) for row in Grid.from_record(grid).text}
    assert list(rows)[:3] == ["SeLen", "WC", "Surface: mean (SeLen)"]
    assert rows["ToCo"][1:3] == [NONE, NONE]
    tables = reproduced.tables
    scores = [tables[part].row("em").score.value for part in ("TrDep", "BShif")]
    assert rows["Syntactic: mean (TrDep, BShif)"][7] == f"{100 * fmean(scores):.2f}"
    assert rows["Syntactic: mean (TrDep, BShif)"][6] == f"{(45.77 + 50.97) / 2:.2f}"
    assert any(row[2].startswith("(") for row in rows.values())
    verdicts = [claim["verdict"] for claim in record["claims"]]
    assert len(verdicts) == 7
    assert all("no verdict" in verdict for verdict in verdicts)
    assert "scores in parentheses are not significantly above chance" in grid["title"]
    page = (tmp_path / "paper" / "RESULTS.md").read_text()
    assert "mean (TrDep, BShif)" in page
    assert "compare the order of the arms within a task or a mean, and no number with one of the paper's" in page
    assert "order of the rows" not in page
    details = next((tmp_path / "paper" / "results").glob("*.md")).read_text()
    for said in ("Wikipedia's and not those of SentEval", "nine tenths of va", "SOMO is one of the five tasks of the"):
        assert said in details
    # the part that was not run is named, and the runs alone, without words, give the same record again
    assert [run for run in record["missing"] if run.endswith(" in SubNm")] == record["missing"]
    assert len(record["missing"]) == 5
    path = next((tmp_path / "paper" / "results").glob("*.json"))
    again = make_record(recompute(path, tmp_path / "again"), record["command"])
    assert json.loads(json.dumps(again)) == record


def test_a_file_in_the_place_of_the_folder_is_told_from_a_folder_without_data(folder):
    with pytest.raises(DataError, match=r"tree_depth.txt is a file; diversify/table-7 takes the folder that holds"):
        with_data(TABLE_7, "cpu", folder / "tree_depth.txt")
