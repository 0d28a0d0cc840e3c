"""Repulsion under Hugging Face's Trainer and under Accelerate equals the loop written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.optim import SGD, AdamW
from transformers import Trainer, TrainerCallback, TrainingArguments

import headwise as hw
from heads.attentions import SeparateAttention
from repulsion.by_hand import RULE, repel_by_hand

RATE, CLIP, ACCUMULATED, UPDATES = 0.02, 0.2, 3, 4
NOISY = hw.SPOS(alpha=0.4, inverse_temperature=9.0, step_size=0.6)


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


def arguments(folder: Path, **changes) -> TrainingArguments:
    settings = {
        "output_dir": str(folder),
        "num_train_epochs": 1,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": CLIP,
        "gradient_accumulation_steps": ACCUMULATED,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
    }
    return TrainingArguments(**(settings | changes))


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


@pytest.mark.parametrize("made_by", ["user", "trainer", "trainer after prepare"])
def test_the_trainer_needs_no_callback(tmp_path, made_by):
    model = Regression()
    heads = hw.find_heads(model)
    own = AdamW(model.parameters(), lr=RATE) if made_by == "user" else None
    trainer = InOrder(
        model,
        arguments(tmp_path, weight_decay=0.01),
        train_dataset=examples(),
        data_collator=collate,
        optimizers=(own, None),
    )
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


class KeepRepulsion(TrainerCallback):
    """Saves the handle beside each checkpoint: all that a resumed Trainer needs for the same noise."""

    def __init__(self, handle: hw.repulsion.Repulsion) -> None:
        self.handle = handle

    def on_save(self, args, state, *_, **__):
        torch.save(self.handle.state_dict(), Path(args.output_dir) / f"checkpoint-{state.global_step}" / "repulsion.pt")


def test_a_resumed_trainer_goes_on_bit_for_bit_with_its_noise(tmp_path):
    def trainer_of(folder, checkpoint=None):
        model = Regression()
        trainer = Trainer(
            model,
            arguments(folder, save_strategy="steps", save_steps=2),
            train_dataset=examples(),
            data_collator=collate,
        )
        handle = hw.repel(hw.find_heads(model), NOISY, trainer.create_optimizer(), seed=5)
        if checkpoint is not None:
            handle.load_state_dict(torch.load(checkpoint / "repulsion.pt", weights_only=True))
        trainer.add_callback(KeepRepulsion(handle))
        return model, trainer, handle

    whole, trainer, _ = trainer_of(tmp_path / "run")
    trainer.train()
    checkpoint = tmp_path / "run" / "checkpoint-2"
    resumed, trainer, handle = trainer_of(tmp_path / "rest", checkpoint)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert handle.steps == UPDATES
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, resumed.get_parameter(name)), name


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


def test_accelerates_closure_reaches_the_inner_step(accelerator):
    results = []
    for repelled in (False, True):
        model = Regression()
        optimizer = SGD(model.parameters(), lr=RATE)
        if repelled:
            hw.repel(hw.find_heads(model), RULE, optimizer)
        prepared, wrapped = accelerator.prepare(model, optimizer)
        inputs = collate(examples(2))

        def closure(model=model, prepared=prepared, wrapped=wrapped, inputs=inputs, repelled=repelled):
            wrapped.zero_grad()
            loss = prepared(**inputs)["loss"]
            accelerator.backward(loss)
            if not repelled:
                repel_by_hand(model)
            return loss

        wrapped.step(closure)
        results.append(model.attention.q_proj.weight.detach())
    torch.testing.assert_close(*results)
