"""What the tasks of labeled texts share: batches, scores on dev, files of a run, and models they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headwise.errors import DataError
from headwise.input_files import encode_json
from headwise_lab.experiment.evaluation import round_to_bins
from headwise_lab.experiment.task import ClassifierTask, Task
from headwise_lab.frozen.runs import read_attending_arm, read_words
from headwise_lab.models.text_classifiers import (
    DRAWN,
    SentenceClassifier,
    SentenceCNN,
    SentenceLSTM,
    TextClassifier,
    WordVectors,
)
from headwise_lab.texts.data import Encoded, TextData, collate
from headwise_lab.training.trained import build_run_model, read_scale, restore_run

MODELS: Mapping[str, type[SentenceClassifier]] = {"bilstm": SentenceLSTM, "cnn": SentenceCNN}
Model = TypeVar("Model", bound=TextClassifier)


class TextTask(ClassifierTask):
    """A task of labeled texts or pairs.

    Attributes:
        needed: The data that the task takes, for messages.
    """

    needed: str = ""

    def require_place(self, place: Path | None) -> Path:
        """Raise `DataError` if no data is named."""
        if place is None:
            raise DataError(f"{self.name} needs --data: {self.needed}.")
        return place

    def other_model(self, name: str, data: TextData, scale: Any) -> SentenceClassifier:
        """Return a bidirectional LSTM with the mean of its states, or a multi-scale CNN."""
        return MODELS[name](make_vectors(data, scale), len(data.labels), texts=1 + data.pairs)

    def collate(self, examples: Sequence[Encoded]) -> dict[str, Tensor]:
        """Return a padded batch."""
        return collate(examples)

    def on_dev(self, model: TextClassifier, data: TextData) -> dict[str, Any]:
        """Return the accuracy on dev."""
        return {"pooled": float((self.predict(model, data.dev) == data.dev.labels).mean())}

    def difficulties(self, data: TextData) -> NDArray[np.int64]:
        """Return the number of words of each test example, rounded up to the end of its bin."""
        return round_to_bins(data.test.lengths - 2 * data.form.bounded, self.bins)

    def extra_files(self, data: TextData) -> dict[str, str]:
        """Return the vocabulary, the labels, and how many examples there were."""
        kept = {"vocabulary": data.vocabulary, "labels": data.labels, "counts": data.counts()}
        return {"vocabulary.json": encode_json(kept, indent=1, ascii_only=False) + "\n"}


def make_vectors(data: TextData, scale: Any, *, drawn: float = DRAWN) -> WordVectors:
    """Return the vectors of the words; see `WordVectors` for words that the file of vectors does not have."""
    ids, known = data.vectors(scale.width)
    return WordVectors(len(data.vocabulary), scale.width, dropout=scale.dropout, ids=ids, known=known, drawn=drawn)


def restore_classifier(
    task: Task,
    folder: Path,
    record: Mapping[str, Any],
    kind: type[Any],
    make: Callable[[WordVectors, int, Any], Model],
) -> tuple[Model, Any, Sequence[str]]:
    """Return the model of a finished run whose model has attention, its scale of type `kind`, and its vocabulary.

    `make` makes the model of word vectors, the number of classes, and the scale.
    """
    arm, scale = read_attending_arm(folder, record), read_scale(folder, record, kind)
    vocabulary, labels = read_words(folder, "labels")
    model = build_run_model(
        folder,
        lambda: make(WordVectors(len(vocabulary), scale.width, dropout=scale.dropout), len(labels), scale),
    )
    restore_run(folder, arm, model, task, seed=int(record["seed"]))
    return model, scale, vocabulary
