from __future__ import annotations

import dataclasses
import io
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from headwise.errors import DataError, HeadwiseError, SettingError
from headwise.repulsion.repel import Repel
from headwise_lab.compare import Comparison, plan_runs
from headwise_lab.experiment.arm import named_arms
from headwise_lab.experiment.arm_text import list_settings, parse_arm, restore_arm
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.run_folder import Failure
from headwise_lab.jobs import pool
from headwise_lab.results.runs import read_results
from headwise_lab.results.table import read_table
from headwise_lab.tasks.glue.scales import GLUE_SCALES
from headwise_lab.tasks.logic.task import LogicTask
from headwise_lab.training.attach import attach_arm, build_model
from headwise_lab.training.start import Start
from headwise_lab.tune import RANGES, Choice, Tuning, Uniform, draw_arm, expect_best, read_tuned, tune
from lab.command import call
from lab.tasks.logic.logic_toy import TOY

pytestmark = pytest.mark.usefixtures("inline")

SMALL = dataclasses.replace(TOY, train_examples=96)


def tuning(arm: str, out: Path = Path("unused"), draws: int = 3, seed: int = 1, seeds: int = 1) -> Tuning:
    return Tuning("logic", arm, draws, seed, SMALL, out, seeds=seeds)


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


@pytest.mark.full
def test_draws_stay_in_their_ranges_and_change_every_setting_that_has_one():
    for name, named in named_arms().items():
        arms = [draw_arm(tuning(name), index) for index in range(1, 13)]
        assert all(SMALL.learning_rate / 3.01 <= arm.learning_rate <= SMALL.learning_rate * 3.01 for arm in arms)
        for setting, path in list_settings(named).items():
            if setting not in RANGES:
                continue
            values = []
            for arm in arms:
                value = arm
                for part in path:
                    value = value[part] if isinstance(part, int) else getattr(value, part)
                values.append(value)
            assert len(set(values)) > 3, (name, setting)
            where = RANGES[setting]
            if isinstance(where, Uniform):
                assert where.low * 0.99 <= min(values) <= max(values) <= where.high * 1.01, (name, setting)
            else:
                assert isinstance(where, Choice)
                assert {str(value) for value in values} <= set(where.values), (name, setting)
    # the controls keep what makes them controls
    assert all(draw_arm(tuning("smooth"), index).methods == named_arms()["smooth"].methods for index in range(1, 6))


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


def test_every_arm_sees_the_same_dropouts_and_the_model_has_them(tmp_path):
    drawn = [[draw_arm(tuning(arm), index).dropout for index in range(1, 9)] for arm in ("plain", "em", "svgd")]
    assert drawn[0] == drawn[1] == drawn[2]
    assert len(set(drawn[0])) == 8
    assert all(0 <= dropout <= 0.5 for dropout in drawn[0])
    assert draw_arm(tuning("plain:dropout=0.25"), 3).dropout == 0.25
    task = named_task("logic")
    data = task.load(None, SMALL, tmp_path)
    for arm, expected in (("plain:dropout=0.25", 0.25), ("plain", SMALL.dropout)):
        model, _ = attach_arm(task, parse_arm(arm), data, SMALL, seed=1)
        found = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
        assert found == {expected}


def test_dropout_is_refused_where_a_task_has_none():
    data: Any = SimpleNamespace(start=Start(Path("model"), "", "0"))
    with pytest.raises(SettingError, match="sets dropout, and the model of task glue has none"):
        build_model(named_task("glue"), parse_arm("plain:dropout=0.1"), data, GLUE_SCALES["demo"], seed=0)


@pytest.mark.full
def test_a_draw_of_several_seeds_scores_their_mean(tmp_path, inline):
    found = tune(tuning("plain", tmp_path, draws=2, seed=7, seeds=3), quiet())
    assert len(inline) == 6
    means = []
    for draw in range(2):
        runs = [tmp_path / "plain" / f"draw-{draw}{turn}" for turn in ("", "-seed-1", "-seed-2")]
        results = [json.loads((run / "result.json").read_text()) for run in runs]
        assert [result["settings"]["seed"] for result in results] == [7, 8, 9]
        means.append(sum(result["dev_score"] for result in results) / 3)
    assert found.dev_score == pytest.approx(max(means))
    assert found.expected == pytest.approx((sum(means) / 2, max(means)))


