"""One run: data, model, arm, training (or the rest of it), one look at the test split, result.

Owns the one Trainer subclass and the order of a run. The methods are `methods`', the bookkeeping is `callback`'s.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainingArguments
from typing_extensions import override

from headwise.lab import runs
from headwise.lab.batches import LengthBatches
from headwise.lab.callback import RunCallback
from headwise.lab.checkpoints import seal, verify
from headwise.lab.evaluation import accuracies, diversity, predict
from headwise.lab.methods import Methods
from headwise.lab.models.pair import PairClassifier
from headwise.lab.protocol import key
from headwise.lab.settings import CLIP_NORM, RunSettings
from headwise.lab.tasks.logic import LogicData, LogicSplit, LogicTask, collate
from headwise.lab.versions import versions
from headwise.lab.workers import Heartbeat

__all__ = ["HeadTrainer", "never", "train_run"]

RUN = "run.pt"


def never() -> bool:
    """Return False: the heartbeat of a run that nobody stops."""
    return False


def train_run(settings: RunSettings, folder: Path, heartbeat: Heartbeat = never) -> None:
    """Do one run in its folder, or the rest of it: the folder then holds `result.json` unless it was stopped.

    Args:
        settings: What the run is made from.
        folder: Its folder; made when missing. A finished run is left alone, an interrupted one goes on from its
            checkpoint to the same bits.
        heartbeat: Asked after each step; True saves a checkpoint and returns.

    Raises:
        SettingError: The folder holds a run with other settings.
        DataError: The data or the checkpoint cannot be read.
        HeadwiseError: The loss is no longer finite.
    """
    runs.claim(folder, settings.record())
    if runs.is_finished(folder):
        return
    data = LogicTask.load(settings.data, settings.scale, settings.cache)
    model = PairClassifier(len(data.vocabulary), len(data.labels), settings.scale)
    methods = Methods(
        settings.arm, model, model.encoder, seed=settings.seed, compile_routing=settings.scale.compile_routing
    )
    trainer = _trainer(settings, folder, model, methods, data, heartbeat)
    checkpoint = runs.latest_checkpoint(folder)
    if checkpoint is not None:
        verify(checkpoint)
    with warnings.catch_warnings():
        # torch's scheduler is stepped by the Trainer before it knows of a resumed optimizer
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if not trainer.run.stopped:
        _finish(settings, folder, model, methods, data, trainer)


class HeadTrainer(Trainer):
    """Hugging Face's Trainer with an arm: penalty in the loss, repulsion before the clip, whole checkpoints.

    Repulsion is applied at the end of the last `training_step` of an update, when all gradients are there: the
    papers' order, in which clipping sees the repelled gradient. Weights are kept by safetensors' model functions,
    which know tied parameters. A checkpoint gets its name once all of it is written.

    Args:
        model: The model; its forward returns {"loss", "logits"}.
        args: The Trainer's arguments; checkpoints are written under `output_dir` and then moved to `folder`.
        folder: The run's folder.
        split: Training split.
        batches: Its batches.
        methods: The arm on the model.
        run: The callback that counts, shows, saves and stops.
        optimizer: The optimizer that the arm's rule is attached to.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        folder: Path,
        split: LogicSplit,
        batches: LengthBatches,
        methods: Methods,
        run: RunCallback,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        methods.repel(optimizer)
        super().__init__(model=model, args=args, train_dataset=split, callbacks=[run], optimizers=(optimizer, None))
        self.remove_callback(PrinterCallback)
        self.trained, self.folder, self.split, self.batches = model, folder, split, batches
        self.methods, self.run = methods, run

    @override
    def get_train_dataloader(self) -> DataLoader:
        """Return the training split in the batches of the run."""
        loader = DataLoader(self.split, batch_sampler=self.batches, collate_fn=collate)
        return self.accelerator.prepare(loader)

    @override
    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the loss with the arm's penalty."""
        outputs = model(**inputs)
        loss = self.methods.penalized(outputs["loss"])
        return (loss, outputs) if return_outputs else loss

    @override
    def training_step(
        self, model: nn.Module, inputs: dict[str, Tensor | Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Return the loss after forward, backward and, on the last batch of an update, repulsion."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        force_ratio = self.methods.apply_repulsion() if self.accelerator.sync_gradients else None
        self.run.add(loss, force_ratio)
        return loss

    @override
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        written = runs.latest_checkpoint(Path(str(self.args.output_dir)))
        assert written is not None
        torch.save({"run": self.run.state_dict(), "methods": self.methods.state_dict()}, written / RUN)
        seal(written)
        runs.keep_checkpoint(written, self.folder)

    @override
    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        checkpoint = Path(str(output_dir or self.args.output_dir))
        checkpoint.mkdir(parents=True, exist_ok=True)
        save_model(self.trained, str(checkpoint / runs.WEIGHTS))

    @override
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        checkpoint = Path(resume_from_checkpoint)
        load_model(self.trained if model is None else model, str(checkpoint / runs.WEIGHTS))
        state = torch.load(checkpoint / RUN, weights_only=True)
        self.run.load_state_dict(state["run"])
        self.methods.load_state_dict(state["methods"])


def _trainer(
    settings: RunSettings, folder: Path, model: PairClassifier, methods: Methods, data: LogicData, heartbeat: Heartbeat
) -> HeadTrainer:
    scale, seed = settings.scale, settings.seed
    rate = settings.arm.learning_rate or scale.learning_rate
    order = key(seed, "order")
    batches = LengthBatches(data.train.lengths, batch_size=scale.batch_size, seed=order)
    staging = folder / runs.UNFINISHED
    shutil.rmtree(staging, ignore_errors=True)
    args = TrainingArguments(
        output_dir=str(staging),
        num_train_epochs=scale.epochs,
        learning_rate=rate,
        warmup_steps=scale.warmup_steps,
        lr_scheduler_type="linear",
        max_grad_norm=CLIP_NORM,
        per_device_train_batch_size=scale.batch_size,
        seed=seed,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to="none",
        log_level="error",
        logging_strategy="no",
        eval_strategy="no",
        save_strategy="no",
    )
    run = RunCallback(
        folder,
        len(batches),
        batches=batches,
        dropout_seed=key(seed, "dropout"),
        evaluate=lambda: _on_dev(model, methods, data),
        heartbeat=heartbeat,
        save_seconds=settings.save_seconds,
    )
    # Adam as Kingma and Ba wrote it, without decay; the fused form costs a small model least
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True)
    return HeadTrainer(
        model,
        args,
        folder=folder,
        split=data.train,
        batches=batches,
        methods=methods,
        run=run,
        optimizer=optimizer,
    )


def _on_dev(model: nn.Module, methods: Methods, data: LogicData) -> dict[str, Any]:
    with methods.evaluating(model):
        predicted = predict(model, data.dev)
    return {"dev_accuracy": accuracies(predicted == data.dev.labels, data.dev.bins)}


def _finish(
    settings: RunSettings, folder: Path, model: nn.Module, methods: Methods, data: LogicData, trainer: HeadTrainer
) -> None:
    """Write weights and predictions, then the result that makes the run a finished one, then drop the checkpoint."""
    run = trainer.run
    accuracy = None
    with methods.evaluating(model):
        if settings.test:
            predicted = predict(model, data.test)
            correct = predicted == data.test.labels
            accuracy = accuracies(correct, data.test.bins)
            runs.write_arrays(folder / runs.PREDICTIONS, correct=correct, predicted=predicted)
        measured = diversity(model, methods.heads, data.dev)
    temporary = folder / f".{runs.WEIGHTS}"
    save_model(model, str(temporary))
    temporary.replace(folder / runs.WEIGHTS)
    result = {
        "task": settings.task,
        "scale": settings.scale.name,
        "arm": settings.arm.name,
        "control": settings.arm.control,
        "seed": settings.seed,
        "settings": settings.record(),
        "accuracy": accuracy,
        "dev_accuracy": run.records[-1]["dev_accuracy"]["pooled"],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "step_seconds": run.median_step_seconds,
        "train_seconds": run.train_seconds,
        **measured,
        "force_ratio": run.force_ratio,
        "versions": versions("torch", "transformers", "accelerate", "numpy"),
    }
    runs.write_json(folder / runs.RESULT, result)
    for path in folder.glob(f"{runs.CHECKPOINT}*"):
        shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(folder / runs.UNFINISHED, ignore_errors=True)
