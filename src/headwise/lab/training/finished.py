"""What the folder of a finished run says of it: for commands that are given a run and nothing else.

Owns the refusal of every folder that is no such run. Must not build models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headwise.errors import DataError, HeadwiseError
from headwise.lab.experiment import run_folder
from headwise.lab.results.runs import COMPARISON

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Scale = TypeVar("Scale", bound="DataclassInstance")


def finished_record(folder: Path, task: str) -> Mapping[str, Any]:
    """Return the settings of a finished run of a task, one with a model, as it wrote them when it began.

    Raises:
        DataError: The folder holds no run, an unfinished one, one of another task or a baseline.
    """
    if not folder.is_dir():
        state = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"{folder} {state}; expected the folder of a finished run of headwise compare {task}.")
    if not (folder / run_folder.SETTINGS).is_file():
        inside = sorted(path.parent for path in folder.glob(f"*/*/{run_folder.WEIGHTS}"))
        advice = f"name one of its runs, such as {inside[0]}" if inside else "expected the folder of a finished run"
        kind = "holds a comparison" if (folder / COMPARISON).is_file() else "holds no run"
        raise DataError(f"{folder} {kind} (it has no {run_folder.SETTINGS}); {advice}.")
    record = run_folder.read_json(folder / run_folder.SETTINGS)
    found = record.get("task") if isinstance(record, dict) else None
    if found != task:
        raise DataError(f"{folder} holds a run of {found or 'no task'}; expected one of {task}.")
    if "arm" not in record:
        raise DataError(f"{folder} holds the baseline {record.get('baseline')!r}, which has no model; name a run.")
    lacking = {"seed", "data", "scale"} - record.keys()
    if lacking:
        raise DataError(f"{folder / run_folder.SETTINGS} has no {min(lacking)}; was it changed since the run began?")
    if not run_folder.is_finished(folder):
        raise DataError(f"{folder} holds a run that is not finished; give the command that began it again.")
    return record


def scale_record(folder: Path, record: Mapping[str, Any], kind: type[Scale]) -> Scale:
    """Return the scale that a run's settings name; what a later version has besides takes its default.

    Raises:
        DataError: The settings do not say it.
    """
    known = {field.name for field in fields(kind)}
    try:
        return kind(**{name: value for name, value in record["scale"].items() if name in known})
    except (KeyError, TypeError, AttributeError, HeadwiseError) as error:
        raise DataError(
            f"{folder / run_folder.SETTINGS} does not say the sizes of the model ({error}); was it made by another "
            "version?"
        ) from error


def kept_file(folder: Path, name: str) -> Path:
    """Return a file that a run keeps when it ends.

    Raises:
        DataError: It is missing.
    """
    if not (folder / name).is_file():
        raise DataError(f"{folder / name} is missing; a run keeps it when it ends: train this one again.")
    return folder / name
