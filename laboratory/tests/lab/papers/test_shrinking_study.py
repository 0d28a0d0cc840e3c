"""The study of shrinking: from data to the record at toy size, its table and its picture."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.scale import ScaleOptions
from headwise_lab.papers.claims import judge
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.diversity.shrinking import draw_shrinking, tabulate_shrinking
from headwise_lab.papers.run import do_plans, make_plans, report
from headwise_lab.results.evidence import Evidence
from headwise_lab.results.runs import read_results
from headwise_lab.results.table import make_table
from lab.results.synthetic_comparison import Drawn, write_comparison

DIFFERENT, TOGETHER = ("output-relative", "cka", "svgd-span"), "cka-together"
SHRUNK = [REPRODUCTIONS[f"diversity/shrinking-{name}"] for name in ("logic", "questions", "translation", "lm")]
ARMS = ("plain", *DIFFERENT, "scaled", TOGETHER)
# What half of the heads adds to the loss.
COSTS = {"plain": 1.0, "output-relative": 1.5, "cka": 2.0, "svgd-span": 0.5, "cka-together": 0.25, "scaled": 0.3}
SMALL = ("width=16", "heads=4", "classifier_width=16", "epochs=1", "warmup_steps=3", "generated_draws=1500")


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    drawn = [Drawn(arm, None if arm == "plain" else "plain") for arm in ARMS]
    results = read_results(write_comparison(tmp_path_factory.mktemp("runs"), drawn, items=40))
    numbers = {}
    for run in results.runs:
        cost = COSTS[run.arm] + 0.01 * ((list(COSTS).index(run.arm) + 1) * run.seed % 5)
        numbers[run.arm, run.seed] = {
            "loss_heads_100": 0.5,
            "loss_added_heads_75": cost / 2,
            "loss_added_heads_50": cost,
            "loss_added_heads_25": 2 * cost,
            "score_heads_50": 0.9 - cost / 4,
            "effective_heads": 2.0 + cost,
        }
    return Evidence(results, numbers)


def test_each_arm_is_compared_with_plain_by_the_loss_that_half_of_its_heads_adds(evidence: Evidence):
    claims = SHRUNK[0].claims_at("demo", named_task("logic").scales)
    judged = {one.claim.statement.partition(":")[0]: one for one in judge(claims, {"": evidence})}
    needed = judged["Heads that were made different are all needed"]
    found = {one.contrast.arm: one for one in needed.found if one.contrast.against == "plain"}
    assert tuple(found) == DIFFERENT
    cka = found["cka"].estimate
    assert cka is not None
    assert cka.value == pytest.approx(1.0)
    assert (cka.seeds, cka.items) == (5, 1)
    assert found["cka"].verdict == found["output-relative"].verdict == "borne out"
    assert found["svgd-span"].verdict == "contradicted"
    (control,) = (one for one in needed.found if one.contrast.against != "plain")
    assert (control.contrast.arm, control.contrast.against) == ("svgd-span", "scaled")
    assert control.verdict == "borne out"
    spared = judged["Of heads that were made alike, some can be spared"]
    assert spared.verdict == "borne out"
    assert spared.found[0].estimate is not None
    assert spared.found[0].estimate.value == pytest.approx(0.75 + 0.02)
    scores = judged["The score after removing half of them, above plain's (ours)."]
    assert scores.verdict == "measured, not tested"
    assert len(scores.found) == len(DIFFERENT) + 1


def test_only_the_language_model_has_claims_about_merging():
    for study in SHRUNK:
        measures = {one.measure for claim in study.claims for one in claim.contrasts}
        assert ("loss_added_kv_heads_50" in measures) == (study.task == "lm")
        assert "loss_added_heads_50" in measures
        assert study.arms_at("cpu", named_task(study.task).scales)[""] == ARMS


def test_key_value_heads_of_the_language_model_are_as_many_as_its_heads(tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("a text\n" * 20)
    for scale in ("demo", "cpu", "gpu"):
        (plan,) = make_plans(
            REPRODUCTIONS["diversity/shrinking-lm"], scale, seeds=1, data=text, out=tmp_path, workers=1
        )
        sizes: Any = plan.comparison.scale
        assert sizes.key_value_heads == sizes.heads


def test_table_and_picture_show_the_loss_added_by_the_share_of_heads(evidence: Evidence):
    table = make_table(evidence.results)
    grid = tabulate_shrinking({"": evidence}, {"": table})
    assert grid is not None
    assert grid.header == ("arm", "loss, whole", "75% of heads", "50% of heads", "25% of heads")
    rows = {row[0]: row[1:] for row in grid.rows}
    value: Any = rows["CKA"][2]
    assert (value.value, value.low, value.high) == pytest.approx((2.02, 2.00037, 2.03963), abs=1e-4)
    (picture,) = draw_shrinking("", Path(), evidence, table)
    assert picture.name == "shrinking"
    assert "cka, heads: 100% +0.000, 75% +1.010, 50% +2.020, 25% +4.040" in picture.alt
    silent = dataclasses.replace(evidence, numbers={})
    assert tabulate_shrinking({"": silent}, {"": table}) is None
    assert draw_shrinking("", Path(), silent, table) == ()


@pytest.mark.usefixtures("inline")
def test_the_study_of_logic_runs_from_data_to_its_record(tmp_path: Path):
    whole = REPRODUCTIONS["diversity/shrinking-logic"]
    study = dataclasses.replace(
        whole, parts=(dataclasses.replace(whole.parts[0], arms=("plain", TOGETHER)),), claims=whole.claims[1:4:2]
    )
    options = ScaleOptions("demo", sizes=(*SMALL, "train_examples=96", "dev_examples=24"))
    plans = make_plans(study, "demo", seeds=2, data=None, out=tmp_path, workers=1, options=options)
    console = Console(record=True, width=160)
    assert do_plans(study, plans, console) == []
    found = report(study, "demo", plans, tmp_path, tmp_path / "paper", console, "headwise reproduce")
    assert [one.name for one in found.pictures] == ["shrinking"]
    shown = console.export_text()
    assert "50% of heads" in shown
    record = json.loads((tmp_path / "paper" / "results" / "shrinking-logic-demo.json").read_text())
    assert record["grids"][0]["title"] == "loss on the test set, and what it rises by, in nats"
    assert record["claims"][1]["contrasts"][0]["value"] is not None
    assert (tmp_path / "paper" / "results" / "shrinking-logic-demo-shrinking.png").exists()
