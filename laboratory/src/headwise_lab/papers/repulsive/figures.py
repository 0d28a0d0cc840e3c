"""Figures and pages of An et al. 2020: attention, reliability, entropy, strength, training curves, written texts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from headwise.errors import DataError
from headwise.input_files import parse_json, read_numbered_lines
from headwise.plots import entropy_cdf, reliability_diagram, sentence_heatmap
from headwise.plots.style import draw_range, drawing, drawing_panels, to_png, use_integer_ticks, use_log_axis
from headwise_lab.experiment.arm import escape_arm_name
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.run_folder import EPOCHS, analysis_file, read_json
from headwise_lab.results.evidence import Evidence
from headwise_lab.results.figures import Picture, choose_styles, draw_means, draw_score_by_force
from headwise_lab.results.runs import Run
from headwise_lab.results.table import PLAIN, Table
from headwise_lab.tasks.graph2text.ratings import make_outputs_page, read_items, write_rating
from headwise_lab.tasks.sentence.analyses import ATTENTION_MAPS, ENTROPY, RELIABILITY, read_reliability

READ, RATED = 10, 50
PAGE = "outputs.html"


@dataclass(frozen=True)
class AttentionMaps:
    """Heatmaps of the attention of trained models over test texts, of the first seed.

    Attributes:
        arms: The arms, each a figure a text.
        texts: How many texts.
        heads: How many heads are shown, spread evenly over all; None for all, 0 for none.
        overall: Whether the sum over all heads is shown.
    """

    arms: tuple[str, ...]
    texts: int = 1
    heads: int | None = None
    overall: bool = True

    def __call__(self, part: str, folder: Path, evidence: Evidence, table: Table) -> tuple[Picture, ...]:  # noqa: ARG002  as all are called
        """Return the heatmaps of the runs that are there; in records words are named by their place."""
        found = []
        for arm in (parse_arm(text).name for text in self.arms):
            kept = _read_analyses(folder, arm, evidence, ATTENTION_MAPS)
            for place, one in enumerate(kept[0]["maps"][: self.texts] if kept else ()):
                words: list[str] = one["words"]
                numbered = [str(number) for number in range(1, len(words) + 1)]
                remark = " Words are named by their place in the text."
                without = self._draw(arm, place, one, numbered, remark)
                found.append(replace(self._draw(arm, place, one, words), without_text=without))
        return tuple(found)

    def _draw(self, arm: str, place: int, one: dict[str, Any], words: list[str], remark: str = "") -> Picture:
        weights: list[list[float]] = one["weights"]
        total = [sum(row[word] for row in weights) for word in range(len(words))]
        count = len(weights) if self.heads is None else min(self.heads, len(weights))
        chosen = [number * len(weights) // count for number in range(count)]
        rows = {f"head {number}": weights[number] for number in chosen}
        rows |= {f"all {len(weights)} heads together": total} if self.overall else {}
        top = words[max(range(len(total)), key=lambda word: total[word])]
        return Picture(
            f"attention-{escape_arm_name(arm)}-{place + 1}",
            to_png(sentence_heatmap(words, rows)),
            f"Attention of {arm} over a test text of class {one['label']}, answered {one['predicted']}: the darker, "
            f"the more; shades compare within a row.{remark}",
            f"The words of a text shaded by attention; together the heads of {arm} look most at {top!r}.",
        )


def draw_reliabilities(part: str, folder: Path, evidence: Evidence, table: Table) -> tuple[Picture, ...]:
    """Return the reliability diagram of all arms and seeds."""
    runs = {
        arm: [*map(read_reliability, kept)] for arm, kept in _read_all(folder, evidence, table, RELIABILITY).items()
    }
    if not runs:
        return ()
    caption = (
        "Accuracy by confidence, all seeds together: below the line a model is surer than it is right. Beside it "
        "ECE and OE of each run."
    )
    alt = "; ".join(f"{arm}: ECE {fmean(one.ece for one in found):.3f}" for arm, found in runs.items())
    png = to_png(reliability_diagram(runs, reference=PLAIN if PLAIN in runs else ""))
    return (Picture(_name_by_part("reliability", part), png, caption, alt),)


def draw_entropies(part: str, folder: Path, evidence: Evidence, table: Table) -> tuple[Picture, ...]:
    """Return the distribution of the entropy of answers to texts of another kind, a curve an arm."""
    kept = _read_all(folder, evidence, table, ENTROPY)
    if not kept:
        return ()
    first = next(iter(kept.values()))[0]
    figure = entropy_cdf(
        {arm: [torch.tensor(one["entropies"], dtype=torch.float64) for one in found] for arm, found in kept.items()},
        classes=int(first["classes"]),
        text=str(first["text"]),
        reference=PLAIN if PLAIN in kept else "",
    )
    caption = (
        f"Entropy of the answers to {first['text']}, texts of no class the models know: the further right and down, "
        "the less sure of what they cannot know."
    )
    means = {arm: fmean(one["numbers"]["other_entropy"] for one in found) for arm, found in kept.items()}
    alt = "; ".join(f"{arm} {value:.2f} nats on average" for arm, value in means.items())
    return (Picture(_name_by_part("entropy", part), to_png(figure), caption, alt),)


def _read_all(folder: Path, evidence: Evidence, table: Table, name: str) -> dict[str, list[dict[str, Any]]]:
    """Return the records of an analysis by arm, where there are any."""
    kept = {row.arm: _read_analyses(folder, row.arm, evidence, name) for row in table.arms}
    return {arm: found for arm, found in kept.items() if found}


def _read_analyses(folder: Path, arm: str, evidence: Evidence, name: str) -> list[dict[str, Any]]:
    """Return the records of an analysis of an arm's finished runs, in the order of the seeds."""
    seeds = sorted(run.seed for run in evidence.results.runs if run.arm == arm)
    paths = [analysis_file(folder / escape_arm_name(arm) / f"seed-{seed}", name) for seed in seeds]
    return [read_json(path) for path in paths if path.exists()]


