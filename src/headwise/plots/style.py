"""The look of all figures: fonts, colors, and elements that are drawn the same way everywhere.

matplotlib is imported on use, and the user's own settings are not changed.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.errors import SettingError
from headwise.report.html import DPI

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's color-blind safe colors without black (the reference) and yellow (too pale), and two of Paul Tol's.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#882255", "#999933")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.2, 1.2, 1.2)))
GRAY = "#6b7078"


@dataclass(frozen=True)
class Style:
    """How a curve is drawn."""

    color: str
    marker: str
    dash: Any


GRAY_DASHED = Style(GRAY, "", DASHES[1])


def assign_styles(names: Sequence[str], *, reference: str = "") -> dict[str, Style]:
    """Assign a style to each name: black for the reference, the others in order.

    >>> assign_styles(["MA", "RMA"], reference="MA")["MA"]
    Style(color='#000000', marker='o', dash='-')
    """
    found = {reference: Style("#000000", "o", "-")} if reference else {}
    others = [name for name in names if name != reference]
    for place, name in enumerate(others):
        turn = place // len(COLORS)
        found[name] = Style(
            COLORS[place % len(COLORS)], MARKERS[(place + turn) % len(MARKERS)], DASHES[turn % len(DASHES)]
        )
    return found


@contextmanager
def drawing(width: float, height: float) -> Iterator[Figure]:
    """Yield an empty figure, its size given in inches, in headwise's style; text is never parsed as math."""
    import matplotlib as mpl

    from headwise.plots.figure import ShownFigure

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
        figure = ShownFigure(figsize=(width, height), dpi=DPI, layout="constrained")
        yield figure
        # ticks take their style when first drawn, which must happen inside this context
        figure.draw_without_rendering()


@contextmanager
def drawing_panels(
    number: int, columns: int, *, panel: tuple[float, float], margin: tuple[float, float]
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a figure and its axes, row by row, with at most `columns` in a row; panel and margin are in inches."""
    columns = min(columns, number)
    rows = math.ceil(number / columns)
    with drawing(margin[0] + panel[0] * columns, margin[1] + panel[1] * rows) as figure:
        places = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes in places[number:]:
            figure.delaxes(axes)
        yield figure, places[:number]


def draw_range(
    axes: Axes,
    places: Sequence[float],
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


def use_log_axis(axes: Axes) -> None:
    """Make the horizontal axis logarithmic, with plain numbers as labels."""

    def minor(value: float, _place: object) -> str:
        low, high = axes.get_xlim()
        # minor labels fit only below a decade
        return f"{value:g}" if high < 10 * low else ""

    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    # matplotlib's own labels are math text, which is not parsed here
    axes.xaxis.set_minor_formatter(minor)


def use_integer_ticks(axes: Axes) -> None:
    """Label the horizontal axis at integers only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_counts(
    axes: Axes, values: Sequence[float], edges: Sequence[float], models: int, style: Style, *, filled: bool, label: str
) -> None:
    """Draw a histogram of values per model, as a mean over models; values beyond the edges count in the end bars."""
    inside = [min(max(value, edges[0]), edges[-1]) for value in values]
    look = {"histtype": "stepfilled", "alpha": 0.45} if filled else {"histtype": "step", "linewidth": 1.6}
    weights = [1 / models] * len(values)
    axes.hist(inside, bins=list(edges), weights=weights, color=style.color, linestyle=style.dash, label=label, **look)


def to_png(figure: Figure) -> bytes:
    """Return a figure as the bytes of a PNG file; equal figures give equal bytes."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DPI, metadata={"Software": None})
    return content.getvalue()


def require_curves(name: str, curves: Mapping[str, Sized]) -> None:
    """Raise `SettingError` unless there is at least one curve and none is empty."""
    empty = [curve for curve, runs in curves.items() if not len(runs)]
    if not curves or empty:
        raise SettingError(
            f"{name} has {'nothing' if not curves else f'nothing for {empty[0]}'}; expected at least one "
            "entry for each name."
        )
