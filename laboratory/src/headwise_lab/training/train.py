"""One run: data, model, arm, training (or the rest of it), scores on the test split, result."""

import math
import shutil
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainingArguments
from typing_extensions import override

from headwise.atomic import new_file
from headwise.errors import DataError
from headwise.stock_folders import require_tensors_alone
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.arm import Orthogonalize
from headwise_lab.experiment.evaluation import METRICS, diversity, scores_by_bin
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.run_folder import Heartbeat, write_result
from headwise_lab.experiment.seeding import derive_key
from headwise_lab.experiment.settings import RunSettings, load_data, read_versions
from headwise_lab.experiment.task import Data, Task
from headwise_lab.training import processes
from headwise_lab.training.attach import Methods, attach_arm
from headwise_lab.training.callback import RunCallback, flatten_numbers
from headwise_lab.training.checkpoints import load_mean_weights, seal_checkpoint, verify_checkpoint
from headwise_lab.training.optimizer import build_optimizer
from headwise_lab.training.processes import OwnBatches, weigh_loss

RUN = "run.pt"


def never() -> bool:
    """Return False: the heartbeat of a run that nobody stops."""
    return False


def train_run(settings: RunSettings, folder: Path, heartbeat: Heartbeat = never) -> None:
    """Do one run in its folder, or the rest of it: the folder then holds `result.json` unless it was stopped.

    Args:
        settings: What the run is made from.
        folder: Its folder; made when missing. A finished run stays as it is, an interrupted one resumes from
            its checkpoint and ends at the same bits.
        heartbeat: Called after each step; True saves a checkpoint and returns.

    Raises:
        SettingError: The folder holds a run with other settings.
        DataError: The data or the checkpoint cannot be read.
        HeadwiseError: The loss, the gradient or a score is no longer finite.
    """
    processes.by_first(lambda: run_folder.claim(folder, settings.record()))
    if processes.agree(run_folder.is_finished(folder)):
        processes.by_first(lambda: run_folder.clean(folder))
        return
    task, scale = named_task(settings.task), settings.scale
    data = load_data(settings)
    model, methods = attach_arm(task, settings.arm, data, scale, seed=settings.seed)
    trainer = HeadTrainer(settings, folder, task, model, methods, data, heartbeat)
    checkpoint = processes.agree(run_folder.latest_checkpoint(folder))
    if checkpoint is not None:
        processes.by_first(lambda: verify_checkpoint(checkpoint))
    with warnings.catch_warnings():
        # torch's scheduler is stepped by the Trainer before it knows of a resumed optimizer
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if not trainer.run.stopped:
        processes.by_first(lambda: _finish(settings, trainer, data))


