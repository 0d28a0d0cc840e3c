"""Classification and probing end to end at toy size: arms, folds, stopping and going on, baselines, and refusals."""

from __future__ import annotations

import dataclasses
import json
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
from headwise_lab.experiment.scale import Scale
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.jobs.workers import do_job
from headwise_lab.models import bag_of_words
from headwise_lab.tasks.classification import probing
from headwise_lab.tasks.classification.probing import ProbingTask
from headwise_lab.tasks.classification.scales import ClassificationScale
from headwise_lab.tasks.classification.task import ClassificationTask
from headwise_lab.training.attach import attach_arm
from headwise_lab.training.cross_validation import gather_parts
from headwise_lab.training.train import train_run
from headwise_lab.tune import Tuning, tune
from lab.published import DATA, needs
from lab.sentences import parse_without_spacy, write_sentences
from lab.tasks.classification.probing_toy import write_probing
from lab.tasks.toys import CLASSIFICATION as TOY
from lab.tasks.toys import PROBING as PROBED

TASK, PROBING = ClassificationTask(), ProbingTask()
PUBLISHED = DATA / "classification"
full = pytest.mark.full


@pytest.fixture(autouse=True)
def parser(monkeypatch: pytest.MonkeyPatch) -> None:
    parse_without_spacy(monkeypatch)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sentences(tmp_path_factory.mktemp("data") / "mine.tsv", 160)


@pytest.fixture(scope="module")
def tense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_probing(tmp_path_factory.mktemp("data") / "past_present.txt", {"va": 200, "te": 60})


def parsed_toy(place: Path, **changes: object) -> ClassificationScale:
    return dataclasses.replace(TOY, pipeline=place, **changes)


def compared(task: str, arms: str, scale: Scale, place: Path, data: Path, **named: bool) -> str:
    """Compare arms, and return what the console said."""
    console = Console(record=True, width=200)
    assert compare(Comparison(task, tuple(parse_arms(arms)), (0,), scale, place, data), console, **named) == []
    return console.export_text()


def rows(out: Path) -> dict[str, dict]:
    return {row["arm"]: row for row in json.loads((out / "results.json").read_text())["rows"]}


