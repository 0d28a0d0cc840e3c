"""What is measured of a trained model afterwards, one file beside its result.

Owns the names of the analyses and how one is done as a job of the pool. What each measures is in a file of its own,
imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.errors import require_choice
from headwise.lab.experiment import run_folder
from headwise.lab.experiment.settings import RunSettings
from headwise.lab.results.head_drops import REDUNDANCY
from headwise.lab.results.runs import STEP_TIME

HEAD_VECTORS = "head-vectors"
RELIABILITY = "reliability"
ENTROPY = "predictive-entropy"
ATTENTION_MAPS = "attention-maps"
FORCE_DIRECTIONS = "force-directions"


def _head_vectors(settings: RunSettings, folder: Path) -> dict[str, Any]:
    from headwise.lab.analyses.head_vectors import measure_head_vectors

    return measure_head_vectors(settings, folder)


def _redundancy(settings: RunSettings, folder: Path) -> dict[str, Any]:
    from headwise.lab.analyses.head_removal import measure_redundancy

    return measure_redundancy(settings, folder)


def _step_time(settings: RunSettings, folder: Path) -> dict[str, Any]:
    from headwise.lab.analyses.step_time import measure_step_time

    return measure_step_time(settings, folder)


def _reliability(settings: RunSettings, folder: Path) -> dict[str, Any]:
    from headwise.lab.tasks.sentence.uncertainty import measure_reliability

    return measure_reliability(settings, folder)


def _entropy(settings: RunSettings, folder: Path) -> dict[str, Any]:
    from headwise.lab.tasks.sentence.uncertainty import measure_entropy

    return measure_entropy(settings, folder)


def _texts(scale: Any) -> str:
    from headwise.lab.tasks.sentence.uncertainty import texts_of

    return texts_of(scale)


def _attention_maps(settings: RunSettings, folder: Path) -> dict[str, Any]:
    from headwise.lab.tasks.sentence.attention_maps import measure_attention

    return measure_attention(settings, folder)


def _force_directions(settings: RunSettings, folder: Path) -> dict[str, Any]:
    from headwise.lab.analyses.force_directions import measure_directions

    return measure_directions(settings, folder)


# Each takes a finished run's settings and folder and returns {"numbers": {name: number}, ...}.
ANALYSES: Mapping[str, Callable[[RunSettings, Path], dict[str, Any]]] = {
    HEAD_VECTORS: _head_vectors,
    REDUNDANCY: _redundancy,
    STEP_TIME: _step_time,
    RELIABILITY: _reliability,
    ENTROPY: _entropy,
    ATTENTION_MAPS: _attention_maps,
    FORCE_DIRECTIONS: _force_directions,
}
# What an analysis is about besides the run, by its scale: a digest, kept under "about".
ABOUT: Mapping[str, Callable[[Any], str]] = {ENTROPY: _texts}
# What is the same for every seed is measured with the first alone.
ONCE = (STEP_TIME,)


@dataclass(frozen=True)
class AnalysisSettings:
    """An analysis of one finished run.

    Attributes:
        name: One of `ANALYSES`.
        run: What the run was made from.
    """

    name: str
    run: RunSettings

    def __post_init__(self) -> None:
        require_choice("analysis", self.name, ANALYSES)

    def record(self) -> dict[str, Any]:
        """Return what determines its numbers, as JSON data."""
        return {"analysis": self.name, **self.run.record()}


def is_analysed(settings: AnalysisSettings, folder: Path) -> bool:
    """Return whether an analysis of the run in `folder` is there, and about what is asked for now."""
    path = run_folder.analysis_file(folder, settings.name)
    if not path.exists():
        return False
    about = ABOUT.get(settings.name)
    return about is None or run_folder.read_json(path).get("about") == about(settings.run.scale)


def analyse(settings: AnalysisSettings, folder: Path) -> None:
    """Do an analysis of the finished run in `folder`, unless it is there already."""
    if not is_analysed(settings, folder):
        run_folder.write_json(
            run_folder.analysis_file(folder, settings.name), ANALYSES[settings.name](settings.run, folder)
        )
