"""The facts task: what its sentences say, how it is split, and that half of its heads can go."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.errors import DataError
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.run_folder import read_json
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.tasks.sentence.facts import FACTS_SCALES, FactsTask, generate
from headwise_lab.training.train import train_run

SCALE = dataclasses.replace(FACTS_SCALES["demo"], name="toy", train_examples=600, epochs=1)


@pytest.fixture(scope="module")
def data():
    return FactsTask().load(None, SCALE, None)


def test_the_answer_is_what_the_person_of_the_question_drinks():
    for one in generate(200, seed=3):
        facts, question = one.texts
        drinks = {name: drink for name, _, drink in (fact.split() for fact in facts.split(" , "))}
        assert len(drinks) == 3
        assert one.label == drinks[question.split()[2]]
    assert [*generate(5, seed=3)] == [*generate(5, seed=3)] != [*generate(5, seed=4)]


def test_no_test_item_is_in_training_and_each_place_of_the_person_has_a_third(data):
    words = {name: {*map(tuple, data.words(getattr(data, name)))} for name in ("train", "dev", "test")}
    assert not words["train"] & (words["dev"] | words["test"])
    counts = Counter(FactsTask().difficulties(data).tolist())
    assert {*counts} == {1, 2, 3}
    assert all(abs(count - len(data.test) / 3) < 100 for count in counts.values())
    facts, question = (data.test.texts[side][0] for side in (0, 1))
    place = int(FactsTask().difficulties(data)[0])
    assert facts[4 * (place - 1)] == question[2]


def test_a_run_is_trained_and_named_files_are_refused(tmp_path):
    train_run(RunSettings("facts", SCALE, parse_arm("plain"), seed=0, cache=tmp_path), tmp_path / "plain")
    result = read_json(tmp_path / "plain" / "result.json")
    assert 0.2 < result["score"]["pooled"] <= 1.0
    assert 1.0 <= result["effective_heads_weighted"] <= SCALE.heads
    with pytest.raises(DataError, match="the facts are generated; omit --data"):
        FactsTask().load(Path("facts.tsv"), SCALE, None)


def test_a_model_without_heads_computes_what_it_computes_with_them_zeroed(data):
    task = FactsTask()
    model = task.model(data, SCALE).eval()
    heads = hw.find_heads(model)
    batch = task.collate([data.test[place] for place in range(8)])
    with torch.no_grad(), hw.ablate(heads, (1, 4, 6)):
        zeroed = model(**batch)["logits"]
    before = sum(parameter.numel() for parameter in model.parameters())
    task.prune(model, heads, {heads.sites[0].name: [1, 4, 6]})
    with torch.no_grad():
        left = model(**batch)["logits"]
    torch.testing.assert_close(left, zeroed)
    assert [site.num_heads for site in hw.find_heads(model)] == [5]
    # of each head its query, the gates of both texts, and its columns of the classifier
    width = 2 * SCALE.units
    assert before - sum(map(torch.numel, model.parameters())) == 3 * (
        SCALE.attention + 2 * width**2 + width * SCALE.hidden
    )