def _name_by_part(name: str, part: str) -> str:
    return f"{name}-{part.lower()}" if part else name


Axis = tuple[str, Callable[[Mapping[str, float | None]], float | None]]
# without repulsion there is no force, and no place for it on a logarithmic axis
FORCE: Axis = "force ratio: norm of the repulsion over norm of the drive", lambda found: found["force_ratio"] or None
PARAMETERS: Axis = (
    "distance of parameters: 1 - mean absolute cosine between heads",
    lambda found: _invert(found["parameter_cosine"]),
)
OUTPUTS: Axis = "distance of outputs: 1 - linear CKA", lambda found: _invert(found["output_cka"])
ATTENTION: Axis = "distance of attention: Jensen-Shannon, nats", lambda found: found["position_js"]


def _invert(similarity: float | None) -> float | None:
    return None if similarity is None else 1.0 - similarity


def draw_strengths(part: str, folder: Path, evidence: Evidence, table: Table) -> tuple[Picture, ...]:  # noqa: ARG001  as all are called
    """Return score and distance of outputs by force ratio, and distances of what heads compute by those of parameters.

    Each where at least two arms have both numbers.
    """
    drawn = (
        draw_score_by_force(table),
        _draw_scatter("outputs-by-force", evidence, table, FORCE, OUTPUTS),
        _draw_scatter("outputs-by-parameters", evidence, table, PARAMETERS, OUTPUTS),
        _draw_scatter("attention-by-parameters", evidence, table, PARAMETERS, ATTENTION),
    )
    said = f"{part}: " if part else ""
    return tuple(
        replace(one, name=_name_by_part(one.name, part), caption=f"{said}{one.caption}")
        for one in drawn
        if one is not None
    )


def _draw_scatter(name: str, evidence: Evidence, table: Table, across: Axis, up: Axis) -> Picture | None:
    dots: dict[str, list[tuple[float, float]]] = {}
    for run in evidence.results.runs:
        x, y = across[1](run.measures), up[1](run.measures)
        if x is not None and y is not None:
            dots.setdefault(run.arm, []).append((x, y))
    if len(dots) < 2:
        return None
    with drawing(8.4, 4.8) as figure:
        axes = figure.subplots()
        if across is FORCE:
            use_log_axis(axes)
        axes.set_xlabel(across[0])
        axes.set_ylabel(up[0])
        draw_means(axes, dots, choose_styles(table))
        png = to_png(figure)
    alt = "; ".join(
        f"{arm} {fmean(x for x, _ in found):.2g}, {fmean(y for _, y in found):.2g}" for arm, found in dots.items()
    )
    caption = (
        f"{up[0][:1].upper()}{up[0][1:]}, by {across[0]}; each small dot a seed, each large one the mean of an arm."
    )
    return Picture(name, png, caption, alt)


