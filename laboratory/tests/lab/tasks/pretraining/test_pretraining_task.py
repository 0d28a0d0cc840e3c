"""Pre-training end to end at toy size: arms, resumption in the middle of a shard, and models for plain transformers."""

from __future__ import annotations

import dataclasses
import gzip
import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.special import expit
from sklearn.metrics import log_loss, roc_auc_score

import headwise as hw
from cases import Made
from headwise.errors import DataError, SettingError
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.evaluation import Auc
from headwise_lab.experiment.scale import ScaleOptions, with_options
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.frozen.open import open_frozen
from headwise_lab.tasks.pretraining.data import MaskedRow
from headwise_lab.tasks.pretraining.scales import PRETRAINING_SCALES
from headwise_lab.tasks.pretraining.scores import compute_placements, score_batches, score_rows
from headwise_lab.tasks.pretraining.task import PretrainingTask
from headwise_lab.training.attach import attach_arm
from headwise_lab.training.optimizer import build_optimizer
from headwise_lab.training.start import Start
from headwise_lab.training.train import train_run
from headwise_lab.training.trained import load_trained
from lab.command import run_elsewhere
from lab.published import DATA, needs
from lab.tasks.pretraining.pretraining_toy import TOY, prepare_toy

TASK = PretrainingTask()


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return prepare_toy(tmp_path_factory.mktemp("text"))


def settings(arm: str, text: Path, scale=TOY) -> RunSettings:
    return RunSettings("pretraining", scale, parse_arm(arm), seed=3, data=text)


def original(row: MaskedRow) -> list[int]:
    """The tokens of a row before some were masked."""
    ids = row.input_ids.copy()
    ids[row.positions] = row.labels
    return ids.tolist()


@pytest.fixture(scope="module")
def runs(text, tmp_path_factory) -> dict[str, Path]:
    """The folder of an uninterrupted run of each arm."""

    def train(arm: str) -> Path:
        folder = tmp_path_factory.mktemp("run") / "run"
        train_run(settings(arm, text), folder)
        return folder

    return Made(train)


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def test_a_run_leaves_losses_force_and_diversity(runs):
    plain, svgd = (result(runs[arm]) for arm in ("plain", "svgd"))
    for found in (plain, svgd):
        assert {"discriminator_loss", "generator_loss", "generator_accuracy", "replaced"} <= set(found["answers"])
        assert 0 < found["answers"]["replaced"] <= 100 * 2 / 16
        assert np.isfinite([found["output_cosine"], found["parameter_cosine"], found["distance"]]).all()
    assert plain["force_ratio"] is None
    assert svgd["force_ratio"] > 0
    assert svgd["control"] == "smooth"
    epochs = [json.loads(line) for line in (runs["plain"] / "epochs.jsonl").read_text().splitlines()]
    assert len(epochs) == TOY.rounds
    assert epochs[1]["dev"]["discriminator_loss"] > 0
    predictions = np.load(runs["plain"] / "predictions.npz")
    assert predictions["statistics"].shape == (12, 4)
    assert (predictions["statistics"][:, [1, 3]].sum(axis=1) == 16).all()


def repelled(arm: str, text: Path, scale=TOY) -> set[str]:
    """The parameters whose gradients an arm's rule changes."""
    data = TASK.load(text, scale, None)
    model, methods = attach_arm(TASK, parse_arm(arm), data, scale, seed=3)
    methods.repel(build_optimizer(model, 0.1, scale.recipe))
    batch = TASK.collate([data.train[index] for index in next(iter(TASK.batches(data, scale, 5)))])
    model(**batch)["loss"].backward()
    named = {name: p for name, p in model.named_parameters() if p.grad is not None}
    before = {name: p.grad.clone() for name, p in named.items()}
    methods.apply_repulsion()
    return {name for name, p in named.items() if not torch.equal(p.grad, before[name])}


