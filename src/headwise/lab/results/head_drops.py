"""The cost of removing each head of a trained model: reading the records and summarizing them."""

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
# A head is redundant if removing it lowers the score, or raises the loss, by less than this share.
HARDLY = 0.01


@dataclass(frozen=True)
class Drop:
    """The cost of removing one head: fall of a score or rise of a loss, negative if it helps.

    Attributes:
        site: Dotted name of the attention module.
        kind: "self", "decoder" or "cross".
        layer: Its layer, from 0.
        head: Its index in the layer, from 0.
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
        whole: The score with all heads.
        items: Number of test items.
        drops: One entry per head.
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
        """The heads whose interval contains zero, without adjustment for their number."""
        return tuple(drop for drop in self.drops if drop.low <= 0.0 <= drop.high)


def summarize_drops(models: Sequence[HeadDrops]) -> dict[str, float]:
    """Return a summary of the heads of several models on one score, pooling all heads.

    Returns:
        "redundant_share" (see `HeadDrops.redundant`), "raising_share" (heads whose removal helps), "unshown_share"
        (heads whose cost has zero in its interval) and "mean_cost".

    Example:
        >>> dear = Drop("encoder", "self", layer=0, head=0, value=0.2, low=0.1, high=0.3)
        >>> harmful = Drop("encoder", "self", layer=0, head=1, value=-0.1, low=-0.3, high=0.1)
        >>> summarize_drops([HeadDrops("accuracy", 0.9, items=100, drops=(dear, harmful))])
        {'redundant_share': 0.5, 'raising_share': 0.5, 'unshown_share': 0.5, 'mean_cost': 0.05}
    """
    count = sum(len(model.drops) for model in models)
    return {
        "redundant_share": sum(len(model.redundant) for model in models) / count,
        "raising_share": sum(len(model.raising) for model in models) / count,
        "unshown_share": sum(len(model.unshown) for model in models) / count,
        "mean_cost": statistics.fmean(drop.value for model in models for drop in model.drops),
    }


def summarize_run(found: Sequence[HeadDrops]) -> dict[str, float]:
    """Return `summarize_drops` of one model for each score; names of the loss are prefixed with "loss_".

    Scores that are zero with all heads are skipped: no head could lower them.
    """
    return {
        f"{LOSS}_{name}" if model.score == LOSS else name: value
        for model in found
        if model.whole > 0.0
        for name, value in summarize_drops([model]).items()
    }


def read_head_drops(folder: Path) -> tuple[HeadDrops, ...]:
    """Return the costs of the heads of the run in `folder`, one entry per score; empty if not measured.

    Raises:
        DataError: The record is damaged.
    """
    path = analysis_file(folder, REDUNDANCY)
    return parse_head_drops(path, read_json(path)) if path.exists() else ()


def parse_head_drops(path: Path, record: Any) -> tuple[HeadDrops, ...]:
    """Return the costs of heads in what a file holds.

    Raises:
        DataError: The record is damaged.
    """
    try:
        return tuple(
            HeadDrops(
                str(score),
                float(whole),
                int(record["items"]),
                tuple(_read_drop(head, head["drops"][score]) for head in record["heads"]),
            )
            for score, whole in record["scores"].items()
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise DataError(f"{path} is not the record of an analysis; delete it and run the same command again.") from None


def _read_drop(head: Mapping[str, Any], cost: Mapping[str, Any]) -> Drop:
    numbers = [float(cost[name]) for name in ("value", "low", "high")]
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"a cost is {numbers}")
    return Drop(str(head["site"]), str(head["kind"]), int(head["layer"]), int(head["head"]), *numbers)
