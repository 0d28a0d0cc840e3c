"""Figures of a number over a setting, such as accuracy over the number of heads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from headwise.errors import SettingError, require_choice
from headwise.plots.style import assign_styles, draw_range, drawing, require_curves, use_log_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headwise.plots.style import Style


def sweep(
    curves: Mapping[str, Mapping[float, Sequence[float]]],
    *,
    setting: str,
    measure: str,
    scale: str = "linear",
    reference: str = "",
) -> Figure:
    """Plot a number over a setting: one dot per run, a line through the means, and a band for the range of runs.

    Args:
        curves: Maps a name to the values of the runs at each value of the setting.
        setting: Label of the horizontal axis, for example "number of heads".
        measure: Label of the vertical axis, for example "accuracy, %".
        scale: "linear" or "log", of the horizontal axis.
        reference: The name drawn in black.

    Returns:
        A figure; `savefig` writes it.

    Raises:
        SettingError: There is nothing to draw, a number is not finite, or not positive on a logarithmic axis.

    Example:
        >>> runs = {"MA": {1: [61.0, 62.0], 10: [66.0, 67.5], 40: [64.0, 65.0]}}
        >>> sweep(runs, setting="number of heads", measure="accuracy, %").axes[0].get_xlabel()
        'number of heads'
    """
    require_curves("curves", curves)
    require_choice("scale", scale, ("linear", "log"))
    for name, places in curves.items():
        require_curves(f"the curve of {name}", {str(place): runs for place, runs in places.items()})
        wrong = next((place for place in places if not math.isfinite(place) or (scale == "log" and place <= 0)), None)
        if wrong is not None:
            above = " above 0, which a logarithmic axis can show" if scale == "log" else ""
            raise SettingError(f"{name} has runs at {setting} {wrong:g}; expected finite numbers{above}.")
        if not all(math.isfinite(value) for runs in places.values() for value in runs):
            raise SettingError(f"a value of {name} is not finite; expected scores of finished runs.")
    style = assign_styles(list(curves), reference=reference)
    with drawing(7.0, 4.4) as figure:
        axes = figure.subplots()
        for name, places in curves.items():
            draw_sweep(axes, sorted(places.items()), style[name], label=name)
        if scale == "log":
            use_log_axis(axes)
        else:
            axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(setting)
        axes.set_ylabel(measure)
        figure.legend(loc="outside upper left", ncols=3, frameon=False)
    return figure


def draw_sweep(axes: Axes, curve: Sequence[tuple[float, Sequence[float]]], style: Style, *, label: str) -> None:
    """Draw runs as dots, their means as a line, and their range as a band."""
    for x, runs in curve:
        axes.scatter([x] * len(runs), runs, s=16, color=style.color, marker=style.marker, alpha=0.4, linewidths=0)
    places, values = [x for x, _ in curve], [runs for _, runs in curve]
    draw_range(axes, places, [*map(min, values)], [*map(fmean, values)], [*map(max, values)], style, label=label)
