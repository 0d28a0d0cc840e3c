"""Table 3 of An et al. 2020 from text to page at toy size: pre-training first, then every set there is data for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from headwise.errors import DataError
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.scale import ScaleOptions
from headwise_lab.papers.data import read_initial_runs, with_data
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.pages import render
from headwise_lab.papers.records import Reproduced
from headwise_lab.papers.reproduction import resize_scale
from headwise_lab.papers.repulsive.glue import SVGD, average_sets
from headwise_lab.papers.run import do_plans, make_plans, report, show_plans
from headwise_lab.results.cells import NONE
from headwise_lab.tasks.glue import scales
from headwise_lab.tasks.pretraining import scales as pretraining_scales
from headwise_lab.tasks.pretraining.scales import PRETRAINING_SCALES
from lab.tasks.glue.glue_toy import write_glue, write_model
from lab.tasks.pretraining.pretraining_toy import TOY, write_jsonl

TABLE = REPRODUCTIONS["repulsive/table-3"]
SETS = ("CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE", "RTE after MNLI")


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder of data, with scales that fit it and two arms."""
    write_glue(tmp_path / "data" / "glue", train=40, judged=12)
    for name in ("CoLA", "STS-B"):
        (tmp_path / "data" / "glue" / name / "train.tsv").unlink()
    write_jsonl(tmp_path / "data" / "corpora" / "docs.jsonl.gz", 120)
    demo = dataclasses.replace(TOY, name="demo", steps=4, rounds=1)
    monkeypatch.setitem(pretraining_scales.PRETRAINING_SCALES, "demo", demo)
    fine = dataclasses.replace(scales.GLUE_SCALES["demo"], length=16, warmup_share=0.0)
    monkeypatch.setitem(scales.GLUE_SCALES, "demo", fine)
    for name in ("repulsive/table-3", "repulsive/pretraining"):
        whole = REPRODUCTIONS[name]
        parts = tuple(dataclasses.replace(part, arms=("plain", SVGD)) for part in whole.parts)
        small = dataclasses.replace(whole, parts=parts, made=_claims if whole.made else None)
        monkeypatch.setitem(REPRODUCTIONS, name, small)
    return tmp_path


def _claims(sets: tuple[str, ...]):
    """The claims without the control that is not run here."""
    assert TABLE.made is not None
    return TABLE.made(sets)[:-1]


def test_the_table_names_the_eight_sets_and_the_second_way_to_rte():
    assert tuple(part.name for part in TABLE.parts) == SETS
    assert TABLE.scales == ("demo", "cpu", "gpu", "paper")
    printed: Mapping[str, list[float]] = {}
    assert TABLE.published is not None
    printed = {arm: [float(row.cells[0]) for row in TABLE.published.rows if row.arm == arm] for arm in ("plain", SVGD)}
    # the paper's own averages, both ways
    assert [round(float(np.mean(printed[arm][:8])), 1) for arm in ("plain", SVGD)] == [80.0, 80.2]
    second = {arm: [*scores[:7], scores[8]] for arm, scores in printed.items()}
    assert [round(float(np.mean(second[arm])), 1) for arm in ("plain", SVGD)] == [80.5, 81.3]
    assert list(average_sets(SETS)) == ["Avg. of 8", "Avg. of 8, RTE after MNLI"]
    for scale, longer in (("cpu", 5), ("gpu", 10), ("paper", 10)):
        found = {p.name: resize_scale(p.sizes[scale], scales.GLUE_SCALES).epochs for p in TABLE.parts}
        assert [name for name, epochs in found.items() if epochs == longer] == ["STS-B", "RTE", "RTE after MNLI"]


@pytest.mark.usefixtures("inline")
def test_one_command_pre_trains_fine_tunes_and_says_what_cannot_be_judged(place):
    table, data, out = REPRODUCTIONS["repulsive/table-3"], place / "data", place / "out"
    found = with_data(table, "demo", data)
    plans = make_plans(found, "demo", seeds=1, data=data, out=out, workers=1)
    assert [plan.part.name for plan in plans] == ["MNLI", "RTE", "RTE after MNLI"]
    screen = Console(record=True, width=200)
    show_plans(found, plans, screen)
    shown = screen.export_text(clear=False)
    assert "pretraining-demo" in shown
    assert "QQP (not there)" in shown
    assert "CoLA (no train.tsv)" in shown
    assert do_plans(found, plans, screen) == []
    for name, begun in (("RTE", "pretraining"), ("RTE after MNLI", "MNLI")):
        folder = next(plan.comparison for plan in plans if plan.part.name == name).scale.pretrained
        assert begun in folder.name
    report(found, "demo", plans, out, place / "paper", screen, "headwise reproduce repulsive/table-3")
    record = json.loads((place / "paper" / "results" / "table-3-demo.json").read_text())
    assert record["left_out"][:2] == ["CoLA (no train.tsv)", "SST-2 (not there)"]
    grid = record["grids"][0]
    assert grid["header"] == [
        "arm", "MNLI", "RTE", "RTE after MNLI", "Avg. of 2", "Avg. of 2, RTE after MNLI",
    ]  # fmt: skip
    scores = {
        name: run_folder.read_json(plan.comparison.out / "plain" / "seed-0" / "result.json")["score"]["pooled"]
        for name in ("MNLI", "RTE", "RTE after MNLI")
        for plan in plans
        if plan.part.name == name
    }
    plain = next(row for row in grid["rows"] if row[0] == "plain")
    assert plain[4]["value"] == pytest.approx((scores["MNLI"] + scores["RTE"]) / 2)
    assert plain[5]["value"] == pytest.approx((scores["MNLI"] + scores["RTE after MNLI"]) / 2)
    page = "\n".join(render(place / "paper").values())
    assert "\n* RTE: " in page
    assert "(test is GLUE's dev file, dev is cut from training)" in page
    assert str(place) not in page
    assert "Begins with pretraining at scale demo (4 steps), data docs " in page
    assert {row[2] for row in ((c["statement"], c["contrasts"], c["verdict"]) for c in record["claims"][:2])} == {
        "no verdict (1 pre-training)"
    }
    assert "Not judged here, for want of data: CoLA (no train.tsv), SST-2 (not there), MRPC (not there)" in page
    assert "mean of MNLI, RTE after MNLI" in page
    quoted = next(row for row in record["published"]["rows"] if row[1] == "QQP" and row[0] == "ELECTRA")
    assert quoted[3:] == [{"value": 88.1, "digits": 1}, NONE]
    # everything is there: nothing is run twice
    assert all(plan.finished == plan.folders for plan in plans)


