"""What each head is worth: against weights set to zero by hand, and going on where it was stopped."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import sacrebleu
import torch
from rich.console import Console

from headwise.atomic import seal
from headwise.errors import DataError
from headwise_lab.analyses import head_removal
from headwise_lab.analyses.head_removal import UNFINISHED, measure_redundancy
from headwise_lab.analyses.registry import AnalysisSettings, analyze
from headwise_lab.compare import Comparison, compare
from headwise_lab.experiment.arm_text import parse_arm, parse_arms
from headwise_lab.experiment.evaluation import METRICS
from headwise_lab.experiment.run_folder import analysis_file, read_json
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.results.runs import Drop, HeadDrops, read_head_drops, summarize_drops, summarize_run
from headwise_lab.tasks.translation.decoding import negative_log_likelihood
from headwise_lab.tasks.translation.task import translate_split
from headwise_lab.training.train import train_run
from headwise_lab.training.trained import load_trained
from lab.tasks.logic import logic_toy
from lab.tasks.translation.translation_toy import SMALLEST, write_toy_corpus

SITES = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A toy run that has learned enough for greedy BLEU not to be zero."""
    folder = tmp_path_factory.mktemp("worth")
    scale = dataclasses.replace(SMALLEST, heads=2, epochs=12, train_examples=200, learning_rate=1e-2)
    corpus = write_toy_corpus(folder / "pairs")
    settings = RunSettings("translation", scale, parse_arm("plain"), seed=4, data=corpus, cache=folder / "cache")
    train_run(settings, folder / "run")
    return settings, folder / "run"


@pytest.fixture(scope="module")
def record(run):
    settings, folder = run
    analyze(AnalysisSettings("redundancy", settings), folder)
    return read_json(analysis_file(folder, "redundancy"))


@pytest.mark.full
def test_every_head_of_encoder_decoder_and_cross_attention_is_removed_once(record, run):
    heads = [(head["kind"], head["layer"], head["head"]) for head in record["heads"]]
    assert sorted(heads) == sorted(
        (kind, layer, head) for kind in ("self", "decoder", "cross") for layer in (0, 1) for head in (0, 1)
    )
    assert record["items"] == SMALLEST.test_examples
    assert not (run[1] / UNFINISHED).exists()


@pytest.mark.full
def test_a_cost_is_that_of_zeroing_the_heads_columns_of_the_output_projection(record, run):
    trained = load_trained(*run)
    model, data = trained.model, trained.data
    for head in (record["heads"][1], record["heads"][-2]):
        (site,) = (site for site in trained.heads if site.name == head["site"])
        weight = site.output.parameter
        kept = weight.detach().clone()
        with torch.no_grad():
            site.output.of(weight)[head["head"]] = 0.0
        loss = negative_log_likelihood(model, data.test)
        greedy = translate_split(model, data.test, data.whole, beams=1, length_penalty=1.0)
        with torch.no_grad():
            weight.copy_(kept)
        assert record["scores"]["loss"] == pytest.approx(negative_log_likelihood(model, data.test), rel=1e-6)
        assert head["drops"]["loss"]["value"] == pytest.approx(loss - record["scores"]["loss"], abs=1e-6)
        # the fall of BLEU is that of the scores: values of items are only its parts
        without = sacrebleu.corpus_bleu(greedy, [data.references("test")])
        if all(without.counts):
            expected = record["scores"]["BLEU"] - without.score / 100
            assert head["drops"]["BLEU"]["value"] == pytest.approx(expected, abs=1e-6)
    whole = translate_split(model, data.test, data.whole, beams=1, length_penalty=1.0)
    assert 100 * record["scores"]["BLEU"] == pytest.approx(
        sacrebleu.corpus_bleu(whole, [data.references("test")]).score
    )
    assert record["scores"]["BLEU"] > 0


@pytest.mark.full
def test_a_cost_lies_in_its_interval_and_the_summary_is_kept_with_it(record, run):
    for head in record["heads"]:
        for cost in head["drops"].values():
            assert cost["low"] <= cost["value"] <= cost["high"]
    found = read_head_drops(run[1])
    assert [drops.score for drops in found] == ["BLEU", "loss"]
    assert record["numbers"] == summarize_run(found)
    costs = [head["drops"]["loss"]["value"] for head in record["heads"]]
    assert record["numbers"]["loss_mean_cost"] == pytest.approx(np.mean(costs))
    assert record["numbers"]["loss_raising_share"] == pytest.approx(np.mean(np.array(costs) < 0))


@pytest.mark.full
def test_a_stopped_analysis_goes_on_to_the_same_record(record, run, tmp_path, monkeypatch):
    settings, folder = run
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("analysis-*"))
    real, left = head_removal._compute_values, [6]

    def stopping(trained):
        if not left[0]:
            raise RuntimeError("stopped")
        left[0] -= 1
        return real(trained)

    monkeypatch.setattr(head_removal, "_compute_values", stopping)
    with pytest.raises(RuntimeError, match="stopped"):
        measure_redundancy(settings, tmp_path / "run")
    assert len(read_json(tmp_path / "run" / UNFINISHED)["heads"]) == 5
    # the whole model once more, and the seven heads that are left
    left[0] = 1 + 2 * SITES - 5
    assert seal(measure_redundancy(settings, tmp_path / "run"), folder) == record
    assert left[0] == 0


