"""How a comparison is drawn: one color, marker and dash an arm, lines with bands, means with names beside them.

Owns the look of every figure of the laboratory. Must not know what is plotted against what; that is `figures`'.
matplotlib is imported inside, and nothing of the user's own settings of it is changed.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from headwise.lab.labels import Box, place_labels
from headwise.lab.statistics import Estimate
from headwise.lab.table import PLAIN, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "GRAY_DASHED",
    "Style",
    "draw_counts",
    "draw_differences",
    "draw_line",
    "draw_means",
    "draw_range",
    "draw_reference",
    "drawing",
    "name_ends",
    "styles",
    "to_png",
    "whole_numbers",
]

# Okabe and Ito's colors, told apart under every common color blindness, without black (plain) and yellow (too pale);
# then two of Paul Tol's for the same purpose.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#882255", "#999933")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.2, 1.2, 1.2)))
GRAY = "#6b7078"
DPI = 160
# In points: the height of a line of text, and how far from its dot a name is led to it by a line.
LINE, LEADER = 12.0, 14.0


@dataclass(frozen=True)
class Style:
    """How an arm is drawn."""

    color: str
    marker: str
    dash: Any


GRAY_DASHED = Style(GRAY, "", DASHES[1])


def styles(table: Table) -> dict[str, Style]:
    """Return how each arm is drawn: plain black, the others by their place in the table."""
    found = {PLAIN: Style("#000000", "o", "-")}
    others = [row.arm for row in table.arms if row.arm != PLAIN]
    for place, arm in enumerate(others):
        turn = place // len(COLORS)
        found[arm] = Style(
            COLORS[place % len(COLORS)], MARKERS[(place + turn) % len(MARKERS)], DASHES[turn % len(DASHES)]
        )
    return found


@contextmanager
def drawing(width: float, height: float) -> Iterator[Figure]:
    """Yield an empty figure of a size in inches under headwise's look; names are text, never mathematics."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    look: dict[Any, Any] = {
        "axes.axisbelow": True,
        "axes.edgecolor": GRAY,
        "axes.grid": True,
        "axes.labelcolor": "#1c1d1f",
        "axes.spines.right": False,
        "axes.spines.top": False,
        "figure.facecolor": "white",
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "grid.color": "#e6e7e9",
        "grid.linewidth": 0.8,
        "legend.fontsize": 9.5,
        "lines.solid_capstyle": "round",
        "savefig.facecolor": "white",
        "text.parse_math": False,
        "text.usetex": False,
        "xtick.color": GRAY,
        "xtick.labelcolor": "#1c1d1f",
        "ytick.color": GRAY,
        "ytick.labelcolor": "#1c1d1f",
    }
    with mpl.rc_context(look):
        yield Figure(figsize=(width, height), dpi=DPI, layout="constrained")


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


def draw_range(
    axes: Axes,
    places: Sequence[int],
    low: Sequence[float],
    middle: Sequence[float],
    high: Sequence[float],
    style: Style,
    *,
    label: str = "",
    width: float = 1.8,
) -> None:
    """Draw values as a line with a band from low to high."""
    axes.plot(
        places,
        middle,
        color=style.color,
        linestyle=style.dash,
        marker=style.marker or None,
        markersize=5,
        linewidth=width,
        label=label or None,
    )
    axes.fill_between(places, low, high, color=style.color, alpha=0.10, linewidth=0)


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


def whole_numbers(axes: Axes) -> None:
    """Label the horizontal axis at whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


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


def draw_counts(
    axes: Axes, values: Sequence[float], edges: Sequence[float], models: int, style: Style, *, filled: bool, label: str
) -> None:
    """Draw how many of one model's values lie between two edges, the mean over models; what lies beyond is at the ends.

    Args:
        axes: Where.
        values: The values of all models.
        edges: Edges of the bars, rising.
        models: How many models they are of.
        style: Its color and dash are used.
        filled: Whether bars are filled, or only their outline is drawn.
        label: Its name in the legend.
    """
    inside = [min(max(value, edges[0]), edges[-1]) for value in values]
    look = {"histtype": "stepfilled", "alpha": 0.45} if filled else {"histtype": "step", "linewidth": 1.6}
    weights = [1 / models] * len(values)
    axes.hist(inside, bins=list(edges), weights=weights, color=style.color, linestyle=style.dash, label=label, **look)


def draw_means(
    figure: Figure, axes: Axes, dots: Mapping[str, Sequence[tuple[float, float]]], style: Mapping[str, Style]
) -> None:
    """Draw seeds as small dots and means as large ones, and name each mean."""
    means = {arm: (fmean(x for x, _ in found), fmean(y for _, y in found)) for arm, found in dots.items()}
    for arm, found in dots.items():
        look = style[arm]
        axes.scatter(*zip(*found, strict=True), s=18, color=look.color, marker=look.marker, alpha=0.45, linewidths=0)
        axes.scatter(
            *means[arm], s=95, color=look.color, marker=look.marker, edgecolors="white", linewidths=1.2, zorder=3
        )
    axes.margins(0.08, 0.1)
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
    places = place_labels(anchors, sizes, obstacles, (left, bottom, right, top))
    back = axes.transData.inverted()
    for text, box, (x, y) in zip(texts, places, anchors, strict=True):
        text.set_position(tuple(back.transform((box[0] * per_point, box[1] * per_point))))
        nearest = min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3])
        if math.dist(nearest, (x, y)) > LEADER:
            (x0, y0), (x1, y1) = back.transform([[edge * per_point for edge in end] for end in (nearest, (x, y))])
            axes.plot([x0, x1], [y0, y1], color=text.get_color(), linewidth=0.9, alpha=0.6, zorder=1)


def draw_reference(axes: Axes, plain: Estimate) -> None:
    """Draw plain as a level with its interval as a band."""
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


def to_png(figure: Figure) -> bytes:
    """Return the bytes of the figure as a PNG file; equal figures have equal bytes."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DPI, metadata={"Software": None})
    return content.getvalue()


def _in_points(axes: Axes, dot: tuple[float, float]) -> tuple[float, float]:
    x, y = axes.transData.transform(dot)
    return float(x) * 72 / DPI, float(y) * 72 / DPI


def _around(dot: tuple[float, float], half: float) -> Box:
    return dot[0] - half, dot[1] - half, dot[0] + half, dot[1] + half
