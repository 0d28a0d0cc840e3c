"""The figures of a reproduction that is one: a number's curve over its parts, and a map of head vectors.

Owns what is plotted against what; the look is `drawing`'s.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from headwise.lab.arms import folder_of
from headwise.lab.drawing import styles
from headwise.lab.evidence import Evidence
from headwise.lab.figures import Picture
from headwise.lab.runs import analysis_file, read_json
from headwise.lab.table import Table
from headwise.plots.drawing import drawing, to_png

__all__ = ["curve", "head_map"]

# t-SNE's own default expects hundreds of points.
PERPLEXITY = 5.0
COLUMNS = 3


def curve(measure: str, evidence: Mapping[str, Evidence], tables: Mapping[str, Table]) -> Picture | None:
    """Return a number of each arm over the parts, seeds as dots and means as a line; None with fewer than two parts."""
    parts = list(evidence)
    arms = list(dict.fromkeys(row.arm for table in tables.values() for row in table.arms))
    found = {arm: {part: list(evidence[part].of(arm, measure).values()) for part in parts} for arm in arms}
    if len(parts) < 2 or not any(values for by_part in found.values() for values in by_part.values()):
        return None
    # the part with most arms names them all
    style = styles(max(tables.values(), key=lambda table: len(table.arms)))
    with drawing(7.2, 4.4) as figure:
        axes = figure.subplots()
        for place, (arm, by_part) in enumerate(found.items()):
            look, shift = style[arm], 0.06 * (place - (len(arms) - 1) / 2)
            there = [(number + shift, values) for number, values in enumerate(by_part.values()) if values]
            for x, values in there:
                axes.scatter(
                    [x] * len(values), values, s=16, color=look.color, marker=look.marker, alpha=0.4, linewidths=0
                )
            axes.plot(
                [x for x, _ in there],
                [fmean(values) for _, values in there],
                color=look.color,
                linestyle=look.dash,
                marker=look.marker,
                markersize=6,
                label=arm,
            )
        axes.set_xticks(range(len(parts)), parts)
        axes.set_ylabel(measure)
        figure.legend(loc="outside upper left", ncols=COLUMNS, frameon=False)
        png = to_png(figure)
    alt = "; ".join(
        f"{arm}: " + ", ".join(f"{part} {fmean(values):.3f}" for part, values in by_part.items() if values)
        for arm, by_part in found.items()
    )
    return Picture(
        f"{measure.lower()}-by-part", png, f"{measure} by part: each dot a seed, each line the means of an arm.", alt
    )


def head_map(analysis: str, folder: Path, evidence: Evidence, table: Table) -> Picture | None:
    """Return a t-SNE map of the heads' vectors of every arm under the first seed; None with fewer than three vectors.

    Args:
        analysis: Name of the analysis that kept the vectors.
        folder: Folder of the comparison.
        evidence: Its runs.
        table: Its table, whose arms keep their colors.
    """
    seed = min(evidence.results.seeds)
    vectors = {}
    for row in table.arms:
        path = analysis_file(folder / folder_of(row.arm) / f"seed-{seed}", analysis)
        if path.exists():
            vectors[row.arm] = np.array(read_json(path)["vectors"], dtype=np.float64)
    if sum(len(found) for found in vectors.values()) < 3:
        return None
    placed, style = _placed(list(vectors.values())), styles(table)
    with drawing(6.4, 4.8) as figure:
        axes = figure.subplots()
        start = 0
        for arm, found in vectors.items():
            dots = placed[start : start + len(found)]
            start += len(found)
            axes.scatter(*dots.T, s=70, color=style[arm].color, marker=style[arm].marker, label=arm, alpha=0.8)
        axes.set_xticks([])
        axes.set_yticks([])
        figure.legend(loc="outside upper left", ncols=COLUMNS, frameon=False)
        png = to_png(figure)
    caption = (
        f"t-SNE of the mean output of each encoder head, seed {seed}: heads near one another put out alike vectors; "
        "the distances between groups mean nothing."
    )
    alt = f"A map of {len(placed)} heads: " + ", ".join(f"{len(found)} of {arm}" for arm, found in vectors.items())
    return Picture("head-vectors", png, caption, alt)


def _placed(vectors: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    # scikit-learn takes seconds to import
    from sklearn.manifold import TSNE

    points = np.concatenate(vectors)
    perplexity = min(PERPLEXITY, (len(points) - 1) / 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return TSNE(perplexity=perplexity, init="random", random_state=0).fit_transform(points)
