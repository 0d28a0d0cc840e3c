"""What the runs of a reproduction began with: a comparison of another task, in which each arm has its own run.

Owns what a record says of it, and the refusal of anything else. Must not know models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.errors import DataError
from headwise.lab.experiment.run_folder import read_json
from headwise.lab.papers.data import find_corpus_name
from headwise.lab.results.runs import COMPARISON


@dataclass(frozen=True)
class Begun:
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


def require_begun(place: Path, task: str, asked: str) -> None:
    """Refuse a place that is no comparison of a task.

    Raises:
        DataError: It is none; the message says what to run instead.
    """
    if _record(place).get("task") != task:
        raise DataError(
            f"{place} is no comparison of {task}; expected for {asked} the --out folder of one, with arms. "
            f"To fine-tune a single model: headwise compare glue --pretrained {place}"
        )


def read_begun(place: Path, data: Path | None, cache: Path) -> Begun:
    """Return what a comparison is.

    Args:
        place: Its folder.
        data: Folder of its data, where that is known.
        cache: Folder that prepared data is kept in.

    Raises:
        DataError: The folder holds no comparison.
    """
    record = _record(place)
    try:
        task, scale, fingerprint = (str(record[name]) for name in ("task", "scale", "data"))
        steps = record["sizes"].get("steps")
    except (KeyError, TypeError, AttributeError):
        raise DataError(f"{place / COMPARISON} is not the record of a comparison; make it again.") from None
    named = f"{find_corpus_name(fingerprint, data, cache)} {fingerprint}".strip()
    return Begun(task, scale, None if steps is None else int(steps), named)


def _record(place: Path) -> dict[str, Any]:
    found = read_json(place / COMPARISON) if (place / COMPARISON).is_file() else {}
    return found if isinstance(found, dict) else {}
