"""The main job end to end on the published files: read, train, judge, reproduce; and what it learns there."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headwise_lab.compare import Comparison, compare
from headwise_lab.experiment.arm_text import parse_arms
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.run import do_plans, make_plans, report
from headwise_lab.tasks.logic.scales import LOGIC_SCALES, LogicScale
from headwise_lab.tasks.logic.task import LogicTask

PUBLISHED = Path(os.environ.get("HEADWISE_DATA", "")) / "logical_inference" / "propositionallogic"
needs_published_data = pytest.mark.skipif(
    "HEADWISE_DATA" not in os.environ, reason="HEADWISE_DATA names no folder with the published files"
)


@pytest.fixture
def smallest(monkeypatch: pytest.MonkeyPatch) -> LogicScale:
    small = {"width": 8, "heads": 2, "classifier_width": 16, "epochs": 1, "train_examples": 256, "dev_examples": 80}
    toy = dataclasses.replace(LOGIC_SCALES["cpu"], name="toy", compile_routing=False, **small)
    monkeypatch.setattr(LogicTask, "scales", {**LOGIC_SCALES, "cpu": toy})
    return toy


def require_whole(record: dict[str, Any], arms: Iterable[str]) -> None:
    # the published test files have 37,361 lines of 1 to 12 operators
    assert sum(record["bins"].values()) == 37_361
    assert {row["arm"] for row in record["rows"]} == {"counts", "majority", *arms}


@needs_published_data
@pytest.mark.usefixtures("inline")
def test_arms_are_compared_on_the_published_files(tmp_path, smallest):
    arms = tuple(parse_arms("plain,output"))
    comparison = Comparison("logic", arms, (0,), smallest, tmp_path, PUBLISHED, workers=1)
    assert compare(comparison, Console(record=True)) == []
    require_whole(json.loads((tmp_path / "results.json").read_text()), ("plain", "output"))


@pytest.mark.slow
@needs_published_data
@pytest.mark.usefixtures("smallest")
def test_every_arm_of_figure_4_runs_on_the_published_files(tmp_path):
    reproduction = REPRODUCTIONS["diversify/figure-4"]
    console = Console(record=True, width=100)
    plans = make_plans(reproduction, "cpu", seeds=1, data=PUBLISHED, out=tmp_path, workers=2)
    assert do_plans(reproduction, plans, console) == []
    report(reproduction, "cpu", plans, tmp_path, tmp_path / "paper", console, "headwise reproduce diversify/figure-4")
    record = json.loads((tmp_path / "diversify-figure-4-cpu" / "results.json").read_text())
    require_whole(record, reproduction.parts[0].arms)
    assert (tmp_path / "diversify-figure-4-cpu" / "report.html").stat().st_size > 10_000
    assert "no verdict (1 seed)" in (tmp_path / "paper" / "RESULTS.md").read_text()


@pytest.mark.slow
@needs_published_data
def test_the_plain_model_of_the_demo_learns_the_published_relations(tmp_path):
    arms = tuple(parse_arms("plain"))
    comparison = Comparison("logic", arms, (0,), LOGIC_SCALES["demo"], tmp_path, PUBLISHED, workers=1)
    assert compare(comparison, Console(record=True)) == []
    rows = {row["arm"]: row["score"]["value"] for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    assert rows["plain"] > rows["majority"] + 0.12
    assert rows["plain"] > rows["counts"]
