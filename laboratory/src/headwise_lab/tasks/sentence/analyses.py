"""Analyses of a trained classifier of texts: calibration, certainty on other texts, and where its heads attend.

Calibration and certainty are those of An et al. 2020, C.4 and C.5.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headwise.errors import DataError, SettingError
from headwise.metrics.calibration import Reliability, predictive_entropy, reliability_of
from headwise.texts.batching import batch_by_length
from headwise.texts.labeled_texts import read_texts
from headwise_lab.data.arrays import Ragged, digest
from headwise_lab.experiment.evaluation import spread_evenly
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.models.text_classifiers import TextClassifier
from headwise_lab.tasks.sentence.model import SelfAttentive
from headwise_lab.tasks.sentence.scales import SentenceScale
from headwise_lab.tasks.sentence.task import BATCH, FORM, probabilities
from headwise_lab.texts.data import UNKNOWN, Split, TextData
from headwise_lab.texts.words import tokenize
from headwise_lab.training.trained import load_trained

RELIABILITY, ENTROPY, ATTENTION_MAPS = "reliability", "predictive-entropy", "attention-maps"
# Maximum number of texts from another domain.
MOST_TEXTS = 2_000
TEXTS = 3
# Length in words of the texts shown, similar to the paper's review.
SHORTEST, LONGEST = 20, 40
COUNTED = 500


def measure_reliability(settings: RunSettings, folder: Path) -> dict[str, Any]:
    """Return ECE and OE on the test set, and their bins."""
    model, data = _load_model(settings, folder)
    with torch.no_grad():
        found = torch.from_numpy(probabilities(model, data.test))
    sure = reliability_of(found, torch.from_numpy(data.test.labels))
    bins = {"counts": sure.counts, "right": sure.right, "confidences": sure.confidences}
    return {"numbers": {"test_ECE": sure.ece, "test_OE": sure.oe}, "bins": bins}


def read_reliability(analysis: dict[str, Any]) -> Reliability:
    """Return the reliability in a record of `measure_reliability`."""
    return Reliability(**{name: tuple(values) for name, values in analysis["bins"].items()})


def measure_entropy(settings: RunSettings, folder: Path) -> dict[str, Any]:
    """Return the entropy of a model's predictions on texts from another domain, `SentenceScale.out_of_domain`.

    Each line has one text; labels are ignored. Texts are truncated and encoded like those of the task.

    Raises:
        SettingError: The scale names no such file.
        DataError: It cannot be read.
    """
    model, data = _load_model(settings, folder)
    scale = settings.scale
    assert isinstance(scale, SentenceScale)
    about = identify_texts(scale)
    assert scale.out_of_domain is not None
    if data.pairs:
        raise DataError("the model was trained on pairs; expected one trained on single texts.")
    others, encode = read_texts(scale.out_of_domain), FORM.encoder(data.vocabulary)
    chosen = [others[number] for number in spread_evenly(len(others), MOST_TEXTS)]
    texts = Ragged.of([encode(words[: scale.max_words]) for words in tokenize(chosen) if words])
    split = Split((texts,), np.zeros(len(texts), dtype=np.int64), np.arange(len(texts)))
    with torch.no_grad():
        entropies = predictive_entropy(torch.from_numpy(probabilities(model, split)))
    return {
        "numbers": {
            "other_entropy": float(entropies.mean()),
            "other_words_unknown": float((texts.values == UNKNOWN).mean()),
        },
        "text": f"{len(texts):,} of {scale.out_of_domain.name}",
        "about": about,
        "classes": len(data.labels),
        "entropies": entropies.tolist(),
    }


def identify_texts(scale: Any) -> str:
    """Return the digest of the texts that `measure_entropy` is about.

    Raises:
        SettingError: The scale names no such file.
        DataError: It cannot be read, or holds no texts.
    """
    place = getattr(scale, "out_of_domain", None)
    if place is None:
        raise SettingError("the entropy of predictions is of other texts than the model's; name them: --out-of-domain.")
    read_texts(place)
    return digest("out of domain", [place])


def measure_attention(settings: RunSettings, folder: Path) -> dict[str, Any]:
    """Return the attention of each head over a few test texts, and how much heads agree on their top words.

    "heads_on_one_word" is the largest share of heads whose greatest weight is on the same word, and "different_words"
    the number of words with some head's greatest weight, both as means over test texts.

    Raises:
        DataError: No test text is long enough.
    """
    model, data = _load_model(settings, folder)
    assert isinstance(model, SelfAttentive)
    counted = spread_evenly(len(data.test), COUNTED)
    found = []
    with torch.no_grad():
        for batch in batch_by_length(data.test.lengths[counted], BATCH):
            found += [count_agreement(_read_weights(model, data, int(number))) for number in counted[batch].tolist()]
        maps = [_map_text(model, data, number) for number in choose_texts(data)]
    shares, words = np.array(found, dtype=np.float64).mean(axis=0).tolist()
    return {"numbers": {"heads_on_one_word": shares, "different_words": words}, "maps": maps}


def count_agreement(weights: NDArray[np.float64]) -> tuple[float, int]:
    """Return the largest share of heads with the same top word, and the number of top words, of weights [H, L].

    >>> count_agreement(np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]]))
    (0.75, 2)
    """
    counts = np.bincount(weights.argmax(axis=1))
    return float(counts.max() / len(weights)), int((counts > 0).sum())


def choose_texts(data: TextData) -> list[int]:
    """Return the test texts to show: the first of 20 to 40 words in the second to last class (four of five stars).

    Raises:
        DataError: No test text has such a length.
    """
    lengths, wanted = data.test.texts[0].lengths, max(0, len(data.labels) - 2)
    inside = np.flatnonzero((lengths >= SHORTEST) & (lengths <= LONGEST))
    if not len(inside):
        raise DataError(f"no test text has {SHORTEST} to {LONGEST} words; name other data.")
    return sorted(inside.tolist(), key=lambda place: (int(data.test.labels[place]) != wanted, place))[:TEXTS]


def _load_model(settings: RunSettings, folder: Path) -> tuple[TextClassifier, TextData]:
    trained = load_trained(settings, folder)
    assert isinstance(trained.model, TextClassifier)
    return trained.model, trained.data


def _map_text(model: SelfAttentive, data: TextData, place: int) -> dict[str, Any]:
    texts = [_read_tokens(model, data, place, text) for text in range(len(data.test.texts))]
    logits = model.logits(texts[0], texts[1] if data.pairs else None)
    return {
        "words": [*data.texts.table(int(data.test.numbers[place])).words],
        "weights": _read_weights(model, data, place).tolist(),
        "label": data.labels[int(data.test.labels[place])],
        "predicted": data.labels[int(logits.argmax())],
    }


def _read_weights(model: SelfAttentive, data: TextData, place: int) -> NDArray[np.float64]:
    return model.attend(_read_tokens(model, data, place, 0))[1][0].double().cpu().numpy()


def _read_tokens(model: SelfAttentive, data: TextData, place: int, text: int) -> torch.Tensor:
    return torch.tensor([data.test.texts[text][place]], device=next(model.parameters()).device)
