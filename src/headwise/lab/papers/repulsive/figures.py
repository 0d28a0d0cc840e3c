"""The figures of An et al. 2020 on texts: attention over the words of a text, reliability, and the entropy of answers.

Owns which runs stand in which figure; the figures themselves are `headwise.plots`'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headwise.lab.experiment.arm import escape_arm_name
from headwise.lab.experiment.arm_text import parse_arm
from headwise.lab.experiment.run_folder import analysis_file, read_json
from headwise.lab.results.evidence import Evidence
from headwise.lab.results.figures import Picture
from headwise.lab.results.table import PLAIN, Table
from headwise.lab.tasks.sentence.analyses import ATTENTION_MAPS, ENTROPY, RELIABILITY
from headwise.lab.tasks.sentence.uncertainty import read_reliability
from headwise.plots import entropy_cdf, reliability_diagram, sentence_heatmap, to_png


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
        """Return the heatmaps of the runs that are there."""
        found = []
        for arm in (parse_arm(text).name for text in self.arms):
            kept = _analyses(folder, arm, evidence, ATTENTION_MAPS)
            for place, one in enumerate(kept[0]["maps"][: self.texts] if kept else ()):
                found.append(self._picture(arm, place, one))
        return tuple(found)

    def _picture(self, arm: str, place: int, one: dict[str, Any]) -> Picture:
        words: list[str] = one["words"]
        drawn = self._drawn(arm, place, one, words)
        numbered = [str(number) for number in range(1, len(words) + 1)]
        remark = " Words are named by their place in the text."
        return replace(drawn, without_text=self._drawn(arm, place, one, numbered, remark))

    def _drawn(self, arm: str, place: int, one: dict[str, Any], words: list[str], remark: str = "") -> Picture:
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


def reliabilities(part: str, folder: Path, evidence: Evidence, table: Table) -> tuple[Picture, ...]:
    """Return the reliability diagram of all arms and seeds."""
    runs = {
        row.arm: [read_reliability(one) for one in _analyses(folder, row.arm, evidence, RELIABILITY)]
        for row in table.arms
    }
    runs = {arm: found for arm, found in runs.items() if found}
    if not runs:
        return ()
    figure = reliability_diagram(runs, reference=PLAIN if PLAIN in runs else "")
    alt = "; ".join(f"{arm}: ECE {_mean([one.ece for one in found]):.3f}" for arm, found in runs.items())
    return (
        Picture(
            _named("reliability", part),
            to_png(figure),
            "Accuracy by confidence, all seeds together: below the line a model is surer than it is right. Beside it "
            "ECE and OE of each run.",
            alt,
        ),
    )


def entropies(part: str, folder: Path, evidence: Evidence, table: Table) -> tuple[Picture, ...]:
    """Return the distribution of the entropy of answers to texts of another kind, a curve an arm."""
    kept = {row.arm: _analyses(folder, row.arm, evidence, ENTROPY) for row in table.arms}
    kept = {arm: found for arm, found in kept.items() if found}
    if not kept:
        return ()
    first = next(iter(kept.values()))[0]
    figure = entropy_cdf(
        {arm: [torch.tensor(one["entropies"], dtype=torch.float64) for one in found] for arm, found in kept.items()},
        classes=int(first["classes"]),
        text=str(first["text"]),
        reference=PLAIN if PLAIN in kept else "",
    )
    means = {arm: _mean([one["numbers"]["other_entropy"] for one in found]) for arm, found in kept.items()}
    return (
        Picture(
            _named("entropy", part),
            to_png(figure),
            f"Entropy of the answers to {first['text']}, texts of no class the models know: the further right and "
            "down, the less sure of what they cannot know.",
            "; ".join(f"{arm} {value:.2f} nats on average" for arm, value in means.items()),
        ),
    )


def _analyses(folder: Path, arm: str, evidence: Evidence, name: str) -> list[dict[str, Any]]:
    """Return the records of an analysis of an arm's finished runs, in the order of the seeds."""
    seeds = sorted(run.seed for run in evidence.results.runs if run.arm == arm)
    paths = [analysis_file(folder / escape_arm_name(arm) / f"seed-{seed}", name) for seed in seeds]
    return [read_json(path) for path in paths if path.exists()]


def _named(name: str, part: str) -> str:
    return f"{name}-{part.lower()}" if part else name


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