@full
def test_the_model_learns_what_shows_in_one_word(tense, tmp_path):
    scale = dataclasses.replace(PROBED, epochs=12, learning_rate=1e-2, train_examples=None)
    train_run(RunSettings("probing", scale, parse_arm("plain"), seed=1, data=tense, cache=None), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["score"]["pooled"] > 0.8


def test_the_masks_reach_the_heads_in_training_and_in_evaluation(sentences):
    scale = parsed_toy(sentences.parent)
    data = TASK.load(sentences, scale, None)
    model, methods = attach_arm(TASK, parse_arm("guided:roles=window"), data, scale, seed=1)
    batch = TASK.collate([data.train[place] for place in range(4)])
    with methods.evaluating(model):
        # with two layers of a window of three the mean of all states does not see ...
        before = model(**batch)["logits"]
        plain, _ = attach_arm(TASK, parse_arm("plain"), data, scale, seed=1)
        # ... what plain attention with the same parameters sees
        after = plain.eval()(**batch)["logits"]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert not torch.allclose(before, after)


@pytest.mark.full
def test_folds_make_one_run_in_which_each_text_is_answered_once(inline, sentences, tmp_path):
    scale = parsed_toy(sentences.parent, folds=3, epochs=1, train_examples=None)
    arguments = "classification", "guided", scale, tmp_path, sentences
    compared(*arguments)
    assert [name for name in inline if name.startswith("guided")] == [f"guided seed 0 part {fold}" for fold in range(3)]
    data = TASK.load(sentences, dataclasses.replace(scale, fold=0), None)
    for run in ("guided/seed-0", "counts/seed-0", "majority/seed-0"):
        answers = np.load(tmp_path / run / "predictions.npz")
        assert len(answers["predicted"]) == len(data.texts.classes)
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
        assert bool(result["sites"]) == run.startswith("guided")
    # every text of a fold was answered by a model that had not seen it or a copy of it
    assert not set(data.texts.keys[data.train.numbers]) & set(data.texts.keys[data.test.numbers])
    # a run whose parts are finished is put together, and a part that is missing is done again, alone
    result, part = tmp_path / "guided" / "seed-0" / "result.json", tmp_path / "guided" / "seed-0" / "part-1"
    before, done = result.read_text(), len(inline)
    result.unlink()
    compared(*arguments)
    assert (inline[done:], result.read_text()) == ([], before)
    result.unlink()
    (part / "result.json").unlink()
    compared(*arguments)
    assert inline[done:] == ["guided seed 0 part 1"]
    # a run taken over from a record has no parts
    for part in tmp_path.glob("*/seed-0/part-*"):
        shutil.rmtree(part)
    compared(*arguments)
    assert inline[done:] == ["guided seed 0 part 1"]
    comparison = Comparison(*arguments[:1], tuple(parse_arms("guided")), (0,), *arguments[2:])
    for option, message in (
        ("redundancy", "with --folds a run has several; omit one of them"),
        ("step_times", "--step-time needs one trained model per run"),
    ):
        with pytest.raises(SettingError, match=message):
            compare(comparison, Console(record=True), **{option: True})
    with pytest.raises(SettingError, match="tuned on one cut of the data; leave the folds out"):
        tune(Tuning("classification", "plain", 1, 0, scale, tmp_path / "tuned", sentences), Console(record=True))


def test_a_job_of_a_part_puts_the_run_together(sentences, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    gather_parts(RunSettings("classification", TOY, parse_arm("plain"), seed=0, data=sentences), tmp_path)
    assert list(tmp_path.iterdir()) == []
    scale = dataclasses.replace(TOY, folds=3, epochs=1)
    comparison = Comparison("classification", tuple(parse_arms("plain")), (0,), scale, tmp_path, sentences)
    own = [job for job in compare_module.plan_runs(comparison, Console(record=True)) if job.name.startswith("plain")]
    for job in own[:2]:
        do_job(job.settings, job.folder, lambda: False)
    assert not (tmp_path / "plain" / "seed-0" / "result.json").exists()
    do_job(own[2].settings, own[2].folder, lambda: False)
    assert (tmp_path / "plain" / "seed-0" / "result.json").exists()


@full
@pytest.mark.usefixtures("inline")
def test_the_heads_of_a_guided_classifier_are_removed_one_by_one(sentences, tmp_path):
    compared("classification", "guided:roles=window/separator", TOY, tmp_path, sentences, redundancy=True)
    (kept,) = tmp_path.glob("*/seed-0/*redundancy.json")
    record = json.loads(kept.read_text())
    assert len(record["heads"]) == TOY.layers * TOY.heads
    assert record["scores"]["accuracy"] == json.loads((kept.parent / "result.json").read_text())["score"]["pooled"]


def test_an_arm_that_the_task_or_the_data_cannot_serve_is_refused_before_any_run(inline, sentences, tmp_path):
    logic = dataclasses.replace(
        named_task("logic").scales["demo"], generated_draws=1500, train_examples=64, dev_examples=20
    )
    for task, arm, message in (
        ("classification", "guided", r"arm guided does not fit .* the roles dependency, major need parses"),
        ("classification", "guided:roles=major", r"the roles major need parses; name a spaCy pipeline with a parser"),
        ("logic", "guided:roles=window", r"task logic has no words with roles"),
        ("logic", "cnn", r"task logic has no model cnn; models besides its own: none"),
    ):
        scale, data = (logic, None) if task == "logic" else (TOY, sentences)
        comparison = Comparison(task, tuple(parse_arms(f"plain,{arm}")), (0,), scale, tmp_path, data)
        with pytest.raises(SettingError, match=message):
            compare(comparison, Console(record=True))
        assert inline == []
        # the folder is nobody's yet
        assert not (tmp_path / "comparison.json").exists()
    for refused, error, message in (
        (
            lambda: PROBING.load(sentences, dataclasses.replace(PROBED, folds=5), None),
            SettingError,
            "not cross-validated",
        ),
    ):
        with pytest.raises(error, match=message):
            refused()


def test_word_vectors_are_where_a_run_starts(sentences, tmp_path):
    (tmp_path / "vectors.txt").write_text("fine " + " ".join(["2.0"] * 12) + "\n")
    data = TASK.load(sentences, dataclasses.replace(TOY, embeddings=tmp_path / "vectors.txt"), None)
    model, _ = attach_arm(TASK, parse_arm("plain"), data, TOY, seed=0)
    place = data.vocabulary.index("fine")
    torch.testing.assert_close(model.encoder.embedding.weight[place], torch.full((12,), 2.0))
    assert data.fingerprint != TASK.load(sentences, TOY, None).fingerprint


def test_where_a_pipeline_lies_is_no_part_of_a_runs_record(sentences):
    settings = RunSettings("classification", parsed_toy(sentences.parent), parse_arm("plain"), 0, data=sentences)
    record = settings.record()
    assert str(sentences.parent) not in json.dumps(record)
    assert "pipeline" not in record["scale"]
    assert record["scale"]["max_words"] == 90


def test_the_representation_is_the_mean_of_the_top_layer_and_padding_counts_for_nothing(tense, monkeypatch):
    data = PROBING.load(tense, PROBED, None)
    model = PROBING.model(data, PROBED).eval()
    tokens = torch.tensor([[2, 5, 6, 3], [2, 7, 3, 0]])
    assert torch.allclose(model(tokens)["logits"][1], model(tokens[1:, :3])["logits"][0], atol=1e-6)
    states = model.encoder(tokens[:1], tokens[:1] == 0)
    assert torch.allclose(model.classifier(states.mean(dim=1)), model(tokens[:1])["logits"], atol=1e-6)
    linear = [module for module in model.classifier if isinstance(module, torch.nn.Linear)]
    assert [module.out_features for module in linear] == [PROBED.width, 2]
    # with many classes counts is naive Bayes
    regression = PROBING.baseline("counts", data, 0)
    monkeypatch.setattr(probing, "MANY", 1)
    monkeypatch.setattr(bag_of_words, "counts", lambda *_, **__: pytest.fail("a regression"))
    bayes = PROBING.baseline("counts", data, 0)
    assert np.mean(bayes.statistics) > 0.8
    assert regression.predicted.shape == bayes.predicted.shape == data.test.labels.shape


@pytest.mark.usefixtures("inline")
@needs("classification")
@pytest.mark.parametrize(
    ("name", "texts"),
    [
        *(pytest.param(*more, marks=full) for more in (("cr", 378), ("trec", 500))),
        *(
            pytest.param(*more, marks=pytest.mark.slow)
            for more in (("subj", 1_000), ("mpqa", 1_061), ("mr", 1_067), ("sst2", 1_821))
        ),
    ],
)
def test_each_published_set_is_trained_on_and_scored(name, texts, tmp_path, monkeypatch):
    scale = dataclasses.replace(TOY, epochs=1, train_examples=128)
    monkeypatch.setattr(TASK.__class__, "baselines", ("majority",))
    compared("classification", "plain,guided:roles=rare/separator/window", scale, tmp_path, PUBLISHED / name)
    assert rows(tmp_path)["plain"]["score"]["value"] > 0.5 / {"trec": 6}.get(name, 2)
    assert sum(json.loads((tmp_path / "results.json").read_text())["bins"].values()) == texts
