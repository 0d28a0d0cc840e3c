"""Methods under Hugging Face's Trainer: what they compute, in every kind of loop it has."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest
from torch import nn
from torch.optim import SGD
from transformers import TrainerCallback
from transformers.hyperparameter_search import ALL_HYPERPARAMETER_SEARCH_BACKENDS, HyperParamSearchBackendBase
from transformers.trainer_utils import HPSearchBackend

import headwise as hw
from cases import cases
from headwise.integrations import huggingface
from integrations.huggingface_trainers import CountsItems, InOrder, build_trainer, custom_loss, new_bert
from integrations.loops import (
    ACCUMULATED,
    FIXED,
    NOISY,
    PENALTY,
    ROUTED,
    UPDATES,
    assert_same,
    build_bert,
    differ,
    train_by_hand,
)

CLIP = 0.2


class Divides(InOrder):
    """A subclass with a loss of its own, a mean over each micro-batch."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, **_counted):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def mean_loss(model, batch):
    return model(**batch)["loss"]


def undivided_loss(model, batch):
    """The loss of a classifier of transformers, which the Trainer takes for one divided by the accumulation."""
    return ACCUMULATED * model(**batch)["loss"]


class Plain(nn.Module):
    """A model without a loss, and without arguments besides its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.network = build_bert(dropout=0.0)

    def forward(self, input_ids, attention_mask, labels=None):
        logits = self.network(input_ids, attention_mask).logits
        outputs = {"logits": logits}
        return outputs if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), **outputs}


def plain_loss(outputs, labels, num_items_in_batch=None):
    return custom_loss(SimpleNamespace(**outputs), labels, num_items_in_batch)


@cases(
    "kind", ["the model's loss", "a loss function", "a loss function alone", "a model that counts items", "a subclass"]
)
def test_penalty_and_repulsion_equal_the_loop_by_hand_however_the_loss_is_made(tmp_path, kind):
    others = {"a model that counts items": CountsItems, "a loss function alone": Plain}
    build = others.get(kind, lambda: build_bert(dropout=0.0))
    model, expected, plain = build(), build(), build()
    trainer = build_trainer(
        tmp_path,
        model,
        kind=Divides if kind == "a subclass" else InOrder,
        compute_loss_func={"a loss function": custom_loss, "a loss function alone": plain_loss}.get(kind),
    )
    callback = huggingface.attach(trainer, PENALTY, NOISY)  # with the noise of the seed of the arguments
    trainer.train()
    loss_of = undivided_loss if kind == "the model's loss" else mean_loss
    train_by_hand(expected, PENALTY, NOISY, loss_of=loss_of)
    train_by_hand(plain, loss_of=loss_of)
    assert_same(model, expected, exactly=False)
    assert differ(model, plain)
    assert callback.attached.steps == UPDATES == trainer.state.global_step


class Search(HyperParamSearchBackendBase):
    """A search without the package of one: as transformers' own backends do, a training and an evaluation a trial."""

    name = "two trials"
    is_available = staticmethod(lambda: True)

    def run(self, trainer, n_trials, _direction, **_options):
        objectives = []
        for number in range(n_trials):
            trainer.train(trial=Trial(number))
            objectives.append(trainer.compute_objective(trainer.evaluate()))
        return objectives


class Trial(dict):
    """A trial of optuna, as far as the Trainer looks at one."""

    def __init__(self, number: int) -> None:
        super().__init__(learning_rate=(0.05, 0.02)[number])
        self.number, self.params = number, dict(self)


