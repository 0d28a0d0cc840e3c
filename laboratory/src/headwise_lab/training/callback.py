"""The callback of a training run: metrics per epoch, progress, and when to save or stop."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from headwise.errors import HeadwiseError
from headwise.input_files import find_not_finite
from headwise_lab.experiment.run_folder import EPOCHS, LOG, PROGRESS, Heartbeat, write_json, write_lines
from headwise_lab.experiment.settings import SAVE_SECONDS
from headwise_lab.experiment.task import Batches
from headwise_lab.training import processes
from headwise_lab.training.checkpoints import write_epoch_weights

SHOW_SECONDS = 0.5
# Enough for a median, few enough for a checkpoint.
KEPT_STEPS = 2000


def choose_clock(device: torch.device) -> Callable[[], float]:
    """Return the clock of a step: CPU seconds on a CPU, which other programs on the machine do not lengthen."""
    return time.process_time if device.type == "cpu" else time.monotonic


class RunCallback(TrainerCallback):
    """Counts, reports, saves and stops at step boundaries only, so that it never changes what is computed.

    Args:
        folder: The run's folder.
        steps_per_epoch: Optimizer steps an epoch.
        batches: The batches; told the epoch here, because accelerate's skipping loader does not tell them.
        dropout_seed: Seed of the global generator at the first step; a resumed run restores its state instead.
        evaluate: Called after each epoch; returns what goes into that epoch's record.
        heartbeat: Called after each step; True saves a checkpoint and stops.
        save_seconds: Time between two checkpoints inside an epoch; one is written after each epoch anyway.
        averaged: How many of the last epochs' weights are kept to be averaged; 1 keeps none.
    """

    def __init__(
        self,
        folder: Path,
        steps_per_epoch: int,
        *,
        batches: Batches,
        dropout_seed: int,
        evaluate: Callable[[], Mapping[str, Any]],
        heartbeat: Heartbeat,
        save_seconds: float = SAVE_SECONDS,
        averaged: int = 1,
    ) -> None:
        self.folder, self.steps_per_epoch, self.batches, self.dropout_seed = (
            folder,
            steps_per_epoch,
            batches,
            dropout_seed,
        )
        self.evaluate, self.heartbeat, self.save_seconds, self.averaged = evaluate, heartbeat, save_seconds, averaged
        self.records: list[dict[str, Any]] = []
        self.step_seconds: deque[float] = deque(maxlen=KEPT_STEPS)
        self.train_seconds = 0.0
        self.stopped = False
        # digests of the weights of single epochs, by file
        self.kept_weights: dict[str, str] = {}
        self._forget(torch.device("cpu"))
        self._began = self._saved = self._shown = time.monotonic()
        self._step_began = 0.0

    def _forget(self, device: torch.device) -> None:
        """Begin the sums of an epoch."""
        self._loss, self._force, self._norm = torch.zeros(3, dtype=torch.float64, device=device)
        self._counted, self._forced = 0, torch.zeros((), dtype=torch.int64, device=device)

    def add(self, loss: Tensor, force_ratio: Tensor | None) -> None:
        """Count one step's loss and force ratio; tensors, so that no step waits for a value.

        A step in which the loss moves no head has no ratio.
        """
        self._loss = self._loss.to(loss.device) + loss.detach().double()
        self._counted += 1
        if force_ratio is not None:
            known = ~force_ratio.isnan()
            self._force = self._force.to(force_ratio.device) + torch.where(known, force_ratio, 0.0).double()
            self._forced = self._forced.to(force_ratio.device) + known

    def add_norm(self, norm: Tensor | float) -> None:
        """Count the norm of one update's gradient; the largest is kept, and one that is not finite stays."""
        norm = torch.as_tensor(norm).detach().double()
        self._norm = torch.maximum(self._norm.to(norm.device), norm)

    @property
    def force_ratio(self) -> float | None:
        """Mean over epochs of the force ratio; None without repulsion."""
        ratios = [record["force_ratio"] for record in self.records if record["force_ratio"] is not None]
        return statistics.fmean(ratios) if ratios else None

    @property
    def median_step_seconds(self) -> float | None:
        """Median seconds of a step: forward, backward, methods, optimizer; not the making of the batch."""
        return statistics.median(self.step_seconds) if self.step_seconds else None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        now = time.monotonic()
        return {
            "records": self.records,
            "step_seconds": list(self.step_seconds),
            "train_seconds": self.train_seconds + now - self._began,
            "loss": processes.mean(self._loss).cpu(),
            "force": self._force.cpu(),
            "counted": self._counted,
            "forced": int(self._forced),
            "norm": self._norm.cpu(),
            "kept_weights": self.kept_weights,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint; records of later epochs are dropped."""
        self.records = list(state["records"])
        self.step_seconds.extend(state["step_seconds"])
        self.train_seconds = state["train_seconds"]
        self._loss, self._force = state["loss"], state["force"]
        self._counted, self._forced = state["counted"], torch.tensor(state["forced"])
        self._norm = state["norm"]
        self.kept_weights = dict(state["kept_weights"])
        if processes.rank() == 0:
            write_lines(self.folder / EPOCHS, self.records)

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step == 0:
            # several processes drop other entries; the first one those that one process alone would
            torch.manual_seed(self.dropout_seed + processes.rank())
        self._began = self._saved = time.monotonic()
        self._show(state)

    @override
    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.batches.set_epoch(state.global_step // self.steps_per_epoch)

    @override
    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._step_began = choose_clock(args.device)()

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        now = time.monotonic()
        self.step_seconds.append(choose_clock(args.device)() - self._step_began)
        if state.global_step % self.steps_per_epoch == 0:
            # the epoch's record comes first; on_epoch_end saves after it
            return
        if now - self._shown > SHOW_SECONDS:
            self._show(state)
        # clocks differ, and all processes save or none does
        self.stopped, due = processes.agree((self.heartbeat(), now - self._saved > self.save_seconds))
        if self.stopped or due:
            control.should_save = True
            self._saved = now
        control.should_training_stop |= self.stopped

    @override
    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.stopped:
            return
        train_loss = float(processes.mean(self._loss) / max(self._counted, 1))
        epoch = state.global_step // self.steps_per_epoch
        force_ratio = float(self._force / self._forced) if self._forced else None
        norm = float(self._norm)
        _require_finite(
            epoch,
            {"the training loss": train_loss, "the norm of the gradient": norm, "the force ratio": force_ratio},
        )
        record = {"epoch": epoch, "train_loss": train_loss, **processes.by_first(self.evaluate)}
        _require_finite(epoch, record)
        self.records.append(record | {"force_ratio": force_ratio})
        if processes.rank() == 0:
            write_lines(self.folder / EPOCHS, self.records)
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in flatten_numbers(self.records[-1]).items())
            # `tail -f` follows it
            with (self.folder / LOG).open("a", encoding="utf-8") as log:
                log.write(f"epoch {epoch}, step {state.global_step:,} of {state.max_steps:,}: {numbers}\n")
            if self.averaged > 1:
                self.kept_weights |= write_epoch_weights(kwargs["model"], self.folder, epoch, self.averaged)
        self._forget(self._loss.device)
        control.should_save = control.should_log = True
        self._saved = time.monotonic()
        self._show(state)
        if state.global_step < state.max_steps and processes.agree(self.heartbeat()):
            self.stopped = control.should_training_stop = True

    @override
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.train_seconds += time.monotonic() - self._began
        self._began = time.monotonic()
        self._show(state)

    def _show(self, state: TrainerState) -> None:
        self._shown = time.monotonic()
        if processes.rank() > 0:
            return
        note = f"dev {100 * self.records[-1]['dev']['pooled']:.1f}" if self.records else ""
        progress = {"step": state.global_step, "steps": state.max_steps, "note": note}
        write_json(self.folder / PROGRESS, progress, durable=False)


def flatten_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an epoch's record by path, as reporters take them.

    >>> flatten_numbers({"epoch": 1, "dev": {"pooled": 0.8}, "force_ratio": None})
    {'dev/pooled': 0.8}
    """
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": number for inner, number in flatten_numbers(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "epoch":
            found[name] = float(value)
    return found


def _require_finite(epoch: int, record: Mapping[str, Any]) -> None:
    found = find_not_finite(record)
    if found is not None:
        name, value = found
        raise HeadwiseError(f"{name} is {value} in epoch {epoch}; lower the learning rate or the strength.")