def test_repulsion_acts_on_the_discriminators_first_layer_unless_told_otherwise(text):
    first = {f"discriminator.electra.encoder.layer.0.attention.self.{p}.weight" for p in ("query", "key", "value")}
    second = {name.replace("layer.0", "layer.1") for name in first}
    assert repelled("svgd", text) == first
    assert repelled("svgd:layers=1", text) == second
    assert repelled("svgd:layers=0/1", text) == first | second
    everywhere = with_options(TOY, ScaleOptions("toy", sizes=("all_layers=true",)), "pretraining")
    assert repelled("svgd", text, everywhere) == first | second


def test_another_seed_masks_the_same_row_elsewhere(text):
    data = TASK.load(text, TOY, None)
    first = [TASK.batches(data, TOY, seed).first_draw for seed in (5, 6)]
    row, same = (data.train[draw * len(data.train) + 7] for draw in first)
    assert original(row) == original(same)
    assert row.input_ids.tolist() != same.input_ids.tolist()


def test_the_scores_follow_from_the_outputs(runs, text):
    data, model = TASK.load(text, TOY, None), load_trained(settings("plain", text), runs["plain"]).model.eval()
    with torch.no_grad():
        found = score_rows(model, data.test)
        (out,) = score_batches(model, data.test)
    replaced, scores = out["replaced"].numpy().ravel(), out["logits"].double().numpy().ravel()
    assert found.measures["replaced"] == pytest.approx(100 * replaced.mean())
    assert found.measures["discriminator_loss"] == pytest.approx(log_loss(replaced, expit(scores)), rel=1e-5)
    placed = found.statistics.sum(axis=0)
    assert placed[0] / placed[1] == pytest.approx(roc_auc_score(replaced, scores), rel=1e-6)
    assert found.measures["generator_accuracy"] == pytest.approx(100 * out["filled"].double().mean().item())
    assert 0 <= found.measures["generator_accuracy"] <= 100


def test_a_discriminator_with_gates_is_not_written(text, tmp_path):
    run = tmp_path / "gated" / "seed-0"
    train_run(settings("gated", text, dataclasses.replace(TOY, steps=4, rounds=1)), run)
    assert not (run / "discriminator").exists()
    with pytest.raises(DataError, match="has no folder 'discriminator': one with gates"):
        Start(tmp_path, "pretraining", "0").folder("gated", 0, 1)
    with pytest.raises(DataError, match="has no folder 'discriminator' with a model and its tokenizer: one with gates"):
        open_frozen(run, None)


@pytest.mark.full
def test_the_discriminator_goes_to_plain_transformers_and_one_with_an_aggregator_does_not(runs, tmp_path):
    routed = runs["em:capsules=4,layers=0"] / "discriminator"
    script = f"""
import sys
sys.modules["headwise"] = None  # what is not installed
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, ElectraForPreTraining
from safetensors.torch import load_file
folder = {str(runs["svgd"] / "discriminator")!r}
model = ElectraForPreTraining.from_pretrained(folder)
weights = load_file({str(runs["svgd"] / "model.safetensors")!r})
own = model.state_dict()
assert all((own[name] == weights["discriminator." + name]).all() for name in own if "discriminator." + name in weights)
assert sum("discriminator." + name in weights for name in own) >= len(own) - 1
words = AutoTokenizer.from_pretrained(folder)
batch = words("The old clock", "a bird", return_tensors="pt")
assert sorted(set(batch["token_type_ids"].tolist()[0])) == [0, 1]
assert words.convert_ids_to_tokens(batch["input_ids"][0])[0] == "[CLS]"
assert AutoModelForSequenceClassification.from_pretrained(folder)(**batch).logits.shape == (1, 2)
for load in (AutoModel.from_pretrained, ElectraForPreTraining.from_pretrained):
    try:
        load({str(routed)!r})
    except (ValueError, OSError, KeyError) as error:
        print("refused:", type(error).__name__)
    else:
        raise SystemExit("a model with an aggregator was loaded")
"""
    assert run_elsewhere(script, tmp_path).count("refused") == 2
    loaded = hw.load(routed)
    weights = load_file(runs["em:capsules=4,layers=0"] / "model.safetensors")
    own = loaded.state_dict()
    assert all(torch.equal(own[name], weights[f"discriminator.{name}"]) for name in own if "votes" in name)
    assert any("votes" in name for name in own)


