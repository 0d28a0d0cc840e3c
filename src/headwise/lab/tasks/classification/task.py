"""The classification task: the class of a sentence, from six published sets or a file of your own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headwise.errors import DataError
from headwise.lab.data.batching import LengthBatches
from headwise.lab.data.labeled_texts import find_layout
from headwise.lab.experiment.answers import BATCH, compute_cross_entropies, predict_classes
from headwise.lab.experiment.evaluation import round_to_bins, spread_batches
from headwise.lab.experiment.frozen import Frozen
from headwise.lab.experiment.guided import Guided, require_parses
from headwise.lab.experiment.metrics import Accuracy
from headwise.lab.experiment.seeding import derive_key
from headwise.lab.experiment.task import Answers, MaskMaker, Task
from headwise.lab.models.text_classifiers import (
    DRAWN,
    SentenceClassifier,
    SentenceCNN,
    SentenceLSTM,
    SentenceTransformer,
    WordVectors,
)
from headwise.lab.role_masks.sentences import Donors, RoleMasks
from headwise.lab.tasks.classification.data import (
    ClassificationData,
    Sentence,
    Sentences,
    collate,
    list_folds,
    load_data,
)
from headwise.lab.tasks.classification.frozen import open_classifier
from headwise.lab.tasks.classification.scales import CLASSIFICATION_SCALES, ClassificationScale
from headwise.roles.idf import idf

PROBED = 256
# The last word count of each bin of test items; the last bin takes what is longer.
BINS = (5, 10, 20, 40, 90)
MODELS: Mapping[str, type[SentenceClassifier]] = {"bilstm": SentenceLSTM, "cnn": SentenceCNN}


class ClassificationTask(Task):
    """Sentence classification (Wang et al. 2021, section 4.1); see `task.Task` for the methods."""

    name = "classification"
    metric = Accuracy().name
    primary = "accuracy on the test texts"
    difficulty = "words, up to"
    scales = CLASSIFICATION_SCALES
    baselines = ("majority", "counts")
    models = tuple(MODELS)
    network: type[SentenceTransformer] = SentenceTransformer
    drawn = DRAWN

    def load(
        self, folder: Path | None, scale: ClassificationScale, cache: Path | None, *, progress: bool = False
    ) -> ClassificationData:
        """Return the data; see `load_data`."""
        return load_data(_require_place(folder), scale, cache, progress=progress)

    def find(self, folder: Path, scale: ClassificationScale) -> None:  # noqa: ARG002  any scale reads the same files
        """Refuse a place without a set of texts."""
        find_layout(folder)

    def parts(
        self, folder: Path | None, scale: ClassificationScale, cache: Path | None
    ) -> tuple[ClassificationScale, ...]:
        """Return the scale of each fold."""
        return list_folds(_require_place(folder), scale, cache)

    def model(self, data: ClassificationData, scale: ClassificationScale) -> SentenceTransformer:
        """Return a Transformer encoder with a classifier."""
        return self.network(word_vectors(data, scale, drawn=self.drawn), len(data.labels), scale)

    def other_model(self, name: str, data: ClassificationData, scale: ClassificationScale) -> SentenceClassifier:
        """Return a bidirectional LSTM or a multi-scale CNN."""
        return MODELS[name](word_vectors(data, scale), len(data.labels))

    def role_masks(self, guided: Guided, data: ClassificationData, scale: ClassificationScale, seed: int) -> MaskMaker:
        """Return what makes the role masks of a batch; the words' rarity is that of the training split."""
        require_parses(guided, data.texts.heads is not None)
        table = data.texts.table
        donors = Donors(
            table, data.texts.words.lengths, data.train.numbers.tolist(), derive_key(seed, "shuffled parse")
        )
        rarity = idf(list_words(data, data.train))
        return RoleMasks(guided, table, donors, rarity, num_heads=scale.heads, seed=seed, pipeline=scale.pipeline)

    def batches(self, data: ClassificationData, scale: ClassificationScale, seed: int) -> LengthBatches:
        """Return batches of texts of like length."""
        return LengthBatches(data.train.lengths, batch_size=scale.batch_size, seed=seed)

    def collate(self, examples: Sequence[Sentence]) -> dict[str, Tensor]:
        """Return a padded batch."""
        return collate(examples)

    def on_dev(self, model: SentenceClassifier, data: ClassificationData) -> dict[str, Any]:
        """Return the accuracy on dev."""
        return {"pooled": float((predict(model, data.dev) == data.dev.labels).mean())}

    def on_test(self, model: SentenceClassifier, data: ClassificationData) -> Answers:
        """Return the predicted classes and whether they are right."""
        predicted = predict(model, data.test)
        return Answers(predicted == data.test.labels, predicted)

    def losses(self, model: SentenceClassifier, data: ClassificationData) -> NDArray[np.float64]:
        """Return the cross entropy of each test text, and 1."""
        split = data.test
        return compute_cross_entropies(lambda places: _logits(model, split, places), split.lengths, split.labels)

    def difficulties(self, data: ClassificationData) -> NDArray[np.int64]:
        """Return the number of words of each test text, rounded up to the end of its bin."""
        return round_to_bins(data.test.lengths - 2, BINS)

    def probe(self, model: SentenceClassifier, data: ClassificationData) -> Iterator[None]:
        """Run the model on dev texts, a batch each time it is asked."""
        for batch in spread_batches(data.dev.lengths, PROBED, BATCH):
            _logits(model, data.dev, batch)
            yield

    def baseline(self, name: str, data: ClassificationData, seed: int) -> Answers:
        """Return the answers of the most frequent class, or of a linear model of the words and pairs of words."""
        # scikit-learn takes seconds to import, and only the worker that fits a baseline needs it
        from headwise.lab.models import bag_of_words

        if name == "counts":
            train, test = (list_words(data, split, lower=True) for split in (data.train, data.test))
            predicted = bag_of_words.counts(train, test, data.train.labels, seed=seed)
        else:
            predicted = np.full(len(data.test), np.bincount(data.train.labels).argmax(), dtype=np.int64)
        return Answers(predicted == data.test.labels, predicted)

    def extra_files(self, data: ClassificationData) -> dict[str, str]:
        """Return the vocabulary, the labels, and how many texts there were."""
        kept = {"vocabulary": data.vocabulary, "labels": data.labels, "counts": data.counts()}
        return {"vocabulary.json": json.dumps(kept, indent=1, ensure_ascii=False) + "\n"}

    def open_frozen(self, folder: Path, record: Mapping[str, Any], pipeline: Path | None) -> Frozen:
        """Return the encoder of a run; heads with roles have them."""
        return open_classifier(self, self.network, folder, record, pipeline)


