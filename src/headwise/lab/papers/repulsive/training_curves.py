"""The figure of a pre-training: losses, score on dev and force ratio as training goes on.

Owns which of the numbers that runs keep of each round are drawn; how it looks is `plots.drawing`'s.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from headwise.errors import DataError
from headwise.lab.experiment.run_folder import EPOCHS
from headwise.lab.results.drawing import choose_styles
from headwise.lab.results.evidence import Evidence
from headwise.lab.results.figures import Picture
from headwise.lab.results.runs import Run
from headwise.lab.results.table import Table
from headwise.plots.style import draw_range, drawing_panels, to_png, use_integer_ticks

COLUMNS = 2
# Fewer rounds are no curve.
FEWEST = 3


@dataclass(frozen=True)
class _Panel:
    title: str
    path: tuple[str, ...]
    factor: float = 1.0


def training_curves(part: str, folder: Path, evidence: Evidence, table: Table) -> tuple[Picture, ...]:  # noqa: ARG001  as all are called
    """Return losses of both networks, score on dev and force ratio by round; nothing with fewer than three rounds.

    Raises:
        DataError: A line of a run's record of rounds lacks a number.
    """
    panels = (
        _Panel("generator's loss on dev, nats", ("dev", "generator_loss")),
        _Panel("discriminator's loss on dev, nats", ("dev", "discriminator_loss")),
        _Panel(f"{table.axis.removesuffix(', %')}, on dev, %", ("dev", "pooled"), 100.0),
        _Panel("force ratio: repulsion over drive", ("force_ratio",)),
    )
    runs = [run for run in evidence.results.runs if len(run.dev) >= FEWEST]
    if not runs:
        return ()
    style = choose_styles(table)
    names = [row.arm for row in table.arms]
    ends = []
    with drawing_panels(len(panels), COLUMNS, panel=(3.9, 2.6), margin=(0.0, 0.5)) as (figure, places):
        for axes, panel in zip(places, panels, strict=True):
            for arm in names:
                found = [values for run in runs if run.arm == arm and (values := _curve(run, panel))]
                if not found:
                    continue
                rounds = list(zip(*found, strict=False))
                middle = [*map(fmean, rounds)]
                draw_range(
                    axes, range(1, len(rounds) + 1), [*map(min, rounds)], middle, [*map(max, rounds)], style[arm]
                )
                ends.append(f"{panel.title.partition(',')[0]} of {arm} {middle[0]:.3g} to {middle[-1]:.3g}")
            axes.set_title(panel.title, loc="left", fontsize=10)
            use_integer_ticks(axes)
        for axes in places[-COLUMNS:]:
            axes.set_xlabel("round")
        for arm in names:
            places[0].plot([], [], color=style[arm].color, marker=style[arm].marker, label=arm)
        figure.legend(loc="outside upper left", ncols=len(names), frameon=False)
        png = to_png(figure)
    caption = (
        "Training round by round: the mean over seeds, and from the lowest seed to the highest. Each discriminator is "
        "judged on what its own generator replaced."
    )
    return (Picture("training", png, caption, "First round to last: " + "; ".join(ends)),)


def _curve(run: Run, panel: _Panel) -> list[float]:
    """Return a number of each round of a run; nothing where the run has none, as plain has no force."""
    found = []
    path = run.folder / EPOCHS
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        value: Any = json.loads(line)
        for name in panel.path:
            if name not in value:
                raise DataError(f"{path}, line {number} has no {'.'.join(panel.path)}; make the run again.")
            value = value[name]
        if value is None:
            return []
        found.append(panel.factor * float(value))
    return found
