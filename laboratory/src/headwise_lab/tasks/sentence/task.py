"""The sentence task: classes of texts and of pairs, by heads that each summarize a text.

Further measures of a classifier's answers: loss, calibration and, for two classes, ranking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwise.errors import DataError
from headwise.input_files import encode_json
from headwise.metrics.calibration import reliability_of
from headwise.texts.batching import batch_by_length
from headwise.texts.frozen import Frozen
from headwise_lab.experiment.evaluation import Accuracy, Measure, round_to_bins
from headwise_lab.experiment.task import Answers, ClassifierTask
from headwise_lab.models.text_classifiers import (
    SentenceClassifier,
    SentenceCNN,
    SentenceLSTM,
    TextClassifier,
    WordVectors,
)
from headwise_lab.tasks.sentence.analyses import ANALYSES
from headwise_lab.tasks.sentence.data import Encoded, SentenceData, Sentences, collate, load_sentences
from headwise_lab.tasks.sentence.files import read_set
from headwise_lab.tasks.sentence.frozen import open_sentence
from headwise_lab.tasks.sentence.model import SelfAttentive
from headwise_lab.tasks.sentence.scales import SENTENCE_SCALES, SentenceScale

SHOWN = (
    Measure("NLL", "NLL", better="lower", digits=3),
    Measure("ECE", "ECE", better="lower", digits=3),
    Measure("OE", "OE", better="lower", digits=3),
    Measure("AUC-ROC", "AUC-ROC", digits=3),
    Measure("AUC-PR", "AUC-PR", digits=3),
    Measure("MCC", "MCC", digits=3),
    Measure("F1", "F1", digits=3),
)
# Lower bound of a probability in the loss.
LEAST = 1e-12


def scores(probabilities: NDArray[np.float64], labels: NDArray[np.int64]) -> dict[str, float]:
    """Return measures by name of class probabilities [N, C] for items with labels [N].

    "error" (share of wrong answers, %), "NLL" (mean negative log likelihood, nats), "ECE" and "OE" with 15 bins (An et
    al. 2020, appendix C.4), and for two classes, the last one positive, "AUC-ROC", "AUC-PR" (average precision), "MCC"
    and "F1".

    >>> found = scores(np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]), np.array([0, 1, 1]))
    >>> round(found["error"], 1), found["AUC-ROC"], round(found["F1"], 3)
    (33.3, 1.0, 0.667)
    """
    predicted = probabilities.argmax(axis=1)
    sure = reliability_of(torch.from_numpy(probabilities), torch.from_numpy(labels))
    likelihood = np.maximum(probabilities[np.arange(len(labels)), labels], LEAST)
    found = {
        "error": 100 * float((predicted != labels).mean()),
        "NLL": float(-np.log(likelihood).mean()),
        "ECE": sure.ece,
        "OE": sure.oe,
    }
    if probabilities.shape[1] == 2 and len(np.unique(labels)) == 2:
        # scikit-learn takes seconds to import
        from sklearn import metrics

        found["AUC-ROC"] = float(metrics.roc_auc_score(labels, probabilities[:, 1]))
        found["AUC-PR"] = float(metrics.average_precision_score(labels, probabilities[:, 1]))
        found["MCC"] = float(metrics.matthews_corrcoef(labels, predicted))
        found["F1"] = float(metrics.f1_score(labels, predicted))
    return found


BATCH = 128
# The last word count of each bin of test items; the last bin takes what is longer.
BINS = (10, 20, 40, 80, 160)
MODELS: Mapping[str, type[SentenceClassifier]] = {"cnn": SentenceCNN, "bilstm": SentenceLSTM}
# Prefixes of the words of a pair: a word in both texts is two features.
SIDES = ("", "2:")


class SentenceTask(ClassifierTask):
    """Self-attentive sentence classification (Lin et al. 2017; An et al. 2020, section 5.1); see `task.Task`."""

    name = "sentence"
    metric = Accuracy().name
    primary = "accuracy on the test texts"
    difficulty = "words, up to"
    scales = SENTENCE_SCALES
    baselines = ("majority", "nb-lr")
    models = tuple(MODELS)
    shown = SHOWN
    analyses = ANALYSES
    probe_batch = BATCH

    def load(
        self, folder: Path | None, scale: SentenceScale, cache: Path | None, *, progress: bool = False
    ) -> SentenceData:
        """Return the data; see `load_sentences`."""
        if folder is None:
            raise DataError(
                "sentence needs --data: a set's folder (Yelp, SNLI or SICK, PAN's author profiles; or train.tsv, "
                "test.tsv and perhaps dev.tsv), or a single file with a label and one or two texts in each line."
            )
        return load_sentences(folder, scale, cache, progress=progress)

    def find(self, folder: Path, scale: SentenceScale) -> None:  # noqa: ARG002  any scale reads the same files
        """Refuse a place without a set of texts or pairs."""
        read_set(folder)

    def model(self, data: SentenceData, scale: SentenceScale) -> SelfAttentive:
        """Return a bidirectional LSTM with additive attention."""
        return SelfAttentive(_word_vectors(data, scale), len(data.labels), scale, texts=1 + data.pairs)

    def other_model(self, name: str, data: SentenceData, scale: SentenceScale) -> SentenceClassifier:
        """Return a temporal CNN, or a bidirectional LSTM with the mean of its states."""
        return MODELS[name](_word_vectors(data, scale), len(data.labels), texts=1 + data.pairs)

    def collate(self, examples: Sequence[Encoded]) -> dict[str, Tensor]:
        """Return a padded batch."""
        return collate(examples)

    def on_dev(self, model: TextClassifier, data: SentenceData) -> dict[str, Any]:
        """Return the accuracy on dev."""
        return {"pooled": float((probabilities(model, data.dev).argmax(axis=1) == data.dev.labels).mean())}

    def on_test(self, model: TextClassifier, data: SentenceData) -> Answers:
        """Return the predicted classes, whether they are right, and `scores`."""
        return _answers(probabilities(model, data.test), data.test)

    def losses(self, model: TextClassifier, data: SentenceData) -> NDArray[np.float64]:
        """Return the cross entropy of each test example, and 1."""
        found = probabilities(model, data.test)[np.arange(len(data.test)), data.test.labels]
        return np.stack([-np.log(np.maximum(found, LEAST)), np.ones(len(found))], axis=1)

    def difficulties(self, data: SentenceData) -> NDArray[np.int64]:
        """Return the number of words of each test example, rounded up to the end of its bin."""
        return round_to_bins(data.test.lengths, BINS)

    def baseline(self, name: str, data: SentenceData, seed: int) -> Answers:
        """Return the answers of the most frequent class, or of a regression on naive Bayes log-count ratios."""
        if name == "majority":
            shares = np.bincount(data.train.labels, minlength=len(data.labels)) / len(data.train)
            return _answers(np.tile(shares, (len(data.test), 1)), data.test)
        # scikit-learn takes seconds to import
        from headwise_lab.tasks.sentence.naive_bayes import naive_bayes_regression

        train, test = _words(data, data.train), _words(data, data.test)
        return _answers(naive_bayes_regression(train, test, data.train.labels, seed=seed), data.test)

    def extra_files(self, data: SentenceData) -> dict[str, str]:
        """Return the vocabulary, the labels, and how many examples there were."""
        kept = {"vocabulary": data.vocabulary, "labels": data.labels, "counts": data.counts()}
        return {"vocabulary.json": encode_json(kept, indent=1, ascii_only=False) + "\n"}

    def open_frozen(self, folder: Path, record: Mapping[str, Any], pipeline: Path | None) -> Frozen:  # noqa: ARG002  nothing is parsed
        """Return the model of a run; of one that compares two texts, the part that reads each of them."""
        return open_sentence(self, folder, record)


def probabilities(model: TextClassifier, split: Sentences) -> NDArray[np.float64]:
    """Return the probability of each class, [N, C], of each example of a split, in the split's order."""
    found = None
    for batch in batch_by_length(split.lengths, BATCH):
        logits = SentenceTask().logits(model, split, np.asarray(batch))
        answered = torch.softmax(logits.double(), dim=-1).cpu().numpy()
        found = np.zeros((len(split), answered.shape[1])) if found is None else found
        found[batch] = answered
    assert found is not None  # no split is empty
    return found


def _answers(found: NDArray[np.float64], split: Sentences) -> Answers:
    predicted = found.argmax(axis=1)
    return Answers(predicted == split.labels, predicted, scores(found, split.labels))


def _word_vectors(data: SentenceData, scale: SentenceScale) -> WordVectors:
    ids, known = data.vectors(scale.width)
    return WordVectors(len(data.vocabulary), scale.width, dropout=scale.dropout, ids=ids, known=known)


def _words(data: SentenceData, split: Sentences) -> list[list[str]]:
    """Return the words of each example of a split; those of a pair's second text are marked."""
    return [
        [
            side + word
            for text, side in zip(range(len(split.texts)), SIDES, strict=False)
            for word in data.words.words(number, text)
        ]
        for number in split.numbers.tolist()
    ]
