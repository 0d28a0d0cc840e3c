"""Repulsion under Hugging Face's Trainer and under Accelerate equals the loop written by hand."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.optim import AdamW
from transformers import Trainer, TrainingArguments

import headwise as hw
from cases import cases
from heads.attentions import SeparateAttention
from repulsion.by_hand import RULE, repel_by_hand

RATE, CLIP, ACCUMULATED, UPDATES = 0.02, 0.2, 3, 4


class Regression(nn.Module):
    """What the Trainer asks of a model: a forward that returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = SeparateAttention()

    def forward(self, x, labels=None):
        output = self.attention(x)
        return {"loss": (output - labels[:, None, None]).square().mean(), "logits": output}


def examples(count: int = 2 * ACCUMULATED * UPDATES) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(6, 12, generator=generator), "labels": torch.tensor(1.0)} for _ in range(count)]


def collate(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class InOrder(Trainer):
    """The Trainer, with examples in the order they are given so that a loop by hand sees the same batches."""

    def _get_train_sampler(self, *_args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trained_by_hand(edit: bool) -> dict[str, torch.Tensor]:
    model, rows = Regression(), examples()
    optimizer = AdamW(model.parameters(), lr=RATE)
    for first in range(0, len(rows), 2):
        inputs = collate(rows[first : first + 2])
        (model(**inputs)["loss"] / ACCUMULATED).backward()
        if (first // 2) % ACCUMULATED == ACCUMULATED - 1:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            if edit:
                repel_by_hand(model)
            optimizer.step()
            optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_repelled(model: nn.Module) -> None:
    expected, plain = trained_by_hand(edit=True), trained_by_hand(edit=False)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            assert not torch.allclose(expected[name], plain[name], atol=1e-2)
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-4, atol=1e-5)


@cases("made_by", ["user", "trainer", "trainer after prepare"])
def test_the_trainer_needs_no_callback(tmp_path, made_by):
    model = Regression()
    heads = hw.find_heads(model)
    own = AdamW(model.parameters(), lr=RATE) if made_by == "user" else None
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=1,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=CLIP,
        gradient_accumulation_steps=ACCUMULATED,
        per_device_train_batch_size=2,
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
    )
    trainer = InOrder(model, arguments, train_dataset=examples(), data_collator=collate, optimizers=(own, None))
    optimizer = trainer.create_optimizer()
    assert own is None or optimizer is own
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.01  # the Trainer spares biases from it
    if made_by == "trainer after prepare":
        optimizer = trainer.accelerator.prepare(optimizer)
    handle = hw.repel(heads, RULE, optimizer)
    trainer.train()
    assert handle.steps == UPDATES == trainer.state.global_step
    handle.check(trainer.optimizer)
    assert_repelled(model)


@pytest.fixture
def accelerator():
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.mark.parametrize("order", ["before prepare", "after prepare", "with prepared model"])
def test_accelerates_wrapper_is_seen_through_and_accumulation_acts_once_an_update(accelerator, order):
    model = Regression()
    heads = hw.find_heads(model)
    optimizer = AdamW(model.parameters(), lr=RATE)
    if order == "before prepare":
        handle = hw.repel(heads, RULE, optimizer)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    if order != "before prepare":
        handle = hw.repel(hw.find_heads(prepared) if "model" in order else heads, RULE, wrapped)
    rows = examples()
    for first in range(0, len(rows), 2):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(**collate(rows[first : first + 2]))["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), CLIP)
            wrapped.step()
            wrapped.zero_grad()
    assert handle.steps == UPDATES
    handle.check(wrapped)
    with pytest.raises(hw.errors.SettingError, match="repelled by this optimizer already"):
        hw.repel(heads, RULE, wrapped)
    assert_repelled(model)
