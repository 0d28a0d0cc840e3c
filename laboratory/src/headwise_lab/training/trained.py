"""Finished runs: their settings, and their models, built as they were trained and with the trained weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_model
from torch import nn

from headwise.errors import DataError, HeadwiseError
from headwise.heads.heads import Heads
from headwise.input_files import describe_place
from headwise.stock_folders import Model, TooLarge, build_within
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.arm import Arm, lasts
from headwise_lab.experiment.arm_text import restore_arm
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.run_folder import require_intact
from headwise_lab.experiment.settings import RunSettings, load_data
from headwise_lab.experiment.task import MaskMaker, Task
from headwise_lab.results.runs import COMPARISON
from headwise_lab.training.attach import Methods, build_model, find_target

# What JSON data of another form raises where it is read.
MALFORMED = (HeadwiseError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


class Trained(NamedTuple):
    """A trained model in evaluation mode, with what it was trained on."""

    task: Task
    data: Any
    model: nn.Module
    heads: Heads


def load_trained(settings: RunSettings, folder: Path) -> Trained:
    """Return the model of the finished run in `folder`.

    Raises:
        DataError: The run is not finished, or its weights are damaged or of another model.
    """
    if not run_folder.is_finished(folder) or not (folder / run_folder.WEIGHTS).exists():
        raise DataError(f"{folder} holds no finished run; give the comparison's command again to go on with it.")
    require_intact(folder)
    task, scale, seed = named_task(settings.task), settings.scale, settings.seed
    data = load_data(settings)
    arm = task.remaining_arm(settings.arm, data)
    model, masks = build_model(task, settings.arm, data, scale, seed=seed)
    methods = restore_run(folder, arm, model, task, seed=seed, masks=masks, compile_routing=scale.compile_routing)
    if methods.heads is None:
        raise DataError(f"the model of arm {settings.arm.name} has no heads to look at; leave that arm out.")
    return Trained(task, data, model, methods.heads)


def restore_run(
    folder: Path,
    arm: Arm,
    model: nn.Module,
    task: Task,
    *,
    seed: int,
    masks: MaskMaker | None = None,
    compile_routing: bool = False,
) -> Methods:
    """Give a new model what the finished run in `folder` has: what of its arm outlives training, and its weights.

    The model is then in evaluation mode, on the GPU where there is one.

    Raises:
        DataError: The weights are damaged or of another model.
    """
    left = replace(arm, methods=tuple(method for method in arm.methods if lasts(method)))
    target = find_target(task, arm, model)
    try:
        methods = Methods(left, model, target, seed=seed, compile_routing=compile_routing, masks=masks)
    except Exception as error:
        # whatever a setting raises that a changed record holds
        settings = folder / run_folder.SETTINGS
        raise DataError(f"{settings} has an arm that its model cannot have ({_shorten(error)}).") from None
    _load_weights(folder, model)
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    return methods


def build_run_model(folder: Path, make: Callable[[], Model]) -> Model:
    """Return a new model of the sizes that a finished run's settings name, unless it is far larger than its weights."""
    path, settings = folder / run_folder.WEIGHTS, folder / run_folder.SETTINGS
    tensors = len(list_weights(folder))
    try:
        return build_within(make, tensors=tensors, size=path.stat().st_size)
    except TooLarge:
        raise DataError(f"{settings} has the sizes of a model far larger than {path}; train it again.") from None
    except Exception as error:
        # whatever a model raises for sizes that do not fit together
        raise DataError(f"{settings} has sizes that no model has ({_shorten(error)}); train it again.") from None


def list_weights(folder: Path) -> list[str]:
    """Return the names of the tensors that a finished run keeps; raises DataError if they cannot be read."""
    try:
        with safe_open(str(require_kept_file(folder, run_folder.WEIGHTS)), "pt") as weights:
            return list(weights.keys())
    except HeadwiseError:
        raise
    except Exception as error:
        raise _explain_weights(folder, error) from None