class HeadTrainer(Trainer):
    """Hugging Face's Trainer with an arm: penalty in the loss, repulsion before the clip, whole checkpoints.

    Repulsion is applied at the end of the last `training_step` of an update, when all gradients are there: the
    papers' order, in which clipping sees the repelled gradient. Weights are kept by safetensors' model functions,
    which know tied parameters. A checkpoint gets its name once all of it is written.
    """

    def __init__(
        self,
        settings: RunSettings,
        folder: Path,
        task: Task,
        model: nn.Module,
        methods: Methods,
        data: Data,
        heartbeat: Heartbeat,
    ) -> None:
        recipe, seed = settings.scale.recipe, settings.seed
        rate = task.remaining_arm(settings.arm, data).learning_rate or recipe.learning_rate
        self.folder, self.task, self.trained, self.split, self.methods = folder, task, model, data.train, methods
        self.batches: Any = task.batches(data, settings.scale, derive_key(seed, "order"))
        steps = math.ceil(len(self.batches) / recipe.accumulation)
        staging = folder / run_folder.UNFINISHED
        processes.by_first(lambda: shutil.rmtree(staging, ignore_errors=True))
        cpu = not torch.cuda.is_available()
        args = TrainingArguments(
            output_dir=str(staging),
            num_train_epochs=recipe.epochs,
            learning_rate=rate,
            warmup_steps=recipe.warmup(recipe.epochs * steps),
            lr_scheduler_type=recipe.schedule,
            max_grad_norm=recipe.clip_norm,
            gradient_accumulation_steps=recipe.accumulation,
            bf16=recipe.bfloat16 and not cpu,
            seed=seed,
            use_cpu=cpu,
            ddp_backend="gloo" if processes.count() > 1 and cpu else None,
            ddp_find_unused_parameters=True,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
            disable_tqdm=True,
            report_to=["tensorboard", *settings.report_to],
            run_name=f"{settings.arm.name} seed {seed}",
            log_level="error",
            logging_strategy="no",
            eval_strategy="no",
            save_strategy="no",
            # the callback looks at the loss once an epoch, without waiting for the device in each step
            logging_nan_inf_filter=False,
        )
        orthogonalize = settings.arm.find(Orthogonalize)
        if orthogonalize is not None:
            # blocks of heads share the memory of the weights, which must not move afterwards
            model.to(args.device)
        self.run = RunCallback(
            folder,
            steps,
            batches=self.batches,
            dropout_seed=derive_key(seed, "dropout"),
            evaluate=lambda: _evaluate_on_dev(task, model, methods, data),
            heartbeat=heartbeat,
            save_seconds=settings.save_seconds,
            averaged=recipe.averaged,
        )
        optimizer = build_optimizer(model, rate, recipe, orthogonalize, methods.heads)
        methods.repel(optimizer)
        threading.excepthook = _hold_back
        with processes.environment(TENSORBOARD_LOGGING_DIR=str(folder / run_folder.EVENTS)):
            super().__init__(
                model=model, args=args, train_dataset=data.train, callbacks=[self.run], optimizers=(optimizer, None)
            )
        self.remove_callback(PrinterCallback)
        # losses are means over a micro-batch: the Trainer divides them by the accumulation, whatever a forward takes
        self.model_accepts_loss_kwargs = False

    @override
    def get_train_dataloader(self) -> DataLoader:
        """Return the training split in the batches of the run."""
        count = processes.count()
        # accelerate would give whole batches to the processes in turn, a larger batch than that of one process
        own: Any = self.batches if count == 1 else OwnBatches(self.batches, processes.rank(), count)
        loader = DataLoader(self.split, batch_sampler=own, collate_fn=self.task.collate)
        if count == 1:
            return self.accelerator.prepare(loader)
        return prepare_data_loader(
            loader, self.accelerator.device, num_processes=1, process_index=0, put_on_device=True
        )

    @override
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Report an epoch with all that its record has."""
        # the last call sums up the training, after its last epoch
        epoch = {} if "train_runtime" in logs else flatten_numbers(self.run.records[-1])
        super().log(logs | epoch, start_time)

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
        loss = self.methods.loss(weigh_loss(outputs["loss"], inputs))
        return (loss, outputs) if return_outputs else loss

    @override
    def training_step(
        self, model: nn.Module, inputs: dict[str, Tensor | Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Return the loss after forward, backward and, on the last batch of an update, repulsion."""
        self.methods.begin_step(self.state.global_step, self.state.max_steps, int(self.args.warmup_steps))
        loss = super().training_step(model, inputs, num_items_in_batch)
        force_ratio = self.methods.apply_repulsion() if self.accelerator.sync_gradients else None
        self.run.add(loss * self.current_gradient_accumulation_steps, force_ratio)
        return loss

    @override
    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm of an update's gradient before the clip; without a clip no gradient is written."""
        gradients = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
        norm = nn.utils.get_total_norm(gradients) if grad_norm is None else grad_norm
        self.run.add_norm(norm)
        return norm

    @override
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        state = {"run": self.run.state_dict(), "methods": self.methods.state_dict()}
        # each process writes the state of its random numbers
        processes.wait()
        processes.by_first(lambda: self._keep(state))

    def _keep(self, state: dict[str, Any]) -> None:
        written = run_folder.latest_checkpoint(Path(str(self.args.output_dir)))
        assert written is not None
        torch.save(state, written / RUN)
        seal_checkpoint(written)
        run_folder.keep_checkpoint(written, self.folder)

    @override
    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        checkpoint = Path(str(output_dir or self.args.output_dir))
        checkpoint.mkdir(parents=True, exist_ok=True)
        save_model(self.trained, str(checkpoint / run_folder.WEIGHTS))

    @override
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        checkpoint = Path(resume_from_checkpoint)
        state = read_state(checkpoint)
        with _explaining(checkpoint):
            load_model(self.trained if model is None else model, str(checkpoint / run_folder.WEIGHTS))
            self.run.load_state_dict(state["run"])
            self.methods.load_state_dict(state["methods"])

    @override
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with _explaining(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    @override
    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _explaining(checkpoint):
            super()._load_rng_state(checkpoint)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the state of a run and of its methods in a checkpoint; raises DataError if it cannot be read."""
    with _explaining(checkpoint):
        require_tensors_alone(checkpoint / RUN)
        state = torch.load(checkpoint / RUN, weights_only=True)
        if not isinstance(state, dict) or not {"run", "methods"} <= state.keys():
            raise DataError(f"{RUN} holds no state of a run")
        return state


@contextmanager
def _explaining(checkpoint: str | Path | None) -> Iterator[None]:
    """Turn whatever a file of a checkpoint makes the block raise into a sentence."""
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(
            f"the checkpoint {checkpoint} cannot be read ({reason}); delete it to start that run again."
        ) from None


def _hold_back(args: threading.ExceptHookArgs) -> None:
    """Print what ended a thread, but for TensorBoard's, whose error is raised again in the thread that trains."""
    if type(args.thread).__name__ != "_AsyncWriterThread":
        threading.__excepthook__(args)


def _evaluate_on_dev(task: Task, model: nn.Module, methods: Methods, data: Data) -> dict[str, Any]:
    with methods.evaluating(model):
        return {"dev": task.on_dev(model, data)}


def _finish(settings: RunSettings, trainer: HeadTrainer, data: Data) -> None:
    """Write weights and predictions, then the result that makes the run a finished one, then drop the checkpoint."""
    run, folder, task = trainer.run, trainer.folder, trainer.task
    model, methods = trainer.trained, trainer.methods
    score, answered, signatures = None, {}, {}
    if settings.scale.recipe.averaged > 1:
        load_mean_weights(model, folder, run.kept_weights)
    with methods.evaluating(model):
        if settings.test:
            answers = task.on_test(model, data)
            score = scores_by_bin(METRICS[task.metric], answers.statistics, task.difficulties(data))
            run_folder.write_answers(folder, answers.statistics, answers.predicted, answers.text)
            answered, signatures = dict(answers.measures), dict(answers.signatures)
        measured = diversity(methods.heads, lambda: task.probe(model, data))
    for name, text in task.extra_files(data).items():
        run_folder.write_text(folder / name, text)
    if methods.masks is not None:
        methods.masks.keep(folder)
    with new_file(folder / run_folder.WEIGHTS) as temporary:
        save_model(model, str(temporary))
    task.export(model, data, settings.scale, folder)
    result = {
        "task": settings.task,
        "scale": settings.scale.name,
        "arm": settings.arm.name,
        "control": settings.arm.control,
        "seed": settings.seed,
        "start": task.initial_run(settings.arm, data, settings.scale, settings.seed),
        "settings": settings.record(),
        "score": score,
        "dev_score": run.records[-1]["dev"]["pooled"],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "step_seconds": run.median_step_seconds,
        "train_seconds": run.train_seconds,
        **measured.means,
        "sites": measured.sites,
        "answers": answered,
        "signatures": signatures,
        "force_ratio": run.force_ratio,
        "versions": read_versions("torch", "transformers", "accelerate", "numpy"),
    }
    write_result(folder, result)
    run_folder.clean(folder)
