"""The figures of a comparison as PNG: score by difficulty, epoch, diversity and strength of repulsion.

How a comparison is drawn: estimates with their intervals, and means over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from headwise.atomic import write_whole
from headwise.plots.heads import draw_ablations
from headwise.plots.style import (
    GRAY,
    GRAY_DASHED,
    Style,
    assign_styles,
    draw_range,
    drawing,
    to_png,
    use_integer_ticks,
    use_log_axis,
)
from headwise.report.html import DPI
from headwise_lab.results.cells import MINUS
from headwise_lab.results.runs import LOSS, STAGES
from headwise_lab.results.statistics import Estimate, estimate
from headwise_lab.results.table import FEW, PLAIN, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Height of a line of text, in points.
LINE = 12.0
# Of a scale with many changed sizes, so much is shown in a figure.
LONGEST_SCALE = 44


# Place of usual arms in the styles: the same arm looks the same in all comparisons, and near arms differ.
PLACES = {"svgd": 0, "output": 1, "em": 2, "output+em": 3, "smooth": 4, "scaled": 5, "svgd-relative": 6, "trunk": 7}


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


def name_data(axes: Axes, table: Table) -> None:
    """Write above the axes what was compared: task, data, scale and number of seeds."""
    results, seeds = table.results, max(len(row.seeds) for row in table.rows)
    scale = results.scale if len(results.scale) <= LONGEST_SCALE else f"{results.scale[:LONGEST_SCALE]}..."
    task = f"{results.task} on {results.named}" if results.named else results.task
    said = f"{task}, scale {scale}, {seeds} seed{'s' * (seeds > 1)}"
    axes.set_title(said, loc="left", fontsize=9, color=GRAY)


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
            label=arm,
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


# Prefix of the names of pictures about single heads.
HEADS_PREFIX = "heads-by-"
HALVES_NAME = "half-of-the-heads"
# Minimum number of epochs of a curve.
EPOCHS = 3
ENDS = ("low", "value", "high")
# Curves of more points have no markers.
MARKED = 15

T = TypeVar("T")


@dataclass(frozen=True)
class Picture:
    """A figure ready to be shown.

    Attributes:
        name: Name of its file, without the suffix.
        png: Content of the PNG file.
        alt: Alternative text.
        without_text: Version for records, if the picture contains texts of the data, which may not be redistributed.
    """

    name: str
    png: bytes
    caption: str
    alt: str
    without_text: Picture | None = None

    @property
    def for_record(self) -> Picture:
        """The picture as stored in a record."""
        return self.without_text or self


def draw_figures(table: Table) -> tuple[Picture, ...]:
    """Return the figures for which the table has data."""
    drawn = (
        draw_score_by_bin(table),
        draw_dev_by_epoch(table),
        draw_effective_heads(table),
        draw_score_by_similarity(table),
        draw_score_by_force(table),
        *draw_head_costs(table),
        draw_halving(table),
    )
    return tuple(picture for picture in drawn if picture is not None)


def write_figures(table: Table, folder: Path) -> tuple[Picture, ...]:
    """Write each figure to `folder`, whole files only, and return them.

    Raises:
        DataError: A file cannot be written.
    """
    drawn = draw_figures(table)
    for picture in drawn:
        write_whole(folder / f"{picture.name}.png", picture.png)
    return drawn


def draw_score_by_bin(table: Table) -> Picture | None:
    """Draw the score by difficulty with the difference to plain below; None with fewer than two bins to draw."""
    shown = table.readable_bins
    if len(shown) < 2:
        return None

    def kept(of_bins: Sequence[T]) -> list[T]:
        return [of_bins[place] for place in shown]

    bins = kept(table.bins)
    style, plain = choose_styles(table), table.row(PLAIN)
    compared = [row for row in table.arms if row.bins_to_plain] if plain is not None else []
    with drawing(7.6, 7.4 if compared else 4.4) as figure:
        if compared:
            upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1))
        else:
            upper, lower = figure.subplots(), None
        for row in table.rows:
            look, label, width = (GRAY_DASHED, "", 1.2) if row.baseline else (style[row.arm], row.arm, 1.8)
            low, middle, high = ([100 * getattr(one, end) for one in kept(row.bins)] for end in ENDS)
            draw_range(upper, bins, low, middle, high, look, label=label, width=width)
        upper.set_ylabel(table.axis)
        name_data(upper, table)
        span_a_point(upper)
        if lower is not None:
            lower.axhline(0, color=style[PLAIN].color, linewidth=1.4)
            width = 0.55 * min(b - a for a, b in pairwise(bins))
            for place, row in enumerate(compared):
                shift = width * ((place + 0.5) / len(compared) - 0.5)
                draw_differences(lower, [number + shift for number in bins], kept(row.bins_to_plain), style[row.arm])
            lower.set_ylabel("difference to plain, points")
            lower.yaxis.set_major_formatter(lambda value, _: f"{value:+g}".replace("-", MINUS) if value else "0")
        bottom = lower or upper
        bottom.set_xlabel(table.bin_words)
        bottom.set_xticks(bins)
        if table.arms:
            figure.legend(loc="outside right upper", frameon=False)
        name_ends(figure, upper, {row.arm: 100 * kept(row.bins)[-1].value for row in table.rows if row.baseline})
        png = to_png(figure)
    title = f"{_capitalize_metric(table)} by {table.bin_words}"
    caption = f"{title} with 95 % intervals over seeds and test items"
    caption += "; below, each arm's difference to plain on the same seeds and items." if compared else "."
    if table.hidden_bins:
        caption += f" Not shown, with fewer than {FEW} test items: {table.hidden_bins}."
    alt = f"{title}, from {bins[0]} to {bins[-1]}: " + "; ".join(
        f"{row.arm} {100 * kept(row.bins)[0].value:.0f} to {100 * kept(row.bins)[-1].value:.0f}" for row in table.rows
    )
    return Picture("score-by-difficulty", png, caption, alt)


def draw_dev_by_epoch(table: Table) -> Picture | None:
    """Draw the score on dev after each epoch; None if no run has three epochs."""
    runs = {row.arm: [run.dev for run in row.runs if len(run.dev) >= EPOCHS] for row in table.arms}
    runs = {arm: found for arm, found in runs.items() if found}
    if not runs:
        return None
    style = choose_styles(table)
    with drawing(7.6, 4.6) as figure:
        axes = figure.subplots()
        for arm, found in runs.items():
            epochs = [[100 * score for score in scores] for scores in zip(*found, strict=False)]
            places = range(1, len(epochs) + 1)
            ends = [*map(min, epochs)], [*map(fmean, epochs)], [*map(max, epochs)]
            look = style[arm] if len(epochs) <= MARKED else replace(style[arm], marker="")
            draw_range(axes, places, *ends, look, label=arm)
        span_a_point(axes)
        axes.set_xlabel("epoch")
        axes.set_ylabel(f"{table.axis} on dev")
        name_data(axes, table)
        use_integer_ticks(axes)
        figure.legend(loc="outside right upper", frameon=False)
        png = to_png(figure)
    caption = f"{_capitalize_metric(table)} on dev after each epoch: the mean and range over seeds."
    alt = f"{table.results.metric.name} on dev, first epoch to last: " + "; ".join(
        f"{arm} {100 * fmean(run[0] for run in found):.1f} to {100 * fmean(run[-1] for run in found):.1f}"
        for arm, found in runs.items()
    )
    return Picture("dev-by-epoch", png, caption, alt)


def draw_effective_heads(table: Table) -> Picture | None:
    """Draw the effective number of heads of each arm, as it is and weighted by variance; None where none is known."""
    known = {
        title: {arm: [x for x, _ in dots] for arm, dots in _gather(table, name).items()}
        for title, name in (
            ("effective heads", "effective_heads"),
            ("effective heads, by variance", "effective_heads_weighted"),
        )
    }
    arms = [row.arm for row in table.arms if all(row.arm in found for found in known.values())]
    if not arms:
        return None
    heads = max((row.settings.get("scale", {}).get("heads", 0) for row in table.arms), default=0)
    style = choose_styles(table)
    with drawing(8.4, 1.1 + 0.42 * len(arms)) as figure:
        panels = figure.subplots(1, len(known), sharey=True)
        for axes, (title, found) in zip(panels, known.items(), strict=True):
            for place, arm in enumerate(arms):
                draw_spread(axes, found[arm], place, style[arm])
            if heads:
                axes.axvline(heads, color=GRAY_DASHED.color, linestyle=GRAY_DASHED.dash, linewidth=1.2)
                axes.set_xlim(1, 1.03 * heads)
            axes.set_xlabel(title)
        panels[0].set_yticks(range(len(arms)), arms)
        panels[0].invert_yaxis()
        name_data(panels[0], table)
        png = to_png(figure)
    caption = (
        "The effective number of heads, mean over layers: on the left every head counts the same, on the right by the "
        "variance of what it contributes. Small markers are seeds, large ones the mean of an arm with its 95 % "
        "interval over seeds (Student's)."
    )
    caption += f" The dashed line is the number of heads, {heads}." if heads else ""
    alt = "Effective heads, and by variance: " + "; ".join(
        f"{arm} {', '.join(f'{fmean(found[arm]):.2f}' for found in known.values())}" for arm in arms
    )
    return Picture("effective-heads", png, caption, alt)


def draw_head_costs(table: Table) -> tuple[Picture, ...]:
    """Draw for each score how much removing one head costs, each arm against its control."""
    scores = dict.fromkeys(score for row in table.arms for score in row.head_drops)
    return tuple(_draw_costs(table, score) for score in scores)


def _draw_costs(table: Table, score: str) -> Picture:
    what, unit, factor = ("rise in loss", "nats", 1.0) if score == LOSS else (f"fall in {score}", "points", 100.0)
    models = {row.arm: found for row in table.arms if (found := row.head_drops.get(score))}
    costs = {arm: [[factor * drop.value for drop in model.drops] for model in found] for arm, found in models.items()}
    measured = [row for row in table.arms if row.arm in costs and row.arm != PLAIN]
    against = {row.arm: row.control if row.control in costs else PLAIN for row in measured}
    judged = [(arm, control) for arm, control in against.items() if control in costs]
    panels = judged or [(arm, None) for arm in costs]
    with drawing(7.6 if len(panels) > 1 else 5.2, 0.5 + 2.6 * math.ceil(len(panels) / 2)) as figure:
        draw_ablations(figure, costs, panels, choose_styles(table), f"{what} without one head, {unit}")
        png = to_png(figure)
    caption = (
        f"Number of heads of a model by the cost of removing each one, by {what} on the test set, mean over seeds. "
        "Filled: an arm; outline: its control, or plain if that was not measured. Left of 0 the model is better "
        "without the head; the outermost bars include everything beyond them."
    )
    alt = f"Heads by {what}: " + "; ".join(
        f"{arm} {fmean(values):.2g} on average, {min(values):.2g} to {max(values):.2g}"
        for arm, values in ((arm, [value for model in found for value in model]) for arm, found in costs.items())
    )
    return Picture(f"{HEADS_PREFIX}{score.lower()}", png, caption, alt)


def draw_halving(table: Table) -> Picture | None:
    """Draw the difference to the whole models of models with half of their heads; None where none was measured."""
    if not table.halved:
        return None
    style, changes = choose_styles(table), {arm: one.changes for arm, one in table.halved.items()}
    stages = list(next(iter(changes.values())))
    with drawing(7.6, 4.0) as figure:
        axes = figure.subplots()
        axes.axhline(0, color=GRAY, linewidth=1.2)
        for place, (arm, found) in enumerate(changes.items()):
            shift = 0.5 * ((place + 0.5) / len(changes) - 0.5)
            places = [number + shift for number in range(len(stages))]
            draw_differences(axes, places, [found[stage].estimate for stage in stages], style[arm])
            axes.plot([], [], color=style[arm].color, marker=style[arm].marker, linestyle="none", label=arm)
        axes.set_xticks(range(len(stages)), [STAGES[stage] for stage in stages])
        axes.set_xlim(-0.5, len(stages) - 0.5)
        axes.set_ylabel("difference to the whole model, points")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:+g}".replace("-", MINUS) if value else "0")
        name_data(axes, table)
        figure.legend(loc="outside right upper", frameon=False)
        png = to_png(figure)
    caption = (
        f"{_capitalize_metric(table)} with half of the heads minus that of the same whole model, as it is and after a "
        "short recovery, with 95 % intervals over seeds and test items."
    )
    alt = "Points lost with half of the heads, and after a recovery: " + "; ".join(
        f"{arm} {', '.join(f'{100 * one.estimate.value:+.1f}' for one in found.values())}"
        for arm, found in changes.items()
    )
    return Picture(HALVES_NAME, png, caption, alt)


def draw_score_by_similarity(table: Table) -> Picture | None:
    """Draw the score against the effective number of heads; None if nothing tells how alike heads are.

    Runs of version 0.1 measured no such number, and are drawn by the cosine of outputs.
    """
    dots, label, name = _gather(table, "effective_heads"), "effective heads", "Effective heads"
    if not dots:
        dots, name = _gather(table, "output_cosine"), "Output cosine"
        label = "mean cosine between outputs of two heads (further left: more diverse)"
    if not dots:
        return None
    png = _draw_dots(table, dots, label)
    caption = f"Diversity against {table.results.metric.name}: small markers are seeds, large ones the mean of an arm."
    alt = f"{name} and {table.results.metric.name}: " + "; ".join(
        f"{arm} {fmean(x for x, _ in found):.2f}, {fmean(y for _, y in found):.1f}" for arm, found in dots.items()
    )
    return Picture("diversity-against-score", png, caption, alt)


def draw_score_by_force(table: Table) -> Picture | None:
    """Draw the score against the force ratio; None where fewer than two arms have one."""
    found = {arm: [dot for dot in dots if dot[0]] for arm, dots in _gather(table, "force_ratio").items()}
    dots = {arm: kept for arm, kept in found.items() if kept}
    if len(dots) < 2:
        return None
    png = _draw_dots(table, dots, "force ratio: norm of what pushes heads apart over norm of the gradient", force=True)
    caption = (
        f"{_capitalize_metric(table)} against the strength that pushes heads apart: small markers are seeds, large "
        "ones the mean of an arm; the band is plain with its 95 % interval."
    )
    alt = f"Force ratio and {table.results.metric.name}: " + "; ".join(
        f"{arm} {fmean(x for x, _ in found):.2g}, {fmean(y for _, y in found):.1f}" for arm, found in dots.items()
    )
    return Picture("score-against-force-ratio", png, caption, alt)


def _gather(table: Table, name: str) -> dict[str, list[tuple[float, float]]]:
    """Return a measure of each run with its score in percent, by arm; only arms for which it was measured."""
    found = {
        row.arm: [
            (value, 100 * score)
            for run, score in zip(row.runs, row.score.by_seed, strict=True)
            if (value := run.measures[name]) is not None
        ]
        for row in table.arms
    }
    return {arm: dots for arm, dots in found.items() if dots}


def _draw_dots(
    table: Table, dots: Mapping[str, Sequence[tuple[float, float]]], label: str, *, force: bool = False
) -> bytes:
    with drawing(8.4, 4.8) as figure:
        axes = figure.subplots()
        if force:
            use_log_axis(axes)
        axes.set_xlabel(label)
        axes.set_ylabel(table.axis)
        name_data(axes, table)
        plain = table.row(PLAIN) if force else None
        draw_means(axes, dots, choose_styles(table), plain and plain.score)
        low, high = axes.get_xlim()
        # strengths that all follow the gradient: ticks so close would have the same label
        if force and high < 1.2 * low:
            axes.set_xlim(low / 1.5, 1.5 * high)
        return to_png(figure)


def _capitalize_metric(table: Table) -> str:
    """Return the metric's name at the start of a sentence."""
    return table.results.metric.name[:1].upper() + table.results.metric.name[1:]