@pytest.mark.full
def test_each_trial_of_a_hyperparameter_search_is_repelled_penalized_and_routed(tmp_path, monkeypatch):
    monkeypatch.setitem(ALL_HYPERPARAMETER_SEARCH_BACKENDS, HPSearchBackend.OPTUNA, Search)
    monkeypatch.setattr("transformers.integrations.hp_params", dict)
    models, attached = [], []

    def build():
        attached.extend(callback.attached.of(hw.Disagreement) if callback else ())
        return build_bert()

    callback = None
    trainer = build_trainer(tmp_path, model_init=build)
    callback = huggingface.attach(trainer, PENALTY, NOISY, ROUTED)

    class Keep(TrainerCallback):
        def on_train_end(self, _args, state, _control, model=None, optimizer=None, **_):
            models.append(model)
            (repulsion,), (penalty,) = (
                callback.attached.of(hw.repulsion.Repulsion),
                callback.attached.of(hw.Disagreement),
            )
            repulsion.check(optimizer)
            assert repulsion.steps == UPDATES == state.global_step
            assert repulsion.heads.model is penalty.heads.model is model
            assert type(model.bert.encoder.layer[1].attention.output.dense).__name__ == "SimpleAggregator"

    trainer.add_callback(Keep())
    objectives = trainer.hyperparameter_search(hp_space=lambda trial: trial.params, n_trials=2, backend="optuna")
    assert len(objectives) == 2
    assert not attached  # the old model need not be kept while the new one is made
    assert differ(*models)
    for index, rate in enumerate((0.05, 0.02)):
        alone = build_trainer(tmp_path, model_init=new_bert, learning_rate=rate)
        huggingface.attach(alone, PENALTY, NOISY, ROUTED)
        alone.train()
        assert_same(models[index], alone.model)
    plain = build_trainer(tmp_path, model_init=new_bert)
    huggingface.attach(plain, PENALTY, ROUTED)
    plain.train()
    assert differ(plain.model, models[0])


def test_repel_by_hand_before_a_model_init_is_said(tmp_path):
    trainer = build_trainer(tmp_path, model_init=new_bert)
    handle = hw.repel(hw.find_heads(trainer.model).layer(0), FIXED.rule, trainer.create_optimizer())
    assert handle.steps == 0
    del handle
    with pytest.warns(UserWarning, match="called on an SGD that never took a step"):
        trainer.train()


@cases("again", ["trained on", "built anew"])
def test_a_second_training_keeps_the_handles_of_a_model_that_is_trained_on(tmp_path, again):
    built_anew = again == "built anew"
    trainer = build_trainer(tmp_path, model_init=new_bert if built_anew else None)
    callback = huggingface.attach(trainer, PENALTY, NOISY)
    trainer.train()
    callback.attached.of(hw.repulsion.Repulsion)[0].strength = 0.5
    trainer.train()
    (repulsion,) = callback.attached.of(hw.repulsion.Repulsion)
    assert (repulsion.steps, repulsion.strength) == ((UPDATES, 1.0) if built_anew else (2 * UPDATES, 0.5))


class ExchangeOptimizer(TrainerCallback):
    """Builds the optimizer anew after two steps, as some schedules of unfreezing do."""

    def __init__(self, trainer) -> None:
        self.trainer = trainer

    def on_step_end(self, _args, state, _control, **_):
        if state.global_step == 2:
            fresh = SGD(self.trainer.model.parameters(), lr=0.05)
            self.trainer.optimizer = self.trainer.callback_handler.optimizer = self.trainer.accelerator.prepare(fresh)


def test_an_optimizer_exchanged_in_mid_training_is_repelled_too(tmp_path):
    models = []
    for exchanged in (False, True):
        trainer = build_trainer(tmp_path)
        callback = huggingface.attach(trainer, NOISY)
        if exchanged:
            trainer.add_callback(ExchangeOptimizer(trainer))
        trainer.train()
        assert callback.attached.steps == UPDATES
        models.append(trainer.model)
    # SGD without momentum has no state: an exchange changes nothing, were the noise not to begin anew
    assert_same(*models)


class StepsAnother(InOrder):
    """A Trainer whose optimizer is not the one its callbacks are told of."""

    def training_step(self, *arguments, **options):
        loss = super().training_step(*arguments, **options)
        self.optimizer = SGD(self.model.parameters(), lr=0.1)
        return loss


class OwnStep(InOrder):
    """A Trainer whose training step computes the loss by itself."""

    def training_step(self, model, inputs, _items=None):
        loss = model(**inputs).loss
        self.accelerator.backward(loss)
        return loss.detach()


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize(
    ("kind", "method", "message"),
    [
        (StepsAnother, FIXED, r"no step\(\) of it was seen"),
        (OwnStep, PENALTY, "OwnStep computes the loss of a training step without compute_loss"),
    ],
)
def test_a_step_in_which_a_method_does_not_act_raises_at_once(tmp_path, kind, method, message):
    trainer = build_trainer(tmp_path, kind=kind)
    huggingface.attach(trainer, method)
    with pytest.raises(hw.errors.NotFired, match=message):
        trainer.train()


