"""What the readers of finished runs share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from headwise.errors import DataError
from headwise.stock_folders import Model
from headwise.texts.batching import Encoded, Row, collate_rows
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.arm import Arm, OtherModel
from headwise_lab.experiment.task import Task
from headwise_lab.training.trained import build_run_model, read_arm, restore_run


def read_attending_arm(folder: Path, record: Mapping[str, Any]) -> Arm:
    """Return what outlives training in the arm of a run; raises DataError if its model has no attention."""
    arm = read_arm(folder, record)
    other = arm.find(OtherModel)
    if other is not None:
        raise DataError(f"{folder} cannot be read: its model {other.model} has no attention that an arm acts on.")
    return arm


def load_run(folder: Path, record: Mapping[str, Any], task: Task, make: Callable[[], Model]) -> Model:
    """Return the model of a finished run: `make()` with what of its arm outlives training, and the trained weights."""
    arm = read_attending_arm(folder, record)
    model = build_run_model(folder, make)
    restore_run(folder, arm, model, task, seed=int(record["seed"]))
    return model


def read_words(folder: Path, *others: str) -> list[list[str]]:
    """Return the vocabulary that a run keeps, and other lists kept with it; raises DataError if it does not."""
    kept = run_folder.read_json(folder / run_folder.VOCABULARY)
    listed: list[Any] = [kept.get(name) if isinstance(kept, dict) else None for name in ("vocabulary", *others)]
    if not all(isinstance(words, list) and all(isinstance(word, str) for word in words) for words in listed):
        names = " and ".join(["a vocabulary", *others])
        raise DataError(f"{folder / run_folder.VOCABULARY} does not have the run's words, {names}; train it again.")
    return listed


def list_files(folder: Path) -> tuple[Path, ...]:
    """Return the files that the states of a run depend on."""
    return tuple(folder / file for file in (run_folder.SETTINGS, run_folder.WEIGHTS, run_folder.VOCABULARY))


def batch_rows(row: Callable[[str], Row], model: nn.Module) -> Callable[[Sequence[str]], Iterable[Encoded]]:
    """Return a function from lines to batches on the device of a model, given one from a line to a row."""
    device = next(model.parameters()).device
    return lambda lines: collate_rows([row(line) for line in lines], device)


def run_encoder(encoder: nn.Module) -> Callable[[Encoded], Tensor]:
    """Return a function that runs an encoder of ids and padding on a batch."""
    return lambda batch: encoder(batch.inputs["input_ids"], ~batch.keep)
