"""The files from which masks of new sentences are made, and those of a spaCy pipeline, found without loading it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from headwise.errors import DataError
from headwise.input_files import is_file
from headwise.roles.idf import IDF
from headwise_lab.data.arrays import digest
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.arm import Guided, require_parses

# What every saved pipeline holds: of another folder nothing is read, however large it is.
CONFIG = "config.cfg"


def list_pipeline_files(pipeline: Path) -> list[Path]:
    """Return the files of a pipeline, given by its folder or the name of an installed package."""
    folder = pipeline
    if folder.is_dir():
        if not is_file(folder / CONFIG):
            raise DataError(f"{pipeline} holds no {CONFIG}; expected the folder of a spaCy pipeline with a parser.")
    else:
        name = str(pipeline)
        package = importlib.util.find_spec(name) if name.isidentifier() else None
        if package is None or package.origin is None:
            raise DataError(
                f"{pipeline} does not exist; expected a spaCy pipeline with a parser: its folder, or the name of an "
                "installed package, as en_core_web_sm."
            )
        folder = Path(package.origin).parent
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def hash_pipeline(pipeline: Path) -> str:
    """Return a digest of everything a pipeline's parses depend on."""
    return digest("parsed", list_pipeline_files(pipeline))


RARITY, ROLES = "idf.json", "roles.json"


def write_roles(folder: Path, rarity: IDF, pipeline: Path | None) -> None:
    """Write the files of `read_roles` into a run's folder; `pipeline` is None if its texts were not parsed."""
    rarity.save(folder / RARITY)
    place = None if pipeline is None else str(pipeline.resolve() if pipeline.is_dir() else pipeline)
    parsed_by = None if pipeline is None else hash_pipeline(pipeline)
    run_folder.write_json(folder / ROLES, {"pipeline": place, "digest": parsed_by})


def read_roles(folder: Path, guided: Guided, pipeline: Path | None) -> tuple[IDF, Path | None]:
    """Return the rarity of words that a finished run with roles keeps, and the pipeline that parsed its texts, if any.

    A pipeline of None is looked for at the path used in training; any is ignored where texts were not parsed.
    """
    if guided.shuffled:
        raise DataError(
            f"{folder} holds a control whose roles are from parses of other training sentences, which a run does not "
            "keep; its answers on the test set are in the folder."
        )
    for name in (RARITY, ROLES):
        if not (folder / name).is_file():
            raise DataError(
                f"{folder / name} is missing; a run with roles keeps it when it ends: train this one again."
            )
    record = run_folder.read_json(folder / ROLES)
    if not isinstance(record, dict) or not {"pipeline", "digest"} <= record.keys():
        raise DataError(f"{folder / ROLES} does not name the pipeline of the run's texts; train this run again.")
    if record["digest"] is None:
        pipeline = None
    else:
        pipeline = pipeline or _find_pipeline(folder / ROLES, record["pipeline"])
        if hash_pipeline(pipeline) != record["digest"]:
            raise DataError(
                f"{pipeline} is not the pipeline that parsed the texts of {folder}, or it was changed since; name that "
                "one (--pipeline DIR)."
            )
    require_parses(guided, pipeline is not None)
    return IDF.load(folder / RARITY), pipeline


def _find_pipeline(path: Path, name: Any) -> Path:
    if not isinstance(name, str):
        raise DataError(f"{path} names no pipeline; name the one that parsed the run's texts (--pipeline DIR).")
    try:
        there = Path(name).exists()
    except OSError as error:
        raise DataError(f"{path} names no pipeline ({error.strerror}); name the right one (--pipeline DIR).") from None
    if os.sep in name and not there:
        raise DataError(
            f"{name}, the pipeline that parsed the run's texts, does not exist any more; name its new path "
            "(--pipeline DIR)."
        )
    return Path(name)
