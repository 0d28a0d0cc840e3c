"""How often the laboratory's tests err on simulated runs: the simulation of benchmarks/calibration.py."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[4] / "benchmarks" / "calibration.py"


@pytest.fixture
def calibration(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # the folder has the module that all benchmarks share
    monkeypatch.syspath_prepend(str(PATH.parent))
    spec = importlib.util.spec_from_file_location("calibration", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "calibration", module)
    spec.loader.exec_module(module)
    return module


def test_tests_of_normal_runs_err_about_as_often_as_they_should(calibration):
    found = calibration.simulate_normal(10, 1.0, 1500)
    # three errors of a share of 5 %, or of 80 %, in 1,500
    assert abs(found["sizes"][0] - 0.05) < 3 * math.sqrt(0.05 * 0.95 / 1500)
    assert found["cover"] == 1 - found["sizes"][0]
    assert abs(found["equivalence"] - 0.05) < 3 * math.sqrt(0.05 * 0.95 / 1500)
    assert abs(found["power_at_detectable"] - 0.8) < 3 * math.sqrt(0.8 * 0.2 / 1500)


def test_tests_over_seeds_alone_err_where_items_are_moved_and_the_laboratorys_do_not(calibration):
    null = calibration.Null("items", 300, 0.0, 2.0)
    found = calibration.simulate_logistic(null, 10, 400)
    assert found["student"] > 0.3
    assert found["joint"] < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
    assert found["cover"] == pytest.approx(1 - found["joint"])


def test_the_simulated_accuracies_are_those_that_are_meant(calibration):
    np = calibration.np
    null = calibration.Null("failing", 4000, 2.0, 1.0, failing=0.2)
    gamma = calibration.choose_gamma(null)
    shift = calibration.find_shift(null, gamma, calibration.compute_accuracy(null, gamma, 0.0) + 0.03)
    drawn = np.random.default_rng(0)
    gains = []
    for _ in range(60):
        control, (arm,) = calibration.draw_logistic(drawn, null, 20, gamma, np.array([shift]))
        gains.append(arm.mean() - control.mean())
    assert np.mean(gains) == pytest.approx(0.03, abs=4 * np.std(gains) / 60**0.5)
    healthy = calibration.Null("healthy", 4000, 2.0, 0.0)
    control, (arm,) = calibration.draw_logistic(drawn, healthy, 400, calibration.choose_gamma(healthy), np.zeros(1))
    # beside seeds a difference has the noise of its items, some 0.6 points
    assert 100 * (arm.mean(axis=1) - control.mean(axis=1)).std() == pytest.approx(2.1, abs=0.25)


def test_a_tiny_run_writes_its_record(calibration, monkeypatch, tmp_path):
    monkeypatch.setattr(calibration, "NULLS", calibration.NULLS[:1])
    out = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["x", "--repetitions", "3", "--normal-repetitions", "3", "--out", str(out)])
    calibration.main()
    record = json.loads(out.read_text())
    assert len(record["normal"]) == len(calibration.RATIOS) * len(calibration.SEEDS)
    assert [row["seeds"] for row in record["logistic"]] == list(calibration.SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("seeds", [5, 10, 20])
def test_sizes_of_normal_runs_are_4_to_6_percent_and_intervals_cover_94_to_96(calibration, seeds, ratio):
    found = calibration.simulate_normal(seeds, ratio, 40_000)
    assert 0.04 <= found["sizes"][0] <= 0.06
    assert 0.94 <= found["cover"] <= 0.96
    # Holm's adjustment asks for small levels
    assert found["sizes"][1] <= 0.014
    assert found["sizes"][2] <= 0.008
    assert 0.045 <= found["equivalence"] <= 0.057
    assert 0.77 <= found["power_at_detectable"] <= 0.83


@pytest.mark.slow
@pytest.mark.parametrize("place", [1, 4, 6])
@pytest.mark.parametrize("seeds", [5, 10])
def test_sizes_and_coverage_of_answers_right_or_wrong(calibration, place, seeds):
    found = calibration.simulate_logistic(calibration.NULLS[place], seeds, 4_000)
    error = 2 * math.sqrt(0.05 * 0.95 / 4_000)
    assert 0.04 - error <= found["joint"] <= 0.06 + error
    for cover in (found["cover"], found["gain_cover"]):
        assert 0.94 - error <= cover <= 0.96 + error
