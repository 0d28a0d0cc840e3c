"""Methods under Lightning's Trainer: accumulation, clipping, a GradScaler, resume, evaluation, manual optimization."""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path

import lightning.pytorch as lightning
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch.optim import SGD
from torch.utils.data import DataLoader

import headwise as hw
from cases import cases
from headwise.integrations.lightning import HeadwiseCallback
from integrations.loops import (
    ACCUMULATED,
    CLIP,
    FIXED,
    NOISY,
    PENALTY,
    RATE,
    ROUTED,
    UPDATES,
    assert_same,
    build_bert,
    collate,
    differ,
    make_rows,
    train_by_hand,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*but have no .val_dataloader"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
]


def make_module(parent: type) -> type:
    class Classifier(parent):
        """A classifier with a validation loss."""

        def __init__(self, dropout: float = 0.0) -> None:
            super().__init__()
            self.network = build_bert(dropout)

        def training_step(self, batch, _index):
            return {"loss": self.network(**batch).loss}

        def validation_step(self, batch, _index):
            self.log("val_loss", self.network(**batch).loss)

        def configure_optimizers(self):
            return SGD(self.parameters(), lr=RATE)

    return Classifier


Classifier = make_module(lightning.LightningModule)


class ByHand(Classifier):
    """The same with manual optimization."""

    callback: HeadwiseCallback | None = None

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)["loss"]
        optimizer = self.optimizers()
        self.manual_backward(loss if self.callback is None else self.callback.attached.loss(loss))
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()


def rows() -> DataLoader:
    return DataLoader(make_rows(), batch_size=2, collate_fn=collate)


def build_trainer(folder, *callbacks, kind=lightning.Trainer, **settings):
    defaults = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "accumulate_grad_batches": ACCUMULATED,
        "gradient_clip_val": CLIP,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return kind(callbacks=list(callbacks), **(defaults | settings))


@cases("package", [lightning, pytorch_lightning])
def test_penalty_and_repulsion_equal_the_loop_by_hand(tmp_path, package):
    module, expected, plain = make_module(package.LightningModule)(), build_bert(0.0), build_bert(0.0)
    callback = HeadwiseCallback(PENALTY, FIXED)
    build_trainer(tmp_path, callback, kind=package.Trainer).fit(module, rows())
    train_by_hand(expected, PENALTY, FIXED)
    train_by_hand(plain)
    assert_same(module.network, expected, exactly=False)
    assert differ(module.network, plain)
    assert callback.attached.steps == UPDATES
    assert "training_step" not in vars(module)


def test_validation_has_the_loss_of_the_task_and_changes_nothing_of_the_training(tmp_path):
    losses, modules = [], []
    for callbacks, validated in (((), rows()), ((HeadwiseCallback(PENALTY, NOISY),), rows())):
        trainer, module = build_trainer(tmp_path, *callbacks, max_epochs=0), Classifier()
        trainer.fit(module, rows())
        losses.append(trainer.validate(module, validated, verbose=False)[0]["val_loss"])
    assert losses[0] == losses[1]
    for validated in (None, rows()):
        trainer, module = build_trainer(tmp_path, HeadwiseCallback(PENALTY, NOISY), val_check_interval=2), Classifier()
        trainer.fit(module, rows(), validated)
        modules.append(module)
    assert_same(*modules)


def test_penalty_similarity_and_force_ratio_are_in_the_trainers_log(tmp_path):
    logger = CSVLogger(tmp_path)
    callback = HeadwiseCallback(PENALTY, FIXED)
    trainer = build_trainer(tmp_path, callback, logger=logger, log_every_n_steps=1)
    trainer.fit(Classifier(), rows(), rows())
    forces = callback.attached.of(hw.repulsion.Repulsion)[0].last
    assert float(trainer.callback_metrics["force_ratio"]) == pytest.approx(
        float(forces.repulsion_norm.norm() / forces.driving_norm.norm())
    )
    with Path(logger.log_dir, "metrics.csv").open(newline="") as file:
        training = [row for row in csv.DictReader(file) if row["penalty"]]
    assert len(training) == UPDATES
    for row in training:
        assert float(row["penalty"]) == pytest.approx(PENALTY.weight * float(row["similarity"]), rel=1e-4)
        assert not row["val_loss"]


def test_a_resumed_fit_ends_at_the_bits_of_the_uninterrupted_one(tmp_path):
    def fit(checkpoint=None, strength=None, callback=None):
        torch.manual_seed(5 if checkpoint is None else 6)  # the aggregators begin elsewhere before they are loaded
        callback = callback or HeadwiseCallback(PENALTY, NOISY, ROUTED, seed=8)

        class Schedule(lightning.Callback):
            def on_train_start(self, *_):
                if strength is not None:
                    callback.attached.of(hw.repulsion.Repulsion)[0].strength = strength

        saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)
        settings = {"enable_checkpointing": True, "max_epochs": 2}
        trainer, module = build_trainer(tmp_path, callback, Schedule(), saving, **settings), Classifier()
        trainer.fit(module, rows(), ckpt_path=checkpoint, weights_only=None if checkpoint is None else True)
        return module, callback

    whole, first = fit(strength=0.5)
    resumed, second = fit(tmp_path / f"step={UPDATES}.ckpt")
    assert_same(whole, resumed)
    assert type(resumed.network.bert.encoder.layer[1].attention.output.dense).__name__ == "SimpleAggregator"
    assert first.attached.steps == second.attached.steps == 2 * UPDATES
    assert second.attached.of(hw.repulsion.Repulsion)[0].strength == 0.5
    # a callback that served another model goes on from the checkpoint, too
    third, _ = fit(tmp_path / f"step={UPDATES}.ckpt", callback=first)
    assert_same(whole, third)


