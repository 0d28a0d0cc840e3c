"""The probing task: classification of a property of a sentence, such as its length or the number of its subject."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from headwise.errors import DataError, SettingError
from headwise.input_files import name_in_errors
from headwise.texts.labeled_texts import DEV, TEST, TRAIN
from headwise_lab.data.probing_files import choose_layout, drop_repeats, find_probing_file, read_probing
from headwise_lab.models.text_classifiers import SentenceTransformer, WordVectors
from headwise_lab.tasks.classification.scales import PROBING_SCALES, ClassificationScale
from headwise_lab.tasks.classification.task import FORM, ClassificationTask, prepare_texts
from headwise_lab.texts.data import TextData
from headwise_lab.texts.sets import ALL, TextSet

# Bump this when `labeled_texts` keeps other lines.
KEPT = "probing-1"
# With more classes a linear model of pairs of words takes gigabytes.
MANY = 100


class ProbedTransformer(SentenceTransformer):
    """Returns the logits of a property of a sentence (Li et al. 2021, section 4.2.2), trained end to end.

    s = mean_t h_t over the tokens of the top layer; logits = W_2 drop(ReLU(W_1 s + b_1)) + b_2. The paper does not give
    the width of the hidden layer; here it is that of s.

    Args:
        words: Vectors of the tokens.
        num_labels: Number of classes.
        sizes: Sizes of the encoder.

    Example:
        >>> import torch
        >>> scale = PROBING_SCALES["demo"]
        >>> model = ProbedTransformer(WordVectors(9, scale.width, dropout=0.0), 6, scale)
        >>> model(torch.tensor([[2, 5, 3], [2, 3, 0]]))["logits"].shape
        torch.Size([2, 6])
    """

    def __init__(self, words: WordVectors, num_labels: int, sizes: Any) -> None:
        super().__init__(words, num_labels, sizes)
        self.classifier = nn.Sequential(
            nn.Linear(words.embedding_dim, words.embedding_dim),
            nn.ReLU(),
            nn.Dropout(words.dropout),
            nn.Linear(words.embedding_dim, num_labels),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class ProbingData(TextData):
    """The task's data.

    Attributes:
        sentences: The kept sentences as in the file, by number.
        repeated: Number of lines left out because their sentence is repeated.
        contradicted: Number of lines left out because their sentence has two labels.
        cut: How the splits were cut; "" if the file has all three.
    """

    sentences: tuple[str, ...]
    repeated: int
    contradicted: int
    cut: str

    def summary(self) -> str:
        """Return the sizes of the splits, what was left out, and how missing splits were cut."""
        counts = self.counts()
        left = [
            f"{counts[name]:,} {reason}"
            for name, reason in (
                ("repeated", "lines left out as their sentence stands there again"),
                ("contradicted", "lines left out as their sentence stands there with two labels"),
                ("labels_untrained", "labels without a training sentence"),
            )
            if counts[name]
        ]
        return "; ".join([super().summary(), *left, *filter(None, [self.cut])])

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

    Raises:
        DataError: The file does not exist, a line is malformed, there are too few sentences, a split is empty, or the
            training sentences have only one label.
    """
    path = find_probing_file(place)
    kept = drop_repeats(read_probing(path))
    layout = choose_layout(tuple(kept.lines))
    every = [one for part in kept.lines.values() for one in part]
    lines, cut = kept.lines, ""
    if layout.test is None:
        lines = {ALL: every}
        cut = f"all of {', '.join(kept.lines)} is cut into tenths by a hash of the sentence: 8 train, dev, test"
    elif not {TRAIN, DEV, TEST} <= kept.lines.keys():
        cut = f"training and dev are nine tenths and one of {layout.train}, by a hash of the sentence"
    found = TextSet.of_lines(layout, lines, dict.fromkeys(lines, path), kept.blank)
    labels = tuple(sorted({one.label for one in every}))
    texts = prepare_texts(found, layout, scale, cache, KEPT, labels=labels, progress=progress)
    with name_in_errors(path):
        splits, dropped = texts.cut_splits()
    data = ProbingData.of(
        texts,
        splits,
        FORM,
        scale,
        path,
        every_label=False,
        dropped=dropped,
        sentences=tuple(one.text for one in every),
        repeated=kept.repeated,
        contradicted=kept.contradicted,
        cut=cut,
    )
    if len(np.unique(data.train.labels)) < 2:
        label = labels[data.train.labels[0]]
        raise DataError(
            f"{path}: all {len(data.train)} training sentences have the label {label!r:.60} (they come from "
            f"{', '.join(kept.lines)}); expected at least two labels among them: add data."
        )
    return data


class ProbingTask(ClassificationTask, settings=Path(__file__).with_name("probing.toml")):
    """Linguistic probing, trained end to end (Li et al. 2021, section 4.2); see `task.Task` for the methods."""

    name = "probing"
    scales = PROBING_SCALES
    network = ProbedTransformer
    # as large as the sinusoids: trains faster than smaller vectors (chosen on dev)
    drawn = 1.0

    def load(
        self, folder: Path | None, scale: ClassificationScale, cache: Path | None, *, progress: bool = False
    ) -> ProbingData:
        """Return the data; see `load_probing`."""
        folder = self.require_place(folder)
        if scale.folds is not None:
            raise SettingError("probing is not cross-validated; omit --folds.")
        return load_probing(folder, scale, cache, progress=progress)

    def find(self, folder: Path, scale: ClassificationScale) -> None:  # noqa: ARG002  any scale reads the same files
        """Refuse a place without the file of a task."""
        find_probing_file(folder)

    def parts(
        self,
        folder: Path | None,  # noqa: ARG002  a probing run is one training
        scale: ClassificationScale,
        cache: Path | None,  # noqa: ARG002
    ) -> tuple[ClassificationScale, ...]:
        """Return the scale: a probing file is not cross-validated."""
        return (scale,)

    def predict_counts(self, data: TextData, seed: int) -> NDArray[np.int64]:
        """Return the classes of test texts by a linear model of the words and pairs of words.

        With over 100 classes, as in word content, it is naive Bayes on the words alone.
        """
        if len(data.labels) <= MANY:
            return super().predict_counts(data, seed)
        # scikit-learn takes seconds to import
        from headwise_lab.models import bag_of_words

        train, test = (data.words(split, lower=True) for split in (data.train, data.test))
        return bag_of_words.naive_bayes(train, test, data.train.labels)
