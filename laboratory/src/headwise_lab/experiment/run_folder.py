"""The folder of a run: its settings, progress and result; files are replaced atomically.

A run is finished exactly when `result.json` exists; that file is written last, with the digests of the others.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.atomic import (
    FILES,
    follow,
    is_sealed,
    new_file,
    put,
    require_folder_unchanged,
    require_unchanged,
    seal,
    sweep,
    write_whole,
)
from headwise.errors import DataError, HeadwiseError, SettingError
from headwise.input_files import describe_place, encode_json, is_file, parse_json, read_whole
from headwise.settings import to_json

SETTINGS = "settings.json"
EPOCHS = "epochs.jsonl"
PROGRESS = "progress.json"
PREDICTIONS = "predictions.npz"
TEXT = "predictions.txt"
WEIGHTS = "model.safetensors"
VOCABULARY = "vocabulary.json"
RESULT = "result.json"
LOG = "log.txt"
# TensorBoard's files, if they are asked for.
EVENTS = "events"
# Prefix of the files of analyses, each {"numbers": {...}, ...}.
ANALYSIS = "analysis-"
CHECKPOINT = "checkpoint-"
# Prefix of the weights of single epochs.
EPOCH = "epoch-"
UNFINISHED = ".writing"


@dataclasses.dataclass(frozen=True)
class Cell:
    """The progress of a run, as recorded in `progress.json`.

    Attributes:
        step: Number of optimizer steps done.
        steps: Total number of steps.
        note: Short text to show next to the progress bar.
    """

    step: int
    steps: int
    note: str = ""


def prepare_folder(folder: Path) -> None:
    """Create `folder` with its parents and check that it is writable."""
    try:
        follow(folder).mkdir(parents=True, exist_ok=True)
        # a file without a name, of which nothing is left where the process is killed
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise SettingError(f"cannot write to {folder} ({reason}); choose another --out.") from None


def claim(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the settings of a run into its folder, or raise `SettingError` unless it has the same."""
    path = folder / SETTINGS
    if not path.exists():
        prepare_folder(folder)
        write_json(path, record)
    require_same(path, record)


def require_same(path: Path, record: Mapping[str, Any]) -> None:
    """Raise `SettingError`, which names the first different setting, unless a file of settings equals `record`."""
    if not path.exists():
        return
    difference = first_difference(read_json(path), parse_json(encode_json(record)))
    if difference is not None:
        name, old, new = difference
        if name == "data":
            raise SettingError(
                f"{path} belongs to data with digest {old}, and the data now has {new}: files changed, or others were "
                "named. Nothing was overwritten; restore the old data, or choose another --out."
            )
        raise SettingError(f"{path} has {name} {old!r} but {new!r} is requested; choose another --out.")


def is_finished(folder: Path) -> bool:
    """Return whether the run in `folder` is finished."""
    return (folder / RESULT).exists()


def list_left(jobs: Sequence[Any]) -> list[Any]:
    """Return the jobs that are not finished, after cleaning the folders of the others."""
    left = [job for job in jobs if not is_finished(job.folder)]
    for job in jobs:
        if job not in left:
            clean(job.folder)
    return left


