"""The data of the probing task: one probing file as words in splits, each sentence once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from headwise.errors import DataError
from headwise.lab.data.probing_files import (
    DEV,
    TEST,
    TRAIN,
    choose_layout,
    drop_repeats,
    find_probing_file,
    read_probing,
)
from headwise.lab.tasks.classification.data import ClassificationData, encode_splits
from headwise.lab.tasks.classification.scales import ClassificationScale
from headwise.lab.tasks.classification.texts import prepare_texts

# Changes with anything in `probing_files` that changes which lines are kept.
KEPT = "probing-1"
ALL = "all"


@dataclass(frozen=True, eq=False)
class ProbingData(ClassificationData):
    """The task's data.

    Attributes:
        partitions: The partitions that the file has.
        repeated: Lines left out as their sentence stands there again.
        contradicted: Lines left out as their sentence stands there with two labels.
        sentences: Every sentence that was kept as the file writes it, by number.
    """

    sentences: tuple[str, ...]
    partitions: tuple[str, ...]
    repeated: int
    contradicted: int

    def summary(self) -> str:
        """Return the sizes of the splits, what was left out, and how the splits were cut where the file lacks one."""
        counts = self.counts()
        left = [
            f"{counts[name]:,} lines left out as their sentence {said}"
            for name, said in (("repeated", "stands there again"), ("contradicted", "stands there with two labels"))
            if counts[name]
        ]
        if counts["labels_untrained"]:
            left.append(f"{counts['labels_untrained']:,} labels without a training sentence")
        return "; ".join([super().summary(), *left, *filter(None, [self.cut])])

    @property
    def cut(self) -> str:
        """How the splits were cut, where the file does not have all three."""
        if {TRAIN, DEV, TEST}.issubset(self.partitions):
            return ""
        if self.texts.layout.test is None:
            return (
                f"all of {', '.join(self.partitions)} is cut into tenths by a hash of the sentence: 8 train, dev, test"
            )
        return f"training and dev are nine tenths and one of {self.texts.layout.train}, by a hash of the sentence"

    def counts(self) -> dict[str, int]:
        """Return how many sentences there are and what was done to them, by name."""
        untrained = len(self.labels) - len(np.unique(self.train.labels))
        own = {"repeated": self.repeated, "contradicted": self.contradicted, "labels_untrained": untrained}
        return {**super().counts(), **own}


def load_probing(place: Path, scale: ClassificationScale, cache: Path | None, *, progress: bool = False) -> ProbingData:
    """Return the data of one probing file.

    The partitions `tr`, `va` and `te` are the splits. Where `tr` is missing, as in X-Probe, or `va` is, training and
    dev are nine tenths and one tenth of the other; where `te` is missing, or nothing else is there, all lines are cut
    into tenths: eight to train, one dev, one test. A cut follows from the sentences alone, through a keyed hash. A
    label without a training sentence, as word content may have among its thousand, stays: its test sentences count as
    errors.

    Args:
        place: The file, with or without `.txt` or `.txt.gz`.
        scale: What to keep.
        cache: Folder for prepared texts and parses; None keeps nothing.
        progress: Whether parsing shows a bar.

    Raises:
        DataError: There is no such file, a line does not fit, there are too few sentences to cut, a split comes out
            empty, or the training sentences have one label alone.
    """
    path = find_probing_file(place)
    kept = drop_repeats(read_probing(path))
    layout = choose_layout(tuple(kept.lines))
    lines = kept.lines if layout.test is not None else {ALL: [one for part in kept.lines.values() for one in part]}
    labels = tuple(sorted({one.label for part in lines.values() for one in part}))
    texts = prepare_texts(
        layout, dict.fromkeys(lines, path), lines, scale, cache, form=KEPT, labels=labels, progress=progress
    )
    try:
        data = encode_splits(texts, scale, path, every_label=False)
    except DataError as error:
        if str(path) in str(error):
            raise
        raise DataError(f"{path}: {error}") from None
    if len(np.unique(data.train.labels)) < 2:
        raise DataError(
            f"{path}: all {len(data.train)} training sentences have the label {labels[data.train.labels[0]]!r} (they "
            f"come from {', '.join(kept.lines)}); expected at least two labels among them: add data."
        )
    return ProbingData(
        **{field.name: getattr(data, field.name) for field in fields(data)},
        sentences=tuple(one.text for part in lines.values() for one in part),
        partitions=tuple(kept.lines),
        repeated=kept.repeated,
        contradicted=kept.contradicted,
    )
