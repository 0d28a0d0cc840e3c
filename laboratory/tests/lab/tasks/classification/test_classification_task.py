"""The classification task end to end at toy size: every kind of arm, folds, stopping and going on, and refusals."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from headwise.errors import SettingError
from headwise_lab import compare as compare_module
from headwise_lab.compare import Comparison, compare
from headwise_lab.experiment.arm_text import parse_arm, parse_arms
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.jobs.workers import do_job
from headwise_lab.tasks.classification.data import load_data
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES, ClassificationScale
from headwise_lab.tasks.classification.task import ClassificationTask
from headwise_lab.training.attach import attach_arm
from headwise_lab.training.cross_validation import gather_parts
from headwise_lab.tune import Tuning, tune
from lab.sentences import parse_without_spacy, write_sentences
from lab.stopping import assert_goes_on_to_the_same_bits

TASK = ClassificationTask()
TOY = dataclasses.replace(
    CLASSIFICATION_SCALES["demo"],
    name="toy",
    width=12,
    heads=6,
    head_size=3,
    hidden=12,
    epochs=2,
    batch_size=16,
    warmup_steps=3,
    train_examples=96,
    dropout=0.1,
)
PUBLISHED = Path(os.environ.get("HEADWISE_DATA", "")) / "classification"


@pytest.fixture(autouse=True)
def parser(monkeypatch: pytest.MonkeyPatch) -> None:
    parse_without_spacy(monkeypatch)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sentences(tmp_path_factory.mktemp("data") / "mine.tsv", 160)


def parsed_toy(place: Path, **changes: object) -> ClassificationScale:
    return dataclasses.replace(TOY, pipeline=place, **changes)


def rows(out: Path) -> dict[str, dict]:
    return {row["arm"]: row for row in json.loads((out / "results.json").read_text())["rows"]}


@pytest.mark.usefixtures("inline")
def test_every_kind_of_arm_trains_on_a_file_of_ones_own(sentences, tmp_path):
    arms = (
        "plain,guided,random-mask,shuffled-parse,guided:drop=major/rare,guided:roles=window,bilstm,cnn,"
        "svgd+guided,output+guided,trunk+guided,drophead+guided"
    )
    scale = parsed_toy(sentences.parent, epochs=1)
    console = Console(record=True, width=200)
    assert (
        compare(Comparison("classification", tuple(parse_arms(arms)), (0,), scale, tmp_path, sentences), console) == []
    )
    said = console.export_text()
    assert "texts: 96 train, 18 dev, 18 test" in said
    assert "labels neg, pos" in said
    found = rows(tmp_path)
    assert set(found) == {"majority", "counts", *(arm.name for arm in parse_arms(arms))}
    assert found["bilstm"]["measures"]["output_cosine"] is None
    assert found["guided"]["measures"]["output_cosine"] is not None
    kept = json.loads((tmp_path / "guided" / "seed-0" / "vocabulary.json").read_text())
    assert kept["labels"] == ["neg", "pos"]
    assert kept["counts"]["test"] == 18


@pytest.mark.parametrize("arm", ["guided", "guided:random=rare/window,shuffled=major", "output+guided", "bilstm"])
def test_a_run_stopped_in_the_middle_goes_on_to_the_same_bits(arm, sentences, tmp_path):
    settings = RunSettings(
        "classification", parsed_toy(sentences.parent), parse_arm(arm), seed=3, data=sentences, cache=tmp_path / "cache"
    )
    assert_goes_on_to_the_same_bits(settings, tmp_path, stopped=8)


def test_the_masks_reach_the_heads_in_training_and_in_evaluation(sentences):
    scale = parsed_toy(sentences.parent)
    data = TASK.load(sentences, scale, None)
    model, methods = attach_arm(TASK, parse_arm("guided:roles=window"), data, scale, seed=1)
    batch = TASK.collate([data.train[place] for place in range(4)])
    with methods.evaluating(model):
        before = model(**batch)["logits"]
        # with two layers of a window of three the mean of all states does not see ...
        states = model.encoder.layers[0].attention
        seen = []
        handle = states.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
        model(**batch)
        handle.remove()
        plain, _ = attach_arm(TASK, parse_arm("plain"), data, scale, seed=1)
        # ... what plain attention with the same parameters sees
        after = plain.eval()(**batch)["logits"]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert not torch.allclose(before, after)
    assert len(seen) == 1


def test_folds_make_one_run_in_which_each_text_is_answered_once(inline, sentences, tmp_path):
    scale = parsed_toy(sentences.parent, folds=3, epochs=1, train_examples=None)
    comparison = Comparison("classification", tuple(parse_arms("plain,guided")), (0,), scale, tmp_path, sentences)
    assert compare(comparison, Console(record=True)) == []
    assert [name for name in inline if name.startswith("guided")] == [f"guided seed 0 part {fold}" for fold in range(3)]
    texts = len(load_data(sentences, scale, None).texts.classes)
    for run in ("plain/seed-0", "guided/seed-0", "counts/seed-0", "majority/seed-0"):
        answers = np.load(tmp_path / run / "predictions.npz")
        assert len(answers["predicted"]) == texts
        parts = [np.load(tmp_path / run / f"part-{fold}" / "predictions.npz")["statistics"] for fold in range(3)]
        assert np.concatenate(parts).tolist() == answers["statistics"].tolist()
        result = json.loads((tmp_path / run / "result.json").read_text())
        assert result["score"]["pooled"] == pytest.approx(answers["statistics"].mean())
        assert len(result["parts"]) == 3
        # the heads of a run are those of all its folds
        folds = [json.loads((tmp_path / run / f"part-{fold}" / "result.json").read_text()) for fold in range(3)]
        for site, values in result["sites"].items():
            distances = [fold["sites"][site]["distance"] for fold in folds]
            assert values["distance"] == pytest.approx(np.mean(distances)) != distances[0]
        assert bool(result["sites"]) == (run.startswith(("plain", "guided")))
    # every text of a fold was answered by a model that had not seen it or a copy of it
    first = dataclasses.replace(scale, fold=0)
    data = load_data(sentences, first, None)
    assert not set(data.texts.keys[data.train.numbers]) & set(data.texts.keys[data.test.numbers])
    before = len(inline)
    assert compare(comparison, Console(record=True)) == []
    assert len(inline) == before
    # as a run taken over from a record is
    for part in tmp_path.glob("*/seed-0/part-*"):
        shutil.rmtree(part)
    assert compare(comparison, Console(record=True)) == []
    assert len(inline) == before
    with pytest.raises(SettingError, match="--redundancy needs one trained model per run"):
        compare(comparison, Console(record=True), redundancy=True)


def test_a_run_whose_parts_are_finished_is_put_together_when_asked_for_again(inline, sentences, tmp_path):
    scale = dataclasses.replace(TOY, folds=3, epochs=1)
    comparison = Comparison("classification", tuple(parse_arms("plain")), (0,), scale, tmp_path, sentences)
    compare(comparison, Console(record=True))
    before = (tmp_path / "plain" / "seed-0" / "result.json").read_text()
    (tmp_path / "plain" / "seed-0" / "result.json").unlink()
    done = len(inline)
    compare(comparison, Console(record=True))
    assert len(inline) == done
    assert (tmp_path / "plain" / "seed-0" / "result.json").read_text() == before
    # a part that is missing is done again, alone
    (tmp_path / "plain" / "seed-0" / "result.json").unlink()
    (tmp_path / "plain" / "seed-0" / "part-1" / "result.json").unlink()
    compare(comparison, Console(record=True))
    assert inline[done:] == ["plain seed 0 part 1"]
    assert (tmp_path / "plain" / "seed-0" / "result.json").exists()


def test_a_run_without_parts_is_left_alone(sentences, tmp_path):
    settings = RunSettings("classification", TOY, parse_arm("plain"), seed=0, data=sentences)
    gather_parts(settings, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_heads_are_not_removed_from_a_run_made_of_folds(inline, sentences, tmp_path):
    scale = dataclasses.replace(TOY, folds=3, epochs=1)
    comparison = Comparison("classification", tuple(parse_arms("plain")), (0,), scale, tmp_path, sentences)
    with pytest.raises(SettingError, match="with --folds a run has several; omit one of them"):
        compare(comparison, Console(record=True), redundancy=True)
    with pytest.raises(SettingError, match="--step-time needs one trained model per run"):
        compare(comparison, Console(record=True), step_times=True)
    assert inline == []


@pytest.mark.usefixtures("inline")
def test_the_heads_of_a_guided_classifier_are_removed_one_by_one(sentences, tmp_path):
    arms = tuple(parse_arms("guided:roles=window/separator"))
    comparison = Comparison("classification", arms, (0,), TOY, tmp_path, sentences)
    assert compare(comparison, Console(record=True), redundancy=True) == []
    (kept,) = tmp_path.glob("*/seed-0/*redundancy.json")
    record = json.loads(kept.read_text())
    assert len(record["heads"]) == TOY.layers * TOY.heads
    assert record["scores"]["accuracy"] == json.loads((kept.parent / "result.json").read_text())["score"]["pooled"]


@pytest.mark.usefixtures("inline")
def test_tuning_does_not_take_folds(sentences, tmp_path):
    scale = dataclasses.replace(TOY, folds=3)
    tuning = Tuning("classification", "plain", 1, 0, scale, tmp_path, sentences)
    with pytest.raises(SettingError, match="tuned on one cut of the data; leave the folds out"):
        tune(tuning, Console(record=True))


@pytest.mark.parametrize(
    ("task", "arm", "message"),
    [
        ("classification", "guided", r"arm guided does not fit .* the roles dependency, major need parses"),
        ("classification", "guided:roles=major", r"the roles major need parses; name a spaCy pipeline with a parser"),
        ("logic", "guided:roles=window", r"task logic has no words with roles"),
        ("logic", "cnn", r"task logic has no model cnn; models besides its own: none"),
    ],
)
def test_an_arm_that_the_task_or_the_data_cannot_serve_is_refused_before_any_run(
    inline, task, arm, message, sentences, tmp_path
):
    scale = TOY if task == "classification" else named_task("logic").scales["demo"]
    data = sentences
    if task == "logic":
        scale, data = dataclasses.replace(scale, generated_draws=1500, train_examples=64, dev_examples=20), None
    comparison = Comparison(task, tuple(parse_arms(f"plain,{arm}")), (0,), scale, tmp_path, data)
    with pytest.raises(SettingError, match=message):
        compare(comparison, Console(record=True))
    assert inline == []
    # the folder is nobody's yet
    assert not (tmp_path / "comparison.json").exists()


def test_word_vectors_are_where_a_run_starts(sentences, tmp_path):
    (tmp_path / "vectors.txt").write_text("fine " + " ".join(["2.0"] * 12) + "\n")
    scale = dataclasses.replace(TOY, embeddings=tmp_path / "vectors.txt")
    data = TASK.load(sentences, scale, None)
    model, _ = attach_arm(TASK, parse_arm("plain"), data, scale, seed=0)
    place = data.vocabulary.index("fine")
    torch.testing.assert_close(model.encoder.embedding.weight[place], torch.full((12,), 2.0))
    assert data.fingerprint != TASK.load(sentences, TOY, None).fingerprint


def test_where_a_pipeline_lies_is_no_part_of_a_runs_record(sentences):
    settings = RunSettings("classification", parsed_toy(sentences.parent), parse_arm("plain"), 0, data=sentences)
    record = json.dumps(settings.record())
    assert str(sentences.parent) not in record
    assert "pipeline" not in settings.record()["scale"]
    assert settings.record()["scale"]["max_words"] == 90


@pytest.mark.usefixtures("inline")
@pytest.mark.skipif("HEADWISE_DATA" not in os.environ, reason="HEADWISE_DATA names no folder with the published files")
@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("cr", 378),
        ("trec", 500),
        *(
            pytest.param(*more, marks=pytest.mark.slow)
            for more in (("subj", 1_000), ("mpqa", 1_061), ("mr", 1_067), ("sst2", 1_821))
        ),
    ],
)
def test_each_published_set_is_trained_on_and_scored(name, texts, tmp_path, monkeypatch):
    arms = tuple(parse_arms("plain,guided:roles=rare/separator/window"))
    scale = dataclasses.replace(TOY, epochs=1, train_examples=128)
    comparison = Comparison("classification", arms, (0,), scale, tmp_path, PUBLISHED / name)
    monkeypatch.setattr(TASK.__class__, "baselines", ("majority",))
    assert compare(comparison, Console(record=True)) == []
    found = rows(tmp_path)
    labels = {"trec": 6}.get(name, 2)
    assert found["plain"]["score"]["value"] > 0.5 / labels
    assert sum(json.loads((tmp_path / "results.json").read_text())["bins"].values()) == texts


def test_a_job_of_a_part_puts_the_run_together(sentences, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    scale = dataclasses.replace(TOY, folds=3, epochs=1)
    comparison = Comparison("classification", tuple(parse_arms("plain")), (0,), scale, tmp_path, sentences)
    jobs = compare_module.plan_runs(comparison, Console(record=True))
    own = [job for job in jobs if job.name.startswith("plain")]
    for job in own[:2]:
        do_job(job.settings, job.folder, lambda: False)
    assert not (tmp_path / "plain" / "seed-0" / "result.json").exists()
    do_job(own[2].settings, own[2].folder, lambda: False)
    assert (tmp_path / "plain" / "seed-0" / "result.json").exists()