def test_the_expected_best_is_that_of_all_subsets():
    scores = [0.3, 0.9, 0.5, 0.5]
    for tried, expected in enumerate(expect_best(scores), start=1):
        best = [max(subset) for subset in itertools.combinations(scores, tried)]
        assert expected == pytest.approx(sum(best) / len(best))


@pytest.mark.full
def test_a_comparison_takes_the_best_draws_under_the_names_of_the_arms(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = dataclasses.replace(SMALL, name="demo")
    monkeypatch.setattr(LogicTask, "scales", {**LogicTask.scales, "demo": small})
    arms = "plain,smooth,svgd"
    given = ("logic", arms, "--draws", "3", "--seed", "5", "--out", "tuned", "--workers", "1")
    assert call("tune", *given) == 0
    best = {arm: json.loads((tmp_path / "tuned" / arm / "tuned.json").read_text())["arm"] for arm in arms.split(",")}
    assert call("compare", "logic", "--arms", arms, "--seeds", "2", "--tuned", "tuned", "--workers", "1") == 0
    runs = [run for run in read_results(tmp_path / "runs" / "logic-demo").runs if not run.baseline]
    assert {(run.arm, run.control) for run in runs} == {("plain", None), ("smooth", "scaled"), ("svgd", "smooth")}
    for run in runs:
        arm = restore_arm(json.loads((run.folder / "result.json").read_text())["settings"]["arm"])
        assert dataclasses.replace(arm, name="", control=None) == dataclasses.replace(
            parse_arm(best[run.arm]), name="", control=None
        )
    assert read_table(tmp_path / "runs" / "logic-demo").row("svgd").to_plain is not None
    assert "--tuned tuned" in " ".join((tmp_path / "runs/logic-demo/report.html").read_text().split())


def test_draws_of_other_ranges_are_not_credited_with_earlier_scores(tmp_path, monkeypatch):
    tune(tuning("cka", tmp_path, draws=2), quiet())
    monkeypatch.setitem(RANGES, "ratio", Uniform(50.0, 90.0))
    with pytest.raises(SettingError, match=r"settings\.json has .* but .* is requested"):
        tune(tuning("cka", tmp_path, draws=2), quiet())


def test_a_tuning_on_other_data_is_refused(tmp_path):
    tune(tuning("plain", tmp_path / "tuned", draws=1), quiet())
    record = json.loads((tmp_path / "tuned" / "tuning.json").read_text())
    (tmp_path / "tuned" / "tuning.json").write_text(json.dumps(record | {"data": "another"}))
    arms, _ = read_tuned(tmp_path / "tuned", [parse_arm("plain")], "logic", SMALL)
    comparison = Comparison("logic", arms, (0,), SMALL, tmp_path / "runs", None, 1, tuned=tmp_path / "tuned")
    with pytest.raises(SettingError, match="tuned on data with digest another, and the data now has"):
        plan_runs(comparison, quiet())
    (tmp_path / "tuned" / "tuning.json").write_text(json.dumps(record))
    assert "plain seed 0" in [job.name for job in plan_runs(comparison, quiet())]


def test_arms_that_were_not_tuned_alike_are_refused(tmp_path):
    tune(tuning("plain", tmp_path), quiet())
    plain, em = parse_arm("plain"), parse_arm("em")
    with pytest.raises(DataError, match=r"no best draw of em; .*headwise tune logic em --draws 3 --seed 1 --seeds 1"):
        read_tuned(tmp_path, [plain, em], "logic", SMALL)
    with pytest.raises(SettingError, match=r"was tuned for sizes .*expected the task and the sizes"):
        read_tuned(tmp_path, [plain], "logic", dataclasses.replace(SMALL, width=2 * SMALL.width))
    kept = json.loads((tmp_path / "plain" / "tuned.json").read_text())
    for changed in ({"tried": []}, {"seeds": 0}, {"tried": [{"arm": "plain", "dev_score": "inf"}]}):
        (tmp_path / "plain" / "tuned.json").write_text(json.dumps({**kept, **changed}))
        with pytest.raises(DataError, match=r"tuned\.json does not hold the draws of an arm"):
            read_tuned(tmp_path, [plain], "logic", SMALL)
    with pytest.raises(DataError, match=r"has no tuning\.json; give the --out of headwise tune"):
        read_tuned(tmp_path / "plain", [plain], "logic", SMALL)
