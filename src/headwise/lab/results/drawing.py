"""How a comparison is drawn: estimates with their intervals, and means over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from headwise.lab.results.statistics import Estimate
from headwise.lab.results.table import PLAIN, Table
from headwise.plots.style import GRAY, Style, assign_styles, draw_range
from headwise.report.html import DPI

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Height of a line of text, in points.
LINE = 12.0


def choose_styles(table: Table) -> dict[str, Style]:
    """Return the style of each arm: plain is black, the others follow their order in the table."""
    return assign_styles([row.arm for row in table.arms], reference=PLAIN)


def draw_line(
    axes: Axes, bins: Sequence[int], found: Sequence[Estimate], style: Style, *, label: str = "", width: float = 1.8
) -> None:
    """Draw values in percent with interval bands."""
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
    """Draw differences in points with error bars."""
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
    """Write names to the right of the last bin at their values, moved apart if they would touch."""
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
    """Make the vertical axis, of scores in percent, span at least a point, starting no lower than the scores or 0.

    Otherwise arms at chance, hundredths of a point apart, would look very different.
    """
    low, high = axes.get_ylim()
    if high - low < 1.0:
        low = max((low + high - 1.0) / 2, min(low, 0.0))
        axes.set_ylim(low, low + 1.0)


def draw_means(
    axes: Axes,
    dots: Mapping[str, Sequence[tuple[float, float]]],
    style: Mapping[str, Style],
    plain: Estimate | None = None,
) -> None:
    """Draw seeds as small dots and means as large ones with a legend, and plain as a level with its interval."""
    if plain is not None:
        _draw_level(axes, plain)
    for arm, found in dots.items():
        look = style[arm]
        mean = fmean(x for x, _ in found), fmean(y for _, y in found)
        axes.scatter(*zip(*found, strict=True), s=18, color=look.color, marker=look.marker, alpha=0.45, linewidths=0)
        axes.scatter(
            *mean, s=95, color=look.color, marker=look.marker, edgecolors="white", linewidths=1.2, zorder=3, label=arm
        )
    axes.margins(0.08, 0.1)
    span_a_point(axes)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.figure.legend(loc="outside right upper", frameon=False)


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
