"""Checkpoints of a Trainer with methods: resumed to the same bits, saved whole, and refused where they do not fit."""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer, TrainerCallback

import headwise as hw
from cases import cases
from headwise.integrations import huggingface
from integrations.huggingface_trainers import CountsItems, build_trainer
from integrations.loops import FIXED, NOISY, PENALTY, ROUTED, UPDATES, assert_same, build_bert


class Schedule(TrainerCallback):
    """Changes the strength before each step, as a user's schedule does."""

    def __init__(self, callback) -> None:
        self.callback = callback

    def on_step_end(self, _args, state, _control, **_):
        if state.global_step == 1:
            self.callback.attached.of(hw.repulsion.Repulsion)[0].strength = 0.25


SAVING = {"save_strategy": "steps", "save_steps": 2, "logging_strategy": "steps", "logging_steps": 1}


def run(folder, build, methods, resumed=None, scheduled=True, **changes) -> tuple[Trainer, object]:
    trainer = build_trainer(folder, build(), **SAVING, **changes)
    callback = huggingface.attach(trainer, *methods)
    if scheduled:
        trainer.add_callback(Schedule(callback))
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    return trainer, callback


@cases("form", ["transformers", "any module"])
@cases("restored", [False, True])
def test_a_resumed_training_ends_at_the_bits_of_the_uninterrupted_one(tmp_path, form, restored):
    build = build_bert if form == "transformers" else CountsItems
    methods = (PENALTY, NOISY, ROUTED)
    whole, _ = run(tmp_path / "whole", build, methods)
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    assert (checkpoint / "headwise.json").is_file() == (form == "transformers")
    changes = {"restore_callback_states_from_checkpoint": restored}
    torch.manual_seed(99)
    resumed, callback = run(tmp_path / "rest", build, methods, checkpoint, scheduled=False, **changes)
    assert_same(whole.model, resumed.model)
    assert callback.attached.of(hw.repulsion.Repulsion)[0].steps == UPDATES
    assert callback.attached.of(hw.repulsion.Repulsion)[0].strength == 0.25
    logged = [
        [{name: entry.get(name) for name in ("loss", "penalty", "force_ratio")} for entry in trainer.state.log_history]
        for trainer in (whole, resumed)
    ]
    assert logged[0] == logged[1]
    assert logged[0][2]["penalty"] > 0.0


@pytest.mark.full
@cases("weight", [hw.Relative(0.5), hw.Target(2.0)])
def test_the_strength_of_a_penalty_alone_goes_on_where_it_was(tmp_path, weight):
    method = hw.Penalize(hw.similarity.CKA(), weight=weight)
    whole, _ = run(tmp_path / "whole", build_bert, [method], scheduled=False)
    rest = run(tmp_path / "rest", build_bert, [method], tmp_path / "whole" / "checkpoint-2", scheduled=False)
    assert_same(whole.model, rest[0].model)
    build_trainer(tmp_path / "plain", **SAVING).train()
    with pytest.warns(UserWarning, match="noise and strengths begin anew"):
        run(tmp_path / "anew", build_bert, [method], tmp_path / "plain" / "checkpoint-2", scheduled=False)


class Fails(TrainerCallback):
    """Ends a training with an error."""

    def on_step_end(self, *_args, **_):
        raise ZeroDivisionError


@pytest.mark.full
@cases("fails", [False, True])
def test_after_a_training_nothing_of_the_model_is_kept(tmp_path, fails):
    trainer = build_trainer(tmp_path)
    callback = huggingface.attach(trainer, hw.Penalize(hw.similarity.Output(), weight=0.1))
    if fails:
        trainer.add_callback(Fails())
        with pytest.raises(ZeroDivisionError):
            trainer.train()
        trainer.remove_callback(Fails)
    else:
        trainer.train()
    for batch in build_trainer(tmp_path).get_train_dataloader():
        trainer.model.train()(**batch)
    (penalty,) = callback.attached.of(hw.Disagreement)
    with pytest.raises(hw.errors.NotFired, match="were not called since the last read"):
        penalty.taps.read()
    # and a further training goes on
    before = callback.attached.readings
    trainer.train()
    assert callback.attached.readings > before


