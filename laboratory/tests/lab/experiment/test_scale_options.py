"""Options of a scale: what a command may change, how it is named and what is refused."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from headwise.errors import DataError, SettingError
from headwise_lab.experiment.scale import ScaleOptions, read_presets, read_task_file, with_options
from headwise_lab.experiment.task import ClassifierTask
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES
from headwise_lab.tasks.lm.scales import LM_SCALES
from headwise_lab.tasks.logic.scales import LOGIC_SCALES, LogicScale

CPU = CLASSIFICATION_SCALES["cpu"]


def test_sizes_are_typed_and_named_and_places_are_not():
    options = ScaleOptions("cpu", Path("p"), Path("e"), 10, ("layers=4", "dropout=0.5", "norm_first=false"))
    scale = with_options(CPU, options, "classification")
    assert (scale.layers, scale.dropout, scale.norm_first, scale.folds) == (4, 0.5, False, 10)
    assert (scale.pipeline, scale.embeddings) == (Path("p"), Path("e"))
    assert scale.name == "cpu-layers=4-dropout=0.5-norm_first=False-folds=10"
    assert with_options(CPU, ScaleOptions("cpu", Path("p")), "classification").name == "cpu"
    assert with_options(CPU, ScaleOptions("cpu"), "classification") is CPU


def test_one_fold_is_one_cut():
    paper = CLASSIFICATION_SCALES["paper"]
    assert paper.folds == 10
    scale = with_options(paper, ScaleOptions("paper", folds=1), "classification")
    assert (scale.folds, scale.name) == (None, "paper-folds=1")
    with pytest.raises(SettingError, match="folds"):
        with_options(paper, ScaleOptions("paper", folds=2), "classification")


def test_a_size_that_may_be_absent_is_set_by_a_number():
    assert with_options(CPU, ScaleOptions("cpu", sizes=("train_examples=50",)), "classification").train_examples == 50


def test_a_size_that_is_one_of_some_words_is_set_by_a_word():
    scale = with_options(LM_SCALES["demo"], ScaleOptions("demo", sizes=("family=qwen3",)), "lm")
    assert (scale.family, scale.name) == ("qwen3", "demo-family=qwen3")
    with pytest.raises(SettingError, match=r"^--set family=gpt: expected llama or qwen3\.$"):
        with_options(LM_SCALES["demo"], ScaleOptions("demo", sizes=("family=gpt",)), "lm")


def test_the_options_are_shown_as_they_are_typed_and_for_others_without_places():
    options = ScaleOptions("cpu", Path("a b"), None, 5, ("layers=4",))
    assert options.words() == ["--scale", "cpu", "--pipeline", "a b", "--folds", "5", "--set", "layers=4"]
    assert options.words(for_others=True)[:4] == ["--scale", "cpu", "--pipeline", "DIR"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ScaleOptions("cpu", pipeline=Path("p")), "task logic takes no --pipeline; omit it"),
        (ScaleOptions("cpu", folds=5), "task logic takes no --folds; omit it"),
        (
            ScaleOptions("cpu", sizes=("layers",)),
            "--set layers: expected size=value, with one of the sizes width, layers",
        ),
        (ScaleOptions("cpu", sizes=("name=x",)), "--set name=x: expected size=value"),
        (ScaleOptions("cpu", sizes=("layers=two",)), "--set layers=two: expected an integer"),
        (ScaleOptions("cpu", sizes=("norm_first=1",)), "--set norm_first=1: expected true or false"),
        (ScaleOptions("cpu", sizes=("layers=0",)), "layers is 0; expected an integer of at least 1"),
    ],
)
def test_what_a_scale_does_not_have_or_cannot_be_is_refused(options, message):
    with pytest.raises(SettingError, match=message):
        with_options(LOGIC_SCALES["cpu"], options, "logic")


LOGIC = Path(inspect.getfile(LogicScale)).with_name("task.toml").read_text(encoding="utf-8")


def test_a_preset_has_the_shared_sizes_and_its_own(tmp_path):
    place = tmp_path / "task.toml"
    place.write_text(LOGIC.replace("[scales.cpu]\n", "[scales.cpu]\nlayers = 5\n", 1), encoding="utf-8")
    found = read_presets(place, LogicScale)
    assert found == {**LOGIC_SCALES, "cpu": dataclasses.replace(LOGIC_SCALES["cpu"], layers=5)}
    assert {name: scale.name for name, scale in found.items()} == {name: name for name in ("demo", "cpu", "paper")}
    assert found["paper"].test_bins == tuple(range(1, 13))


def test_a_file_of_settings_that_is_wrong_is_refused_with_its_place(tmp_path):
    place, missed = tmp_path / "task.toml", []
    shown = '[[shown]]\nkey = "a"\nnames = "b"'
    for old, new, kind, message in (
        ("metric", "metric metric", DataError, f"{place}: .*expected the settings of a task as TOML"),
        ("metric", "metrics", DataError, f"{place}: metrics is not a setting of Wrong; correct its name"),
        ("[scales]", f"{shown}\n[scales]", DataError, f"{place}: .*'names'; correct what is shown"),
        ("layers = 2", "depth = 2", DataError, rf"{place}, \[scales\.demo\]: .*'depth'; correct the sizes"),
        ("layers = 2", "", DataError, rf"{place}, \[scales\.demo\]: .*'layers'; correct the sizes"),
        ("layers = 2", "layers = 0", SettingError, "LogicScale.layers is 0; expected"),
    ):
        place.write_text(LOGIC.replace(old, new, 1), encoding="utf-8")
        read_task_file.cache_clear()
        try:
            type("Wrong", (ClassifierTask,), {}, settings=place)
            read_presets(place, LogicScale)
        except kind as error:
            missed += [] if re.search(message, str(error)) else [str(error)]
        else:
            missed.append(new)
    assert not missed
