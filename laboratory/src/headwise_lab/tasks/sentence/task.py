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
from torch import Tensor, nn

from headwise.errors import DataError
from headwise.heads.find import find_heads
from headwise.heads.heads import Heads
from headwise.input_files import name_in_errors
from headwise.metrics.calibration import reliability_of
from headwise.texts.batching import Encoded, Row, batch_by_length
from headwise.texts.frozen import Agreement, Fidelity, Frozen
from headwise_lab.data.splits import order_by_hash
from headwise_lab.experiment.task import Answers, name_run
from headwise_lab.frozen.runs import batch_rows, list_files
from headwise_lab.models.text_classifiers import TextClassifier
from headwise_lab.tasks.sentence.model import SelfAttentive
from headwise_lab.tasks.sentence.scales import SENTENCE_SCALES, SentenceScale
from headwise_lab.texts.data import UNKNOWN, Form, Split, TextData, Texts, load_texts
from headwise_lab.texts.sets import read_set
from headwise_lab.texts.task import TextTask, make_vectors, restore_classifier
from headwise_lab.texts.words import find_spacy, locate_words, tokenize
from headwise_lab.training.trained import list_weights

ENCODING = "sentence-1"  # changes with anything that changes the words
# Examples that are answered together.
BATCH = 128
# Lower bound of a probability in the loss.
LEAST = 1e-12
# The label that `SentenceScale.positive` is about.
POSITIVE = "1"
FORM = Form(
    words=lambda texts, _scale, _cache, progress: [*tokenize(texts, progress=progress)],
    key=lambda _example, words: ("example", *(" ".join(text) for text in words)),
    grouped=True,
    bounded=False,
    left_out=("without_words", "without a word left out"),
    cut="texts cut to the longest length",
)


class SentenceData(TextData):
    """The task's data."""

    def describe_labels(self) -> str:
        """Return the labels with their shares of test, the size of the vocabulary, and how many words have a vector."""
        shares = np.bincount(self.test.labels, minlength=len(self.labels)) / len(self.test)
        labels = ", ".join(f"{name} {share:.0%}" for name, share in zip(self.labels, shares, strict=True))
        known = f", {len(self.texts.vectors):,} words of the set with a vector" if self.texts.vectors else ""
        return f"labels of test {labels}; {len(self.vocabulary):,} token ids{known}"


def load_sentences(place: Path, scale: SentenceScale, cache: Path | None, *, progress: bool = False) -> SentenceData:
    """Return the data of a scale.

    Of published splits, training examples that are also in dev or test are left out, and dev is cut from training if
    there is none. A set without splits is cut into tenths by a hash of the text, the premise or the author.

    Raises:
        DataError: A file is missing or malformed, a split is empty, or there are too few examples of label 1.
        HeadwiseError: spaCy is not installed.
    """
    found = read_set(place, scale.columns)
    inputs = f"{ENCODING} {scale.max_words} {found.description} {[*found.splits]} {find_spacy()}"
    inputs += "" if scale.embeddings is None else f" vectors {scale.width}"
    inputs = " ".join([inputs, *scale.columns.words()])
    files = [] if scale.embeddings is None else [scale.embeddings]
    texts = load_texts(found, FORM, scale, cache, inputs, files, progress=progress)
    with name_in_errors(place):
        splits, dropped = texts.cut_splits()
    before = sum(map(len, splits.values()))
    if scale.positive is not None:
        splits = {name: _thin(texts, numbers, scale.positive, place) for name, numbers in splits.items()}
    thinned = before - sum(map(len, splits.values()))
    return SentenceData.of(texts, splits, FORM, scale, place, dropped=dropped, thinned=thinned)


def _thin(texts: Texts, numbers: NDArray[np.int64], share: float, place: Path) -> NDArray[np.int64]:
    """Return a split with as many examples of label 1 left out as needed to reach their share."""
    if sorted(texts.labels) != ["0", POSITIVE]:
        raise DataError(f"{place} has labels {', '.join(texts.labels[:4])}; a share of label 1 needs labels 0 and 1.")
    positive = texts.classes[numbers] == texts.labels.index(POSITIVE)
    wanted = round(share / (1 - share) * int((~positive).sum()))
    if wanted > int(positive.sum()):
        raise DataError(f"{place}: {positive.mean():.1%} of a split have label 1, less than {share:.1%}; lower it.")
    chosen = order_by_hash(numbers[positive], texts.keys, "thin")[:wanted]
    return np.sort(np.concatenate([numbers[~positive], chosen]))


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


