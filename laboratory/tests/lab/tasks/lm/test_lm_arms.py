"""Every arm of the laboratory on a language model: it trains and generates, or is refused in one sentence."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from headwise.errors import SettingError
from headwise_lab.experiment.arm import named_arms
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.training.train import train_run
from headwise_lab.training.trained import load_trained
from lab.tasks.lm.lm_toy import TOY, prepare_toy

# What needs words with a parse, or another model.
REFUSED = ("guided", "random-mask", "shuffled-parse", "bilstm", "cnn", "no-graph")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return prepare_toy(tmp_path_factory.mktemp("text"))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(named_arms()))
def test_every_arm_trains_and_generates_or_is_refused(name, text, tmp_path):
    # the function of a head is its own only without grouped queries
    groups = TOY.heads if name == "svgd-function" else TOY.key_value_heads
    scale = dataclasses.replace(TOY, steps=4, key_value_heads=groups)
    settings = RunSettings("lm", scale, named_arms()[name], seed=3, data=text)
    if name in REFUSED:
        with pytest.raises(SettingError):
            train_run(settings, tmp_path / "run")
        return
    train_run(settings, tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert 0 < result["answers"]["loss"] < 7
    model = load_trained(settings, tmp_path / "run").model
    prompt = torch.tensor([[1, 40, 41, 42]])
    said = [
        model.network.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=cached) for cached in (True, False)
    ]
    assert torch.equal(*said)


@pytest.mark.slow
def test_functions_of_heads_that_share_keys_are_refused(text, tmp_path):
    with pytest.raises(SettingError, match="4 query heads share 2 key/value heads"):
        train_run(RunSettings("lm", TOY, named_arms()["svgd-function"], 3, data=text), tmp_path / "run")
