"""How a comparison is drawn: estimates with their intervals, and means over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from headwise.lab.results.statistics import Estimate, estimate
from headwise.lab.results.table import PLAIN, Table
from headwise.plots.style import GRAY, Style, assign_styles, draw_range
from headwise.report.html import DPI

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Height of a line of text, in points.
LINE = 12.0
# Of a scale with many changed sizes, so much is shown in a figure.
LONGEST_SCALE = 44


# Place of usual arms in the styles: the same arm looks the same in all comparisons, and near arms differ.
PLACES = {"svgd": 0, "output": 1, "em": 2, "output+em": 3, "smooth": 4, "scaled": 5, "svgd-relative": 6, "trunk": 7}
SHORT = {name: name.upper() for name in ("svgd", "spos", "sgld", "em", "cka", "hsic")}


def choose_styles(table: Table) -> dict[str, Style]:
    """Return the style of each arm: plain is black; the usual arms have theirs everywhere, others what is left."""
    names = [row.arm for row in table.arms if row.arm != PLAIN]
    # of arms with equal letters before the settings the first has the usual place
    usual: dict[int, str] = {}
    for name in names:
        place = PLACES.get(name.partition(":")[0])
        if place is not None and place not in usual:
            usual[place] = name
    others = iter(name for name in names if name not in usual.values())
    ordered = [usual[place] if place in usual else next(others, "") for place in range(len(PLACES))]
    # an empty name holds a place that no arm of this table has
    held = [name or f" {place}" for place, name in enumerate([*ordered, *others])]
    found = assign_styles([PLAIN, *held], reference=PLAIN)
    return {name: found[name] for name in (PLAIN, *names)}


def label_arm(name: str) -> str:
    """Return an arm's name as a figure has it.

    >>> label_arm("svgd:alpha=1.0,layers=0/1"), label_arm("output+em"), label_arm("svgd-relative")
    ('SVGD, alpha 1, layers 0/1', 'output + EM', 'SVGD-relative')
    """
    words, _, settings = name.partition(":")
    methods = ["-".join(SHORT.get(word, word) for word in method.split("-")) for method in words.split("+")]
    given = [
        setting.replace("=", " ").replace("_", " ").removesuffix(".0") for setting in settings.split(",") if setting
    ]
    return ", ".join([" + ".join(methods), *given])


def name_data(axes: Axes, table: Table) -> None:
    """Write above the axes what was compared: task, data, scale and number of seeds."""
    seeds = max(len(row.seeds) for row in table.rows)
    scale = table.scale if len(table.scale) <= LONGEST_SCALE else f"{table.scale[:LONGEST_SCALE]}..."
    task = f"{table.task} on {table.named}" if table.named else table.task
    said = f"{task}, scale {scale}, {seeds} seed{'s' * (seeds > 1)}"
    axes.set_title(said, loc="left", fontsize=9, color=GRAY)


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
            *mean,
            s=95,
            color=look.color,
            marker=look.marker,
            edgecolors="white",
            linewidths=1.2,
            zorder=3,
            label=label_arm(arm),
        )
    axes.margins(0.08, 0.1)
    span_a_point(axes)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.figure.legend(loc="outside right upper", frameon=False)


def draw_spread(axes: Axes, values: Sequence[float], place: float, style: Style) -> None:
    """Draw numbers of seeds along a row as small dots, and their mean with Student's 95 % interval."""
    axes.scatter(values, [place] * len(values), s=18, color=style.color, marker=style.marker, alpha=0.45, linewidths=0)
    found = estimate(np.array(values)[:, None])
    spread = None if found.is_one_number else [[found.value - found.low], [found.high - found.value]]
    axes.errorbar(
        [found.value],
        [place],
        xerr=spread,
        color=style.color,
        marker=style.marker,
        markersize=9,
        markeredgecolor="white",
        elinewidth=1.3,
        linestyle="none",
    )


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
