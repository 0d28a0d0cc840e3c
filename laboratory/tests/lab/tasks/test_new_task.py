"""A task is a folder with two files, and a line in the registry: the tutorial's, as such a folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headwise_lab.experiment import registry
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.run_folder import read_json
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.training.train import train_run

PAGE = Path(__file__).parents[4] / "docs" / "tutorials" / "add_a_task.py"


def test_a_folder_of_two_files_and_a_line_are_a_task(tmp_path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "counting_task"
    folder.mkdir()
    code, _ = PAGE.read_text(encoding="utf-8").split("registry.TASKS =")
    written = re.search(r'SETTINGS = .*\nSETTINGS\.write_text\("""\n(.*?)"""\)\n', code, re.DOTALL)
    assert written
    (folder / "task.toml").write_text(written[1], encoding="utf-8")
    kept = code.replace(written[0], 'SETTINGS = Path(__file__).with_name("task.toml")\n')
    (folder / "task.py").write_text(kept, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "TASKS", {**registry.TASKS, "counting": "counting_task.task:CountingTask"})
    task = registry.named_task("counting")
    assert (task.metric, task.bins, list(task.scales)) == ("accuracy", (5, 10, 15), ["demo"])
    run = tmp_path / "plain"
    train_run(RunSettings("counting", task.scales["demo"], parse_arm("plain"), seed=0, cache=tmp_path), run)
    result = read_json(run / "result.json")
    assert result["score"]["pooled"] > 0.6
    assert {*task.difficulties(task.load(None, task.scales["demo"], None))} == {5, 10, 15}
