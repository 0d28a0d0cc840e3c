"""The calibration of a trained classifier, and its certainty on other texts (An et al. 2020, C.4 and C.5)."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwise.errors import DataError, SettingError
from headwise.metrics.calibration import Reliability, predictive_entropy, reliability_of
from headwise.texts.labeled_texts import read_texts
from headwise_lab.data.arrays import Ragged, digest
from headwise_lab.experiment.evaluation import spread_evenly
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.models.text_classifiers import TextClassifier
from headwise_lab.tasks.sentence.data import UNKNOWN, SentenceData, Sentences, encode
from headwise_lab.tasks.sentence.scales import SentenceScale
from headwise_lab.tasks.sentence.task import probabilities
from headwise_lab.tasks.sentence.words import tokenize
from headwise_lab.training.trained import load_trained

# Maximum number of texts from another domain.
MOST_TEXTS = 2_000


def measure_reliability(settings: RunSettings, folder: Path) -> dict[str, Any]:
    """Return ECE and OE on the test set, and their bins."""
    model, data = _load_model(settings, folder)
    test = data.test
    with torch.no_grad():
        found = torch.from_numpy(probabilities(model, test))
    sure = reliability_of(found, torch.from_numpy(test.labels))
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
    others = read_texts(scale.out_of_domain)
    chosen = [others[number] for number in spread_evenly(len(others), MOST_TEXTS)]
    texts = Ragged.of([encode(words[: scale.max_words], data.vocabulary) for words in tokenize(chosen) if words])
    split = Sentences((texts,), np.zeros(len(texts), dtype=np.int64), np.arange(len(texts)))
    with torch.no_grad():
        entropies = predictive_entropy(torch.from_numpy(probabilities(model, split)))
    classes = len(data.labels)
    return {
        "numbers": {
            "other_entropy": float(entropies.mean()),
            "other_words_unknown": float((texts.values == UNKNOWN).mean()),
        },
        "text": f"{len(texts):,} of {scale.out_of_domain.name}",
        "about": about,
        "classes": classes,
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


def _load_model(settings: RunSettings, folder: Path) -> tuple[TextClassifier, SentenceData]:
    trained = load_trained(settings, folder)
    assert isinstance(trained.model, TextClassifier)
    return trained.model, trained.data
