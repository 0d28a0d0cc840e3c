from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

from cases import cases
from headwise.errors import DataError, HeadwiseError, LayoutError, NotFired, SettingError
from headwise.gating.attach import Gating, gate_heads
from headwise.gating.gates import SigmoidGate
from headwise.heads.ablation import HeadDropping
from headwise.heads.find import find_heads
from headwise.heads.scores.mixing import mix_heads
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.tasks.logic.data import load_logic
from headwise_lab.tasks.logic.model import PairClassifier
from headwise_lab.tasks.logic.scales import LOGIC_SCALES, LogicScale
from headwise_lab.training import train
from headwise_lab.training.attach import Methods, attach_arm, pair_all_heads, widen_feed_forward
from headwise_lab.training.start import Classifier
from headwise_lab.training.train import train_run
from headwise_lab.training.trained import load_trained
from lab.stopping import assert_same_run, same_bits, stop_after
from lab.tasks.logic import logic_toy

TOY = dataclasses.replace(
    logic_toy.TOY, dropout=0.1, epochs=2, batch_size=16, generated_draws=2000, train_examples=160, dev_examples=60
)
STEPS = 10  # an epoch
SCHEDULED = "drophead-scheduled:start=0.4+mixture:shared=0,active=1"
TARGETS = "svgd-target:effective_heads=2+cka-target:effective_heads=2"
ARMS = ("plain", "spos", SCHEDULED, "output+em", TARGETS)
# Each arm is stopped inside and before the end of its first epoch and inside its second; some of these are quick.
STOPS = [
    pytest.param(arm, stopped, marks=[] if number in (1, 3) and (number + place) % 3 == 0 else [pytest.mark.full])
    for number, arm in enumerate(ARMS)
    for place, stopped in enumerate((STEPS // 2, STEPS - 1, STEPS + 3))
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def whole(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an uninterrupted run of an arm, made once."""
    made: dict[str, Path] = {}

    def run(arm: str) -> Path:
        if arm not in made:
            made[arm] = tmp_path_factory.mktemp("whole") / "run"
            train_run(settings(arm, cache), made[arm])
        return made[arm]

    return run


def settings(arm: str, cache: Path, scale: LogicScale = TOY, **changes) -> RunSettings:
    return RunSettings("logic", scale, parse_arm(arm), seed=3, cache=cache, **changes)


def make_bert() -> BertModel:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertModel(BertConfig(vocab_size=8, **sizes))


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def test_a_run_leaves_everything_the_table_needs(whole, cache):
    folder = whole("svgd")
    found = result(folder)
    test = load_logic(None, TOY, cache).test
    predictions = np.load(folder / "predictions.npz")
    assert predictions["statistics"].dtype == bool
    assert len(predictions["statistics"]) == len(predictions["predicted"]) == len(test)
    assert found["score"]["pooled"] == pytest.approx(predictions["statistics"].mean())
    assert set(found["score"]["bins"]) == {"1", "2", "3"}
    assert found["arm"] == "svgd"
    assert found["control"] == "smooth"
    for name in ("distance", "output_cosine", "output_cka", "position_js", "parameter_cosine", "particle_norm"):
        assert np.isfinite(found[name])
    assert found["step_seconds"] > 0
    assert found["train_seconds"] > 0
    assert found["force_ratio"] > 0
    epochs = [json.loads(line) for line in (folder / "epochs.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in epochs] == [1, 2]
    assert epochs[1]["train_loss"] < epochs[0]["train_loss"]
    assert epochs[1]["dev"]["pooled"] == found["dev_score"]
    assert not list(folder.glob("checkpoint-*"))
    assert not (folder / ".writing").exists()


def test_the_bits_of_a_run_follow_from_its_settings_and_its_seed(whole, cache, tmp_path):
    train_run(settings("svgd", cache), tmp_path / "again")
    assert same_bits(whole("svgd"), tmp_path / "again")
    train_run(dataclasses.replace(settings("svgd", cache), seed=4), tmp_path / "other")
    assert not same_bits(whole("svgd"), tmp_path / "other")


@pytest.mark.parametrize(("arm", "stopped"), STOPS)
def test_a_run_stopped_in_the_middle_goes_on_to_the_same_bits(arm, stopped, whole, cache, tmp_path):
    folder = tmp_path / "run"
    train_run(settings(arm, cache), folder, stop_after(stopped))
    assert not (folder / "result.json").exists()
    assert list(folder.glob("checkpoint-*"))
    train_run(settings(arm, cache), folder)
    assert_same_run(whole(arm), folder)


@cases(
    ("arm", "added", "count"),
    [
        ("talking+muon-heads", ("head_mixer.logits", "head_mixer.weights"), 4),
        (
            "gated+differential+wider:units=3",
            ("head_gates.weight", "head_difference.vectors", "head_difference.norm.weight"),
            6,
        ),
    ],
)
def test_a_run_comes_back_with_what_its_arm_added(arm, added, count, whole, cache):
    trained = load_trained(settings(arm, cache), whole(arm))
    kept, state = load_file(whole(arm) / "model.safetensors"), trained.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in kept.items())
    found = [state[name] for name in state if name.endswith(added)]
    assert len(found) == count
    assert all(tensor.std() > 0 and not torch.equal(tensor, torch.eye(2)) for tensor in found)
    paired = "differential" in arm
    assert [site.num_heads for site in trained.heads] == ([1, 1] if paired else [2, 2])
    assert state["encoder.layers.1.feed_forward.0.weight"].shape == (19 if paired else 16, 8)


def test_the_rate_of_scheduled_drophead_falls_while_the_learning_rate_warms_up_and_then_rises(
    cache, tmp_path, monkeypatch
):
    rates, loss = [], train.HeadTrainer.compute_loss

    def recorded(self, model, inputs, **options):
        rates.append(self.methods.run.of(HeadDropping)[0].rate)
        return loss(self, model, inputs, **options)

    monkeypatch.setattr(train.HeadTrainer, "compute_loss", recorded)
    train_run(settings("drophead-scheduled:rate=0.16,start=0.3", cache), tmp_path / "run")
    # three of 20 steps warm up, and the last is step 19
    assert rates == pytest.approx([0.3, 0.2, 0.1, *(0.16 * step / 16 for step in range(17))])


def test_the_balance_of_a_mixture_enters_the_loss_of_training_and_no_other(cache):
    data, task = load_logic(None, TOY, cache), named_task("logic")
    scale = dataclasses.replace(TOY, dropout=0.0)
    model, methods = attach_arm(task, parse_arm("mixture:shared=0,active=1"), data, scale, seed=0)
    batch: Any = task.collate([data.train[index] for index in range(16)])
    with methods.evaluating(model):
        plain = model(**batch)["loss"]
        task.on_dev(model, data)
    model.train()
    (gating,) = methods.run.of(Gating)
    with pytest.raises(NotFired, match="no gated attention ran in training mode"):
        gating.balance()
    model(**batch)
    term = gating.balance()
    assert 1.01 < term < 2.0
    torch.testing.assert_close(methods.loss(model(**batch)["loss"]), plain + 0.01 * term)
    # a relative penalty is a share of the loss without it
    measured = []
    for balance in (0.0, 0.01):
        arm = parse_arm(f"mixture:shared=0,active=1,balance={balance}+output-relative")
        model, methods = attach_arm(task, arm, data, scale, seed=0)
        methods.loss(model.train()(**batch)["loss"])
        measured.append(methods.penalty.state_dict()["logarithms"])
    assert measured[0] == measured[1]


def test_arms_that_a_model_cannot_have_and_folders_that_transformers_would_pass_over_are_refused(tmp_path):
    with pytest.raises(LayoutError, match="arms differential and paired change torch's multi-head attention and the"):
        pair_all_heads(find_heads(make_bert()), second=True)
    with pytest.raises(SettingError, match="has no feed_forward or mlp of Linears"):
        widen_feed_forward(find_heads(make_bert()))
    for number, method in enumerate((lambda heads: gate_heads(heads, SigmoidGate()), mix_heads)):
        bert = make_bert()
        method(find_heads(bert))
        bert.save_pretrained(tmp_path / str(number))
        with pytest.raises(DataError, match="which transformers does not load"):
            Classifier(tmp_path / str(number), 2)


def test_a_wider_llama_has_the_parameters_of_gates_and_is_built_anew_from_its_configuration():
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    llama = LlamaModel(LlamaConfig(vocab_size=8, pad_token_id=0, **sizes))
    before = sum(parameter.numel() for parameter in llama.parameters())
    widen_feed_forward(find_heads(llama))
    more = sum(parameter.numel() for parameter in llama.parameters()) - before
    gates = 2 * 24 * 25
    assert abs(more - gates) <= 2 * 3 * 24 / 2
    assert {name: one.shape for name, one in LlamaModel(llama.config).named_parameters()} == {
        name: one.shape for name, one in llama.named_parameters()
    }


@pytest.mark.full
def test_a_run_killed_after_a_checkpoint_goes_on_to_the_same_bits(whole, cache, tmp_path, monkeypatch):
    folder, step = tmp_path / "run", train.HeadTrainer.training_step

    def killed(self, *args):
        if self.state.global_step == STEPS + 6:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(train.HeadTrainer, "training_step", killed)
    with pytest.raises(KeyboardInterrupt):
        train_run(settings("spos", cache, save_seconds=0.0), folder)
    monkeypatch.undo()
    assert [path.name for path in folder.glob("checkpoint-*")] == [f"checkpoint-{STEPS + 6}"]
    train_run(settings("spos", cache), folder)
    assert same_bits(whole("spos"), folder)


def test_a_finished_run_is_left_alone_and_one_with_other_settings_refused(whole, cache):
    folder = whole("plain")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    train_run(settings("plain", cache), folder)
    other = settings("plain", cache, dataclasses.replace(TOY, batch_size=8))
    with pytest.raises(SettingError, match=r"scale\.batch_size 16 but 8 is requested; choose another --out"):
        train_run(other, folder)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_corrupt_checkpoint_is_named_in_one_sentence(cache, tmp_path):
    folder = tmp_path / "run"
    train_run(settings("plain", cache, test=False), folder, stop_after(2))
    (checkpoint,) = folder.glob("checkpoint-*")
    for name in ("model.safetensors", "optimizer.pt", "run.pt", "trainer_state.json", "rng_state.pth"):
        content = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(DataError, match=rf"{name} was changed .*; delete {checkpoint} to start that run again"):
            train_run(settings("plain", cache, test=False), folder)
        (checkpoint / name).write_bytes(content)
    shutil.rmtree(checkpoint)
    train_run(settings("plain", cache, test=False), folder)
    # a run of tuning never sees the test split
    assert result(folder)["score"] is None
    assert not (folder / "predictions.npz").exists()


def test_arms_start_from_the_same_parameters_see_the_same_batches_and_the_same_dropout(cache, tmp_path, monkeypatch):
    seen: dict[str, list[torch.Tensor]] = {}
    loss = train.HeadTrainer.compute_loss

    def recorded(self, model, inputs, **options):
        if self.state.global_step == 0:
            name = self.methods.arm.name
            seen[name] = [inputs["premise"], *(p.detach().clone() for p in model.classifier.parameters())]
            seen[name].append(model(**inputs)["loss"].detach())
            torch.manual_seed(0)
        return loss(self, model, inputs, **options)

    monkeypatch.setattr(train.HeadTrainer, "compute_loss", recorded)
    for arm in ("plain", "svgd", "drophead:rate=0.3", "em"):
        train_run(settings(arm, cache), tmp_path / arm.partition(":")[0], stop_after(1))
    for arm in ("svgd", "drophead:rate=0.3", "em"):
        shared = seen[arm] if arm == "svgd" else seen[arm][:-1]
        assert all(torch.equal(one, other) for one, other in zip(seen["plain"], shared, strict=False))


def test_repulsion_is_applied_before_the_gradient_is_clipped(cache, tmp_path, monkeypatch):
    norms: list[float] = []
    clip = train.HeadTrainer._clip_grad_norm

    def recorded(self, model):
        assert all(attachment.applied for attachment in self.methods.repulsion._attachments)
        norms.append(float(clip(self, model)))
        return torch.tensor(norms[-1])

    monkeypatch.setattr(train.HeadTrainer, "_clip_grad_norm", recorded)
    train_run(settings("svgd:alpha=1e4", cache), tmp_path, stop_after(2))
    # with such a strength the norm to be clipped is the repulsion's
    assert min(norms) > 10.0


def test_routing_is_compiled_where_the_scale_says_so():
    compiled = {}
    for wanted in (False, True):
        model = PairClassifier(5, 7, TOY)
        methods = Methods(parse_arm("em+svgd"), model, model.encoder, seed=3, compile_routing=wanted)
        compiled[wanted] = [site.output_projection.module.setting.chunks.compile for site in methods.heads.sites]
    assert compiled == {False: [False, False], True: [True, True]}
    assert LOGIC_SCALES["cpu"].compile_routing


def test_a_penalty_is_part_of_the_loss_and_a_measured_strength_is_recorded(whole):
    plain, output = (
        json.loads((whole(arm) / "epochs.jsonl").read_text().splitlines()[0]) for arm in ("plain", "output+em")
    )
    assert output["train_loss"] > plain["train_loss"] + 0.3
    assert 0 < result(whole(TARGETS))["force_ratio"] <= 1


@pytest.mark.parametrize(
    ("arm", "reason"),
    [
        ("plain:learning_rate=1e30", "the training loss is nan"),
        ("spos:step_size=1e30", "the force ratio is inf"),
        *(
            pytest.param(arm, "the norm of the gradient is inf", marks=pytest.mark.full)
            for arm in ("svgd:alpha=1e30", "output:weight=1e30", "cosine-penalty:alpha=1e30")
        ),
    ],
)
def test_what_is_not_finite_ends_the_run_in_one_sentence(arm, reason, cache, tmp_path):
    with pytest.raises(HeadwiseError, match=f"^{reason} in epoch 1; lower the learning rate or the strength.$"):
        train_run(settings(arm, cache), tmp_path)
    assert not (tmp_path / "result.json").exists()
    assert not (tmp_path / "epochs.jsonl").exists()


def test_a_score_that_is_not_finite_ends_the_run_in_one_sentence(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "_evaluate_on_dev", lambda *_: {"dev": {"pooled": float("nan")}})
    with pytest.raises(HeadwiseError, match=r"^dev\.pooled is nan in epoch 1; lower the learning rate"):
        train_run(settings("plain", cache), tmp_path)


def test_a_zero_gradient_has_no_force_ratio_and_forces_that_are_not_finite_an_infinite_one():
    model = PairClassifier(5, 7, TOY)
    ratios = []
    for arm, slope in (("svgd", 0.0), ("spos:step_size=1e30", 1.0)):
        methods = Methods(parse_arm(arm), model, model.encoder, seed=3)
        methods.repel(torch.optim.SGD(model.parameters(), lr=0.1))
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, slope)
        ratios.append(methods.apply_repulsion())
    assert ratios[0].isnan()
    assert ratios[1].isinf()
