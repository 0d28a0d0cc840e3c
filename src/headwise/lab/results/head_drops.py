"""What each head of a trained model is worth: the fall of its scores without that head, as a record and as numbers.

Owns the record and what "redundant" means. How it is measured is `redundancy`'s. Must not know models.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.errors import DataError
from headwise.lab.experiment.run_folder import analysis_file, read_json

REDUNDANCY = "redundancy"
LOSS = "loss"
# A head is redundant when the score falls, or the loss rises, by less than this share of itself without it.
HARDLY = 0.01


@dataclass(frozen=True)
class Drop:
    """What the removal of one head costs on one score: its fall, or the rise of a loss; negative where it helps.

    Attributes:
        site: Dotted name of the attention module.
        kind: "self", "decoder" or "cross".
        layer: Its layer, from 0.
        head: Its place there, from 0.
        value: The cost.
        low: Lower end of its 95 % interval over test items, paired by item.
        high: Upper end.
    """

    site: str
    kind: str
    layer: int
    head: int
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class HeadDrops:
    """The costs of all heads of one trained model on one score.

    Attributes:
        score: Name of the score: that of the task's metric, or "loss".
        whole: The score with every head.
        items: Number of test items.
        drops: One entry a head.
    """

    score: str
    whole: float
    items: int
    drops: tuple[Drop, ...]

    @property
    def redundant(self) -> tuple[Drop, ...]:
        """The heads whose removal costs less than a hundredth of the score."""
        return tuple(drop for drop in self.drops if drop.value < HARDLY * self.whole)

    @property
    def raising(self) -> tuple[Drop, ...]:
        """The heads whose removal helps."""
        return tuple(drop for drop in self.drops if drop.value < 0.0)

    @property
    def unshown(self) -> tuple[Drop, ...]:
        """The heads whose cost has zero in its interval; each interval is by itself."""
        return tuple(drop for drop in self.drops if drop.low <= 0.0 <= drop.high)


def pooled(models: Sequence[HeadDrops]) -> dict[str, float]:
    """Return the summary of the heads of some models on one score, all heads together.

    Returns:
        "redundant_share" (see `HeadDrops.redundant`), "raising_share" (heads whose removal helps), "unshown_share"
        (heads whose cost has zero in its interval) and "mean_cost".

    Example:
        >>> dear = Drop("encoder", "self", layer=0, head=0, value=0.2, low=0.1, high=0.3)
        >>> harmful = Drop("encoder", "self", layer=0, head=1, value=-0.1, low=-0.3, high=0.1)
        >>> pooled([HeadDrops("accuracy", 0.9, items=100, drops=(dear, harmful))])
        {'redundant_share': 0.5, 'raising_share': 0.5, 'unshown_share': 0.5, 'mean_cost': 0.05}
    """
    count = sum(len(model.drops) for model in models)
    return {
        "redundant_share": sum(len(model.redundant) for model in models) / count,
        "raising_share": sum(len(model.raising) for model in models) / count,
        "unshown_share": sum(len(model.unshown) for model in models) / count,
        "mean_cost": statistics.fmean(drop.value for model in models for drop in model.drops),
    }


def numbers_of(found: Sequence[HeadDrops]) -> dict[str, float]:
    """Return `pooled` of one model by name, those of the loss with "loss_" before it.

    A score that is zero with every head has none: a head could not lower it.
    """
    return {
        f"{LOSS}_{name}" if model.score == LOSS else name: value
        for model in found
        if model.whole > 0.0
        for name, value in pooled([model]).items()
    }


def read_head_drops(folder: Path) -> tuple[HeadDrops, ...]:
    """Return what the run in `folder` knows of its heads, a score each; nothing where it was not measured.

    Raises:
        DataError: The record is damaged.
    """
    path = analysis_file(folder, REDUNDANCY)
    if not path.exists():
        return ()
    record = read_json(path)
    try:
        return tuple(
            HeadDrops(
                str(score),
                float(whole),
                int(record["items"]),
                tuple(_drop(head, head["drops"][score]) for head in record["heads"]),
            )
            for score, whole in record["scores"].items()
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DataError(
            f"{path} is not the record of an analysis; delete it and give the same command again."
        ) from None


def _drop(head: Mapping[str, Any], cost: Mapping[str, Any]) -> Drop:
    numbers = [float(cost[name]) for name in ("value", "low", "high")]
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"a cost is {numbers}")
    return Drop(str(head["site"]), str(head["kind"]), int(head["layer"]), int(head["head"]), *numbers)
