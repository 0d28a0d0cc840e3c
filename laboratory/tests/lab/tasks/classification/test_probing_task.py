"""The probing task end to end at toy size: every kind of arm, baselines, stopping and going on, and refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from headwise.errors import DataError, SettingError
from headwise_lab.compare import Comparison, compare
from headwise_lab.experiment.arm_text import parse_arm, parse_arms
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.tasks.classification import probing as task
from headwise_lab.tasks.classification.probing import ProbingTask
from headwise_lab.tasks.classification.probing_scales import PROBING_SCALES
from headwise_lab.training.train import train_run
from lab.stopping import assert_goes_on_to_the_same_bits
from lab.tasks.classification.probing_toy import write_probing

TASK = ProbingTask()
TOY = dataclasses.replace(
    PROBING_SCALES["demo"],
    name="toy",
    width=12,
    heads=3,
    head_size=4,
    hidden=12,
    epochs=2,
    batch_size=16,
    warmup_steps=3,
    train_examples=96,
    min_count=1,
)


@pytest.fixture(scope="module")
def tense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_probing(tmp_path_factory.mktemp("data") / "past_present.txt", {"va": 200, "te": 60})


@pytest.mark.usefixtures("inline")
def test_every_kind_of_arm_trains_on_a_probing_file(tense, tmp_path):
    arms = "plain,svgd,output,em:layers=0,trunk:layers=0,output+em:layers=0,guided:roles=window,drophead,bilstm"
    scale = dataclasses.replace(TOY, epochs=1)
    console = Console(record=True, width=200)
    asked = Comparison("probing", tuple(parse_arms(arms)), (0,), scale, tmp_path, tense.with_suffix(""))
    assert compare(asked, console) == []
    said = console.export_text()
    assert "training and dev are nine tenths and one of va" in said
    rows = {row["arm"]: row for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    assert set(rows) == {"majority", "counts", *(arm.name for arm in parse_arms(arms))}
    assert rows["counts"]["score"]["value"] > 0.9
    kept = json.loads((tmp_path / "output" / "seed-0" / "vocabulary.json").read_text())
    assert kept["labels"] == ["PAST", "PRES"]


def test_the_model_learns_what_shows_in_one_word(tense, tmp_path):
    scale = dataclasses.replace(TOY, epochs=12, learning_rate=1e-2, train_examples=None)
    settings = RunSettings("probing", scale, parse_arm("plain"), seed=1, data=tense, cache=None)
    train_run(settings, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["score"]["pooled"] > 0.8


def test_a_run_stopped_in_the_middle_goes_on_to_the_same_bits(tense, tmp_path):
    settings = RunSettings("probing", TOY, parse_arm("output+em:layers=0"), seed=3, data=tense, cache=None)
    assert_goes_on_to_the_same_bits(settings, tmp_path, stopped=5)


def test_the_representation_is_the_mean_of_the_top_layer_and_padding_counts_for_nothing(tense):
    data = TASK.load(tense, TOY, None)
    model = TASK.model(data, TOY).eval()
    tokens = torch.tensor([[2, 5, 6, 3], [2, 7, 3, 0]])
    alone = model(tokens[1:, :3])["logits"]
    assert torch.allclose(model(tokens)["logits"][1], alone[0], atol=1e-6)
    states = model.encoder(tokens[:1], tokens[:1] == 0)
    assert torch.allclose(model.classifier(states.mean(dim=1)), model(tokens[:1])["logits"], atol=1e-6)
    linear = [module for module in model.classifier if isinstance(module, torch.nn.Linear)]
    assert [module.out_features for module in linear] == [TOY.width, 2]


def test_with_many_classes_counts_is_naive_bayes(tense, monkeypatch):
    data = TASK.load(tense, TOY, None)
    regression = TASK.baseline("counts", data, 0)
    monkeypatch.setattr(task, "MANY", 1)
    bayes = TASK.baseline("counts", data, 0)
    assert np.mean(bayes.statistics) > 0.8
    assert regression.predicted.shape == bayes.predicted.shape == data.test.labels.shape


def test_folds_are_refused(tense):
    with pytest.raises(SettingError, match="probing is not cross-validated; omit --folds"):
        TASK.load(tense, dataclasses.replace(TOY, folds=5), None)


def test_without_a_file_it_says_what_it_takes():
    with pytest.raises(DataError, match=r"probing needs --data: the file of one task"):
        TASK.load(None, TOY, None)