def test_the_claims_are_those_of_the_paper_about_the_sets_there_are():
    assert TABLE.made is not None
    whole = TABLE.made(SETS)
    rising = ["CoLA", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE after MNLI"]
    assert [one.part for one in whole[1].contrasts] == rising
    assert len(whole[0].contrasts) == 2
    few = TABLE.made(("CoLA", "SST-2", "RTE"))
    # RTE fine-tuned alone falls in the paper
    assert [one.part for one in few[1].contrasts] == ["CoLA"]
    assert few[1].statement.endswith("(1 of these seven are here: CoLA).")
    assert "Avg. of 3" in few[0].statement


@pytest.mark.usefixtures("inline")
def test_each_fine_tuning_has_a_pre_training_where_there_are_several(place):
    table, data, out = REPRODUCTIONS["repulsive/table-3"], place / "data", place / "out"
    found = with_data(table.only(("RTE",), "demo"), "demo", data)
    options = ScaleOptions("demo", sizes=("starts=2",))
    plans = make_plans(found, "demo", seeds=2, data=data, out=out, workers=1, options=options)
    assert plans[0].before[0].comparison.seeds == (0, 1)
    assert do_plans(found, plans, Console(quiet=True)) == []
    starts = [run_folder.read_json(folder / "result.json")["start"] for folder in plans[0].folders]
    assert starts == [0, 1, 0, 1]


def test_only_a_comparison_of_pre_training_is_begun_with(place):
    table = REPRODUCTIONS["repulsive/table-3"]
    model = write_model(place / "model")
    options = ScaleOptions("demo", pretrained=model)
    with pytest.raises(DataError, match="model is no comparison of pretraining; expected for repulsive/table-3"):
        make_plans(table, "demo", seeds=1, data=place / "data", out=place / "out", workers=1, options=options)
    (place / "bare").mkdir()
    (place / "data" / "glue").rename(place / "bare" / "glue")
    with pytest.raises(DataError, match="bare holds no text to pre-train on; expected one of prepared, corpora"):
        make_plans(table, "demo", seeds=1, data=place / "bare", out=place / "out", workers=1)


def test_a_record_says_what_its_runs_began_with(tmp_path):
    run_folder.write_json(
        tmp_path / "comparison.json", {"task": "pretraining", "scale": "gpu", "sizes": {"steps": 6000}, "data": "ab12"}
    )
    begun = read_initial_runs(tmp_path, None, tmp_path)
    assert str(begun) == "pretraining at scale gpu (6,000 steps), data ab12"
    assert Reproduced(TABLE, "gpu", {}, {}, {}, initial_runs=begun).file == "table-3-gpu.json"
    assert Reproduced(TABLE, "cpu", {}, {}, {}, initial_runs=begun).file == "table-3-cpu-after-pretraining-gpu.json"


def test_what_begins_with_a_set_that_is_not_there_is_left_out_too(place):
    table = REPRODUCTIONS["repulsive/table-3"]
    (place / "data" / "glue" / "MNLI" / "train.tsv").unlink()
    found = with_data(table, "demo", place / "data")
    assert [part.name for part in found.parts] == ["RTE"]
    assert found.left_out[-1] == "RTE after MNLI (MNLI is not there)"
    assert "MNLI (no train.tsv)" in found.left_out
    # a claim about an average needs two sets
    assert {part for claim in found.claims for one in claim.contrasts for part in one.parts} == {"RTE"}
    alone = table.only(("RTE after MNLI",), "demo")
    with pytest.raises(DataError, match="begins with the runs of MNLI, which is not among the parts to run"):
        make_plans(alone, "demo", seeds=1, data=place / "data", out=place / "out", workers=1)


def test_a_folder_without_any_of_the_sets_is_refused(place):
    table = REPRODUCTIONS["repulsive/table-3"]
    (place / "none").mkdir()
    expected = (
        r"none holds no data that repulsive/table-3 could be run on: CoLA \(not there\), SST-2 .*expected some of"
    )
    with pytest.raises(DataError, match=expected):
        with_data(table, "demo", place / "none")
    write_jsonl(place / "none" / "corpora" / "docs.jsonl.gz", 4)
    with pytest.raises(DataError, match="CoLA does not exist; at scale demo repulsive/table-3 takes a folder"):
        make_plans(table, "demo", seeds=1, data=place / "none", out=place / "out", workers=1)


def test_pre_training_has_the_papers_settings():
    assert PRETRAINING_SCALES["paper"].steps == 1_000_000
    (part,) = REPRODUCTIONS["repulsive/pretraining"].parts
    assert part.arms == ("plain", "smooth:step_size=0.01", "svgd:alpha=0.1,step_size=0.01")