class SentenceTask(TextTask, settings=Path(__file__).with_name("task.toml")):
    """Self-attentive sentence classification (Lin et al. 2017; An et al. 2020, section 5.1); see `task.Task`."""

    name = "sentence"
    scales = SENTENCE_SCALES

    def load(
        self, folder: Path | None, scale: SentenceScale, cache: Path | None, *, progress: bool = False
    ) -> SentenceData:
        """Return the data; see `load_sentences`."""
        return load_sentences(self.require_place(folder), scale, cache, progress=progress)

    def find(self, folder: Path, scale: SentenceScale) -> None:  # noqa: ARG002  any scale reads the same files
        """Refuse a place without a set of texts or pairs."""
        read_set(folder)

    def model(self, data: TextData, scale: SentenceScale) -> SelfAttentive:
        """Return a bidirectional LSTM with additive attention."""
        return SelfAttentive(make_vectors(data, scale), len(data.labels), scale, texts=1 + data.pairs)

    def prune(self, model: SelfAttentive, heads: Heads, removed: Mapping[str, Sequence[int]]) -> None:  # noqa: ARG002  of its one attention
        """Remove heads of the one attention, and what the layers after it have of them."""
        (numbers,) = removed.values()
        model.remove_heads(numbers)

    def predict(self, model: TextClassifier, split: Split) -> NDArray[np.int64]:
        """Return the predicted class of each example of a split, [N]."""
        return probabilities(model, split).argmax(axis=1)

    def on_test(self, model: TextClassifier, data: TextData) -> Answers:
        """Return the predicted classes, whether they are right, and `scores`."""
        return _answers(probabilities(model, data.test), data.test)

    def losses(self, model: TextClassifier, data: TextData) -> NDArray[np.float64]:
        """Return the cross entropy of each test example, and 1."""
        found = probabilities(model, data.test)[np.arange(len(data.test)), data.test.labels]
        return np.stack([-np.log(np.maximum(found, LEAST)), np.ones(len(found))], axis=1)

    def baseline(self, name: str, data: TextData, seed: int) -> Answers:
        """Return the answers of the most frequent class, or of a regression on naive Bayes log-count ratios."""
        if name == "majority":
            shares = np.bincount(data.train.labels, minlength=len(data.labels)) / len(data.train)
            return _answers(np.tile(shares, (len(data.test), 1)), data.test)
        # scikit-learn takes seconds to import
        from headwise_lab.models.bag_of_words import naive_bayes_regression

        train, test = data.words(data.train), data.words(data.test)
        return _answers(naive_bayes_regression(train, test, data.train.labels, seed=seed), data.test)

    def open_frozen(self, folder: Path, record: Mapping[str, Any], pipeline: Path | None) -> Frozen:  # noqa: ARG002  nothing is parsed
        """Return the model of a run; of one that compares two texts, the part that reads each of them."""
        pairs = any(name.startswith("gate.") for name in list_weights(folder))
        model, scale, vocabulary = restore_classifier(
            self,
            folder,
            record,
            SentenceScale,
            lambda words, labels, scale: SelfAttentive(words, labels, scale, texts=1 + pairs),
        )
        read, encode = OneText(model) if pairs else model, FORM.encoder(vocabulary)

        def row(sentence: str) -> Row:
            whole = next(locate_words([sentence]))
            found = whole[: scale.max_words]
            numbers = encode([word for word, _ in found])
            shown = tuple(
                word if one != UNKNOWN else vocabulary[UNKNOWN] for (word, _), one in zip(found, numbers, strict=True)
            )
            return Row(numbers, shown, [span for _, span in found], cut=len(whole) > len(found))

        def run(batch: Encoded) -> Tensor:
            found = read(batch.inputs["input_ids"])
            return found if isinstance(found, Tensor) else found["logits"]

        return Frozen(
            name_run(folder),
            read,
            find_heads(read),
            batch_rows(row, read),
            run,
            None,
            list_files(folder),
            score=Fidelity if pairs else Agreement,
            note="This run compares two texts; each line was read as one, and fidelity is of its heads side by side."
            if pairs
            else "",
            longest=f"{scale.max_words} words",
        )


class OneText(nn.Module):
    """Returns the concatenated heads of each text, [B, r * d], of ids [B, L], by a model that compares two texts."""

    def __init__(self, model: SelfAttentive) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the heads."""
        return self.model.attend(tokens)[0]


def probabilities(model: TextClassifier, split: Split) -> NDArray[np.float64]:
    """Return the probability of each class, [N, C], of each example of a split, in the split's order."""
    places = batch_by_length(split.lengths, BATCH)
    logits = [SentenceTask().logits(model, split, np.asarray(batch)).double() for batch in places]
    answered = torch.cat([torch.softmax(one, dim=-1).cpu() for one in logits]).numpy()
    found = np.empty_like(answered)
    found[np.concatenate(places)] = answered
    return found


def _answers(found: NDArray[np.float64], split: Split) -> Answers:
    predicted = found.argmax(axis=1)
    return Answers(predicted == split.labels, predicted, scores(found, split.labels))
