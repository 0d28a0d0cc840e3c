"""Our own question: whether models whose heads were trained to differ, or to be alike, lose less when they shrink."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from headwise.plots.style import drawing, to_png
from headwise_lab.analyses.shrinking import ADDED, HEADS, KEY_VALUE_HEADS, LOSS, SHARES, name_number
from headwise_lab.results.cells import NONE, Cell, Grid, Number
from headwise_lab.results.evidence import Evidence
from headwise_lab.results.figures import Picture, choose_styles, name_data
from headwise_lab.results.statistics import Estimate, estimate
from headwise_lab.results.table import Table

WORDS = {HEADS: "heads", KEY_VALUE_HEADS: "key/value heads"}
# Lines of arms stand beside one another by so many points of percent.
APART = 1.0


def measure_number(evidence: Evidence, arm: str, number: str) -> Estimate | None:
    """Return the mean over seeds of a number of an arm's runs, with Student's interval; None where no run has it."""
    found = list(evidence.of(arm, number).values())
    return estimate(np.array(found)[:, None]) if found else None


def tabulate_shrinking(evidence: Mapping[str, Evidence], tables: Mapping[str, Table]) -> Grid | None:
    """Return the loss of each arm's whole models, and what it rises by with shares of their heads."""
    columns = [("loss, whole", name_number(LOSS, HEADS, 1.0))]
    for left, shares in SHARES.items():
        columns += [(f"{share:.0%} of {WORDS[left]}", name_number(ADDED, left, share)) for share in shares]
    known = [
        (title, number)
        for title, number in columns
        if any(found.of(row.arm, number) for part, found in evidence.items() for row in tables[part].arms)
    ]
    rows = tuple(
        (row.arm, *(_show(measure_number(found, row.arm, number)) for _, number in known))
        for part, found in evidence.items()
        for row in tables[part].arms
    )
    if not known:
        return None
    header = ("arm", *(title for title, _ in known))
    return Grid("loss on the test set, and what it rises by, in nats", header, rows, "l" + "r" * len(known))


def draw_shrinking(part: str, folder: Path, evidence: Evidence, table: Table) -> tuple[Picture, ...]:  # noqa: ARG001  as all are called
    """Return what the loss rises by over the share of heads kept: a line for each arm, with intervals over seeds."""
    curves = {left: _trace(evidence, table, left) for left in SHARES}
    curves = {left: curve for left, curve in curves.items() if curve}
    if not curves:
        return ()
    styles = choose_styles(table)
    with drawing(1.8 + 4.2 * len(curves), 4.2) as figure:
        panels = figure.subplots(1, len(curves), squeeze=False)[0]
        for axes, (left, curve) in zip(panels, curves.items(), strict=True):
            for place, (arm, found) in enumerate(curve.items()):
                shift = APART * (place - (len(curve) - 1) / 2)
                values = [one.value for one in found.values()]
                axes.errorbar(
                    [100 * share + (shift if share < 1 else 0) for share in found],
                    values,
                    yerr=[
                        [one.value - one.low for one in found.values()],
                        [one.high - one.value for one in found.values()],
                    ],
                    color=styles[arm].color,
                    linestyle=styles[arm].dash,
                    marker=styles[arm].marker,
                    markersize=5,
                    linewidth=1.4,
                    elinewidth=1.0,
                    label=arm if left == HEADS else "",
                )
            axes.set_xticks([100 * share for share in (1.0, *SHARES[left])])
            axes.invert_xaxis()
            axes.set_xlabel(f"{WORDS[left]} kept, %")
        panels[0].set_ylabel("loss added on the test set, nats")
        name_data(panels[0], table)
        figure.legend(loc="outside right upper", frameon=False)
        png = to_png(figure)
    said = "; ".join(
        f"{arm}, {WORDS[left]}: " + ", ".join(f"{share:.0%} {one.value:+.3f}" for share, one in found.items())
        for left, curve in curves.items()
        for arm, found in curve.items()
    )
    caption = (
        "What the loss on the test set rises by when heads are removed (those that matter least, to first order, on "
        "dev) or key/value heads are merged, without training afterwards: means over seeds with Student's 95 % "
        "intervals."
    )
    return (Picture(f"shrinking-{part}" if part else "shrinking", png, caption, said),)


def _trace(evidence: Evidence, table: Table, left: str) -> dict[str, dict[float, Estimate]]:
    """Return for each arm what the loss rises by, by the share that is kept; nothing is lost of the whole model."""
    found = {}
    for row in table.arms:
        measured = {share: measure_number(evidence, row.arm, name_number(ADDED, left, share)) for share in SHARES[left]}
        known = {share: one for share, one in measured.items() if one is not None}
        if known:
            found[row.arm] = {1.0: Estimate((0.0, 0.0)), **known}
    return found


def _show(found: Estimate | None) -> Cell:
    if found is None:
        return NONE
    low, high = (None, None) if found.is_one_number else (found.low, found.high)
    return Number(found.value, low, high, digits=3)
