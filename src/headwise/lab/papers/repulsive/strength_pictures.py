"""Figures of how strong repulsion is and what it reaches: in what heads compute, and in their parameters.

Owns which measures of runs are plotted against which; how it looks is `drawing`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from headwise.lab.results.drawing import choose_styles, draw_means
from headwise.lab.results.evidence import Evidence
from headwise.lab.results.figures import Picture, draw_score_by_force
from headwise.lab.results.table import Table
from headwise.plots.style import drawing, to_png, use_log_axis

Measures = Mapping[str, float | None]
Reads = Callable[[Measures], float | None]
FORCE = "force ratio: norm of the repulsion over norm of the drive"
PARAMETERS = "distance of parameters: 1 - mean absolute cosine between heads"
OUTPUTS = "distance of outputs: 1 - linear CKA"
ATTENTION = "distance of attention: Jensen-Shannon, nats"


def strengths(part: str, folder: Path, evidence: Evidence, table: Table) -> tuple[Picture, ...]:  # noqa: ARG001  as all are called
    """Return score and distance of outputs by force ratio, and distances of what heads compute by those of parameters.

    Each where at least two arms have both numbers.
    """
    drawn = (
        draw_score_by_force(table),
        _scatter("outputs-by-force", evidence, table, (FORCE, _force), (OUTPUTS, _outputs), log=True),
        _scatter("outputs-by-parameters", evidence, table, (PARAMETERS, _parameters), (OUTPUTS, _outputs)),
        _scatter("attention-by-parameters", evidence, table, (PARAMETERS, _parameters), (ATTENTION, _attention)),
    )
    named = f"-{part.lower()}" if part else ""
    said = f"{part}: " if part else ""
    return tuple(
        replace(one, name=f"{one.name}{named}", caption=f"{said}{one.caption}") for one in drawn if one is not None
    )


def _scatter(
    name: str,
    evidence: Evidence,
    table: Table,
    across: tuple[str, Reads],
    up: tuple[str, Reads],
    *,
    log: bool = False,
) -> Picture | None:
    dots: dict[str, list[tuple[float, float]]] = {}
    for run in evidence.results.runs:
        x, y = across[1](run.measures), up[1](run.measures)
        if x is not None and y is not None:
            dots.setdefault(run.arm, []).append((x, y))
    if len(dots) < 2:
        return None
    with drawing(8.4, 4.8) as figure:
        axes = figure.subplots()
        if log:
            use_log_axis(axes)
        axes.set_xlabel(across[0])
        axes.set_ylabel(up[0])
        draw_means(axes, dots, choose_styles(table))
        png = to_png(figure)
    alt = "; ".join(
        f"{arm} {fmean(x for x, _ in found):.2g}, {fmean(y for _, y in found):.2g}" for arm, found in dots.items()
    )
    caption = (
        f"{up[0][:1].upper()}{up[0][1:]}, by {across[0]}; each small dot a seed, each large one the mean of an arm."
    )
    return Picture(name, png, caption, alt)


def _force(measures: Measures) -> float | None:
    # without repulsion there is none, and no place for it on a logarithmic axis
    return measures["force_ratio"] or None


def _parameters(measures: Measures) -> float | None:
    return _distance(measures["parameter_cosine"])


def _outputs(measures: Measures) -> float | None:
    return _distance(measures["output_cka"])


def _attention(measures: Measures) -> float | None:
    return measures["position_js"]


def _distance(similarity: float | None) -> float | None:
    return None if similarity is None else 1.0 - similarity
