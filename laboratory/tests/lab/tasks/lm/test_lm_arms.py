"""Arms of the laboratory on a language model: each trains and generates or is refused, and acts on groups of heads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from cases import cases
from headwise.errors import LayoutError, SettingError
from headwise.repulsion.repel import Repel
from headwise.similarity.penalty import Penalize
from headwise_lab.experiment.arm import named_arms
from headwise_lab.experiment.arm_text import parse_arm, record_arm, restore_arm
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.tasks.lm.task import LmTask
from headwise_lab.training.attach import attach_arm
from headwise_lab.training.train import train_run
from headwise_lab.training.trained import load_trained
from lab.tasks.lm.lm_toy import TOY, open_toy, prepare_toy

# What needs words with a parse, or another model.
REFUSED = ("guided", "random-mask", "shuffled-parse", "bilstm", "cnn", "no-graph")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return prepare_toy(tmp_path_factory.mktemp("text"))


@pytest.mark.slow
@cases("name", named_arms())
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


TASK = LmTask()
CHOSEN: dict[str, Any] = {
    "grouping=within": lambda heads: heads.grouped("within"),
    "grouping=across,projections=query": lambda heads: heads.projection("query").grouped("across"),
    "projections=key/value": lambda heads: heads.projection("key", "value"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return open_toy(prepare_toy(tmp_path_factory.mktemp("text")))


def attach(arm: str, data, **changes):
    model, methods = attach_arm(TASK, parse_arm(arm), data, dataclasses.replace(TOY, **changes), seed=3)
    return model, methods, TASK.collate([data.train[number] for number in range(4)])


@cases("place", CHOSEN)
def test_a_rule_acts_on_the_groups_that_the_arm_names(place: str, data):
    found = []
    for arm in (f"svgd:alpha=0.5,{place}", "plain", "svgd:alpha=0.5"):
        model, methods, batch = attach(arm, data)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        methods.repel(optimizer)
        model(**batch)["loss"].backward()
        if arm == "plain":
            hw.repel(CHOSEN[place](hw.find_heads(model)), hw.SVGD(alpha=0.5), optimizer, when="manual").apply()
        methods.apply_repulsion()
        found.append(torch.cat([one.grad.flatten() for one in model.parameters()]))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])


@cases("grouping", ["within", "across"])
def test_a_penalty_compares_the_groups_that_the_arm_names(grouping: str, data):
    model, methods, batch = attach(f"output:grouping={grouping}", data)
    loss = model(**batch)["loss"]
    found = methods.loss(loss) - loss
    with hw.Disagreement(
        hw.find_heads(model), hw.similarity.GroupedQueries(hw.similarity.Output(), grouping)
    ) as penalty:
        model(**batch)
        torch.testing.assert_close(found, penalty())
    with hw.Disagreement(hw.find_heads(model), hw.similarity.Output()) as penalty:
        model(**batch)
        assert not torch.allclose(found, penalty())


def test_groups_are_written_into_records_and_shared_with_the_control():
    arm = parse_arm("svgd:grouping=across+cka:grouping=within")
    assert arm.control == "smooth:grouping=across"
    assert restore_arm(json.loads(json.dumps(record_arm(arm)))) == arm
    assert not {"grouping", "penalty_grouping"} & {*record_arm(parse_arm("svgd+cka"))}
    # beside another penalty, only the one that names groups has them
    both = parse_arm("output-relative+cka:grouping=within")
    assert [type(term).__name__ for _, term in both.find(Penalize).weighted] == ["Output", "GroupedQueries"]
    assert restore_arm(json.loads(json.dumps(record_arm(both)))) == both
    assert parse_arm("cka:grouping=none").name == "cka"


def test_what_has_no_groups_is_refused(data):
    with pytest.raises(SettingError, match=r"term is Subspace\(.*expected one on the outputs or the weights"):
        parse_arm("subspace:grouping=within")
    with pytest.raises(SettingError, match="grouping is 'between'; expected one of within, across"):
        Repel(hw.SVGD(), grouping="between")
    model, methods, _ = attach("svgd:grouping=within", data, key_value_heads=4)
    with pytest.raises(LayoutError, match="4 query heads"):
        methods.repel(torch.optim.SGD(model.parameters(), lr=0.1))