@pytest.mark.full
def test_what_was_kept_and_is_damaged_or_of_other_weights_is_refused(run, tmp_path):
    settings, folder = run
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("analysis-*"))
    damaged = r"unfinished-redundancy\.json is not the record of an analysis; delete it"
    for begun, message in (
        ([], damaged),
        ({"scores": []}, damaged),
        ({"scores": {"BLEU": "x"}, "items": 8, "heads": []}, damaged),
        ({"scores": {"loss": 1.0}, "heads": [5]}, damaged),
        (
            {"scores": {"BLEU": 0.5, "loss": 1.0}, "items": 8, "heads": []},
            r"unfinished-redundancy\.json was measured at BLEU 0\.5, this model has",
        ),
    ):
        (tmp_path / "run" / UNFINISHED).write_text(json.dumps(begun))
        with pytest.raises(DataError, match=message):
            measure_redundancy(settings, tmp_path / "run")


@pytest.mark.full
def test_heads_under_routing_are_removed_too(tmp_path):
    arm = parse_arm("em:layers=0,kinds=decoder,capsules=4")
    corpus = write_toy_corpus(tmp_path / "pairs")
    settings = RunSettings("translation", SMALLEST, arm, seed=2, data=corpus, cache=tmp_path / "cache")
    train_run(settings, tmp_path / "run")
    record = measure_redundancy(settings, tmp_path / "run")
    routed = [head for head in record["heads"] if (head["kind"], head["layer"]) == ("decoder", 0)]
    assert len(routed) == SMALLEST.heads
    assert all(head["drops"]["loss"]["value"] != 0.0 for head in routed)
    # an untrained model's BLEU is zero: nothing could fall
    assert record["scores"]["BLEU"] == 0.0
    assert set(record["numbers"]) == {
        f"loss_{name}" for name in ("redundant_share", "raising_share", "unshown_share", "mean_cost")
    }


@pytest.mark.full
@pytest.mark.usefixtures("inline")
def test_a_comparison_of_logic_ends_with_the_worth_of_heads_and_does_not_measure_them_again(tmp_path):
    scale = dataclasses.replace(logic_toy.TOY, train_examples=96)
    comparison = Comparison("logic", tuple(parse_arms("plain,output")), (0,), scale, tmp_path)
    console = Console(record=True, width=100)
    assert compare(comparison, console, redundancy=True) == []
    shown = console.export_text()
    assert "without one head: fall in accuracy, points" in shown
    assert "without one head: rise in loss, nats" in shown
    assert "redundancy of output seed 0" in shown
    html = (tmp_path / "report.html").read_text()
    assert "What each head is worth" in html
    assert "--redundancy" in html
    assert (tmp_path / "figures" / "heads-by-accuracy.png").exists()
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    heads = {row["arm"]: row["heads"] for row in rows}
    assert heads["majority"] == {}
    assert heads["output"]["accuracy"]["heads"] == 4

    path = analysis_file(tmp_path / "plain" / "seed-0", "redundancy")
    before = path.stat().st_mtime_ns
    settings = RunSettings("logic", scale, parse_arm("plain"), 0, cache=tmp_path / "data")
    trained = load_trained(settings, tmp_path / "plain" / "seed-0")
    result = read_json(tmp_path / "plain" / "seed-0" / "result.json")
    with torch.no_grad():
        greedy = METRICS["accuracy"].values(trained.task.greedy(trained.model, trained.data))
        losses = trained.task.losses(trained.model, trained.data)
        batch = trained.task.collate([trained.data.test[index] for index in range(30)])
        expected = trained.model(**batch)["loss"]
    assert greedy.mean() == pytest.approx(result["score"]["pooled"])
    assert losses[:30, 0].mean() == pytest.approx(float(expected), rel=1e-5)
    assert (losses[:, 1] == 1).all()
    assert compare(comparison, Console(quiet=True), redundancy=True) == []
    assert path.stat().st_mtime_ns == before


def drop(value: float, low: float, high: float, head: int = 0) -> Drop:
    return Drop("encoder.layers.0", "self", 0, head, value, low, high)


def test_redundant_raising_and_unshown_heads_are_counted_over_all_models():
    one = HeadDrops("BLEU", 0.4, 100, (drop(0.0039, 0.001, 0.006), drop(0.0041, -0.001, 0.009), drop(0.2, 0.1, 0.3)))
    other = HeadDrops("BLEU", 0.2, 100, (drop(-0.05, -0.08, -0.02),))
    assert summarize_drops([one, other]) == pytest.approx(
        {"redundant_share": 0.5, "raising_share": 0.25, "unshown_share": 0.25, "mean_cost": 0.158 / 4}
    )
    loss = HeadDrops("loss", 2.0, 100, (drop(0.01, 0.0, 0.02),))
    numbers = summarize_run([HeadDrops("BLEU", 0.0, 100, (drop(0, 0, 0),)), loss])
    assert numbers == {
        "loss_redundant_share": 1.0,
        "loss_raising_share": 0.0,
        "loss_unshown_share": 1.0,
        "loss_mean_cost": 0.01,
    }


def test_a_damaged_record_is_refused_by_name(tmp_path):
    for content in ('{"scores": {"BLEU": 0.1}, "items": 3}', '{"scores": [], "items": 3, "heads": []}'):
        analysis_file(tmp_path, "redundancy").write_text(content)
        with pytest.raises(DataError, match=r"analysis-redundancy\.json is not the record of an analysis; delete it"):
            read_head_drops(tmp_path)
