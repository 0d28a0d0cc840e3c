"""The data of the probing task: one probing file as words in splits, each sentence once."""

from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from headwise.errors import DataError
from headwise.texts.labeled_texts import DEV, TEST, TRAIN
from headwise_lab.data.probing_files import choose_layout, drop_repeats, find_probing_file, read_probing
from headwise_lab.tasks.classification.data import ClassificationData, encode_splits
from headwise_lab.tasks.classification.scales import ClassificationScale
from headwise_lab.tasks.classification.texts import prepare_texts

# Bump this when `labeled_texts` keeps other lines.
KEPT = "probing-1"
ALL = "all"


@dataclass(frozen=True, eq=False)
class ProbingData(ClassificationData):
    """The task's data.

    Attributes:
        partitions: The partitions in the file.
        repeated: Number of lines left out because their sentence is repeated.
        contradicted: Number of lines left out because their sentence has two labels.
        sentences: The kept sentences as in the file, by number.
    """

    sentences: tuple[str, ...]
    partitions: tuple[str, ...]
    repeated: int
    contradicted: int

    def summary(self) -> str:
        """Return the sizes of the splits, what was left out, and how missing splits were cut."""
        counts = self.counts()
        left = [
            f"{counts[name]:,} lines left out as their sentence {reason}"
            for name, reason in (("repeated", "stands there again"), ("contradicted", "stands there with two labels"))
            if counts[name]
        ]
        if counts["labels_untrained"]:
            left.append(f"{counts['labels_untrained']:,} labels without a training sentence")
        return "; ".join([super().summary(), *left, *filter(None, [self.cut])])

    @property
    def cut(self) -> str:
        """How the splits were cut if the file does not have all three."""
        if {TRAIN, DEV, TEST}.issubset(self.partitions):
            return ""
        if self.texts.layout.test is None:
            return (
                f"all of {', '.join(self.partitions)} is cut into tenths by a hash of the sentence: 8 train, dev, test"
            )
        return f"training and dev are nine tenths and one of {self.texts.layout.train}, by a hash of the sentence"

    def counts(self) -> dict[str, int]:
        """Return the numbers of sentences, and of those left out or truncated, by name."""
        untrained = len(self.labels) - len(np.unique(self.train.labels))
        own = {"repeated": self.repeated, "contradicted": self.contradicted, "labels_untrained": untrained}
        return {**super().counts(), **own}


def load_probing(place: Path, scale: ClassificationScale, cache: Path | None, *, progress: bool = False) -> ProbingData:
    """Return the data of one probing file.

    The partitions `tr`, `va` and `te` are the splits. If `tr` is missing, as in X-Probe, or `va` is, training and dev
    are nine tenths and one tenth of the other; if `te` is missing or the only partition, all lines are cut into eight
    tenths for training, one for dev and one for test, by a hash of the sentences. Test sentences with a label that no
    training sentence has, as may occur in word content, count as errors.

    Args:
        place: The file, with or without `.txt` or `.txt.gz`.
        scale: What to keep.
        cache: Folder for prepared texts and parses; None keeps nothing.
        progress: Whether parsing shows a bar.

    Raises:
        DataError: The file does not exist, a line is malformed, there are too few sentences, a split is empty, or the
            training sentences have only one label.
    """
    path = find_probing_file(place)
    kept = drop_repeats(read_probing(path))
    layout = choose_layout(tuple(kept.lines))
    lines = kept.lines if layout.test is not None else {ALL: [one for part in kept.lines.values() for one in part]}
    labels = tuple(sorted({one.label for part in lines.values() for one in part}))
    texts = prepare_texts(
        layout, dict.fromkeys(lines, path), lines, scale, cache, form=KEPT, labels=labels, progress=progress
    )
    data = encode_splits(replace(texts, left_out=kept.blank), scale, path, every_label=False)
    if len(np.unique(data.train.labels)) < 2:
        label = labels[data.train.labels[0]]
        raise DataError(
            f"{path}: all {len(data.train)} training sentences have the label {label!r:.60} (they come from "
            f"{', '.join(kept.lines)}); expected at least two labels among them: add data."
        )
    return ProbingData(
        **{field.name: getattr(data, field.name) for field in fields(data)},
        sentences=tuple(one.text for part in lines.values() for one in part),
        partitions=tuple(kept.lines),
        repeated=kept.repeated,
        contradicted=kept.contradicted,
    )
