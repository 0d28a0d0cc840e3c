"""The files of a finished run, whose digests its result holds: what was changed since is noticed and named."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.digests import FILES, is_sealed, require_folder_unchanged, require_unchanged, seal
from headwise.errors import DataError
from headwise.input_files import is_file
from headwise.lab.experiment.run_folder import (
    ANALYSIS,
    CHECKPOINT,
    EVENTS,
    LOG,
    PROGRESS,
    RESULT,
    read_json,
    write_json,
)

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
    """Compare files of a finished run with their digests; a run of an earlier version has none.

    Args:
        folder: The run's folder.
        starts: How the names of the files begin; none for all files that are there.

    Raises:
        DataError: There is no result, or a file was changed, or one of `starts` is missing; the message names it.
    """
    record = read_json(folder / RESULT)
    if not is_sealed(record):
        # those of every version name the task
        if not isinstance(record, dict) or "task" not in record:
            raise DataError(
                f"{folder / RESULT} holds no result of a run; copy the folder again, or delete the folder {folder} and "
                "run the same command again."
            )
        return
    digests = record.get(FILES)
    kept = digests if isinstance(digests, dict) else {}
    names = [name for name in kept if (name.startswith(starts) if starts else (folder / name).exists())]
    remedy = f"copy the folder again, or delete {folder} and run the same command again, which redoes only this run."
    require_unchanged(folder / RESULT, record, names, remedy=remedy)


def require_intact_export(folder: Path) -> None:
    """Compare the files of a model's folder with the digests in its seal, or in the finished run that it lies in.

    Raises:
        DataError: As `require_intact`.
    """
    require_folder_unchanged(folder)
    run = folder.absolute().parent
    if is_file(run / RESULT):
        require_intact(run, f"{folder.absolute().name}/")
