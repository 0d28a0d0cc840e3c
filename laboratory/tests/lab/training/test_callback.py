"""The callback of a run, called as the Trainer calls it."""

from __future__ import annotations

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from headwise.texts.batching import LengthBatches
from headwise_lab.training import train
from headwise_lab.training.callback import RunCallback


def test_a_step_in_which_the_loss_moves_no_head_has_no_force_ratio(tmp_path):
    run = RunCallback(
        tmp_path, 3, batches=[], dropout_seed=0, evaluate=lambda: {"dev": {"pooled": 0.5}}, heartbeat=train.never
    )
    for ratio in (0.5, float("nan"), 0.25):
        run.add(torch.tensor(1.0), torch.tensor(ratio))
    args, control = TrainingArguments(output_dir=str(tmp_path), report_to="none"), TrainerControl()
    run.on_epoch_end(args, TrainerState(global_step=3, max_steps=6), control)
    assert run.records[0]["force_ratio"] == 0.375
    run.add(torch.tensor(1.0), torch.tensor(float("nan")))
    run.on_epoch_end(args, TrainerState(global_step=6, max_steps=6), control)
    assert run.records[1]["force_ratio"] is None
    assert run.force_ratio == 0.375


def test_the_callback_seeds_dropout_only_for_a_new_run_and_tells_the_batches_their_epoch(tmp_path):
    batches = LengthBatches([3] * 20, batch_size=2, seed=0)
    run = RunCallback(tmp_path, len(batches), batches=batches, dropout_seed=11, evaluate=dict, heartbeat=train.never)
    args, control = TrainingArguments(output_dir=str(tmp_path), report_to="none"), TrainerControl()
    torch.manual_seed(0)
    run.on_train_begin(args, TrainerState(global_step=0, max_steps=20), control)
    fresh = torch.get_rng_state()
    assert torch.equal(fresh, torch.manual_seed(11).get_state())
    torch.manual_seed(0)
    run.on_train_begin(args, TrainerState(global_step=5, max_steps=20), control)
    assert not torch.equal(torch.get_rng_state(), fresh)
    run.on_epoch_begin(args, TrainerState(global_step=10, max_steps=20), control)
    assert batches.epoch == 1
