"""The classification task: the class of a sentence, from six published sets or a given file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headwise.errors import DataError
from headwise.input_files import encode_json
from headwise.roles.idf import idf
from headwise.texts.frozen import Frozen
from headwise.texts.labeled_texts import find_layout
from headwise_lab.experiment.arm import Guided, require_parses
from headwise_lab.experiment.evaluation import Accuracy, round_to_bins
from headwise_lab.experiment.seeding import derive_key
from headwise_lab.experiment.task import Answers, ClassifierTask, MaskMaker
from headwise_lab.models.text_classifiers import (
    DRAWN,
    SentenceClassifier,
    SentenceCNN,
    SentenceLSTM,
    SentenceTransformer,
    WordVectors,
)
from headwise_lab.role_masks.sentences import Donors, RoleMasks
from headwise_lab.tasks.classification.data import (
    ClassificationData,
    Sentence,
    Sentences,
    collate,
    list_folds,
    load_data,
)
from headwise_lab.tasks.classification.frozen import open_classifier
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES, ClassificationScale

# The last word count of each bin of test items; the last bin takes what is longer.
BINS = (5, 10, 20, 40, 90)
MODELS: Mapping[str, type[SentenceClassifier]] = {"bilstm": SentenceLSTM, "cnn": SentenceCNN}


class ClassificationTask(ClassifierTask):
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
        """Return a maker of role masks, with the rarity of words in the training split."""
        require_parses(guided, data.texts.heads is not None)
        table = data.texts.table
        donors = Donors(
            table, data.texts.words.lengths, data.train.numbers.tolist(), derive_key(seed, "shuffled parse")
        )
        rarity = idf(list_words(data, data.train))
        return RoleMasks(guided, table, donors, rarity, num_heads=scale.heads, seed=seed, pipeline=scale.pipeline)

    def collate(self, examples: Sequence[Sentence]) -> dict[str, Tensor]:
        """Return a padded batch."""
        return collate(examples)

    def on_dev(self, model: SentenceClassifier, data: ClassificationData) -> dict[str, Any]:
        """Return the accuracy on dev."""
        return {"pooled": float((self.predict(model, data.dev) == data.dev.labels).mean())}

    def difficulties(self, data: ClassificationData) -> NDArray[np.int64]:
        """Return the number of words of each test text, rounded up to the end of its bin."""
        return round_to_bins(data.test.lengths - 2, BINS)

    def baseline(self, name: str, data: ClassificationData, seed: int) -> Answers:
        """Return the answers of the most frequent class, or of a linear model of the words and pairs of words."""
        # scikit-learn takes seconds to import
        from headwise_lab.models import bag_of_words

        if name == "counts":
            train, test = (list_words(data, split, lower=True) for split in (data.train, data.test))
            predicted = bag_of_words.counts(train, test, data.train.labels, seed=seed)
        else:
            predicted = np.full(len(data.test), np.bincount(data.train.labels).argmax(), dtype=np.int64)
        return Answers(predicted == data.test.labels, predicted)

    def extra_files(self, data: ClassificationData) -> dict[str, str]:
        """Return the vocabulary, the labels, and how many texts there were."""
        kept = {"vocabulary": data.vocabulary, "labels": data.labels, "counts": data.counts()}
        return {"vocabulary.json": encode_json(kept, indent=1, ascii_only=False) + "\n"}

    def open_frozen(self, folder: Path, record: Mapping[str, Any], pipeline: Path | None) -> Frozen:
        """Return the encoder of a run; heads with roles have them."""
        return open_classifier(self, self.network, folder, record, pipeline)


def _require_place(place: Path | None) -> Path:
    if place is None:
        raise DataError(
            "classification needs --data: a set's folder (all.tsv; or train.tsv, test.tsv and perhaps dev.tsv), or a "
            "single file with a label and a text in each line (.tsv or .csv)."
        )
    return place


def word_vectors(data: ClassificationData, scale: ClassificationScale, *, drawn: float = DRAWN) -> WordVectors:
    """Return the vectors of the words; see `WordVectors` for those that the file of vectors does not have."""
    ids, known = data.vectors(scale.width)
    return WordVectors(len(data.vocabulary), scale.width, dropout=scale.dropout, ids=ids, known=known, drawn=drawn)


def list_words(data: ClassificationData, split: Sentences, *, lower: bool = False) -> list[list[str]]:
    """Return the words of each text of a split, as they are written or in lower case."""
    types = data.texts.lower if lower else data.texts.types
    return [[types[word] for word in data.texts.words[number]] for number in split.numbers.tolist()]
