"""The files in the folder of a run with roles from which masks of new sentences are made.

Files and digest of a spaCy pipeline, found without loading spaCy.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any, NamedTuple

from headwise.errors import DataError
from headwise.input_files import is_file
from headwise.roles.idf import IDF
from headwise_lab.data.arrays import digest
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.arm import Guided, require_parses

# What every saved pipeline holds: of another folder nothing is read, however large it is.
CONFIG = "config.cfg"


def list_pipeline_files(pipeline: Path) -> list[Path]:
    """Return the files of a pipeline, given by its folder or the name of an installed package.

    Raises:
        DataError: Neither exists, or the folder is none of a pipeline.
    """
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
    """Return a digest of everything a pipeline's parses depend on.

    Raises:
        DataError: There is no such pipeline.
    """
    return digest("parsed", list_pipeline_files(pipeline))


RARITY, ROLES = "idf.json", "roles.json"


class KeptRoles(NamedTuple):
    """The input of masks of new sentences.

    Attributes:
        rarity: Rarity of words in the training split.
        pipeline: The spaCy pipeline that parsed; None if texts were not parsed.
    """

    rarity: IDF
    pipeline: Path | None


def write_roles(folder: Path, rarity: IDF, pipeline: Path | None) -> None:
    """Write the files of `read_roles` into a run's folder; `pipeline` is None if its texts were not parsed."""
    rarity.save(folder / RARITY)
    place = None if pipeline is None else str(pipeline.resolve() if pipeline.is_dir() else pipeline)
    parsed_by = None if pipeline is None else hash_pipeline(pipeline)
    run_folder.write_json(folder / ROLES, {"pipeline": place, "digest": parsed_by})


def read_roles(folder: Path, guided: Guided, pipeline: Path | None) -> KeptRoles:
    """Return what a finished run with roles keeps.

    Args:
        folder: The run's folder.
        guided: Its roles.
        pipeline: The pipeline that parsed its texts; None for the path used in training. Ignored if they were not
            parsed.

    Raises:
        DataError: A file is missing or damaged, the pipeline is missing or different, or the roles are those of
            other parses, which a run does not keep.
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
    return KeptRoles(IDF.load(folder / RARITY), pipeline)


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