def build_adapted():
    """The model under LoRA, as peft returns it."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(4)
    return peft.get_peft_model(build_bert(), peft.LoraConfig(r=2, target_modules=["query", "value"]))


@pytest.mark.full
def test_an_aggregator_under_peft_is_trained_saved_with_the_adapter_and_resumed(tmp_path):
    lowered = hw.Repel(NOISY.rule, projections=("query",))
    whole, _ = run(tmp_path / "whole", build_adapted, (PENALTY, lowered, ROUTED))
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    assert (checkpoint / "adapter_model.safetensors").is_file()
    assert not (checkpoint / "headwise.json").exists()
    torch.manual_seed(99)
    resumed, callback = run(tmp_path / "rest", build_adapted, (PENALTY, lowered, ROUTED), checkpoint, scheduled=False)
    assert_same(whole.model, resumed.model)
    assert callback.attached.of(hw.repulsion.Repulsion)[0].steps == UPDATES
    trained = [name for name, parameter in whole.model.named_parameters() if parameter.requires_grad]
    assert any("votes" in name for name in trained)


def test_a_checkpoint_without_the_state_is_said_where_the_noise_begins_anew(tmp_path):
    plain = build_trainer(tmp_path, **SAVING)
    plain.train()
    with pytest.warns(UserWarning, match=r"the checkpoint of step 2 holds no state of headwise"):
        run(tmp_path / "rest", build_bert, [NOISY], tmp_path / "checkpoint-2")
    run(tmp_path / "rest", build_bert, [FIXED], tmp_path / "checkpoint-2")


def test_a_checkpoint_of_other_methods_is_refused(tmp_path):
    run(tmp_path, build_bert, [NOISY])
    with pytest.raises(hw.errors.SettingError, match=r"is that of 1 methods, and 2 are attached"):
        run(tmp_path, build_bert, [NOISY, hw.Repel(FIXED.rule, layers=(1,))], tmp_path / "checkpoint-2")


@cases("form", ["transformers", "any module"])
def test_the_best_model_comes_back_with_its_aggregators_and_the_state_it_had(tmp_path, form):
    build = build_bert if form == "transformers" else CountsItems
    best = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        # the first evaluation is the best
        "metric_for_best_model": "order",
        "greater_is_better": False,
    }
    trainer = build_trainer(tmp_path, build(), **SAVING, **best)
    evaluated = []
    trainer.compute_metrics = lambda _: {"order": len(evaluated)}
    callback = huggingface.attach(trainer, PENALTY, NOISY, ROUTED)

    class Keep(TrainerCallback):
        def on_evaluate(self, _args, _state, _control, model=None, **_):
            evaluated.append({name: tensor.clone() for name, tensor in model.state_dict().items()})

    trainer.add_callback(Keep())
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    first, last = evaluated
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, first[name]), name
    assert not torch.equal(
        first["classifier.weight" if form == "transformers" else "network.classifier.weight"],
        last["classifier.weight" if form == "transformers" else "network.classifier.weight"],
    )
    assert callback.attached.of(hw.repulsion.Repulsion)[0].steps == 2


def test_a_model_whose_heads_are_found_in_a_part_of_it_is_saved_whole(tmp_path):
    trainer = build_trainer(tmp_path, save_strategy="steps", save_steps=2)
    huggingface.attach(trainer, ROUTED, find=lambda model: hw.find_heads(model.bert))
    trainer.train()
    again = hw.load(tmp_path / f"checkpoint-{UPDATES}")
    assert_same(trainer.model, again)


def test_a_model_that_was_aggregated_by_hand_is_resumed_too(tmp_path):
    def build():
        model = build_bert()
        torch.manual_seed(5)
        ROUTED.attach(hw.find_heads(model))
        return model

    whole, _ = run(tmp_path / "whole", build, [], scheduled=False)
    resumed, _ = run(tmp_path / "rest", build, [], tmp_path / "whole" / "checkpoint-2", scheduled=False)
    assert_same(whole.model, resumed.model)
