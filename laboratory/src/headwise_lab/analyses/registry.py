"""The analyses of finished runs by name, and how one is done as a job; each result is a file in the run's folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from headwise.atomic import seal
from headwise.errors import require_choice
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.experiment.task import Analysis
from headwise_lab.results.runs import HALVE, REDUNDANCY, STEP_TIME

HEAD_VECTORS = "head-vectors"
FORCE_DIRECTIONS = "force-directions"
SHRINKING = "shrinking"
# For runs of any task; those of one task are its `analyses`.
ANALYSES: Mapping[str, Analysis] = {
    HEAD_VECTORS: Analysis("headwise_lab.analyses.head_vectors:measure_head_vectors"),
    REDUNDANCY: Analysis("headwise_lab.analyses.head_removal:measure_redundancy"),
    HALVE: Analysis("headwise_lab.analyses.shrinking:measure_halving"),
    STEP_TIME: Analysis("headwise_lab.analyses.step_time:measure_step_time", once=True),
    FORCE_DIRECTIONS: Analysis("headwise_lab.analyses.force_directions:measure_directions"),
    SHRINKING: Analysis("headwise_lab.analyses.shrinking:measure_shrinking"),
}


@dataclass(frozen=True)
class AnalysisSettings:
    """An analysis of one finished run.

    Attributes:
        name: One of `ANALYSES` or of the task's analyses.
        run: The run's settings.
    """

    name: str
    run: RunSettings

    def __post_init__(self) -> None:
        find_analysis(self.name, self.run.task)

    def record(self) -> dict[str, Any]:
        """Return what determines its numbers, as JSON data."""
        return {"analysis": self.name, **self.run.record()}


def find_analysis(name: str, task: str) -> Analysis:
    """Return an analysis of runs of a task; raises SettingError for an unknown name."""
    known = {**ANALYSES, **named_task(task).analyses}
    require_choice("analysis", name, known)
    return known[name]


def identify_inputs(name: str, task: str, scale: Any) -> str | None:
    """Return the digest of an analysis' further inputs, or None; raises if the scale does not name readable ones."""
    about = find_analysis(name, task).about
    return resolve_name(about)(scale) if about else None


def is_analyzed(settings: AnalysisSettings, folder: Path) -> bool:
    """Return whether the analysis of the run in `folder` exists and is of the same inputs."""
    path = run_folder.analysis_file(folder, settings.name)
    if not path.exists():
        return False
    about = identify_inputs(settings.name, settings.run.task, settings.run.scale)
    return about is None or run_folder.read_json(path).get("about") == about


def analyze(settings: AnalysisSettings, folder: Path) -> None:
    """Do an analysis of the finished run in `folder`, unless it exists."""
    if not is_analyzed(settings, folder):
        measure = resolve_name(find_analysis(settings.name, settings.run.task).measure)
        path = run_folder.analysis_file(folder, settings.name)
        run_folder.write_json(path, seal(measure(settings.run, folder), folder))
