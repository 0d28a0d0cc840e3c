from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from headwise.errors import HeadwiseError, SettingError
from headwise.integrations.methods import Repel
from headwise.lab.experiment.arm import named_arms
from headwise.lab.experiment.arm_text import list_settings, parse_arm
from headwise.lab.experiment.job import Failure
from headwise.lab.jobs import pool
from headwise.lab.tune import RANGES, Choice, Tuning, Uniform, draw_arm, tune
from lab.tasks.logic.logic_toy import TOY

pytestmark = pytest.mark.usefixtures("inline")

SMALL = dataclasses.replace(TOY, train_examples=96)


def tuning(arm: str, out: Path = Path("unused"), draws: int = 3, seed: int = 1) -> Tuning:
    return Tuning("logic", arm, draws, seed, SMALL, out)


def quiet() -> Console:
    return Console(file=io.StringIO())


def test_the_first_draw_is_the_arm_as_given_and_a_given_setting_is_kept():
    assert draw_arm(tuning("svgd"), 0) == parse_arm("svgd")
    for index in range(1, 6):
        arm = draw_arm(tuning("svgd:step_size=0.5,learning_rate=0.01+em"), index)
        assert arm.find(Repel).rule.step_size == 0.5
        assert arm.learning_rate == 0.01
        assert arm.find(Repel).rule.alpha != 0.01


def test_every_arm_sees_the_same_learning_rates_and_more_draws_add_to_the_earlier_ones():
    def rates(arm, draws, seed=1):
        return [draw_arm(tuning(arm, draws=draws, seed=seed), index).learning_rate for index in range(1, 4)]

    assert rates("plain", 4) == rates("em", 9)
    assert len(set(rates("plain", 4))) == 3
    assert rates("plain", 4) != rates("plain", 4, seed=2)
    assert draw_arm(tuning("output", draws=4), 2) == draw_arm(tuning("output", draws=9), 2)


@pytest.mark.parametrize("name", list(named_arms()))
def test_draws_stay_in_their_ranges_and_change_every_setting_that_has_one(name):
    arms = [draw_arm(tuning(name), index) for index in range(1, 25)]
    assert all(SMALL.learning_rate / 3.01 <= arm.learning_rate <= SMALL.learning_rate * 3.01 for arm in arms)
    for setting, path in list_settings(named_arms()[name]).items():
        if setting not in RANGES:
            continue
        values = []
        for arm in arms:
            value = arm
            for part in path:
                value = value[part] if isinstance(part, int) else getattr(value, part)
            values.append(value)
        assert len(set(values)) > 3
        where = RANGES[setting]
        if isinstance(where, Uniform):
            assert where.low * 0.99 <= min(values) <= max(values) <= where.high * 1.01
        else:
            assert isinstance(where, Choice)
            assert {str(value) for value in values} <= set(where.values)


def test_the_controls_keep_what_makes_them_controls():
    for index in range(1, 6):
        assert draw_arm(tuning("smooth"), index).methods == named_arms()["smooth"].methods


def test_the_best_draw_on_dev_is_the_result_and_all_are_kept(tmp_path, inline):
    found = tune(tuning("output", tmp_path), quiet())
    record = json.loads((tmp_path / "output" / "tuned.json").read_text())
    scores = {entry["arm"]: entry["dev_score"] for entry in record["tried"]}
    assert len(scores) == 3
    assert (found.arm.name, found.dev_score) == (record["arm"], record["dev_score"])
    assert found.dev_score == max(scores.values())
    assert parse_arm(record["arm"]) == found.arm
    assert len(inline) == 3
    result = json.loads((tmp_path / "output" / "draw-1" / "result.json").read_text())
    assert result["score"] is None
    # a second call finds everything done
    assert tune(tuning("output", tmp_path), quiet()) == found
    assert len(inline) == 3


def test_every_arm_of_a_folder_gets_the_same_number_of_draws(tmp_path):
    tune(tuning("plain", tmp_path, draws=1), quiet())
    with pytest.raises(SettingError, match=r"tuning\.json has draws 1 but 2 is requested; choose another --out"):
        tune(tuning("output", tmp_path, draws=2), quiet())


def test_a_failed_draw_is_left_out_and_all_failed_is_an_error(tmp_path, monkeypatch):
    def fail(_target, jobs, _workers, _watch):
        return [Failure(job, "no.", refused=False) for job in jobs]

    monkeypatch.setattr(pool, "run_jobs", fail)
    with pytest.raises(HeadwiseError, match=r"every draw of output failed; the first: draw 0 output failed: no\."):
        tune(tuning("output", tmp_path), quiet())
