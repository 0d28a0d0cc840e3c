"""The translation task end to end at toy size: models, search, scores, averages, and a comparison that is killed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

import headwise as hw
from cases import cases
from headwise.errors import SettingError
from headwise_lab.compare import Comparison, compare
from headwise_lab.experiment.arm_text import parse_arm, parse_arms
from headwise_lab.experiment.scale import ScaleOptions, with_options
from headwise_lab.experiment.seeding import initialize_parameters
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.tasks.translation import model as translation_model
from headwise_lab.tasks.translation.data import TranslationExample
from headwise_lab.tasks.translation.decoding import score_targets
from headwise_lab.tasks.translation.model import END, START, Seq2Seq, Seq2SeqConfig
from headwise_lab.tasks.translation.scales import TRANSLATION_SCALES, TranslationScale
from headwise_lab.tasks.translation.task import TranslationTask
from headwise_lab.training.attach import Methods
from headwise_lab.training.train import train_run
from lab.stopping import assert_same_run, stop_after
from lab.tasks.translation.translation_text import write_corpus
from lab.tasks.translation.translation_toy import TOY, write_toy_corpus


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


@pytest.mark.full
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


SIZES = {"vocab_size": 11, "width": 16, "hidden": 24, "heads": 4, "encoder_layers": 2, "decoder_layers": 2}
SOURCE = torch.tensor([[4, 5, 6, 7, 2], [8, 2, 0, 0, 0]])
TARGET = torch.tensor([[5, 9, 6, 2], [7, 2, -100, -100]])


def built(seed: int = 3, **changes) -> Seq2Seq:
    model = Seq2Seq(Seq2SeqConfig(**{**SIZES, **changes}))
    initialize_parameters(model, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # sharper than a fresh model, so that no two continuations are nearly as likely
            parameter.mul_(2.0)
    return model.double().eval()


@cases("arm", ["plain", "differential", "gated-elements+talking", "mixture", "pruned"])
@cases("norm_first", [False, True])
def test_decoding_with_a_cache_equals_decoding_without(norm_first, arm):
    model = built(norm_first=norm_first)
    if arm == "pruned":
        hw.prune(hw.find_heads(model), {site.name: [1] for site in hw.find_heads(model)})
    else:
        Methods(parse_arm(arm), model, model, seed=3)
    model.double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "head_" in name:
                # gates and matrices that are not what they start as
                parameter.add_(torch.randn_like(parameter), alpha=0.5)
    ids = torch.tensor([[START, 5, 9, 6, 8], [START, 7, 4, 4, 3]])
    whole = model(SOURCE, decoder_input_ids=ids).logits
    states = model.encoder(SOURCE)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    parts = []
    for start, end in ((0, 1), (1, 3), (3, 5)):
        mask = (SOURCE != 0).long()
        step = model(
            attention_mask=mask,
            encoder_outputs=states,
            decoder_input_ids=ids[:, start:end],
            past_key_values=cache,
            use_cache=True,
        )
        parts.append(step.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-10, atol=1e-10)


@cases("beams", [1, 4])
def test_generate_gives_the_same_tokens_with_and_without_a_cache(beams):
    model = built()
    hw.aggregate(hw.find_heads(model).kind("decoder").layer(1), hw.routing.EMRouting(capsules=4, iterations=2))
    model.double()
    settings = {"num_beams": beams, "max_new_tokens": 9, "length_penalty": 0.6}
    with_cache = model.generate(SOURCE, use_cache=True, **settings)
    assert torch.equal(with_cache, model.generate(SOURCE, use_cache=False, **settings))
    assert len(torch.unique(with_cache)) > 2


@cases("length_penalty", [0.0, 0.7, 1.0])
def test_beam_search_with_room_for_everything_finds_the_best_of_all_translations(length_penalty):
    model = built(vocab_size=5, seed=8)
    source = torch.tensor([[4, 3, 3, 2]])
    longest = 3
    scored = {}
    for length in range(1, longest + 1):
        for words in itertools.product([3, 4], repeat=length - 1):
            scored[(*words, END)] = None
    for words in itertools.product([3, 4], repeat=longest):
        scored[words] = None
    for words in scored:
        labels = torch.tensor([words])
        with torch.no_grad():
            logits = model(source, labels=labels).logits
        # padding and the start are never generated, so the others share what is left
        logits[..., [0, START]] = -torch.inf
        total = logits.log_softmax(-1)[0, range(len(words)), list(words)].sum()
        scored[words] = float(total) / len(words) ** length_penalty
    best = max(scored, key=lambda words: scored[words])
    found = model.generate(
        source,
        num_beams=12,
        max_new_tokens=longest,
        length_penalty=length_penalty,
        early_stopping="never",
        suppress_tokens=[0, START],
        renormalize_logits=True,
    )
    assert tuple(found[0, 1:].tolist()) == best


def test_padding_of_source_and_target_changes_nothing():
    model = built()
    alone = model(SOURCE[1:, :2], labels=TARGET[1:, :2])
    together = model(SOURCE, labels=TARGET)
    torch.testing.assert_close(together.logits[1:, :2], alone.logits, rtol=1e-10, atol=1e-10)


def test_a_target_token_sees_no_later_one():
    model = built()
    ids = torch.tensor([[START, 5, 9, 6]])
    changed = torch.tensor([[START, 5, 9, 8]])
    one, other = (model(SOURCE[:1], decoder_input_ids=given).logits for given in (ids, changed))
    assert torch.equal(one[:, :3], other[:, :3])
    assert not torch.allclose(one[:, 3], other[:, 3])


def test_the_loss_is_the_smoothed_cross_entropy_over_target_tokens():
    model = built(label_smoothing=0.3)
    output = model(SOURCE, labels=TARGET)
    logarithm = output.logits.log_softmax(-1)
    terms = [
        0.7 * -logarithm[b, t, TARGET[b, t]] + 0.3 * -logarithm[b, t].mean()
        for b, t in (TARGET != -100).nonzero().tolist()
    ]
    torch.testing.assert_close(output.loss, torch.stack(terms).mean())


def test_one_embedding_serves_source_target_and_output():
    model = built()
    shared = [name for name, parameter in model.named_parameters() if parameter.shape == (11, 16)]
    assert shared == ["embedding.weight"]


def test_its_heads_are_found_by_kind_and_verified():
    model = built()
    heads = hw.find_heads(model)
    assert [len(heads.kind(kind)) for kind in ("self", "decoder", "cross")] == [2, 2, 2]
    given = {"input_ids": SOURCE[:1], "decoder_input_ids": torch.tensor([[START, 5, 9]])}
    assert len(hw.verify(heads, given).sites) == 6


def test_taps_know_the_padding_of_both_sides():
    model = built().train()
    penalty = hw.Disagreement(hw.find_heads(model), hw.similarity.Output())
    model(SOURCE, labels=TARGET)
    pooled = penalty()
    model(SOURCE[:1], labels=TARGET[:1])
    model(SOURCE[1:, :2], labels=TARGET[1:, :3])
    torch.testing.assert_close(penalty(), pooled)


def test_a_saved_model_comes_back(tmp_path):
    model = built(dropout=0.2, label_smoothing=0.1, norm_first=False)
    model.save_pretrained(tmp_path)
    again = Seq2Seq.from_pretrained(tmp_path).eval()
    assert again.config.norm_first is False
    assert torch.equal(again.double()(SOURCE, labels=TARGET).logits, model(SOURCE, labels=TARGET).logits)


def test_wrong_sizes_and_missing_inputs_are_refused():
    with pytest.raises(SettingError, match="width is 15 with 4 heads"):
        Seq2SeqConfig(width=15, heads=4)
    with pytest.raises(SettingError, match="neither labels nor"):
        built()(SOURCE)
    with pytest.raises(SettingError, match="neither input_ids nor"):
        built()(labels=TARGET)
    assert isinstance(built(norm_first=False).encoder.norm, nn.Identity)


ROOT = Path(__file__).parents[5]
ARMS = {
    "plain": "plain",
    "all": "spos:kinds=self+output:weight=0.7,kinds=self+em:capsules=4,layers=0,kinds=decoder",
}
# the command itself, whose demo is a toy: batches are accumulated, epochs averaged
COMMAND = """
import dataclasses, sys
from headwise.cli.main import main
from headwise_lab.tasks.translation.scales import TRANSLATION_SCALES as scales

