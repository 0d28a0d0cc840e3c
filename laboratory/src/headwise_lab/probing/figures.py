"""Grids and figures of probes: tasks by layers and by heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from headwise.plots.style import GRAY, assign_styles, drawing_panels, to_png
from headwise_lab.probing.probe import Probed, ProbedTask
from headwise_lab.results.cells import NONE, Grid
from headwise_lab.results.figures import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOTE = (
    "Accuracy on test, %. In parentheses: not significantly above the majority baseline, or guessing if that is better "
    "(one-sided binomial test at 0.05, Holm-adjusted over all probes of the task). ± is the widest half of a "
    "95 % binomial interval in the row. The best head is the one best on dev."
)
COLUMNS = 3


def make_layers_grid(tasks: Sequence[ProbedTask]) -> Grid | None:
    """Return the accuracy of each layer on each task; None if no layer was probed."""
    names, cells = _lay_out([task.layers for task in tasks])
    rows = tuple(
        (task.title, str(task.labels), f"{100 * task.majority:.1f}", *row, _format_half(task.layers))
        for task, row in zip(tasks, cells, strict=True)
    )
    header = ("task", "classes", "majority", *names, "±")
    return Grid("accuracy by layer, %", header, rows, "l" + "r" * (len(header) - 1)) if names else None


def make_heads_grid(tasks: Sequence[ProbedTask]) -> Grid | None:
    """Return the best head of each task and the number above chance; None if no single head was probed."""
    rows = []
    for task in tasks:
        if not (heads := task.single_heads):
            continue
        best = max(heads, key=lambda one: one.dev)
        shares = (task.majority, best.name, _format_cell(best), median(one.accuracy for one in heads))
        told = f"{sum(not one.at_chance for one in heads)} of {len(heads)}"
        cells = (f"{100 * one:.1f}" if isinstance(one, float) else one for one in shares)
        rows.append((task.title, *cells, told, _format_half(heads)))
    header = ("task", "majority", "best head", "its accuracy", "median head", "above chance", "±")
    return Grid("accuracy of single heads, %", header, tuple(rows), "lrlrrrr") if rows else None


def make_sets_grid(tasks: Sequence[ProbedTask]) -> Grid | None:
    """Return the accuracy of each set of heads on each task; None if none was probed."""
    names, cells = _lay_out([task.sets for task in tasks])
    rows = tuple((task.title, f"{100 * task.majority:.1f}", *row) for task, row in zip(tasks, cells, strict=True))
    header = ("task", "majority", *names)
    return Grid("accuracy of sets of heads, %", header, rows, "lr" + "r" * len(names)) if names else None


def draw_layers(tasks: Sequence[ProbedTask]) -> Picture | None:
    """Draw one panel per task: accuracy by layer with its interval, the majority baseline, hollow dots at chance."""
    tasks = [task for task in tasks if task.layers]
    if not tasks:
        return None
    style = assign_styles(["layer"])["layer"]
    with drawing_panels(len(tasks), COLUMNS, panel=(3.0, 2.3), margin=(0.6, 0.5)) as (figure, grid):
        for axes, task in zip(grid, tasks, strict=True):
            found = task.layers
            places = range(len(found))
            values = [100 * one.accuracy for one in found]
            below = [100 * (one.accuracy - one.low) for one in found]
            above = [100 * (one.high - one.accuracy) for one in found]
            axes.errorbar(places, values, yerr=[below, above], color=style.color, linewidth=1.4, elinewidth=1.1)
            for place, value, one in zip(places, values, found, strict=True):
                face = "white" if one.at_chance else style.color
                axes.plot(place, value, marker="o", markersize=5, markerfacecolor=face, markeredgecolor=style.color)
            axes.axhline(100 * task.majority, color=GRAY, linewidth=1.2, linestyle=(0, (5, 1.5)))
            axes.set_xticks(list(places), [one.name for one in found])
            axes.set_title(_format_title(task), fontsize=10, loc="left")
        figure.supxlabel("layer", fontsize=10)
        figure.supylabel("accuracy on test, %", fontsize=10)
        png = to_png(figure)
    caption = (
        "Accuracy of a classifier on the mean state of each layer, with 95 % binomial intervals; dashed, the majority "
        "baseline; a hollow dot is not significantly above it."
    )
    alt = "; ".join(
        f"{task.title}: " + ", ".join(f"{one.name} {100 * one.accuracy:.0f}" for one in task.layers) for task in tasks
    )
    return Picture("layers", png, caption, alt)


def draw_heads(tasks: Sequence[ProbedTask]) -> Picture | None:
    """Draw one panel per task and one square per head: points above the majority baseline, a cross at chance."""
    tasks = [task for task in tasks if len(task.single_heads) > 1]
    if not tasks:
        return None
    with drawing_panels(len(tasks), COLUMNS, panel=(3.2, 2.3), margin=(0.6, 0.5)) as (figure, grid):
        for axes, task in zip(grid, tasks, strict=True):
            _draw_squares(axes, task)
        figure.supxlabel("head", fontsize=10)
        figure.supylabel("layer", fontsize=10)
        png = to_png(figure)
    caption = (
        "Points of accuracy above the majority baseline of a classifier on the mean output of each head alone; panels "
        "have different scales; a cross is not significantly above the baseline."
    )
    alt = "; ".join(
        f"{task.title}: {sum(not one.at_chance for one in task.single_heads)} of {len(task.single_heads)} heads above "
        "chance"
        for task in tasks
    )
    return Picture("heads", png, caption, alt)


def _draw_squares(axes: Axes, task: ProbedTask) -> None:
    heads = {one.heads[0]: one for one in task.single_heads}
    deep, wide = (1 + max(place[axis] for place in heads) for axis in (0, 1))
    values = [[math.nan] * wide for _ in range(deep)]
    for (layer, head), one in heads.items():
        values[layer][head] = 100 * (one.accuracy - task.majority)
    highest = max([1.0, *(100 * (one.accuracy - task.majority) for one in heads.values())])
    image = axes.imshow(values, cmap="Blues", vmin=0.0, vmax=highest, aspect="auto")
    axes.figure.colorbar(image, ax=axes, pad=0.02)
    for (layer, head), one in heads.items():
        if one.at_chance:
            axes.plot(head, layer, marker="x", markersize=4, color=GRAY)
    axes.grid(visible=False)
    axes.set_title(_format_title(task), fontsize=10, loc="left")
    axes.set_xticks(range(0, wide, max(1, wide // 6)))
    axes.set_yticks(range(0, deep, max(1, deep // 6)))
    axes.tick_params(length=0)


def _format_title(task: ProbedTask) -> str:
    return f"{task.title} (majority {100 * task.majority:.1f})"


def _lay_out(found: Sequence[Sequence[Probed]]) -> tuple[list[str], list[list[str]]]:
    """Return the names of all probes, and a cell for each in each task."""
    names = list(dict.fromkeys(one.name for probes in found for one in probes))
    by_name = [{one.name: one for one in probes} for probes in found]
    return names, [[_format_cell(known.get(name)) for name in names] for known in by_name]


def _format_cell(one: Probed | None) -> str:
    if one is None:
        return NONE
    text = f"{100 * one.accuracy:.1f}"
    return f"({text})" if one.at_chance else text


def _format_half(found: Sequence[Probed]) -> str:
    return f"{max(50 * (one.high - one.low) for one in found):.1f}" if found else NONE