def test_another_fit_attaches_again_to_new_optimizers_and_to_a_new_model(tmp_path):
    callback, module = HeadwiseCallback(PENALTY, FIXED, ROUTED), Classifier()
    for steps in (UPDATES, 2 * UPDATES):  # the noise of a model that is trained on goes on
        build_trainer(tmp_path, callback).fit(module, rows())
        assert callback.attached.steps == steps
    other = Classifier()
    build_trainer(tmp_path, callback).fit(other, rows())
    assert callback.attached.steps == UPDATES
    assert callback.attached.of(hw.Disagreement)[0].heads.model is other
    assert type(other.network.bert.encoder.layer[1].attention.output.dense).__name__ == "SimpleAggregator"


class ExchangeOptimizer(lightning.Callback):
    """Builds the optimizer anew after a batch."""

    def on_train_batch_end(self, trainer, module, *_):
        trainer.strategy.optimizers = [SGD(module.parameters(), lr=RATE)]


def test_an_optimizer_exchanged_in_mid_training_raises_at_its_first_step(tmp_path):
    module = Classifier()
    trainer = build_trainer(tmp_path, HeadwiseCallback(FIXED), ExchangeOptimizer(), accumulate_grad_batches=1)
    with pytest.raises(hw.errors.NotFired, match="is not attached to the optimizer in use"):
        trainer.fit(module, rows())


def test_manual_optimization_adds_the_penalty_itself_and_is_told_where_it_does_not(tmp_path):
    callback = HeadwiseCallback(PENALTY, FIXED)
    automatic, manual = Classifier(), ByHand()
    settings = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    build_trainer(tmp_path, HeadwiseCallback(PENALTY, FIXED), **settings).fit(automatic, rows())
    with pytest.raises(hw.errors.NotFired, match=r"ByHand optimizes manually; in training_step, write loss = callback"):
        build_trainer(tmp_path, callback, **settings).fit(manual, rows())
    manual = ByHand()
    manual.callback = callback
    build_trainer(tmp_path, callback, **settings).fit(manual, rows())
    assert_same(automatic, manual)


class Skips(Classifier):
    """Leaves out a batch whose loss is not finite."""

    def training_step(self, batch, index):
        if index == 1:
            # what a bad batch computes
            hidden = self.network.bert.embeddings.word_embeddings
            handle = hidden.register_forward_hook(lambda _module, _args, out: out * float("nan"))
            self.network(**batch)
            handle.remove()
            return None
        return super().training_step(batch, index)


@pytest.mark.filterwarnings("ignore:.training_step. returned .None")
def test_a_batch_that_is_left_out_is_no_fault_and_does_not_enter_the_next_penalty(tmp_path):
    module, callback = Skips(), HeadwiseCallback(hw.Penalize(hw.similarity.Output(), weight=0.1), FIXED)
    build_trainer(tmp_path, callback, accumulate_grad_batches=1).fit(module, rows())
    assert callback.attached.steps == 2 * UPDATES - 1
    assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())


def test_an_error_in_a_fit_leaves_nothing_on_the_module(tmp_path):
    class Fails(Classifier):
        def training_step(self, batch, index):
            if index == 1:
                raise RuntimeError("on purpose")
            return super().training_step(batch, index)

    module = Fails()
    with pytest.raises(RuntimeError, match="on purpose"):
        build_trainer(tmp_path, HeadwiseCallback(PENALTY)).fit(module, rows())
    assert "training_step" not in vars(module)


@cases("precision", ["16-mixed", "bf16-mixed"])
def test_mixed_precision_is_trained_also_over_a_step_that_overflows(tmp_path, precision):
    scaled = precision == "16-mixed"
    # the first steps overflow in half precision
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=2.0**-5) if scaled else None
    callback, module = HeadwiseCallback(PENALTY, NOISY), Classifier()
    plugin = MixedPrecision(precision, "cpu", scaler)
    build_trainer(tmp_path, callback, plugins=[plugin], max_epochs=2).fit(module, rows())
    assert (0 < callback.attached.steps < 2 * UPDATES) if scaled else callback.attached.steps == 2 * UPDATES
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_nothing_given_and_a_missing_lightning_are_said_in_a_sentence(monkeypatch):
    with pytest.raises(hw.errors.SettingError, match="was given no method"):
        HeadwiseCallback()
    monkeypatch.delitem(sys.modules, "headwise.integrations.lightning")
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"lightning needs Lightning; pip install lightning"):
        importlib.import_module("headwise.integrations.lightning")