def predict(model: SentenceClassifier, split: Sentences) -> NDArray[np.int64]:
    """Return the predicted class of each text of a split, [N], in the split's order."""
    return predict_classes(lambda places: _logits(model, split, places), split.lengths)


def _logits(model: SentenceClassifier, split: Sentences, batch: Sequence[int] | NDArray[np.int64]) -> Tensor:
    device = next(model.parameters()).device
    made = collate([split[int(index)] for index in batch])
    return model(tokens=made["tokens"].to(device), numbers=made["numbers"])["logits"]


def _require_place(place: Path | None) -> Path:
    if place is None:
        raise DataError(
            "classification needs --data: a set's folder (all.tsv; or train.tsv, test.tsv and perhaps dev.tsv), or a "
            "file of your own with a label and a text in each line (.tsv or .csv)."
        )
    return place


def word_vectors(data: ClassificationData, scale: ClassificationScale, *, drawn: float = DRAWN) -> WordVectors:
    """Return the vectors of the words; where the file of vectors has none, they are drawn as `WordVectors` says."""
    ids, known = data.vectors(scale.width)
    return WordVectors(len(data.vocabulary), scale.width, dropout=scale.dropout, ids=ids, known=known, drawn=drawn)


def list_words(data: ClassificationData, split: Sentences, *, lower: bool = False) -> list[list[str]]:
    """Return the words of each text of a split, as they are written or in lower case."""
    types = data.texts.lower if lower else data.texts.types
    return [[types[word] for word in data.texts.words[number]] for number in split.numbers.tolist()]
