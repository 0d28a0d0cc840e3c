"""The sentence task end to end at toy size: model, arms, stopping and going on, scores, analyses and refusals."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from sklearn import metrics

from headwise.errors import DataError, SettingError, ShapeError
from headwise.repulsion.rules import SVGD, CosineRepulsion, update
from headwise_lab.analyses.force_directions import measure_directions, radial_share
from headwise_lab.analyses.registry import AnalysisSettings, analyze, is_analyzed
from headwise_lab.compare import Comparison, compare
from headwise_lab.experiment.arm_text import parse_arm, parse_arms
from headwise_lab.experiment.scale import ScaleOptions, with_options
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.models.bag_of_words import naive_bayes_regression
from headwise_lab.tasks.logic.scales import LOGIC_SCALES
from headwise_lab.tasks.sentence.analyses import measure_attention, measure_entropy, measure_reliability
from headwise_lab.tasks.sentence.model import HeadGate, SelfAttentive
from headwise_lab.tasks.sentence.scales import SENTENCE_SCALES, SentenceScale
from headwise_lab.tasks.sentence.task import SentenceTask, probabilities, scores
from headwise_lab.texts.data import collate
from headwise_lab.training.attach import attach_arm
from headwise_lab.training.train import train_run
from lab.stopping import assert_goes_on_to_the_same_bits
from lab.tasks.sentence.sentence_sets import write_pairs, write_texts

pytest.importorskip("spacy")

TASK = SentenceTask()
TOY = dataclasses.replace(
    SENTENCE_SCALES["demo"],
    name="toy",
    width=8,
    units=6,
    attention=5,
    heads=4,
    hidden=10,
    epochs=2,
    batch_size=16,
    warmup_steps=3,
    train_examples=96,
    dropout=0.1,
    min_count=1,
)
PUBLISHED = Path(os.environ.get("HEADWISE_DATA", ""))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("data") / "mine.tsv", 160)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("data") / "pairs", 96)


def settings_of(arm: str, data: Path, cache: Path, scale: SentenceScale = TOY, seed: int = 3) -> RunSettings:
    return RunSettings("sentence", scale, parse_arm(arm), seed=seed, data=data, cache=cache)


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(
    "arms",
    [
        "plain,scaled,svgd-function,cnn",
        pytest.param(
            "smooth,svgd,svgd-relative,svgd-normalized,spos,sgld,cosine-penalty,cosine-repulsion,svgd:kernel=cosine,"
            "frobenius,output,drophead,svgd+frobenius,bilstm",
            marks=pytest.mark.full,
        ),
    ],
)
def test_every_kind_of_arm_trains_on_a_file_of_ones_own(arms, texts, tmp_path):
    scale, names = dataclasses.replace(TOY, epochs=1), [arm.name for arm in parse_arms(arms)]
    console = Console(record=True, width=200)
    assert compare(Comparison("sentence", tuple(parse_arms(arms)), (0,), scale, tmp_path, texts), console) == []
    rows = {row["arm"]: row for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    assert set(rows) == {"majority", "nb-lr", *names}
    assert [rows[name]["measures"]["output_cosine"] is None for name in names] == [
        n in ("bilstm", "cnn") for n in names
    ]
    assert rows["nb-lr"]["answered"]["AUC-ROC"] > 0.9
    assert rows[names[0]]["answered"]["ECE"] is not None
    if "svgd-function" in names:
        assert rows["svgd-function"]["measures"]["force_ratio"] == pytest.approx(0.1, rel=1e-3)
        assert rows["svgd-function"]["control"] == "scaled"


@pytest.mark.parametrize(
    ("arm", "kind"),
    [
        ("svgd-function", "texts"),
        ("frobenius", "pairs"),
        *(pytest.param(arm, "texts", marks=pytest.mark.full) for arm in ("plain", "spos", "frobenius", "cnn")),
        *(pytest.param(arm, "pairs", marks=pytest.mark.full) for arm in ("plain", "spos", "svgd-function", "cnn")),
    ],
)
def test_a_run_stopped_in_the_middle_goes_on_to_the_same_bits(arm, kind, texts, pairs, tmp_path):
    settings = settings_of(arm, {"texts": texts, "pairs": pairs}[kind], tmp_path / "cache")
    assert_goes_on_to_the_same_bits(settings, tmp_path, stopped=8)


def test_an_answer_depends_on_the_words_alone_and_losses_are_the_models(texts, pairs):
    for place in (texts, pairs):
        data = TASK.load(place, TOY, None)
        model = TASK.model(data, TOY).double().eval()
        examples = [data.train[number] for number in range(6)]
        together = model(**{n: v for n, v in collate(examples).items() if n != "labels"})["logits"]
        alone = [model(**{n: v for n, v in collate([one]).items() if n != "labels"})["logits"] for one in examples]
        assert torch.allclose(together, torch.cat(alone), rtol=1e-10)
        # padding never receives attention
        tokens = collate([data.train[number] for number in range(8)])["tokens"]
        weights = model.attend(tokens)[1]
        assert (tokens == 0).any()
        assert not weights.masked_select((tokens == 0).unsqueeze(1)).any()
        assert torch.allclose(weights.sum(-1), torch.ones(8, TOY.heads, dtype=torch.float64))
        with torch.no_grad():
            losses = TASK.losses(model, data)
            wanted = float(model(**collate([data.test[number] for number in range(len(data.test))]))["loss"])
            assert losses[:, 0].mean() == pytest.approx(wanted, rel=1e-5)
            right = probabilities(model, data.test).argmax(1) == data.test.labels
            assert np.array_equal(TASK.greedy(model, data), right)
        with pytest.raises(ShapeError, match="text 1 of the batch is padding alone"):
            model.attend(torch.tensor([[2, 3], [0, 0]]))


def test_the_gate_is_lins_head_by_head():
    torch.manual_seed(0)
    gate = HeadGate(3, 4)
    one, other = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    found = gate(one, other)
    for b in range(2):
        for h in range(3):
            wanted = (one[b, h] @ gate.first[h]) * (other[b, h] @ gate.second[h])
            assert torch.allclose(found[b, h], wanted, atol=1e-6)
    assert float(gate.first.detach().std()) == pytest.approx((1 / 4) ** 0.5, rel=0.3)


def test_both_texts_of_a_pair_reach_the_answer_and_the_penalty(pairs):
    data = TASK.load(pairs, TOY, None)
    model, methods = attach_arm(TASK, parse_arm("frobenius"), data, TOY, seed=1)
    assert isinstance(model, SelfAttentive)
    batch = collate([data.train[number] for number in range(4)])
    changed = {**batch, "second": batch["second"].flip(0)}
    model.eval()
    assert not torch.allclose(model(**batch)["logits"], model(**changed)["logits"])
    model.train()
    model.words.dropout = 0.0
    assert methods.penalty is not None
    outputs = model(**batch)
    value = float(methods.penalty().detach())
    both = []
    for tokens in (batch["tokens"], batch["second"]):
        a = model.attend(tokens)[1]
        both += [(one @ one.T - torch.eye(TOY.heads)).square().sum() for one in a]
    methods.penalty.taps.read()
    assert value == pytest.approx(float(torch.stack(both).mean().detach()), rel=1e-4)
    assert outputs["loss"].requires_grad
    with pytest.raises(ShapeError, match="got no second text"):
        model(batch["tokens"])


def test_repulsion_of_a_pair_acts_once_a_step(pairs):
    data = TASK.load(pairs, TOY, None)
    model, methods = attach_arm(TASK, parse_arm("svgd:alpha=0.5"), data, TOY, seed=1)
    methods.repel(torch.optim.SGD(model.parameters(), lr=0.1))
    model(**collate([data.train[number] for number in range(4)]))["loss"].backward()
    weight = model.attention.score.weight
    wanted = update(SVGD(alpha=0.5), weight, weight.grad).gradient
    methods.apply_repulsion()
    assert torch.allclose(weight.grad, wanted, rtol=1e-4, atol=1e-7)


def test_scores_are_scikit_learns_and_errors_add_up():
    generator = np.random.default_rng(0)
    positive = generator.uniform(size=50)
    labels = (generator.uniform(size=50) < positive).astype(np.int64)
    found = scores(np.stack([1 - positive, positive], axis=1), labels)
    assert found["AUC-PR"] == pytest.approx(metrics.average_precision_score(labels, positive))
    assert found["AUC-ROC"] == pytest.approx(metrics.roc_auc_score(labels, positive))
    assert found["MCC"] == pytest.approx(metrics.matthews_corrcoef(labels, positive > 0.5))
    assert found["F1"] == pytest.approx(metrics.f1_score(labels, positive > 0.5))
    assert found["NLL"] == pytest.approx(metrics.log_loss(labels, positive))
    assert found["error"] == pytest.approx(100 * np.mean((positive > 0.5) != labels))
    assert set(scores(np.full((4, 3), 1 / 3), np.array([0, 1, 2, 0]))) == {"error", "NLL", "ECE", "OE"}


def test_naive_bayes_regression_of_three_classes_finds_the_telling_words():
    train = [[word, "the"] for word in ("red", "green", "blue") for _ in range(4)]
    found = naive_bayes_regression(train, [["green"], ["blue", "the"]], np.repeat([0, 1, 2], 4), seed=0)
    assert found.argmax(axis=1).tolist() == [1, 2]
    assert np.allclose(found.sum(axis=1), 1.0)


def test_the_analyses_of_a_trained_run(texts, tmp_path):
    other = write_texts(tmp_path / "other.tsv", 30)
    scale = dataclasses.replace(TOY, out_of_domain=other)
    settings = settings_of("svgd:kernel=cosine", texts, tmp_path / "cache", scale)
    train_run(settings, tmp_path / "run")
    sure = measure_reliability(settings, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert sure["numbers"]["test_ECE"] == pytest.approx(record["answers"]["ECE"])
    assert sum(sure["bins"]["counts"]) == 16
    unsure = measure_entropy(settings, tmp_path / "run")
    assert len(unsure["entropies"]) == 30
    assert 0 < unsure["numbers"]["other_entropy"] <= math.log(2)
    assert unsure["text"] == "30 of other.tsv"
    lines = [line.split("\t")[1] for line in other.read_text().splitlines()]
    asked = AnalysisSettings("predictive-entropy", settings)
    for content, count in (("\n".join(lines), 30), ("\n".join(f"0\t{line}" for line in lines[:20]), 20)):
        # whatever its labels, and another file of that name is another question
        other.write_text(content + "\n")
        assert not is_analyzed(asked, tmp_path / "run")
        analyze(asked, tmp_path / "run")
        assert is_analyzed(asked, tmp_path / "run")
        kept = json.loads((tmp_path / "run" / "analysis-predictive-entropy.json").read_text())
        assert (kept["text"], len(kept["entropies"])) == (f"{count} of other.tsv", count)
        assert kept["entropies"] == pytest.approx(unsure["entropies"][:count], abs=1e-6)
    pushed = measure_directions(settings, tmp_path / "run")["numbers"]
    assert 0 < pushed["radial_share_at_start"] <= 1
    with pytest.raises(DataError, match="no test text has 20 to 40 words"):
        measure_attention(settings, tmp_path / "run")
    bare = dataclasses.replace(settings, scale=TOY)
    with pytest.raises(SettingError, match="--out-of-domain"):
        measure_entropy(bare, tmp_path / "run")


def test_attention_maps_hold_whole_texts_of_the_class_next_to_the_last(tmp_path):
    path = tmp_path / "long.tsv"
    lines = [f"{n % 3}\t" + " ".join(f"word{(n + place) % 30}" for place in range(24)) + f" n{n}" for n in range(90)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    settings = settings_of("plain", path, tmp_path / "cache")
    train_run(settings, tmp_path / "run")
    found = measure_attention(settings, tmp_path / "run")
    assert [one["label"] for one in found["maps"]].count("1") >= 1
    assert found["maps"][0]["label"] == "1"
    weights = np.array(found["maps"][0]["weights"])
    assert weights.shape == (TOY.heads, len(found["maps"][0]["words"])) == (4, 25)
    assert np.allclose(weights.sum(axis=1), 1.0)
    assert 1 / TOY.heads <= found["numbers"]["heads_on_one_word"] <= 1


def test_the_radial_share_is_one_for_growth_and_nothing_without_repulsion():
    nearly_orthogonal = torch.eye(3) + 0.01
    assert radial_share(CosineRepulsion(alpha=1.0), nearly_orthogonal) > 0.9
    assert radial_share(SVGD(alpha=0.0), nearly_orthogonal) is None


def test_options_and_missing_data_are_refused(texts):
    with pytest.raises(DataError, match="sentence needs --data"):
        TASK.load(None, TOY, None)
    scale = with_options(TOY, ScaleOptions("demo", out_of_domain=texts), "sentence")
    assert (scale.name, scale.out_of_domain) == ("toy", texts)
    with pytest.raises(SettingError, match="takes no --out-of-domain"):
        with_options(LOGIC_SCALES["demo"], ScaleOptions("demo", out_of_domain=texts), "logic")


@pytest.mark.full
@pytest.mark.skipif(not (PUBLISHED / "snli").is_dir(), reason="HEADWISE_DATA has no SICK")
def test_sick_is_learned_beyond_the_most_frequent_class(tmp_path):
    scale = dataclasses.replace(
        SENTENCE_SCALES["cpu"], name="short", units=24, attention=16, heads=8, hidden=64, width=40, epochs=2
    )
    settings = settings_of("plain", PUBLISHED / "snli", tmp_path / "cache", scale)
    train_run(settings, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["dev_score"] > 0.58
