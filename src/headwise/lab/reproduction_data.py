"""Where the data of a reproduction's parts lies, and which parts there is none for.

Owns the finding of folders and of what lacks. What is run on them is `reproduce`'s.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from headwise.checks import DataError
from headwise.lab.tables.data_names import is_there
from headwise.lab.tables.reproduction import Reproduction
from headwise.lab.tasks.named import named_task
from headwise.lab.tasks.task import Task, WithStarts

__all__ = ["data_of", "folder_of_part", "lacks", "missing", "text_of", "with_data", "without_absent"]

# Where below --data text to pre-train on is looked for; prepared shards first.
TEXTS = ("prepared", "corpora/docs.jsonl.gz", "corpora")


def text_of(data: Path | None) -> Path | None:
    """Return where in a folder of several kinds of data the text to pre-train on lies."""
    if data is None or not data.is_dir():
        return data
    return next((data / name for name in TEXTS if (data / name).exists()), data)


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


def lacks(task: Task, data: Path | None, corpus: str | None) -> str:
    """Return what a set lacks so that a task of pretrained models could run on it, "" where nothing does."""
    if not isinstance(task, WithStarts) or data is None or corpus is None:
        return ""
    if not (data / corpus).is_dir():
        return "not there"
    found = task.lacking(data / corpus)
    return f"no {found}" if found else ""


def missing(reproduction: Reproduction, planned: Collection[str], data: Path | None) -> dict[str, str]:
    """Return the parts that a task of pretrained models has no plan for, each with what lacks."""
    task = named_task(reproduction.task)
    found: dict[str, str] = {}
    for part in reproduction.parts if isinstance(task, WithStarts) else ():
        if part.name not in planned:
            corpus = next((size.corpus for size in part.sizes.values()), None)
            found[part.name] = lacks(task, data, corpus) or f"{part.after} is not there"
    return found


def with_data(reproduction: Reproduction, scale: str, data: Path | None) -> Reproduction:
    """Return a reproduction with those of its parts whose data is there, where it says something without the others.

    Raises:
        DataError: The data of none of its parts is there.
    """
    if not reproduction.partial or data is None:
        return reproduction
    parts = reproduction.parts_at(scale)
    absent = [part.name for part in parts if not is_there(data / str(part.sizes[scale].corpus))]
    if len(absent) == len(parts):
        wanted = ", ".join(reproduction.corpora_at(scale))
        raise DataError(
            f"{data} holds no data of {reproduction.id}; expected some of {wanted}, plain, .txt or .txt.gz."
        )
    return reproduction.without(dict.fromkeys(absent, "not there")) if absent else reproduction


def without_absent(reproduction: Reproduction, planned: Collection[str], scale: str, data: Path | None) -> Reproduction:
    """Return a reproduction without the parts that have no plan, as there is no data for them."""
    at = replace(reproduction, parts=reproduction.parts_at(scale))
    absent = missing(at, planned, data_of(reproduction, data))
    return reproduction.without(absent) if absent else reproduction
