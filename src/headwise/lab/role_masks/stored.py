"""The files in the folder of a run with roles from which masks of new sentences are made."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from headwise.errors import DataError
from headwise.lab.data.spacy_pipelines import hash_pipeline
from headwise.lab.experiment import run_folder
from headwise.lab.experiment.guided import Guided, require_parses
from headwise.roles.idf import IDF

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