@pytest.mark.full
def test_the_area_is_scikit_learns_and_its_spread_that_of_resampling_rows():
    from sklearn.metrics import roc_auc_score

    generator = np.random.default_rng(0)
    replaced = generator.random((60, 30)) < 0.1
    # rows differ, and scores have ties
    scores = np.round(generator.normal(size=(60, 30)) + replaced + generator.normal(size=(60, 1)), 1)
    values = Auc().values(compute_placements(scores, replaced))
    assert values.mean() == pytest.approx(roc_auc_score(replaced.flatten(), scores.flatten()))
    draws = generator.integers(0, 60, (300, 60))
    exact = [roc_auc_score(replaced[draw].flatten(), scores[draw].flatten()) for draw in draws]
    linear = [values[draw].mean() for draw in draws]
    assert np.std(linear) == pytest.approx(np.std(exact), rel=0.1)
    assert Auc().values(compute_placements(np.zeros((60, 30)), replaced)).mean() == pytest.approx(0.5)
    assert Auc().values(compute_placements(scores, np.zeros_like(replaced))).tolist() == [0.0] * 60


def test_settings_and_folders_that_do_not_fit_are_refused(text, tmp_path):
    with pytest.raises(DataError, match=r"was prepared with rows of 16 tokens and .* scale demo has 128 and 8000"):
        TASK.load(text, PRETRAINING_SCALES["demo"], None)
    with pytest.raises(SettingError, match="16 steps cannot be cut into 3 rounds"):
        dataclasses.replace(TOY, rounds=3)
    with pytest.raises(DataError, match="is prepared already"):
        TASK.prepare(text, TOY, tmp_path / "again", tokenizer=None)
    files = text.parent / "docs.jsonl.gz"
    (tmp_path / "mine").mkdir()
    TASK.prepare(files, TOY, tmp_path / "mine", tokenizer=None)
    assert TASK.prepare(files, TOY, tmp_path / "mine", tokenizer=None).fingerprint
    with pytest.raises(DataError, match="holds something else"):
        TASK.prepare(files, dataclasses.replace(TOY, length=20), tmp_path / "mine", tokenizer=None)


def test_the_papers_scale_is_electra_smalls():
    scale = PRETRAINING_SCALES["paper"]
    recipe = scale.recipe
    assert (scale.steps, recipe.warmup_steps, recipe.learning_rate, scale.batch_size) == (1_000_000, 10_000, 5e-4, 128)
    assert (recipe.schedule, recipe.weight_decay, recipe.clip_norm, recipe.epsilon) == ("linear", 0.01, 1.0, 1e-6)
    assert (scale.masked, scale.generator, scale.vocabulary_size, scale.length) == (0.15, 0.25, 30_522, 128)
    assert (scale.generator_weight, scale.discriminator_weight) == (1.0, 50.0)


@pytest.mark.full
@needs("corpora/docs.jsonl.gz")
def test_a_discriminator_of_real_text_learns(tmp_path):
    with (
        gzip.open(DATA / "corpora/docs.jsonl.gz", "rb") as whole,
        gzip.open(tmp_path / "part.jsonl.gz", "wb") as part,
    ):
        part.writelines(islice(whole, 40))
    scale = dataclasses.replace(
        TOY, width=32, hidden=32, steps=60, rounds=3, vocabulary_size=600, length=32, learning_rate=1e-2, dev_rows=32
    )
    chosen = RunSettings(
        "pretraining", scale, parse_arm("plain"), 0, data=tmp_path / "part.jsonl.gz", cache=tmp_path / "cache"
    )
    train_run(chosen, tmp_path / "run")
    epochs = [json.loads(line) for line in (tmp_path / "run" / "epochs.jsonl").read_text().splitlines()]
    assert epochs[-1]["dev"]["generator_loss"] < epochs[0]["dev"]["generator_loss"]
    assert epochs[-1]["dev"]["generator_loss"] < 0.95 * np.log(600)
    assert epochs[-1]["dev"]["pooled"] > 0.55
