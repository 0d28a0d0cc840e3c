"""The translation task end to end at toy size: train, average, search, score, stop and go on."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import torch
from rich.console import Console
from safetensors.torch import load_file

from cases import cases
from headwise.errors import SettingError
from headwise_lab.compare import Comparison, compare
from headwise_lab.data.subwords import END
from headwise_lab.experiment.arm_text import parse_arm, parse_arms
from headwise_lab.experiment.scale import ScaleOptions, with_options
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.tasks.translation import model as translation_model
from headwise_lab.tasks.translation.data import TranslationExample
from headwise_lab.tasks.translation.decoding import score_targets
from headwise_lab.tasks.translation.scales import TRANSLATION_SCALES, TranslationScale
from headwise_lab.tasks.translation.task import TranslationTask
from headwise_lab.training.train import train_run
from lab.stopping import same_bits, stop_after
from lab.tasks.translation.translation_toy import write_toy_corpus

TOY = dataclasses.replace(
    TRANSLATION_SCALES["demo"],
    name="toy",
    width=16,
    hidden=16,
    heads=2,
    encoder_layers=1,
    decoder_layers=1,
    dropout=0.1,
    vocabulary_size=300,
    tokens=256,
    epochs=2,
    warmup_steps=5,
    averaged=2,
    beams=2,
    train_examples=80,
    dev_examples=8,
    test_examples=12,
    compile_routing=False,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def settings(arm: str, corpus: Path, cache: Path, scale: TranslationScale = TOY) -> RunSettings:
    return RunSettings("translation", scale, parse_arm(arm), seed=3, data=corpus, cache=cache)


ARM = "svgd:kinds=self,projections=query+output:kinds=self,kind_weights=1/0.5/0.5+em:layers=0,kinds=decoder,capsules=4"


@pytest.mark.full
@cases("model", ["seq2seq", "marian"])
def test_accumulated_batches_are_averaged(model, corpus, cache, tmp_path):
    # a forward that takes further arguments is none that divides its loss itself
    losses = []
    for accumulation in (1, 4):
        scale = dataclasses.replace(TOY, model=model, averaged=1, epochs=1, accumulation=accumulation, dropout=0.0)
        train_run(settings("plain", corpus, cache, scale), tmp_path / str(accumulation))
        (record,) = (tmp_path / str(accumulation) / "epochs.jsonl").read_text().splitlines()
        losses.append(json.loads(record)["train_loss"])
    # fewer steps, so that the loss falls less, and no multiple of it
    assert losses[0] < losses[1] < 1.3 * losses[0]


@pytest.mark.parametrize("model", ["seq2seq", pytest.param("marian", marks=pytest.mark.full)])
def test_a_run_keeps_its_translations_and_scores_them_as_sacrebleu_does(model, corpus, cache, tmp_path):
    scale = dataclasses.replace(TOY, model=model)
    folder = tmp_path / "run"
    train_run(settings(ARM, corpus, cache, scale), folder)
    result = json.loads((folder / "result.json").read_text())
    found = (folder / "predictions.txt").read_text().splitlines()
    references = (corpus / "test_2016_flickr.de").read_text().splitlines()[:12]
    assert len(found) == 12
    expected = sacrebleu.corpus_bleu(found, [references]).score
    assert result["answers"]["BLEU"] == pytest.approx(expected)
    assert set(result["answers"]) == {"BLEU", "chrF", "decoding_seconds", "NLL"}
    assert result["answers"]["chrF"] == pytest.approx(sacrebleu.corpus_chrf(found, [references]).score)
    version = f"version:{sacrebleu.__version__}"
    assert result["signatures"] == {
        "BLEU": f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|{version}",
        "chrF": f"nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|{version}",
    }
    statistics = np.load(folder / "predictions.npz")["statistics"]
    assert statistics.shape == (12, 10)
    # without a match of some order it is 0, where sacrebleu's is smoothed
    matched = statistics[:, :4].sum(0).all()
    assert 100 * result["score"]["pooled"] == pytest.approx(expected if matched else 0.0)
    assert matched == (model == "marian"), "both are seen here"
    assert result["force_ratio"] > 0
    assert np.isfinite(result["position_js"])
    assert not list(folder.glob("epoch-*"))


def test_what_says_nothing_to_marian_is_refused():
    sizes = ("model=marian", "norm_first=false")
    with pytest.raises(SettingError, match="--set norm_first=False: norm_first says nothing to Marian"):
        with_options(TRANSLATION_SCALES["demo"], ScaleOptions("demo", sizes=sizes), "translation")
    assert not with_options(TRANSLATION_SCALES["demo"], ScaleOptions("demo", sizes=sizes[1:]), "translation").norm_first


def test_dev_and_test_may_have_pairs_longer_than_the_positions_of_marian(corpus, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(translation_model, "LONGEST", 40)
    copy = shutil.copytree(corpus, tmp_path / "corpus")
    for path in (*copy.glob("val.*"), *copy.glob("test_2016_flickr.*")):
        first, rest = path.read_text().split("\n", maxsplit=1)
        path.write_text(" ".join([first] * 30) + "\n" + rest)
    scale = dataclasses.replace(TOY, model="marian")
    train_run(settings("cka", copy, cache, scale), tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    data = TranslationTask().load(copy, scale, cache)
    model = TranslationTask().model(data, scale).eval()
    pair = data.test[0]
    assert len(pair["source"]) > 40 < len(pair["target"])
    cut = TranslationExample(source=[*pair["source"][:39], END], target=[*pair["target"][:39], END])
    for found, expected in zip(score_targets(model, [pair]), score_targets(model, [cut]), strict=True):
        assert found.item() == expected.item()
    assert np.isfinite(result["answers"]["NLL"])


@pytest.mark.full
def test_a_run_stopped_in_the_middle_goes_on_to_the_same_bits(corpus, cache, tmp_path):
    train_run(settings(ARM, corpus, cache), tmp_path / "whole")
    for stopped in (3, 7):
        folder = tmp_path / f"stopped-{stopped}"
        train_run(settings(ARM, corpus, cache), folder, stop_after(stopped))
        assert not (folder / "result.json").exists()
        train_run(settings(ARM, corpus, cache), folder)
        assert same_bits(tmp_path / "whole", folder)
        assert (folder / "predictions.txt").read_text() == (tmp_path / "whole" / "predictions.txt").read_text()


@pytest.mark.full
def test_the_weights_of_the_last_epochs_are_averaged(corpus, cache, tmp_path):
    # two of three epochs
    scale = dataclasses.replace(TOY, epochs=3)
    alone = dataclasses.replace(scale, averaged=1)
    last = tmp_path / "last"
    train_run(settings("plain", corpus, cache, alone), last)
    train_run(settings("plain", corpus, cache, scale), tmp_path / "mean")
    first = tmp_path / "first"
    kept: dict[str, torch.Tensor] = {}
    stopped = stop_after(10_000)

    def watched() -> bool:
        for path in first.glob("epoch-2.safetensors"):
            kept.update(load_file(path))
        return stopped()

    train_run(settings("plain", corpus, cache, scale), first, watched)
    a, b = load_file(last / "model.safetensors"), load_file(tmp_path / "mean" / "model.safetensors")
    assert kept
    for name, mean in b.items():
        torch.testing.assert_close(mean, (a[name] + kept[name]) / 2)


@pytest.mark.full
@pytest.mark.usefixtures("inline")
def test_a_comparison_of_arms_ends_with_a_table_of_bleu(corpus, tmp_path):
    arms = tuple(parse_arms("plain,output:kinds=cross"))
    scale = dataclasses.replace(TOY, epochs=1, averaged=1)
    console = Console(record=True, width=120)
    assert compare(Comparison("translation", arms, (0, 1), scale, tmp_path, corpus), console) == []
    shown = console.export_text()
    assert "BLEU" in shown
    assert "copy" in shown
    assert "BLEU by source words (bins by their upper ends)" in shown
    assert "chrF ↑" in shown
    assert "decoding, s ↓" in shown
    assert "tok:13a" in shown
    assert "sacreBLEU's paired tests on chrF" in shown
    references = (tmp_path / "references.txt").read_text().splitlines()
    assert references == (corpus / "test_2016_flickr.de").read_text().splitlines()[:12]
    record = json.loads((tmp_path / "results.json").read_text())
    assert sum(record["bins"].values()) == 12
    assert set(record["bins"]) <= {"10", "20", "30"}
    assert [(tests["arm"], tests["metric"]) for tests in record["paired_tests"]] == [
        ("output:kinds=cross", "BLEU"),
        ("output:kinds=cross", "chrF"),
    ]
    for seed, test in record["paired_tests"][1]["seeds"].items():
        result = json.loads((tmp_path / "plain" / f"seed-{seed}" / "result.json").read_text())
        assert test["against"] == pytest.approx(result["answers"]["chrF"])
        assert 0 < test["p_bootstrap"] <= 1


@pytest.mark.full
@pytest.mark.usefixtures("inline")
def test_a_folder_from_before_further_scores_and_references_goes_on_with_them(corpus, tmp_path):
    scale = dataclasses.replace(TOY, epochs=1, averaged=1)
    comparison = Comparison("translation", tuple(parse_arms("plain")), (0,), scale, tmp_path, corpus)
    compare(comparison, Console(quiet=True))
    path = tmp_path / "comparison.json"
    record = json.loads(path.read_text())
    later = ("shown", "file_digests", "record_digest")
    path.write_text(json.dumps({name: value for name, value in record.items() if name not in later}))
    (tmp_path / "references.txt").unlink()
    assert compare(comparison, Console(quiet=True)) == []
    assert json.loads(path.read_text()) == record
    assert (tmp_path / "references.txt").exists()