scales["demo"] = dataclasses.replace(
    scales["demo"], width=16, hidden=16, heads=2, encoder_layers=1, decoder_layers=1, dropout=0.1, vocabulary_size=300,
    tokens=128, epochs=4, warmup_steps=5, accumulation=3, averaged=3, beams=2, train_examples=280, dev_examples=8,
    test_examples=12, compile_routing=False,
)
main(sys.argv[1:])
"""


def started(out: Path, data: Path) -> subprocess.Popen[bytes]:
    arguments = ["compare", "translation", "--arms", ",".join(ARMS.values()), "--seeds", "1", "--workers", "2"]
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments, "--data", str(data), "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def finish(out: Path, data: Path) -> None:
    with started(out, data) as process:
        _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said.decode()
    assert b"Traceback" not in said


def runs_of(out: Path) -> list[Path]:
    return [out / arm.replace(":", "@") / "seed-0" for arm in ARMS.values()]


def kill_once(out: Path, data: Path, epoch: int) -> None:
    """Start, wait until some run is past an epoch, and kill every process where it stands."""
    with started(out, data) as process:
        deadline = time.monotonic() + 600
        while not any(list(folder.glob(f"epoch-{epoch}.safetensors")) for folder in runs_of(out)):
            assert process.poll() is None, process.stderr.read() if process.stderr else b""
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.full
@pytest.mark.slow
def test_a_killed_comparison_goes_on_to_the_same_bits(tmp_path):
    data = f"{write_corpus(tmp_path / 'own')}:de-en"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    finish(whole, Path(data))
    for epoch in (1, 2, 3):
        kill_once(parts, Path(data), epoch)
        # workers notice within a second that nobody asks for them any more
        assert not all((folder / "result.json").exists() for folder in runs_of(parts))
    assert any(list(folder.glob("checkpoint-*")) for folder in runs_of(parts))
    finish(parts, Path(data))
    for one, other in zip(runs_of(whole), runs_of(parts), strict=True):
        assert_same_run(one, other)
