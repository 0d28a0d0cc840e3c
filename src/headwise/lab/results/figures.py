"""The figures of a comparison, as PNG bytes: score by difficulty, by epoch, by diversity and by strength of repulsion.

Owns what is plotted against what, and the words beside it; how it looks is `drawing`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from headwise.atomic import write_whole
from headwise.lab.results.cells import MINUS
from headwise.lab.results.drawing import draw_differences, draw_line, draw_means, name_ends, span_a_point, styles
from headwise.lab.results.head_drops import LOSS
from headwise.lab.results.table import PLAIN, Table
from headwise.plots.heads import draw_ablations
from headwise.plots.style import GRAY_DASHED, draw_range, drawing, to_png, use_integer_ticks, use_log_axis

# How the names of pictures about single heads begin.
OF_HEADS = "heads-by-"
# Fewer epochs than this make no curve.
EPOCHS = 3
# More points than this would touch.
MARKED = 15
# The interval of a bin of fewer test items hides every other.
FEW = 10


T = TypeVar("T")


@dataclass(frozen=True)
class Picture:
    """A figure ready to be shown.

    Attributes:
        name: Name of its file, without the ending.
        png: The bytes of the PNG file.
        caption: What to see in it.
        alt: What it shows, for a reader who cannot see it.
        without_text: What a record shows in its place, where it holds texts of the data: they are others', and a
            record goes where the data does not.
    """

    name: str
    png: bytes
    caption: str
    alt: str
    without_text: Picture | None = None

    @property
    def for_record(self) -> Picture:
        """The picture as a record keeps it."""
        return self.without_text or self


def pictures(table: Table) -> tuple[Picture, ...]:
    """Return the figures that the table has data for."""
    drawn = (
        score_by_bin(table),
        dev_by_epoch(table),
        score_by_similarity(table),
        score_by_force(table),
        *costs_of_heads(table),
    )
    return tuple(picture for picture in drawn if picture is not None)


def write_pictures(table: Table, folder: Path) -> tuple[Picture, ...]:
    """Write each figure to `folder` under its name, whole files only, and return them.

    Raises:
        DataError: A file cannot be written.
    """
    drawn = pictures(table)
    for picture in drawn:
        write_whole(folder / f"{picture.name}.png", picture.png)
    return drawn


def score_by_bin(table: Table) -> Picture | None:
    """Return the score by difficulty, and the difference to plain below it; None with a single bin of items enough."""
    shown = [place for place, items in enumerate(table.items) if items >= FEW]
    if len(shown) < 2:
        return None

    def kept(of_bins: Sequence[T]) -> list[T]:
        return [of_bins[place] for place in shown]

    bins = kept(table.bins)
    left_out = [str(number) for number in table.bins if number not in bins]
    style, plain = styles(table), table.row(PLAIN)
    compared = [row for row in table.arms if row.bins_to_plain] if plain is not None else []
    with drawing(7.6, 7.4 if compared else 4.4) as figure:
        if compared:
            upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1))
        else:
            upper, lower = figure.subplots(), None
        for row in table.rows:
            if row.baseline:
                draw_line(upper, bins, kept(row.bins), GRAY_DASHED, width=1.2)
            else:
                draw_line(upper, bins, kept(row.bins), style[row.arm], label=row.arm)
        upper.set_ylabel(table.axis)
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
        bottom.set_xlabel(table.difficulty)
        bottom.set_xticks(bins)
        if table.arms:
            figure.legend(loc="outside right upper", frameon=False)
        name_ends(figure, upper, {row.arm: 100 * kept(row.bins)[-1].value for row in table.rows if row.baseline})
        png = to_png(figure)
    title = f"{_metric(table)} by {table.difficulty}"
    caption = f"{title} with 95 % intervals over seeds and test items"
    caption += "; below, each arm's difference to plain on the same seeds and items." if compared else "."
    if left_out:
        caption += f" Left out for having fewer than {FEW} test items: {', '.join(left_out)}."
    alt = f"{title}, from {bins[0]} to {bins[-1]}: " + "; ".join(
        f"{row.arm} {100 * kept(row.bins)[0].value:.0f} to {100 * kept(row.bins)[-1].value:.0f}" for row in table.rows
    )
    return Picture("score-by-difficulty", png, caption, alt)


def dev_by_epoch(table: Table) -> Picture | None:
    """Return the score on dev after each epoch, or None where no run took as many as three."""
    runs = {row.arm: [point.dev for point in row.points if len(point.dev) >= EPOCHS] for row in table.arms}
    runs = {arm: found for arm, found in runs.items() if found}
    if not runs:
        return None
    style = styles(table)
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
        use_integer_ticks(axes)
        figure.legend(loc="outside right upper", frameon=False)
        png = to_png(figure)
    caption = f"{_metric(table)} on dev after each epoch: the mean over seeds, and from the lowest seed to the highest."
    alt = f"{table.metric.name} on dev, first epoch to last: " + "; ".join(
        f"{arm} {100 * fmean(run[0] for run in found):.1f} to {100 * fmean(run[-1] for run in found):.1f}"
        for arm, found in runs.items()
    )
    return Picture("dev-by-epoch", png, caption, alt)


def costs_of_heads(table: Table) -> tuple[Picture, ...]:
    """Return for each score how many heads cost how much when one is removed, each arm against its control."""
    scores = dict.fromkeys(score for row in table.arms for score in row.head_drops)
    return tuple(_costs(table, score) for score in scores)


def _costs(table: Table, score: str) -> Picture:
    what, unit, factor = ("rise in loss", "nats", 1.0) if score == LOSS else (f"fall in {score}", "points", 100.0)
    models = {row.arm: found for row in table.arms if (found := row.head_drops.get(score))}
    costs = {arm: [[factor * drop.value for drop in model.drops] for model in found] for arm, found in models.items()}
    measured = [row for row in table.arms if row.arm in costs and row.arm != PLAIN]
    against = {row.arm: row.control if row.control in costs else PLAIN for row in measured}
    judged = [(arm, control) for arm, control in against.items() if control in costs]
    panels = judged or [(arm, None) for arm in costs]
    with drawing(7.6 if len(panels) > 1 else 5.2, 0.5 + 2.6 * math.ceil(len(panels) / 2)) as figure:
        draw_ablations(figure, costs, panels, styles(table), f"{what} without one head, {unit}")
        png = to_png(figure)
    caption = (
        f"How many heads of a model cost how much when one is removed, by {what} on the test set, the mean over seeds. "
        "Filled: an arm; outline: what it is judged against, or plain where that was not measured. Left of 0 the model "
        "is better without the head; the outermost bars hold all that lies beyond."
    )
    alt = f"Heads by {what}: " + "; ".join(
        f"{arm} {fmean(values):.2g} on average, {min(values):.2g} to {max(values):.2g}"
        for arm, values in ((arm, [value for model in found for value in model]) for arm, found in costs.items())
    )
    return Picture(f"{OF_HEADS}{score.lower()}", png, caption, alt)


def score_by_similarity(table: Table) -> Picture | None:
    """Return the pooled score against how alike the outputs of the heads are, or None when nothing was measured."""
    dots = {
        row.arm: [(point.output_cosine, 100 * point.score) for point in row.points if point.output_cosine is not None]
        for row in table.arms
    }
    dots = {arm: found for arm, found in dots.items() if found}
    if not dots:
        return None
    with drawing(8.4, 4.8) as figure:
        axes = figure.subplots()
        axes.set_xlabel("mean cosine between the outputs of two heads (further left: heads differ more)")
        axes.set_ylabel(table.axis)
        draw_means(axes, dots, styles(table))
        png = to_png(figure)
    caption = f"Diversity against {table.metric.name}: each small dot a seed, each large one the mean of an arm."
    alt = f"Output cosine and {table.metric.name}: " + "; ".join(
        f"{arm} {fmean(x for x, _ in found):.2f}, {fmean(y for _, y in found):.1f}" for arm, found in dots.items()
    )
    return Picture("diversity-against-score", png, caption, alt)


def score_by_force(table: Table) -> Picture | None:
    """Return the pooled score against the force ratio, or None with fewer than two strengths of repulsion."""
    dots = {
        row.arm: [(point.force_ratio, 100 * point.score) for point in row.points if point.force_ratio]
        for row in table.arms
    }
    dots = {arm: found for arm, found in dots.items() if found}
    if len(dots) < 2:
        return None
    with drawing(8.4, 4.8) as figure:
        axes = figure.subplots()
        use_log_axis(axes)
        axes.set_xlabel("force ratio: norm of the repulsion over norm of the drive")
        axes.set_ylabel(table.axis)
        plain = table.row(PLAIN)
        draw_means(axes, dots, styles(table), None if plain is None else plain.score)
        png = to_png(figure)
    caption = (
        f"{_metric(table)} against the strength of repulsion: each small dot a seed, each large one the mean of an "
        "arm; the band is plain with its 95 % interval."
    )
    alt = f"Force ratio and {table.metric.name}: " + "; ".join(
        f"{arm} {fmean(x for x, _ in found):.2g}, {fmean(y for _, y in found):.1f}" for arm, found in dots.items()
    )
    return Picture("score-against-force-ratio", png, caption, alt)


def _metric(table: Table) -> str:
    """Return the metric's name at the start of a sentence."""
    return table.metric.name[:1].upper() + table.metric.name[1:]
