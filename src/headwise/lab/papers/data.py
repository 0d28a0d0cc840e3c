"""The data of a reproduction's parts and the runs they begin with: names, places, and which parts have none."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headwise.errors import DataError
from headwise.lab.experiment.registry import named_task
from headwise.lab.experiment.run_folder import read_json
from headwise.lab.experiment.task import Task
from headwise.lab.papers.reproduction import Reproduction
from headwise.lab.results.runs import COMPARISON

RECORD = "record.json"
# A layout of a few files of a corpus; what was trained on it was not trained on the corpus.
PARTIAL = "partial"
# Behind the names of sets that are one file each.
FORMS = (".txt", ".txt.gz")


def name_data(data: Path | None) -> str:
    """Return what a comparison's folder calls its data: the name of the data's folder.

    >>> name_data(Path("corpora/WMT 14 (parts)")), name_data(None)
    ('WMT_14_parts', '')
    """
    return "" if data is None else re.sub(r"[^\w.+-]+", "_", data.resolve().name).strip("_")


def exists(data: Path) -> bool:
    """Return whether there is data of that name: a folder or a file, or a file with .txt or .txt.gz behind it."""
    return data.exists() or any(data.with_name(data.name + form).is_file() for form in FORMS)


def find_corpus_name(fingerprint: str, data: Path | None, cache: Path) -> str:
    """Return the name of the corpus with this fingerprint, "" where the task has no corpora."""
    # the digest of a parser follows a plus
    prepared = fingerprint.partition("+")[0]
    places = [] if data is None else [data / RECORD]
    for path in (*places, *sorted(cache.glob(f"*/{RECORD}")), *sorted(cache.glob(f"*/*/{RECORD}"))):
        found = read_json(path) if path.exists() else {}
        if isinstance(found, dict) and found.get("fingerprint") == prepared and "corpus" in found:
            return "-".join([str(found["corpus"])] + [PARTIAL] * (found.get("layout") == PARTIAL))
    return ""


# Where below --data text to pre-train on is looked for; prepared shards first.
TEXTS = ("prepared", "corpora/docs.jsonl.gz", "corpora")


def find_text(data: Path | None) -> Path | None:
    """Return the text to pre-train on, in a folder of several kinds of data.

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


def find_data(reproduction: Reproduction, data: Path | None) -> Path | None:
    """Return the folder with the sets of a reproduction's parts."""
    if data is None or not reproduction.folder or not (data / reproduction.folder).is_dir():
        return data
    return data / reproduction.folder


def find_part_folder(reproduction: Reproduction, data: Path | None, corpus: str | None, scale: str) -> Path | None:
    """Return the folder of a corpus, or of all data where a part names no corpus."""
    if data is None or corpus is None:
        return data
    own, corpora = data / corpus, reproduction.corpora_at(scale)
    if exists(own):
        return own
    if len(corpora) > 1:
        raise DataError(
            f"{own} does not exist; at scale {scale} {reproduction.id} takes a folder that holds "
            f"{' and '.join(corpora)}. --part runs a part alone."
        )
    return data


def require_data(task: str, data: Path | None, scale: Any) -> None:
    """Refuse data that is not a task's, without reading it all.

    Raises:
        DataError: There is no such place, or it holds something else.
    """
    if data is not None:
        named_task(task).find(data, scale)


def with_data(reproduction: Reproduction, scale: str, data: Path | None) -> Reproduction:
    """Return a reproduction with only those parts whose data is there, where it allows that.

    Its claims and means are then about these, and it lists what is missing for the others.

    Raises:
        DataError: The data of none of its parts is there.
    """
    if not reproduction.partial and reproduction.made is None:
        return reproduction
    task, place = named_task(reproduction.task), find_data(reproduction, data)
    at = replace(reproduction, parts=reproduction.parts_at(scale))
    there: list[str] = []
    absent: dict[str, str] = {}
    for part in at.parts:
        lack = "" if place is None else _find_lack(task, place, part.sizes[scale].corpus)
        if not lack and part.after and part.after not in there:
            known = any(one.name == part.after for one in at.parts)
            lack = f"{part.after} is not there" if known else f"begins with {part.after}, which --part leaves out"
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


def _find_lack(task: Task, place: Path, corpus: str | None) -> str:
    """Return what is missing from a part's data, "" for nothing."""
    if corpus is None:
        return ""
    if not exists(place / corpus):
        return "not there"
    found = task.missing_file(place / corpus)
    return f"no {found}" if found else ""


@dataclass(frozen=True)
class InitialRuns:
    """A comparison whose runs others begin with.

    Attributes:
        task: Its task.
        scale: Its scale.
        steps: Steps of a run; None where the task counts none.
        data: Name of its data, "" where that is not known, and its fingerprint.
    """

    task: str
    scale: str
    steps: int | None
    data: str

    def __str__(self) -> str:
        steps = "" if self.steps is None else f" ({self.steps:,} steps)"
        return f"{self.task} at scale {self.scale}{steps}, data {self.data}"


def require_initial_runs(place: Path, task: str, reproduction: str) -> None:
    """Refuse a place that is no comparison of a task.

    Raises:
        DataError: It is none.
    """
    if _read_comparison(place).get("task") != task:
        raise DataError(
            f"{place} is no comparison of {task}; expected for {reproduction} the --out folder of one, with arms. To "
            f"fine-tune a single model: headwise compare glue --pretrained {place}"
        )


def read_initial_runs(place: Path, data: Path | None, cache: Path) -> InitialRuns:
    """Return what a comparison is.

    Raises:
        DataError: The folder holds no comparison.
    """
    record = _read_comparison(place)
    try:
        task, scale, fingerprint = (str(record[name]) for name in ("task", "scale", "data"))
        steps = record["sizes"].get("steps")
    except (KeyError, TypeError, AttributeError):
        raise DataError(f"{place / COMPARISON} is not the record of a comparison; make it again.") from None
    named = f"{find_corpus_name(fingerprint, data, cache)} {fingerprint}".strip()
    return InitialRuns(task, scale, None if steps is None else int(steps), named)


def _read_comparison(place: Path) -> dict[str, Any]:
    found = read_json(place / COMPARISON) if (place / COMPARISON).is_file() else {}
    return found if isinstance(found, dict) else {}
