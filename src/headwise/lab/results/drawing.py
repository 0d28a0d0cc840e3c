"""How a comparison is drawn: estimates with their intervals, and means with names beside them.

Owns what only an estimate or a table has; the look is that of `headwise.plots.style`. Must not know what is plotted
against what; that is `figures`'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from headwise.lab.results.labels import Box, place_labels
from headwise.lab.results.statistics import Estimate
from headwise.lab.results.table import PLAIN, Table
from headwise.plots.style import GRAY, Style, draw_range, styles_of
from headwise.report.html import DPI

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# In points: the height of a line of text, and how far from its dot a name is led to it by a line.
LINE, LEADER = 12.0, 14.0


def styles(table: Table) -> dict[str, Style]:
    """Return how each arm is drawn: plain black, the others by their place in the table."""
    return styles_of([row.arm for row in table.arms], reference=PLAIN)


def draw_line(
    axes: Axes, bins: Sequence[int], found: Sequence[Estimate], style: Style, *, label: str = "", width: float = 1.8
) -> None:
    """Draw values in percent with their intervals as a band."""
    draw_range(
        axes,
        bins,
        [100 * one.low for one in found],
        [100 * one.value for one in found],
        [100 * one.high for one in found],
        style,
        label=label,
        width=width,
    )


def draw_differences(axes: Axes, places: Sequence[float], found: Sequence[Estimate], style: Style) -> None:
    """Draw differences in points with their intervals as bars."""
    values = [100 * one.value for one in found]
    spread = [[100 * (one.value - one.low) for one in found], [100 * (one.high - one.value) for one in found]]
    # the thin line leads the eye from bin to bin
    axes.plot(places, values, color=style.color, linestyle=style.dash, linewidth=0.8, alpha=0.45)
    axes.errorbar(
        places,
        values,
        yerr=spread,
        color=style.color,
        marker=style.marker,
        linestyle="none",
        markersize=5,
        elinewidth=1.3,
    )


def name_ends(figure: Figure, axes: Axes, ends: Mapping[str, float]) -> None:
    """Write names to the right of the last bin at their values, moved apart where they would touch."""
    figure.draw_without_rendering()
    low, high = axes.get_ylim()
    step = LINE * (high - low) / (axes.get_window_extent().height * 72 / DPI)
    place = -math.inf
    for name, value in sorted(ends.items(), key=lambda item: item[1]):
        place = max(value, place + step)
        axes.annotate(
            name,
            (axes.get_xticks()[-1], place),
            xytext=(7, 0),
            textcoords="offset points",
            color=GRAY,
            va="center",
            fontsize=9,
        )


def span_a_point(axes: Axes) -> None:
    """Let the vertical axis, of scores in percent, span a point or more, and begin no lower than they do or 0.

    Scores of arms at chance lie hundredths of a point apart, and an axis of that span makes them look far from it.
    """
    low, high = axes.get_ylim()
    if high - low < 1.0:
        low = max((low + high - 1.0) / 2, min(low, 0.0))
        axes.set_ylim(low, low + 1.0)


def draw_means(
    figure: Figure,
    axes: Axes,
    dots: Mapping[str, Sequence[tuple[float, float]]],
    style: Mapping[str, Style],
    plain: Estimate | None = None,
) -> None:
    """Draw seeds as small dots and means as large ones, name each mean, and draw plain as a level with its interval."""
    if plain is not None:
        _draw_level(axes, plain)
    means = {arm: (fmean(x for x, _ in found), fmean(y for _, y in found)) for arm, found in dots.items()}
    for arm, found in dots.items():
        look = style[arm]
        axes.scatter(*zip(*found, strict=True), s=18, color=look.color, marker=look.marker, alpha=0.45, linewidths=0)
        axes.scatter(
            *means[arm], s=95, color=look.color, marker=look.marker, edgecolors="white", linewidths=1.2, zorder=3
        )
    axes.margins(0.08, 0.1)
    span_a_point(axes)
    axes.yaxis.set_major_formatter("{x:g}")
    figure.draw_without_rendering()
    # what is measured now must hold when the file is written
    figure.set_layout_engine("none")
    axes.autoscale(False)
    per_point = DPI / 72
    texts = [
        axes.text(*means[arm], arm, color=style[arm].color, fontsize=9.5, fontweight="bold", va="bottom")
        for arm in means
    ]
    sizes = [(box.width / per_point, box.height / per_point) for box in (text.get_window_extent() for text in texts)]
    anchors = [_in_points(axes, mean) for mean in means.values()]
    obstacles = [_around(anchor, 6) for anchor in anchors for _ in range(3)]
    obstacles += [_around(_in_points(axes, dot), 2) for found in dots.values() for dot in found]
    left, bottom, right, top = (edge / per_point for edge in axes.get_window_extent().extents)
    if plain is not None:
        level = _in_points(axes, (axes.get_xlim()[0], 100 * plain.value))[1]
        obstacles.append((left, level - 2, right, level + 2))
    places = place_labels(anchors, sizes, obstacles, (left, bottom, right, top))
    back = axes.transData.inverted()
    for text, box, (x, y) in zip(texts, places, anchors, strict=True):
        text.set_position(tuple(back.transform((box[0] * per_point, box[1] * per_point))))
        nearest = min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3])
        if math.dist(nearest, (x, y)) > LEADER:
            (x0, y0), (x1, y1) = back.transform([[edge * per_point for edge in end] for end in (nearest, (x, y))])
            axes.plot([x0, x1], [y0, y1], color=text.get_color(), linewidth=0.9, alpha=0.6, zorder=1)


def _draw_level(axes: Axes, plain: Estimate) -> None:
    axes.axhspan(100 * plain.low, 100 * plain.high, color="black", alpha=0.06, linewidth=0)
    axes.axhline(100 * plain.value, color="black", linewidth=1.2)
    axes.annotate(
        PLAIN,
        (1, 100 * plain.value),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        fontweight="bold",
        fontsize=9.5,
    )


def _in_points(axes: Axes, dot: tuple[float, float]) -> tuple[float, float]:
    x, y = axes.transData.transform(dot)
    return float(x) * 72 / DPI, float(y) * 72 / DPI


def _around(dot: tuple[float, float], half: float) -> Box:
    return dot[0] - half, dot[1] - half, dot[0] + half, dot[1] + half
