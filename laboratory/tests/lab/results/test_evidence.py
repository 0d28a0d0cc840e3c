"""The runs a reproduction reads from a folder that it shares, and the numbers beside them."""

from __future__ import annotations

import json

import pytest

from headwise.errors import DataError
from headwise_lab.experiment.run_folder import analysis_file, write_result
from headwise_lab.results.evidence import read_evidence, read_numbers
from lab.results.synthetic_comparison import PAPER, write_comparison


@pytest.fixture
def folder(tmp_path):
    return write_comparison(tmp_path / "runs", PAPER, items=20)


def test_only_the_arms_and_seeds_asked_for_are_read_with_the_baselines(folder):
    found = read_evidence(folder, ["plain", "em"], [1, 3])
    arms = {(run.arm, run.seed) for run in found.results.runs if not run.baseline}
    assert arms == {("plain", 1), ("plain", 3), ("em", 1), ("em", 3)}
    assert {run.arm for run in found.results.runs if run.baseline} == {"majority", "counts"}
    assert found.results.arms == ("plain", "em")
    assert found.results.missing == ()
    assert read_evidence(folder, ["plain", "spos"], [1]).results.missing == ("spos seed 1",)


def test_without_a_run_there_is_no_evidence(folder, tmp_path):
    assert read_evidence(tmp_path / "nowhere", ["plain"], [0]) is None
    assert read_evidence(folder, ["spos"], [0, 1]) is None


def test_numbers_come_from_the_result_its_answers_and_its_analyses(folder):
    run = folder / "em" / "seed-3"
    result = json.loads((run / "result.json").read_text())
    write_result(run, result | {"answers": {"NLL": 2.5, "text": "no number"}})
    analysis_file(run, "head-vectors").write_text(json.dumps({"numbers": {"head_vector_cosine": 0.25}, "vectors": []}))
    numbers = read_numbers(run)
    assert (numbers["NLL"], numbers["head_vector_cosine"]) == (2.5, 0.25)
    assert numbers["parameters"] == 181_319
    assert "text" not in numbers
    assert "force_ratio" not in numbers
    found = read_evidence(folder, ["plain", "em"], range(5))
    assert found.of("em", "NLL") == {3: 2.5}
    assert found.mean("em", "NLL") == 2.5
    assert found.mean("plain", "NLL") is None
    assert sorted(found.of("plain", "step_seconds")) == [0, 1, 2, 3, 4]


def test_a_damaged_analysis_is_named(folder):
    analysis_file(folder / "em" / "seed-3", "redundancy").write_text("[]")
    with pytest.raises(DataError, match=r"em/seed-3/analysis-redundancy\.json is not the record of an analysis"):
        read_evidence(folder, ["em"], [3])
