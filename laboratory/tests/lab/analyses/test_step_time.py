"""Step times: taken in turn with plain's, whatever the clock of the runs said, and read by every table."""

from __future__ import annotations

import io
import itertools
import time

import pytest
import torch
from rich.console import Console

from headwise.errors import DataError
from headwise_lab.analyses import step_time
from headwise_lab.analyses.step_time import BATCHES, ROUNDS, measure_step_time
from headwise_lab.compare import Comparison, compare
from headwise_lab.experiment.arm_text import parse_arm, parse_arms
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.run_folder import analysis_file, read_json, write_json
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.papers.claims import show_step_times
from headwise_lab.results.evidence import read_evidence
from headwise_lab.results.runs import STEP_RATIO, STEP_TIME
from headwise_lab.results.table import read_table
from headwise_lab.training.callback import choose_clock
from lab.results.synthetic_comparison import Drawn, write_comparison
from lab.tasks.logic.logic_toy import TOY


@pytest.fixture
def settings(tmp_path):
    return RunSettings("logic", TOY, parse_arm("svgd:alpha=5"), seed=2, cache=tmp_path / "cache")


def test_the_ratio_is_the_median_within_rounds_and_each_model_comes_first_as_often(settings, tmp_path, monkeypatch):
    now, order = [0.0], []
    slower = itertools.cycle([1.0, 4.0, 1.0, 1.0])

    def stand_in(_task, arm, _data, _settings):
        own = len(order)
        order.append([])

        def step(_batch):
            order[own].append(sum(map(len, order)))
            # the machine is four times as slow in some rounds, for all models alike
            pace = next(slower) if own == 0 else 1.0
            now[0] += pace * (3.0 if arm.name != "plain" else 2.0)

        return step

    monkeypatch.setattr(step_time, "_make_step", stand_in)
    monkeypatch.setattr(step_time, "choose_clock", lambda _: lambda: now[0])
    found = measure_step_time(settings, tmp_path)
    assert found["numbers"] == {STEP_RATIO: 1.5, "plain_again": 1.0}
    assert found["rounds"] == BATCHES * ROUNDS
    assert [len(steps) for steps in order] == [BATCHES * (ROUNDS + 1)] * 3
    # the first step of each batch is not counted; of the others each model takes each place as often
    counted = [[place for number, place in enumerate(steps) if number % (ROUNDS + 1)] for steps in order]
    for places in counted:
        assert [sum(place % 3 == rest for place in places) for rest in (0, 1, 2)] == [BATCHES * ROUNDS // 3] * 3


def test_a_step_is_a_training_step_of_the_arm(settings):
    task = named_task("logic")
    data = task.load(None, TOY, settings.cache)
    batch = task.collate([data.train[index] for index in range(8)])
    made = []

    def kept(*arguments, **named):
        model, methods = attach(*arguments, **named)
        made.append((model, methods, [parameter.detach().clone() for parameter in model.parameters()]))
        return model, methods

    attach = step_time.attach_arm
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_time, "attach_arm", kept)
        steps = [
            step_time._make_step(task, parse_arm(name), data, settings) for name in ("plain", "svgd:alpha=5", "output")
        ]
    torch.manual_seed(0)
    for step in steps:
        step(batch)
    for model, _, before in made:
        assert model.training
        moved = [not torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True)]
        assert any(moved)
    repulsion = made[1][1].repulsion
    assert (repulsion.last.force_ratio > 0).all()
    penalty = made[2][1].penalty
    assert penalty.last is not None


def test_muon_is_timed_as_muon(settings, monkeypatch):
    task, built = named_task("logic"), []
    build = step_time.build_optimizer
    monkeypatch.setattr(step_time, "build_optimizer", lambda *given: built.append(build(*given)) or built[-1])
    for arm in ("plain", "muon-heads"):
        step_time._make_step(task, parse_arm(arm), task.load(None, TOY, settings.cache), settings)
    assert [type(optimizer).__name__ for optimizer in built] == ["AdamW", "PerHeadMuon"]


def test_tables_and_claims_take_it_before_the_runs_own_times(tmp_path):
    write_comparison(tmp_path, (Drawn("plain", None), Drawn("svgd", "smooth")), items=20, seeds=(0, 1))
    own = read_table(tmp_path).row("svgd").step_ratio
    evidence = {"": read_evidence(tmp_path, ["plain", "svgd"], [0, 1])}
    before = str(show_step_times(("svgd",)).line(evidence))
    path = analysis_file(tmp_path / "svgd" / "seed-0", STEP_TIME)
    write_json(path, {"numbers": {STEP_RATIO: 1.37, "plain_again": 1.01}, "rounds": 27})
    assert own != 1.37
    assert read_table(tmp_path).row("svgd").step_ratio == 1.37
    evidence = {"": read_evidence(tmp_path, ["plain", "svgd"], [0, 1])}
    assert str(show_step_times(("svgd",)).line(evidence)) == "step time over plain: svgd 1.37" != before
    path.write_text('{"rounds": 27}')
    with pytest.raises(DataError, match="is not the record of step times"):
        read_table(tmp_path)


@pytest.mark.full
@pytest.mark.usefixtures("inline")
def test_compare_times_each_arm_once(tmp_path):
    arms = tuple(parse_arms("plain,svgd"))
    comparison = Comparison("logic", arms, (0, 1), TOY, tmp_path)
    console = Console(file=io.StringIO(), record=True)
    assert compare(comparison, console, step_times=True) == []
    timed = sorted(path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("analysis-step-time.json"))
    assert timed == ["plain/seed-0", "svgd/seed-0"]
    numbers = read_json(tmp_path / timed[1] / "analysis-step-time.json")["numbers"]
    assert 0.05 < numbers[STEP_RATIO] < 20
    assert "--step-time" in (tmp_path / "report.html").read_text()


def test_steps_on_a_cpu_are_timed_in_seconds_that_other_programs_do_not_lengthen():
    assert choose_clock(torch.device("cpu")) is time.process_time
    assert choose_clock(torch.device("cuda")) is time.monotonic
