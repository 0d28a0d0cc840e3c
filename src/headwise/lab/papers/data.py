"""Where the data of a reproduction's parts lies, and which parts there is none for.

Owns the finding of folders and of what lacks. What is run on them is `reproduce`'s.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from headwise.errors import DataError
from headwise.lab.experiment.registry import named_task
from headwise.lab.experiment.task import Task
from headwise.lab.papers.data_names import is_there
from headwise.lab.papers.reproduction import Reproduction

# Where below --data text to pre-train on is looked for; prepared shards first.
TEXTS = ("prepared", "corpora/docs.jsonl.gz", "corpora")


def text_of(data: Path | None) -> Path | None:
    """Return where in a folder of several kinds of data the text to pre-train on lies.

    Raises:
        DataError: The folder holds none.
    """
    if data is None or not data.is_dir():
        return data
    found = next((data / name for name in TEXTS if (data / name).exists()), None)
    if found is None:
        raise DataError(
            f"{data} holds no text to pre-train on; expected one of {', '.join(TEXTS)} beside the sets, or name with "
            "--pretrained the --out folder of a comparison of pretraining."
        )
    return found


def data_of(reproduction: Reproduction, data: Path | None) -> Path | None:
    """Return the folder that the sets of a reproduction's parts lie in."""
    if data is None or not reproduction.folder or not (data / reproduction.folder).is_dir():
        return data
    return data / reproduction.folder


def folder_of_part(reproduction: Reproduction, data: Path | None, corpus: str | None, scale: str) -> Path | None:
    """Return the folder of a corpus, or of all data where a part has no corpus of its own."""
    if data is None or corpus is None:
        return data
    own, corpora = data / corpus, reproduction.corpora_at(scale)
    if is_there(own):
        return own
    if len(corpora) > 1:
        raise DataError(
            f"{own} does not exist; at scale {scale} {reproduction.id} takes a folder that holds "
            f"{' and '.join(corpora)}. --part runs a part alone."
        )
    return data


def require_data(task: str, data: Path | None, scale: Any) -> None:
    """Refuse data that a run of a task would refuse for being none of its own, without reading it all.

    Raises:
        DataError: There is no such place, or it holds something else.
    """
    if data is not None:
        named_task(task).find(data, scale)


def with_data(reproduction: Reproduction, scale: str, data: Path | None) -> Reproduction:
    """Return a reproduction with those of its parts whose data is there, where it says something without the others.

    Its claims and means are then about these, and it names the others with what lacks.

    Raises:
        DataError: The data of none of its parts is there.
    """
    if not reproduction.partial and reproduction.made is None:
        return reproduction
    task, place = named_task(reproduction.task), data_of(reproduction, data)
    at = replace(reproduction, parts=reproduction.parts_at(scale))
    there: list[str] = []
    absent: dict[str, str] = {}
    for part in at.parts:
        lack = "" if place is None else _lack(task, place, part.sizes[scale].corpus)
        if not lack and part.after and part.after not in there:
            asked = any(one.name == part.after for one in at.parts)
            lack = f"{part.after} is not there" if asked else f"begins with {part.after}, which --part leaves out"
        if lack:
            absent[part.name] = lack
        else:
            there.append(part.name)
    if not absent:
        return reproduction
    left = at.without(absent)
    if not there and place is not None and place.is_file():
        raise DataError(
            f"{place} is a file; {at.id} takes the folder that holds some of {', '.join(at.corpora_at(scale))}."
        )
    if not there:
        raise DataError(
            f"{place} holds no data that {at.id} could be run on: {', '.join(left.left_out)}; expected some of "
            f"{', '.join(at.corpora_at(scale))}."
        )
    return left


def _lack(task: Task, place: Path, corpus: str | None) -> str:
    """Return what of a part's data lacks, "" where nothing does."""
    if corpus is None:
        return ""
    if not is_there(place / corpus):
        return "not there"
    found = task.missing_file(place / corpus)
    return f"no {found}" if found else ""
