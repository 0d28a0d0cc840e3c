"""What is measured of a trained model: it comes back with its weights, and its numbers are what a loop finds."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from headwise.errors import DataError, SettingError
from headwise.heads.taps import Taps
from headwise_lab.analyses.head_vectors import measure_head_vectors, vector_cosine
from headwise_lab.analyses.registry import AnalysisSettings, analyze
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.run_folder import analysis_file, write_result
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.tasks.translation.decoding import negative_log_likelihood
from headwise_lab.tasks.translation.model import PADDING, START
from headwise_lab.training.train import train_run
from headwise_lab.training.trained import load_trained
from lab.tasks.translation.translation_toy import SMALLEST, write_toy_corpus


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    corpus = write_toy_corpus(folder / "pairs")
    arm = parse_arm("output+em:layers=0,kinds=self,capsules=4")
    settings = RunSettings("translation", SMALLEST, arm, seed=2, data=corpus, cache=folder / "cache")
    train_run(settings, folder / "run")
    return settings, folder / "run"


def test_a_finished_run_comes_back_with_its_aggregators_and_weights(run):
    settings, folder = run
    trained = load_trained(settings, folder)
    kept = load_file(folder / "model.safetensors")
    state = trained.model.state_dict()
    assert any("votes" in name or "routing" in name or "trunk" in name for name in kept)
    assert all(torch.equal(state[name], tensor) for name, tensor in kept.items())
    assert not trained.model.training
    result = json.loads((folder / "result.json").read_text())
    assert negative_log_likelihood(trained.model, trained.data.test) == pytest.approx(result["answers"]["NLL"])


def test_weights_that_are_damaged_or_missing_are_refused_by_name(run, tmp_path):
    settings, folder = run
    write_result(tmp_path, {"task": "translation"})
    with pytest.raises(DataError, match="holds no finished run"):
        load_trained(settings, tmp_path)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:200])
    with pytest.raises(DataError, match=r"model\.safetensors does not hold the weights of this run"):
        load_trained(settings, tmp_path)
    other = RunSettings("translation", SMALLEST, parse_arm("plain"), seed=2, data=settings.data, cache=settings.cache)
    with pytest.raises(DataError, match=r"model\.safetensors does not hold the weights of this run"):
        load_trained(other, folder)


def test_the_loss_is_the_mean_over_target_tokens_without_smoothing(run):
    trained = load_trained(*run)
    total, tokens = 0.0, 0
    for pair in trained.data.test:
        source, target = list(pair["source"]), list(pair["target"])
        with torch.no_grad():
            logits = trained.model(
                input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([[START, *target[:-1]]])
            ).logits[0]
        likelihoods = logits.double().log_softmax(-1)
        total -= sum(float(likelihoods[place, token]) for place, token in enumerate(target))
        tokens += len(target)
    found = negative_log_likelihood(trained.model, trained.data.test)
    assert found == pytest.approx(total / tokens, rel=1e-5)
    # with smoothing, or as a mean of sentences' means, it would be another number
    assert abs(found - math.log(trained.model.config.vocab_size)) > 0.01


def test_a_heads_vector_is_its_mean_output_over_words_and_then_over_layers(run):
    settings, folder = run
    found = torch.tensor(measure_head_vectors(settings, folder)["vectors"], dtype=torch.float64)
    trained = load_trained(settings, folder)
    layers = []
    for site in trained.heads.kind("self"):
        rows = []
        for example in trained.data.dev:
            batch = trained.task.collate([example])
            with torch.no_grad(), Taps(trained.heads.kind("self"), outputs=True) as taps:
                trained.model(**batch)
                (capture,) = (one for one in taps.read() if one.site.name == site.name)
            assert PADDING not in batch["input_ids"]
            rows.append(capture.outputs[0].double())
        layers.append(torch.cat(rows).mean(0))
    assert len(layers) == 2
    torch.testing.assert_close(found, torch.stack(layers).mean(0), rtol=1e-5, atol=1e-7)


def test_the_cosine_between_vectors_is_the_mean_over_pairs_of_different_heads():
    vectors = torch.tensor([[1.0, 2.0, 0.5], [-3.0, 0.2, 1.0], [0.3, 0.1, -2.0]])
    pairs = [(0, 1), (0, 2), (1, 2)]
    expected = sum(float(torch.cosine_similarity(vectors[i], vectors[j], dim=0)) for i, j in pairs) / 3
    assert vector_cosine(vectors) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(SettingError, match="expected at least two heads"):
        vector_cosine(vectors[:1])


def test_an_analysis_is_kept_beside_the_result_and_not_done_again(run):
    settings, folder = run
    path = analysis_file(folder, "head-vectors")
    analyze(AnalysisSettings("head-vectors", settings), folder)
    record = json.loads(path.read_text())
    assert record["numbers"]["head_vector_cosine"] == pytest.approx(vector_cosine(torch.tensor(record["vectors"])))
    path.write_text("{}")
    analyze(AnalysisSettings("head-vectors", settings), folder)
    assert path.read_text() == "{}"
    path.unlink()
    with pytest.raises(SettingError, match="analysis is 'phrenology'"):
        AnalysisSettings("phrenology", settings)
