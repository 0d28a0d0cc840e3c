"""Probing a frozen model: which of its layers, heads and sets of heads tell which property of a sentence.

Owns what is probed, the choice of sentences and what a probe found. Encoding is `encodings`', fitting `probing_fit`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from headwise.errors import DataError, SettingError
from headwise.lab.data.arrays import stable_key
from headwise.lab.frozen.vectors import Encodings
from headwise.lab.probing.fit import Classifier, Fitted, Split, fit
from headwise.lab.results.statistics import holm

EMBEDDINGS = "emb"
ALL, NONE = "all", "none"
# How a capped number of sentences is shared between training, dev and test.
SHARES = {"train": 0.6, "dev": 0.1, "test": 0.3}
CONFIDENCE, LEVEL = 0.95, 0.05


@dataclass(frozen=True)
class Vectors:
    """What one classifier reads: the state of a layer, or the outputs of heads, side by side.

    Attributes:
        layer: The layer, from 0, or -1 for what goes into layer 0; None for heads.
        heads: (layer, head) of each head, both from 0; () for a layer.
    """

    layer: int | None = None
    heads: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        if self.layer is not None:
            return EMBEDDINGS if self.layer < 0 else str(self.layer)
        return "+".join(f"{layer}.{head}" for layer, head in self.heads)

    def of(self, found: Encodings) -> NDArray[np.floating]:
        """Return the vectors [N, d] of encoded sentences."""
        if self.layer is not None:
            assert found.layers is not None  # no layer is asked for where there are none
            return found.layers[self.layer + 1]
        return np.concatenate([found.head(layer, head) for layer, head in self.heads], axis=1)


@dataclass(frozen=True, eq=False)
class Chosen:
    """The sentences of a probe: places among those that are encoded, and classes, by split."""

    places: dict[str, NDArray[np.int64]]
    labels: dict[str, NDArray[np.int64]]


@dataclass(frozen=True)
class Probed:
    """What one classifier found.

    Attributes:
        name: What it read: a layer ("emb", "0", ...), a head ("3.5") or several ("3.5+4.0").
        layer: The layer; None for heads.
        heads: Layer and head of each head.
        dev: Accuracy on dev, by which its penalty was chosen.
        accuracy: Accuracy on test.
        low: Lower end of its 95 % binomial interval (Wilson).
        high: Upper end.
        p: One-sided binomial p-value of doing no better than the majority baseline, Holm-adjusted over what was probed
            on the task.
        penalty: The chosen penalty.
        converged: Whether the fit came to its end.
    """

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
        """Whether it is not told from the majority baseline, or from guessing where that is more."""
        return self.p > LEVEL


@dataclass(frozen=True)
class ProbedTask:
    """What was found on one task.

    Attributes:
        task: Name of its file.
        data: Digest of what the file holds.
        title: Its short name.
        labels: Number of classes.
        train: Training sentences.
        dev: Dev sentences.
        test: Test sentences.
        majority: Share of test that has the most frequent class of training.
        said: What was done to the file's sentences.
        found: What each classifier found, in the order asked for.
    """

    task: str
    data: str
    title: str
    labels: int
    train: int
    dev: int
    test: int
    majority: float
    said: str
    found: tuple[Probed, ...]

    @property
    def layers(self) -> list[Probed]:
        """What layers told."""
        return [one for one in self.found if one.layer is not None]

    @property
    def single_heads(self) -> list[Probed]:
        """What single heads told."""
        return [one for one in self.found if len(one.heads) == 1]

    @property
    def sets(self) -> list[Probed]:
        """What sets of heads told."""
        return [one for one in self.found if len(one.heads) > 1]

    def record(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return asdict(self)

    @classmethod
    def read(cls, record: dict[str, Any]) -> ProbedTask:
        """Return what `record` wrote.

        Raises:
            TypeError: It is not such a record.
            KeyError: Likewise.
        """
        found = [{**one, "heads": tuple((layer, head) for layer, head in one["heads"])} for one in record["found"]]
        return cls(**{**record, "found": tuple(Probed(**one) for one in found)})


def layers_asked(text: str, count: int) -> list[Vectors]:
    """Return the layers of an option: all, none, or names as in "emb,0,5".

    Args:
        text: The option.
        count: Layers of the model.

    Raises:
        SettingError: A name is no layer of the model.

    >>> [str(one) for one in layers_asked("all", 2)], [one.layer for one in layers_asked("emb,1", 2)]
    (['emb', '0', '1'], [-1, 1])
    """
    known = {EMBEDDINGS: -1, **{str(layer): layer for layer in range(count)}}
    if text in (ALL, NONE):
        return [Vectors(layer) for layer in known.values() if text == ALL]
    names = [name.strip() for name in text.split(",")]
    wrong = next((name for name in names if name not in known), None)
    if wrong is not None:
        raise SettingError(f"--layers has {wrong!r}; expected all, none, or some of {', '.join(known)}.")
    return [Vectors(known[name]) for name in dict.fromkeys(names)]


def heads_asked(text: str, counts: Sequence[int]) -> list[Vectors]:
    """Return the heads of an option: all, none, or single heads and sets of them as in "3.5,3.5+4.0".

    Args:
        text: The option.
        counts: Heads of each layer.

    Raises:
        SettingError: A name is no head of the model.

    >>> [str(one) for one in heads_asked("0.1,0.1+1.0", (2, 2))], len(heads_asked("all", (2, 2)))
    (['0.1', '0.1+1.0'], 4)
    """
    known = {f"{layer}.{head}": (layer, head) for layer, count in enumerate(counts) for head in range(count)}
    if text in (ALL, NONE):
        return [Vectors(heads=(place,)) for place in known.values() if text == ALL]
    found: dict[frozenset[tuple[int, int]], Vectors] = {}
    for piece in text.split(","):
        names = [name.strip() for name in piece.split("+")]
        wrong = next((name for name in names if name not in known), None)
        if wrong is not None:
            last = f"{len(counts) - 1}.{counts[-1] - 1}" if counts else "none: it has no heads that can be read"
            raise SettingError(f"--heads has {wrong!r}; expected all, none, or LAYER.HEAD from 0.0 to {last}.")
        places = tuple(dict.fromkeys(known[name] for name in names))
        found.setdefault(frozenset(places), Vectors(heads=places))
    return list(found.values())


def choose_sentences(data: Any, most: int | None, place: Path) -> tuple[list[int], Chosen]:
    """Return the numbers of the sentences to encode, and the splits among them.

    Of a capped number six tenths are for training, one for dev and three for test, as far as the splits have them;
    which ones follows from a hash of the sentences.

    Args:
        data: The sentences.
        most: Sentences in all; None for every one.
        place: What messages call the data.

    Raises:
        DataError: A split has no sentence, or the training sentences have one class alone.
    """
    numbers: list[int] = []
    places, labels = {}, {}
    for name, share in SHARES.items():
        split = getattr(data, name)
        chosen = split.numbers.tolist()
        if most is not None:
            ordered = sorted(chosen, key=lambda number: (stable_key("probe", data.sentences[number].lower()), number))
            chosen = sorted(ordered[: int(share * most)])
        if not chosen:
            raise DataError(f"{place}: no {name} sentence is left; ask for more with --sentences.")
        places[name] = np.arange(len(numbers), len(numbers) + len(chosen))
        labels[name] = data.texts.classes[np.array(chosen)]
        numbers += chosen
    if len(np.unique(labels["train"])) < 2:
        raise DataError(f"{place}: the training sentences have one class alone; ask for more with --sentences.")
    return numbers, Chosen(places, labels)


def sentences_of(data: Any, numbers: Iterable[int]) -> list[str]:
    """Return sentences by number, as the file writes them."""
    return [data.sentences[number] for number in numbers]


def probe_vectors(found: Encodings, chosen: Chosen, vectors: Vectors, classifier: Classifier) -> Fitted:
    """Return what a classifier finds in the vectors of a layer or of heads."""
    read = vectors.of(found)
    splits = {name: Split(read[places], chosen.labels[name]) for name, places in chosen.places.items()}
    return fit(classifier, splits)


def judged(fitted: Sequence[tuple[Vectors, Fitted]], *, test: int, majority: float) -> tuple[Probed, ...]:
    """Return what was found with intervals, and p-values against the majority baseline, adjusted over all of it.

    Args:
        fitted: What was read and what was found.
        test: Test sentences.
        majority: Accuracy of the majority baseline on them, or of guessing where that is more.
    """
    tests = [binomtest(one.correct, test, majority, alternative="greater") for _, one in fitted]
    adjusted = holm([float(one.pvalue) for one in tests])
    probed = []
    for (vectors, one), p in zip(fitted, adjusted, strict=True):
        # the interval is two-sided, the test is not
        interval = binomtest(one.correct, test).proportion_ci(CONFIDENCE, method="wilson")
        probed.append(
            Probed(
                name=str(vectors),
                layer=vectors.layer,
                heads=vectors.heads,
                dev=one.dev,
                accuracy=one.correct / test,
                low=float(interval.low),
                high=float(interval.high),
                p=p,
                penalty=one.penalty,
                converged=one.converged,
            )
        )
    return tuple(probed)
