"""Probing a frozen model: which layers, heads and sets of heads encode which property of a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter
from scipy.stats import binomtest

from headwise.errors import DataError
from headwise_lab.data.arrays import stable_key
from headwise_lab.frozen.vectors import Encodings
from headwise_lab.probing.fit import Classifier, Fitted, Split, fit
from headwise_lab.results.statistics import holm

EMBEDDINGS = "emb"
# How a capped number of sentences is shared between training, dev and test.
SHARES = {"train": 0.6, "dev": 0.1, "test": 0.3}
CONFIDENCE, LEVEL = 0.95, 0.05


@dataclass(frozen=True)
class Vectors:
    """The input of one classifier: the states of a layer, or the concatenated outputs of heads."""

    # From 0, or -1 for what goes into layer 0; None for heads.
    layer: int | None = None
    # Layer and head, both from 0; () for a layer.
    heads: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        if self.layer is not None:
            return EMBEDDINGS if self.layer < 0 else str(self.layer)
        return "+".join(f"{layer}.{head}" for layer, head in self.heads)

    def select(self, found: Encodings) -> NDArray[np.floating]:
        """Return the vectors [N, d] of encoded sentences."""
        if self.layer is not None:
            assert found.layers is not None  # checked when the request was parsed
            return found.layers[self.layer + 1]
        return np.concatenate([found.head(layer, head) for layer, head in self.heads], axis=1)


@dataclass(frozen=True, eq=False)
class Chosen:
    """The sentences of a probe: indices among the encoded ones, and classes, by split."""

    places: dict[str, NDArray[np.int64]]
    labels: dict[str, NDArray[np.int64]]


@dataclass(frozen=True)
class Probed:
    """The result of one classifier.

    `dev` and `accuracy` on test are shares, with the 95 % binomial interval of the latter (Wilson); `p` is one-sided,
    against the majority baseline, Holm-adjusted over all probes of the task.
    """

    # The input: a layer ("emb", "0", ...), a head ("3.5") or several ("3.5+4.0").
    name: str
    layer: int | None
    heads: tuple[tuple[int, int], ...]
    dev: float
    accuracy: float
    low: float
    high: float
    p: float
    penalty: float
    converged: bool

    @property
    def at_chance(self) -> bool:
        """Whether it is not significantly above the majority baseline, or guessing if that is better."""
        return self.p > LEVEL


@dataclass(frozen=True)
class ProbedTask:
    """The results on one task."""

    # The name of its file, and the digest of what it holds.
    task: str
    data: str
    title: str
    # Number of classes, and of sentences.
    labels: int
    train: int
    dev: int
    test: int
    # Share of test that has the most frequent class of training.
    majority: float
    # Summary of the data.
    said: str
    # Result of each classifier, in the requested order.
    found: tuple[Probed, ...]

    @property
    def layers(self) -> list[Probed]:
        """Results of layers."""
        return [one for one in self.found if one.layer is not None]

    @property
    def single_heads(self) -> list[Probed]:
        """Results of single heads."""
        return [one for one in self.found if len(one.heads) == 1]

    @property
    def sets(self) -> list[Probed]:
        """Results of sets of heads."""
        return [one for one in self.found if len(one.heads) > 1]

    def record(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return asdict(self)

    @staticmethod
    def read(record: Any) -> ProbedTask:
        """Return what `record` wrote; raise `ValueError` for other data."""
        return TypeAdapter(ProbedTask).validate_python(record)


def choose_sentences(data: Any, most: int | None, place: Path) -> tuple[list[int], Chosen]:
    """Return the numbers of the sentences to encode, and the splits among them.

    At most `most` sentences, None for all, are divided into six tenths for training, one for dev and three for test,
    chosen by a hash of the sentences.

    Raises:
        DataError: A split has no sentence, or all training sentences have one class.
    """
    numbers: list[int] = []
    places, labels = {}, {}
    for name, share in SHARES.items():
        chosen = getattr(data, name).numbers.tolist()
        if most is not None:
            chosen.sort(key=lambda number: (stable_key("probe", data.sentences[number].lower()), number))
            chosen = sorted(chosen[: int(share * most)])
        if not chosen:
            raise DataError(f"{place}: no {name} sentence is left; raise --sentences.")
        places[name] = np.arange(len(numbers), len(numbers) + len(chosen))
        labels[name] = data.texts.classes[np.array(chosen)]
        numbers += chosen
    if len(np.unique(labels["train"])) < 2:
        raise DataError(f"{place}: all training sentences have one class; raise --sentences.")
    return numbers, Chosen(places, labels)


def probe_vectors(found: Encodings, chosen: Chosen, vectors: Vectors, classifier: Classifier) -> Fitted:
    """Fit a classifier on the vectors of a layer or of heads."""
    read = vectors.select(found)
    return fit(classifier, {name: Split(read[at], chosen.labels[name]) for name, at in chosen.places.items()})


def judge_probes(fitted: Sequence[tuple[Vectors, Fitted]], *, test: int, majority: float) -> tuple[Probed, ...]:
    """Return the results with intervals, and adjusted p-values against the majority baseline.

    `test` is the number of test sentences, and `majority` the accuracy of the baseline on them, or of guessing if that
    is better.
    """
    tests = [binomtest(one.correct, test, majority, alternative="greater") for _, one in fitted]
    probed = []
    for (vectors, one), p in zip(fitted, holm([float(one.pvalue) for one in tests]), strict=True):
        # the interval is two-sided, the test is not
        ends = binomtest(one.correct, test).proportion_ci(CONFIDENCE, method="wilson")
        own = (one.dev, one.correct / test, float(ends.low), float(ends.high), p, one.penalty, one.converged)
        probed.append(Probed(str(vectors), vectors.layer, vectors.heads, *own))
    return tuple(probed)