@cases("by_function", [False, True])
def test_the_evaluation_loss_is_that_of_the_model_without_a_penalty(tmp_path, by_function):
    losses = []
    for methods in ([], [PENALTY]):
        trainer = build_trainer(tmp_path, build_bert(), compute_loss_func=custom_loss if by_function else None)
        if methods:
            huggingface.attach(trainer, *methods)
            losses.append(trainer.evaluate()["eval_loss"])  # before any training
            trainer.train()
            trainer.model.load_state_dict(build_bert().state_dict())
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == losses[1] == losses[2]


def test_evaluations_amid_the_training_change_nothing_of_it(tmp_path):
    models = []
    for evaluation in ({}, {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}):
        trainer = build_trainer(tmp_path, build_bert(dropout=0.0), **evaluation)
        huggingface.attach(trainer, PENALTY, NOISY)
        trainer.train()
        models.append(trainer.model)
    assert_same(*models)


def test_the_log_of_the_loss_holds_penalty_similarity_and_force_ratio_and_that_of_evaluation_does_not(tmp_path):
    seen = []

    class Watch(TrainerCallback):
        def on_log(self, _args, _state, _control, logs=None, **_):
            seen.append(dict(logs))

    trainer = build_trainer(tmp_path, logging_strategy="steps", logging_steps=2, eval_strategy="epoch")
    trainer.add_callback(Watch())
    callback = huggingface.attach(trainer, PENALTY, FIXED)
    trainer.train()
    training = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(training) == UPDATES / 2
    for entry in training:
        assert entry["penalty"] == pytest.approx(PENALTY.weight * entry["similarity"])
        assert 0.0 < entry["similarity"] < 1.5
    forces = callback.attached.of(hw.repulsion.Repulsion)[0].last
    assert training[-1]["force_ratio"] == pytest.approx(
        float(forces.repulsion_norm.norm() / forces.driving_norm.norm())
    )
    others = [entry for entry in trainer.state.log_history if "loss" not in entry]
    assert len(others) == 2
    assert not any(name in entry for entry in others for name in ("penalty", "similarity", "force_ratio"))
    assert [entry.get("penalty") for entry in seen] == [entry.get("penalty") for entry in trainer.state.log_history]


def test_bfloat16_is_trained_with_every_method(tmp_path):
    trainer = build_trainer(tmp_path, bf16=True)
    callback = huggingface.attach(trainer, PENALTY, NOISY, ROUTED)
    trainer.train()
    assert callback.attached.steps == UPDATES
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path):
    trainer = build_trainer(tmp_path)
    with pytest.raises(hw.errors.SettingError, match="trainer is a BertForSequenceClassification"):
        huggingface.attach(trainer.model, PENALTY)
    with pytest.raises(hw.errors.SettingError, match="was given no method"):
        huggingface.attach(trainer)
    with pytest.raises(hw.errors.SettingError, match=r"Output\(\) is no method; expected hw.Repel"):
        huggingface.attach(trainer, hw.similarity.Output())
    huggingface.attach(trainer, PENALTY)
    with pytest.raises(hw.errors.SettingError, match="has methods already"):
        huggingface.attach(trainer, FIXED)
    model = build_bert()
    trainer = build_trainer(tmp_path, model, optimizers=(SGD(model.parameters(), lr=0.1), None))
    huggingface.attach(trainer, ROUTED)
    with pytest.raises(hw.errors.LayoutError, match=r"the optimizer does not hold votes.*build the optimizer after"):
        trainer.train()


def test_a_group_without_a_gradient_is_said_at_the_end_and_the_model_kept(tmp_path):
    model = build_bert()
    for layer in model.bert.encoder.layer:
        layer.attention.self.value.register_forward_hook(lambda _module, _args, output: output.detach())
    trainer = build_trainer(tmp_path, model)
    huggingface.attach(trainer, FIXED)
    with pytest.warns(UserWarning, match=r"layer\.0.* value: no gradient at any step"):
        trainer.train()
    assert trainer.state.global_step == UPDATES


def test_a_missing_transformers_is_said_in_a_sentence(monkeypatch):
    monkeypatch.delitem(sys.modules, "headwise.integrations.huggingface")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"huggingface needs the Trainer of transformers; pip install"):
        importlib.import_module("headwise.integrations.huggingface")
