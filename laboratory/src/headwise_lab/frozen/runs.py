"""Helpers for reading finished runs whose tokens are words."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from headwise.errors import DataError
from headwise.texts.batching import Encoded, Row, collate_rows
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.arm import Arm, OtherModel
from headwise_lab.training.trained import read_arm


def read_attending_arm(folder: Path, record: Mapping[str, Any]) -> Arm:
    """Return the arm of a run whose model has attention.

    Raises:
        DataError: Its model has none, or the record does not describe the arm.
    """
    arm = read_arm(folder, record)
    other = arm.find(OtherModel)
    if other is not None:
        raise DataError(f"{folder} cannot be read: its model {other.model} has no attention that an arm acts on.")
    return arm


def read_words(folder: Path, *others: str) -> list[list[str]]:
    """Return the vocabulary that a run keeps, and other lists kept with it.

    Raises:
        DataError: The run does not keep them.
    """
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
