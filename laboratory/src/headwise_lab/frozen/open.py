"""Trained models opened for reading: a folder of Hugging Face, or a finished run of any task."""

from dataclasses import replace
from pathlib import Path

from headwise.errors import DataError
from headwise.input_files import describe_place
from headwise.stock_folders import CONFIG
from headwise.texts.frozen import Frozen
from headwise.texts.transformer import open_folder
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.registry import TASKS, named_task
from headwise_lab.experiment.run_folder import require_intact, require_intact_in_run
from headwise_lab.experiment.task import name_run
from headwise_lab.training.trained import read_finished


def open_frozen(folder: Path, pipeline: Path | None = None, *, trust_remote_code: bool = False) -> Frozen:
    """Return the model of a folder of Hugging Face, or of a finished run of any task.

    Args:
        folder: The folder.
        pipeline: The spaCy pipeline that parsed the texts of a run whose heads have roles; None for the path used in
            training. Ignored if nothing was parsed.
        trust_remote_code: Whether code that a folder of Hugging Face names may run.

    Raises:
        DataError: The folder holds no such model, or it cannot be read.
        LayoutError: The heads of the model cannot be found.
    """
    if not folder.is_dir():
        raise DataError(
            f"{folder} {describe_place(folder)}; expected a folder of save_pretrained(), or a finished run."
        )
    if not (folder / run_folder.SETTINGS).is_file():
        require_intact_in_run(folder)
        return open_folder(folder, trust_remote_code=trust_remote_code)
    if run_folder.is_finished(folder):
        require_intact(folder, run_folder.SETTINGS)
    record = run_folder.read_json(folder / run_folder.SETTINGS)
    task = str(record.get("task") or "")[:60] if isinstance(record, dict) else ""
    if task not in TASKS:
        raise DataError(f"{folder} holds a run of {task or 'no task'}; expected one of {', '.join(TASKS)}.")
    finished, exported = read_finished(folder, task), named_task(task).exported
    if not exported or not (folder / exported / CONFIG).is_file():
        return named_task(task).open_frozen(folder, finished, pipeline)
    require_intact_in_run(folder / exported)
    opened = open_folder(folder / exported, name_run(folder), trust_remote_code=trust_remote_code)
    return replace(opened, note=f"Of this run the {exported} was looked at.")