def clean(folder: Path) -> None:
    """Remove what a finished run needs no more, and what processes that were killed left half written."""
    for path in folder.glob(f"{CHECKPOINT}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f"{EPOCH}*.safetensors"):
        path.unlink()
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    sweep(folder)


def analysis_file(folder: Path, name: str) -> Path:
    """Return where an analysis of the run in `folder` is kept."""
    return folder / f"{ANALYSIS}{name}.json"


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in `folder`, or None."""
    found = (path for path in folder.glob(f"{CHECKPOINT}*") if path.is_dir())
    steps = {int(step): path for path in found if (step := path.name.removeprefix(CHECKPOINT)).isdecimal()}
    return steps[max(steps)] if steps else None


def keep_checkpoint(written: Path, folder: Path) -> None:
    """Move a complete checkpoint "checkpoint-STEP" into a run's folder, and remove older ones."""
    place = folder / written.name
    put(written, place)
    for path in {*folder.glob(f"{CHECKPOINT}*")} - {place}:
        shutil.rmtree(path, ignore_errors=True)


def read_progress(folder: Path) -> Cell | None:
    """Return the progress of the run in `folder`, or None."""
    try:
        value = read_json(folder / PROGRESS)
        return Cell(step=int(value["step"]), steps=int(value["steps"]), note=str(value["note"]))
    except (DataError, ValueError, KeyError, TypeError, OverflowError):
        return None


def read_json(path: Path, remedy: str = "") -> Any:
    """Return the content of a JSON file; `remedy` says what to do where it cannot be read and no run writes it again.

    Raises:
        DataError: The file is missing or is not JSON, or it has a digest and was changed.
    """
    if not is_file(path):
        raise DataError(f"{path} {describe_place(path)}; {remedy or 'was the run that writes it finished?'}")
    remedy = remedy or "delete it and run again."
    try:
        value = parse_json(read_whole(path))
    except ValueError as error:
        raise DataError(f"{path} is not readable as JSON ({error}); {remedy}") from None
    if is_sealed(value):
        require_unchanged(path, value, (), remedy=remedy)
    return value


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Write `value` as JSON, atomically; raises HeadwiseError, and changes nothing, if a number is not finite."""
    write_whole(path, _encode(path, value, indent=1).encode(), durable=durable)


def write_text(path: Path, text: str) -> None:
    """Write a text, atomically."""
    write_whole(path, text.encode())


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line, as `write_json`."""
    write_text(path, "".join(_encode(path, record) for record in records))


def write_answers(folder: Path, statistics: NDArray, predicted: NDArray, text: Sequence[str] | None) -> None:
    """Write a run's answers on the test split: statistics for the metric, predictions and their text, if any."""
    if text is not None:
        write_text(folder / TEXT, "".join(f"{line}\n" for line in text))
    write_arrays(folder / PREDICTIONS, statistics=statistics, predicted=predicted)


def write_arrays(path: Path, **arrays: NDArray) -> None:
    """Write arrays as an .npz file, atomically."""
    with new_file(path) as temporary, temporary.open("wb") as stream:
        np.savez(stream, allow_pickle=False, **arrays)


def as_record(value: Any, *, sparse: bool = False) -> Any:
    """Return `value` as JSON data: a dataclass becomes its fields with its type's name (or `record_kind`) under "kind".

    Fields with the metadata {"recorded": False} are left out, and in a sparse record those that are None by default.

    >>> as_record(Cell(step=1, steps=4))
    {'kind': 'Cell', 'step': 1, 'steps': 4, 'note': ''}
    """

    def pack(settings: Any, held: dict[str, Any]) -> dict[str, Any]:
        left_out = {
            field.name
            for field in dataclasses.fields(settings)
            if not field.metadata.get("recorded", True)
            or (sparse and field.default is None and held[field.name] is None)
        }
        kept = {name: one for name, one in held.items() if name not in left_out}
        return {"kind": getattr(settings, "record_kind", type(settings).__name__), **kept}

    return to_json(value, pack, lambda leaf: str(leaf) if isinstance(leaf, Path) else leaf)


def first_difference(old: Any, new: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Return (dotted name, old, new) of the first difference between two JSON values, or None.

    >>> first_difference({"scale": {"width": 32}}, {"scale": {"width": 64}})
    ('scale.width', 32, 64)
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            inner = first_difference(old.get(key), new.get(key), f"{name}.{key}" if name else str(key))
            if inner is not None:
                return inner
        return None
    return None if old == new else (name, old, new)


def _encode(path: Path, value: Any, indent: int | None = None) -> str:
    try:
        return encode_json(value, indent=indent, ascii_only=False) + "\n"
    except HeadwiseError as error:
        raise HeadwiseError(f"{path} was not written: {error}") from None


# Analyses go on writing these.
GROWING = (LOG, PROGRESS, RESULT)
# What is temporary, hidden, or has its own digest.
APART = (".", CHECKPOINT, ANALYSIS, EVENTS, "epoch-", "part-", "unfinished-")


def write_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Write the result of a run with the digests of the files in its folder; the run is finished then."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    names = [
        path.as_posix()
        for path in found
        if path.as_posix() not in GROWING and not any(part.startswith(APART) for part in path.parts)
    ]
    write_json(folder / RESULT, seal(result, folder, sorted(names)))


def require_intact(folder: Path, *starts: str) -> None:
    """Compare files of a finished run with their digests.

    Args:
        folder: The run's folder.
        starts: How the names of the files begin; none for all files that are there.
    """
    record = read_json(folder / RESULT)
    if not is_sealed(record):
        raise DataError(
            f"{folder / RESULT} holds no result of a run with its digests; copy the folder again, or delete the folder "
            f"{folder} and run the same command again."
        )
    digests = record.get(FILES)
    kept = digests if isinstance(digests, dict) else {}
    names = [name for name in kept if (name.startswith(starts) if starts else (folder / name).exists())]
    remedy = f"copy the folder again, or delete {folder} and run the same command again, which redoes only this run."
    require_unchanged(folder / RESULT, record, names, remedy=remedy)


def require_intact_export(folder: Path) -> None:
    """Compare the files of a model's folder with the digests in its seal, or in the finished run that it lies in."""
    require_folder_unchanged(folder)
    require_intact_in_run(folder)


def require_intact_in_run(folder: Path) -> None:
    """Compare the files of a model's folder with the digests in the finished run that it lies in, if it does."""
    run = folder.absolute().parent
    if is_file(run / RESULT):
        require_intact(run, f"{folder.absolute().name}/")


# Called regularly by a job; True means that it should save and return.
Heartbeat = Callable[[], bool]


@dataclass(frozen=True, eq=False)
class Job:
    """One run to do.

    Attributes:
        name: Its name.
        folder: Its folder.
        settings: Its settings.
        weight: Its relative duration, for the share of all work.
        kind: What runs of about the same duration share, for the remaining time.
    """

    name: str
    folder: Path
    settings: Any
    weight: float = 1.0
    kind: str = ""


@dataclass(frozen=True)
class Failure:
    """A run that failed: the error in one sentence, and whether it was a refusal (bad input) or a defect."""

    job: Job
    message: str
    refused: bool

    def __str__(self) -> str:
        return f"{self.job.name} failed: {self.message} (log: {self.job.folder / LOG})"


class Watch:
    """Callbacks while jobs run; subclasses show progress, this one shows nothing."""

    def started(self, job: Job) -> None:
        """A job was handed to a worker."""

    def ended(self, job: Job, failure: Failure | None) -> None:
        """A job ended, perhaps with a failure."""

    def silent(self, job: Job, minutes: int) -> None:
        """A job has written nothing for so long."""

    def tick(self) -> None:
        """Called a few times a second."""