def _load_weights(folder: Path, model: nn.Module) -> None:
    try:
        load_model(model, str(folder / run_folder.WEIGHTS))
    except Exception as error:
        # whatever safetensors and torch raise for a damaged file
        raise _explain_weights(folder, error) from None
    wrong = next((name for name, one in model.named_parameters() if not bool(one.isfinite().all())), None)
    if wrong is not None:
        raise _explain_weights(folder, f"{wrong} holds numbers that are not finite")


def _explain_weights(folder: Path, reason: object) -> DataError:
    path = folder / run_folder.WEIGHTS
    return DataError(
        f"{path} does not hold the weights of this run ({_shorten(reason)}); delete {folder} and train it again."
    )


def _shorten(reason: object) -> str:
    return " ".join(str(reason).split())[:200]


def read_arm(folder: Path, record: Mapping[str, Any]) -> Arm:
    """Return what outlives training in the arm of a run's settings; raises DataError if they do not have it."""
    try:
        arm = restore_arm(record["arm"])
        return Arm(arm.name, tuple(method for method in arm.methods if lasts(method)))
    except MALFORMED as error:
        raise _explain_settings(folder, "what its arm is", error) from error


Scale = TypeVar("Scale")


def read_finished(folder: Path, task: str) -> Mapping[str, Any]:
    """Return the settings of a finished run of a task, one with a model, as it wrote them when it began."""
    if not folder.is_dir():
        raise DataError(
            f"{folder} {describe_place(folder)}; expected the folder of a finished run of headwise compare {task}."
        )
    if not (folder / run_folder.SETTINGS).is_file():
        inside = sorted(path.parent for path in folder.glob(f"*/*/{run_folder.WEIGHTS}"))
        advice = f"name one of its runs, such as {inside[0]}" if inside else "expected the folder of a finished run"
        kind = "holds a comparison" if (folder / COMPARISON).is_file() else "holds no run"
        raise DataError(f"{folder} {kind} (it has no {run_folder.SETTINGS}); {advice}.")
    if run_folder.is_finished(folder):
        require_intact(folder)
    record = run_folder.read_json(folder / run_folder.SETTINGS)
    found = record.get("task") if isinstance(record, dict) else None
    if found != task:
        raise DataError(f"{folder} holds a run of {str(found)[:60] if found else 'no task'}; expected one of {task}.")
    if "arm" not in record:
        name = str(record.get("baseline"))[:60]
        raise DataError(f"{folder} holds the baseline {name!r}, which has no model; name a run.")
    forms = {"seed": int, "data": str, "scale": dict, "arm": dict}
    lacking = [name for name, form in forms.items() if type(record.get(name)) is not form]
    if lacking:
        raise DataError(f"{folder / run_folder.SETTINGS} has no {lacking[0]}; was it changed since the run began?")
    if not run_folder.is_finished(folder):
        raise DataError(f"{folder} holds a run that is not finished; give the command that began it again.")
    return record


def read_scale(folder: Path, record: Mapping[str, Any], kind: type[Scale]) -> Scale:
    """Return the scale of a run's settings, with defaults for what is missing; raises DataError if they have none."""
    scale: Any = kind
    try:
        known = {field.name for field in fields(scale)}
        return kind(**{name: value for name, value in record["scale"].items() if name in known})
    except MALFORMED as error:
        raise _explain_settings(folder, "the sizes of the model", error) from error


def _explain_settings(folder: Path, what: str, reason: object) -> DataError:
    return DataError(
        f"{folder / run_folder.SETTINGS} does not say {what} ({str(reason)[:200]}); was it made by another version?"
    )


def require_kept_file(folder: Path, name: str) -> Path:
    """Return a file that a run keeps when it ends; raises DataError if it is missing."""
    if not (folder / name).is_file():
        raise DataError(f"{folder / name} is missing; a run keeps it when it ends: train this one again.")
    return folder / name
