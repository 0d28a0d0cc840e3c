"""Methods in Hugging Face's Trainer, whose model may be built anew for each trial and resumed from a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from typing_extensions import override

from headwise.attached import Attached
from headwise.errors import HeadwiseError, NotFired, SettingError
from headwise.heads.find import find_heads
from headwise.heads.heads import Heads
from headwise.heads.method import Method
from headwise.repulsion.repel import Repulsion
from headwise.routing.save import find_aggregators, load
from headwise.similarity.penalty import Disagreement
from headwise.stock_folders import RECORD

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer import TRAINER_STATE_NAME
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "headwise.integrations.huggingface needs the Trainer of transformers; pip install 'headwise[cli]', or "
        f"transformers and accelerate. ({error})"
    ) from error

# Where the Trainer's own state, which every checkpoint holds, keeps that of the methods.
KEY = "headwise"


def attach(
    trainer: Trainer, *methods: Method, find: Callable[[nn.Module], Heads] = find_heads, seed: int | None = None
) -> HeadwiseCallback:
    """Attach methods to the model and optimizer of a Trainer, and to each that it builds later; returns the callback.

    The penalty is added to the loss of training alone, so that `eval_loss` is that of the task. Repulsion acts in
    `optimizer.step()`, after the Trainer has clipped. Aggregators are put into the Trainer's model at once, and into
    each that `model_init` returns. The state of the methods is in `trainer_state.json` of each checkpoint, and a
    resumed training equals an uninterrupted one bit for bit; `load_best_model_at_end` loads aggregators too. The log
    of the training loss also holds "penalty", "similarity" (the penalty without its weight) and "force_ratio" (the
    norm of the repulsion over that of the driving terms, at the last step).

    Args:
        trainer: A Trainer, also a subclass with its own `compute_loss`, before `train()`.
        methods: `hw.Aggregate(...)`, `hw.Penalize(...)`, `hw.Repel(...)` or another `hw.Method`, any number of each.
            None where the model holds aggregators already, and only its checkpoints are to be loaded.
        find: Returns the heads of a model, for example `lambda model: hw.find_heads(model, layouts=[...])`.
        seed: Seed of the noise of rules that have one; by default that of the TrainingArguments.

    Raises:
        SettingError: `trainer` is not a Trainer or already has methods, or an argument is not a
            method, or none was given.
        LayoutError: The methods do not fit the heads of the model.

    Example:
        >>> import contextlib, tempfile, transformers, headwise as hw
        >>> sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        >>> config = transformers.BertConfig(vocab_size=9, **sizes)
        >>> row = {"input_ids": [1, 2, 3], "labels": 1}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     arguments = transformers.TrainingArguments(folder, max_steps=2, report_to="none", disable_tqdm=True,
        ...         use_cpu=True, logging_strategy="no", save_strategy="no", dataloader_pin_memory=False)
        ...     trainer = transformers.Trainer(args=arguments, train_dataset=[row] * 4,
        ...         model_init=lambda: transformers.BertForSequenceClassification(config))
        ...     headwise = attach(trainer, hw.Penalize(hw.similarity.Output()), hw.Repel(hw.SVGD(alpha=0.01)))
        ...     with contextlib.redirect_stdout(None):
        ...         _ = trainer.train()
        >>> headwise.attached.of(hw.repulsion.Repulsion)[0].steps
        2
    """
    if not isinstance(trainer, Trainer):
        raise SettingError(f"trainer is a {type(trainer).__name__}; expected a Trainer of transformers.")
    if any(isinstance(callback, HeadwiseCallback) for callback in trainer.callback_handler.callbacks):
        raise SettingError("this Trainer has methods already; give all of them to one attach(trainer, ...).")
    model: Any = trainer.model
    if not methods and not find_aggregators(model):
        raise SettingError("attach was given no method; expected hw.Penalize(...), hw.Repel(...) or hw.Aggregate(...).")
    attached = Attached(methods, find=find, seed=0 if seed is None else seed)
    callback = HeadwiseCallback(trainer, attached, seed)
    attached.build(model)
    trainer.add_callback(callback)
    instead = {
        "train": callback.train,
        "call_model_init": callback.build_model,
        "compute_loss": callback.compute_loss,
        "log": callback.log,
        "_load_from_checkpoint": callback.load_checkpoint,
        "_load_best_model": callback.load_best_model,
    }
    for name, function in instead.items():
        setattr(trainer, name, partial(function, getattr(trainer, name)))
    return callback


class HeadwiseCallback(TrainerCallback):
    """What `attach` adds to a Trainer, and calls around some of its methods.

    Attributes:
        attached: The methods and their handles, which there are once training has begun.
    """

    def __init__(self, trainer: Trainer, attached: Attached, seed: int | None) -> None:
        self.trainer, self.attached, self.seed = trainer, attached, seed
        self._steps = self._readings = 0

    def build_model(self, original: Callable[..., nn.Module], *arguments: Any) -> nn.Module:
        """Build the model of a trial, and put its aggregators in place before it has an optimizer."""
        self.attached.detach()
        model = original(*arguments)
        self.attached.build(model)
        return model

    def train(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Train, and read nothing of the model afterwards."""
        try:
            return original(*arguments, **options)
        finally:
            self.attached.pause()

    def compute_loss(self, original: Callable[..., Any], model: nn.Module, *arguments: Any, **options: Any) -> Any:
        """Compute the loss, and add the penalty while the model trains."""
        computed = original(model, *arguments, **options)
        if not model.training:
            return computed
        loss = computed[0] if isinstance(computed, tuple) else computed
        scaled = getattr(self.trainer, "loss_is_scaled_for_ga", None)
        if scaled is None:
            counted = self.trainer.model_accepts_loss_kwargs and options.get("num_items_in_batch") is not None
            scaled = counted or self.trainer.compute_loss_func is not None
        # the Trainer does not divide such a loss by the number of micro-batches, which it counts while it trains
        batches = getattr(self.trainer, "current_gradient_accumulation_steps", 1) if scaled else 1
        loss = self.attached.loss(loss, share=1 / batches)
        return (loss, *computed[1:]) if isinstance(computed, tuple) else loss

    def log(self, original: Callable[..., None], logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """Log what the methods did beside the training loss."""
        if "loss" in logs:
            logs = {**{name: float(value) for name, value in self.attached.stats().items()}, **logs}
        original(logs, *arguments, **options)

    def load_checkpoint(
        self, original: Callable[..., None], resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Load the weights of a checkpoint, also where `save_pretrained` of a model with aggregators wrote them."""
        if (Path(resume_from_checkpoint) / RECORD).is_file():
            load(resume_from_checkpoint, self.trainer.model if model is None else model)
        else:
            original(resume_from_checkpoint, model)

    def load_best_model(self, original: Callable[[], None]) -> None:
        """Load the weights of the best checkpoint, and the state that the methods had there."""
        best = Path(str(self.trainer.state.best_model_checkpoint))
        if (best / RECORD).is_file():
            load(best, self.trainer.model)
        else:
            original()
        file = best / TRAINER_STATE_NAME
        saved = _read_saved(TrainerState.load_from_json(str(file))) if file.is_file() else None
        if saved is not None:
            self.attached.load_state_dict(saved)

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach the methods, and go on from the state of a checkpoint."""
        if self.seed is None:
            self.attached.seed = args.seed
        self.attached.attach(kwargs["model"], kwargs["optimizer"])
        saved = _read_saved(state)
        if saved is not None:
            self.attached.load_state_dict(saved)
        elif state.global_step and self.attached.has_state:
            warnings.warn(
                f"the checkpoint of step {state.global_step} holds no state of headwise; noise and strengths begin "
                "anew, and the run differs from an uninterrupted one.",
                stacklevel=2,
            )

    @override
    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach the methods again where something exchanged the model or the optimizer."""
        self.attached.attach(kwargs["model"], kwargs["optimizer"])
        self._steps, self._readings = self.attached.steps, self.attached.readings

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Raise where a method did not act in this step, and keep what a checkpoint needs.

        Raises:
            NotFired: The Trainer's step did not call `compute_loss`, or stepped another optimizer.
        """
        attached = self.attached
        if attached.of(Disagreement) and attached.readings == self._readings:
            raise NotFired(
                f"the penalty entered no loss: {type(self.trainer).__name__} computes the loss of a training step "
                "without compute_loss; add callback.attached.loss(loss) there."
            )
        skipped = self.trainer.accelerator.optimizer_step_was_skipped
        if attached.of(Repulsion) and attached.steps == self._steps and not skipped:
            attached.check(kwargs["optimizer"])
            raise NotFired(f"{type(self.trainer).__name__} took a step without the optimizer that heads repel under.")
        if attached.of(Repulsion) or attached.of(Disagreement):
            kept: Any = state.stateful_callbacks
            kept[KEY] = attached.state_dict()

    @override
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Say what `Repulsion.check` would raise; an error here would lose a trained model."""
        try:
            if self.attached.steps:
                self.attached.check(kwargs["optimizer"])
        except HeadwiseError as error:
            warnings.warn(str(error), stacklevel=2)


def _read_saved(state: TrainerState) -> dict[str, Any] | None:
    # a list of callbacks until TrainerState has read it, then their states by name
    kept: Any = state.stateful_callbacks
    return (kept or {}).get(KEY)
