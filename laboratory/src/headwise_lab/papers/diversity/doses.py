"""Our own question: how score and effective heads follow the strength of a method and the budget of its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from headwise.plots.style import GRAY, MARKERS, assign_styles, drawing, to_png
from headwise_lab.results.evidence import Evidence
from headwise_lab.results.figures import Picture, draw_effective_heads, name_data
from headwise_lab.results.statistics import Estimate, estimate
from headwise_lab.results.table import Row, Table

EFFECTIVE = "effective_heads"
# Shares of the loss's gradient on the heads, in equal steps on a logarithmic axis.
RATIOS = (0.01, 0.04, 0.17, 0.72, 3.0)
METHODS = ("svgd-relative", "svgd-span", "output-relative", "cka", "subspace-relative")
CONTROLS = ("plain", "smooth", "scaled", "trunk", "em", "drophead")
# Effective heads and the score in percent.
Point = tuple[Estimate, Estimate]


def name_doses(method: str) -> tuple[str, ...]:
    """Return the arms of a method, the weakest first.

    >>> name_doses("cka")[:2]
    ('cka:ratio=0.01', 'cka:ratio=0.04')
    """
    return tuple(f"{method}:ratio={ratio}" for ratio in RATIOS)


def draw_heads(part: str, folder: Path, evidence: Evidence, table: Table) -> tuple[Picture, ...]:  # noqa: ARG001  as all are called
    """Return the effective heads of each arm."""
    drawn = draw_effective_heads(table)
    return () if drawn is None else (drawn,)


def draw_doses(evidence: Mapping[str, Evidence], tables: Mapping[str, Table]) -> Picture | None:
    """Return the score by effective heads, a panel for each budget, a line for each method from weak to strong."""
    placed = {part: {row.arm: _place(row, found) for row in tables[part].arms} for part, found in evidence.items()}
    panels: dict[str, dict[str, list[Point]]] = {}
    for part, arms in placed.items():
        # the weakest first
        lines = {method: [point for arm in name_doses(method) if (point := arms.get(arm))] for method in METHODS}
        if any(len(points) > 1 for points in lines.values()):
            panels[part] = {method: points for method, points in lines.items() if points}
    if not panels:
        return None
    with drawing(2.2 + 4.2 * len(panels), 4.8) as figure:
        shown = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
        for axes, (part, lines) in zip(shown, panels.items(), strict=True):
            _draw_panel(axes, lines, placed[part])
            axes.set_xlabel("effective heads")
            axes.set_title(part, loc="right", fontsize="medium")
        first = tables[next(iter(panels))]
        shown[0].set_ylabel(first.axis)
        name_data(shown[0], first)
        figure.legend(*shown[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
        png = to_png(figure)
    ends = "; ".join(
        f"{method} in {part} from {_write(points[0])} to {_write(points[-1])}"
        for part, lines in panels.items()
        for method, points in lines.items()
    )
    caption = (
        f"Score by effective heads, means over seeds with Student's 95 % intervals; a line for each method from "
        f"{RATIOS[0]:g} of the loss's gradient to {RATIOS[-1]:g} of it, where the dot is large; controls in gray. "
        f"A panel for each budget of training."
    )
    return Picture("doses", png, caption, ends)


def _draw_panel(axes: Axes, lines: Mapping[str, list[Point]], found: Mapping[str, Point | None]) -> None:
    styles = assign_styles(METHODS)
    for method, points in lines.items():
        color, places = styles[method].color, [(heads.value, score.value) for heads, score in points]
        axes.plot(*zip(*places, strict=True), color=color, marker="o", markersize=3, label=method)
        axes.plot(*places[-1], color=color, marker="o", markersize=8)
        _draw_intervals(axes, points, color)
    for place, (arm, mark) in enumerate(zip(CONTROLS, MARKERS, strict=False)):
        if point := found.get(arm):
            heads, score = (one.value for one in point)
            # plain in front of what hardly differs from it
            look: dict[str, Any] = {"s": 95, "color": GRAY, "edgecolors": "white", "zorder": 4 - 0.1 * place}
            axes.scatter(heads, score, marker=mark, label=arm, **look)
            _draw_intervals(axes, [point], GRAY)


def _place(row: Row, evidence: Evidence) -> Point | None:
    """Return the effective heads of an arm and its score in percent, over seeds; None where heads were not counted."""
    heads = list(evidence.of(row.arm, EFFECTIVE).values())
    scores = [100 * score for score in row.score.by_seed]
    return (estimate(np.array(heads)[:, None]), estimate(np.array(scores)[:, None])) if heads else None


def _draw_intervals(axes: Axes, points: Sequence[Point], color: str) -> None:
    for heads, score in points:
        if not heads.is_one_number:
            axes.hlines(score.value, heads.low, heads.high, color=color, linewidth=0.8, alpha=0.4)
            axes.vlines(heads.value, score.low, score.high, color=color, linewidth=0.8, alpha=0.4)


def _write(point: Point) -> str:
    return f"{point[0].value:.2f} heads, {point[1].value:.1f}"
