"""Figures of any reproduction: a number's curve over its parts, and a map of head vectors."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import torch

from headwise.plots.heads import head_embedding
from headwise.plots.style import drawing, to_png
from headwise.plots.sweeps import draw_sweep
from headwise_lab.analyses.registry import HEAD_VECTORS
from headwise_lab.experiment.arm import escape_arm_name
from headwise_lab.experiment.run_folder import analysis_file, read_json
from headwise_lab.papers.reproduction import Reproduction
from headwise_lab.results.evidence import Evidence
from headwise_lab.results.figures import Picture, choose_styles
from headwise_lab.results.table import Table

COLUMNS = 3


def draw_pictures(
    reproduction: Reproduction,
    places: Mapping[str, Path],
    evidence: Mapping[str, Evidence],
    tables: Mapping[str, Table],
) -> tuple[Picture, ...]:
    """Return the figures of a reproduction, in addition to those of each table.

    Args:
        reproduction: What was run.
        places: Folder of the comparison of each part.
        evidence: The runs of each part that has any.
        tables: Their tables.
    """
    drawn = [draw_curve(measure, evidence, tables) for measure in reproduction.measures]
    for part, found in evidence.items():
        if reproduction.analysis == HEAD_VECTORS:
            drawn.append(draw_head_map(HEAD_VECTORS, places[part], found, tables[part]))
        if reproduction.drawn is not None:
            drawn += reproduction.drawn(part, places[part], found, tables[part])
    if reproduction.drawn_together is not None:
        drawn.append(reproduction.drawn_together(evidence, tables))
    return tuple(picture for picture in drawn if picture is not None)


def draw_curve(measure: str, evidence: Mapping[str, Evidence], tables: Mapping[str, Table]) -> Picture | None:
    """Return a number of each arm over the parts, seeds as dots and means as marks; None with fewer than two parts.

    Means are joined by a line where the parts are numbers of something, as in "5 heads".
    """
    parts = list(evidence)
    ordered = all(part[:1].isdigit() for part in parts)
    arms = list(dict.fromkeys(row.arm for table in tables.values() for row in table.arms))
    found = {arm: {part: list(evidence[part].of(arm, measure).values()) for part in parts} for arm in arms}
    if len(parts) < 2 or not any(values for by_part in found.values() for values in by_part.values()):
        return None
    # the part with most arms names them all
    style = choose_styles(max(tables.values(), key=lambda table: len(table.arms)))
    with drawing(7.2, 4.4) as figure:
        axes = figure.subplots()
        for number, (arm, by_part) in enumerate(found.items()):
            look, shift = style[arm], 0.06 * (number - (len(arms) - 1) / 2)
            there = [(part + shift, values) for part, values in enumerate(by_part.values()) if values]
            for place, members in enumerate([there] if ordered else [[one] for one in there]):
                draw_sweep(axes, members, look, label="" if place else arm)
        axes.set_xticks(range(len(parts)), parts)
        axes.set_ylabel(measure)
        figure.legend(loc="outside upper left", ncols=COLUMNS, frameon=False)
        png = to_png(figure)
    alt = "; ".join(
        f"{arm}: " + ", ".join(f"{part} {fmean(values):.3f}" for part, values in by_part.items() if values)
        for arm, by_part in found.items()
    )
    means = "each line an arm's means, its band from seed to seed" if ordered else "each large mark an arm's mean"
    return Picture(f"{measure.lower()}-by-part", png, f"{measure} by part: each dot a seed, {means}.", alt)


def draw_head_map(analysis: str, folder: Path, evidence: Evidence, table: Table) -> Picture | None:
    """Return a t-SNE map of the head vectors that an analysis kept, for the first seed; None with fewer than three."""
    seed = min(evidence.results.seeds)
    vectors = {}
    for row in table.arms:
        path = analysis_file(folder / escape_arm_name(row.arm) / f"seed-{seed}", analysis)
        if path.exists():
            vectors[row.arm] = read_json(path)["vectors"]
    if sum(len(found) for found in vectors.values()) < 3:
        return None
    png = to_png(
        head_embedding({arm: torch.tensor(found) for arm, found in vectors.items()}, style=choose_styles(table))
    )
    caption = (
        f"t-SNE of the mean output of each encoder head, seed {seed}: heads near one another put out alike vectors; "
        "the distances between groups mean nothing. Beside them the mean cosine between two heads of a model."
    )
    alt = f"Maps of {sum(map(len, vectors.values()))} heads: " + ", ".join(
        f"{len(found)} of {arm}" for arm, found in vectors.items()
    )
    return Picture("head-vectors", png, caption, alt)