COLUMNS = 2
# Fewer rounds are no curve.
FEWEST = 3


def draw_training_curves(part: str, folder: Path, evidence: Evidence, table: Table) -> tuple[Picture, ...]:  # noqa: ARG001  as all are called
    """Return losses of both networks, score on dev and force ratio by round; nothing with fewer than three rounds.

    Raises:
        DataError: A line of a run's record of rounds lacks a number.
    """
    # title, place in a line of a run's record, factor
    panels: tuple[tuple[str, str, float], ...] = (
        ("generator's loss on dev, nats", "dev.generator_loss", 1.0),
        ("discriminator's loss on dev, nats", "dev.discriminator_loss", 1.0),
        (f"{table.axis.removesuffix(', %')}, on dev, %", "dev.pooled", 100.0),
        ("force ratio: repulsion over drive", "force_ratio", 1.0),
    )
    runs = [run for run in evidence.results.runs if len(run.dev) >= FEWEST]
    if not runs:
        return ()
    style = choose_styles(table)
    names = [row.arm for row in table.arms]
    ends = []
    with drawing_panels(len(panels), COLUMNS, panel=(3.9, 2.6), margin=(0.0, 0.5)) as (figure, places):
        for axes, (title, path, factor) in zip(places, panels, strict=True):
            for arm in names:
                found = [values for run in runs if run.arm == arm and (values := _read_curve(run, path, factor))]
                if not found:
                    continue
                rounds = list(zip(*found, strict=False))
                middle = [*map(fmean, rounds)]
                draw_range(
                    axes, range(1, len(rounds) + 1), [*map(min, rounds)], middle, [*map(max, rounds)], style[arm]
                )
                ends.append(f"{title.partition(',')[0]} of {arm} {middle[0]:.3g} to {middle[-1]:.3g}")
            axes.set_title(title, loc="left", fontsize=10)
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


def _read_curve(run: Run, place: str, factor: float) -> list[float]:
    """Return a number of each round of a run; nothing where the run has none, as plain has no force."""
    found = []
    path = run.folder / EPOCHS
    for number, line in read_numbered_lines(path):
        try:
            value: Any = parse_json(line)
            for name in place.split("."):
                value = value[name]
            if value is None:
                return []
            found.append(factor * float(value))
        except (KeyError, TypeError, ValueError, IndexError, OverflowError):
            raise DataError(f"{path}, line {number} has no {place}; make the run again.") from None
    return found


@dataclass(frozen=True)
class OutputPages:
    """A page with texts of two arms, graph and reference, and perhaps a form on which raters compare the texts.

    Attributes:
        arms: The arm that is judged and the one it is judged against.
        form: Whether the form is written too.
    """

    arms: tuple[str, str]
    form: bool = False

    def __call__(self, place: Path, folder: Path, data: Path | None, evidence: Evidence) -> tuple[Path, ...]:
        """Write the pages of the runs that are there; see `reproduction.WritePages`."""
        one, other = (parse_arm(text).name for text in self.arms)
        seeds = {arm: {run.seed for run in evidence.results.runs if run.arm == arm} for arm in (one, other)}
        shared = sorted(seeds[one] & seeds[other])
        if data is None or not shared:
            return ()
        first, second = (folder / escape_arm_name(arm) / f"seed-{shared[0]}" for arm in (one, other))
        items = read_items(first, second, data)
        pages = [place / PAGE]
        make_outputs_page(items[:READ], (one, other), title=f"Texts of {one} and {other}").write(pages[0])
        if self.form:
            pages += write_rating(place, items, (first, second), (one, other), count=RATED, seed=0)
        return tuple(pages)
