"""The data of the classification task: splits of labeled texts as token ids, and how a batch is made.

A text is encoded as START, its words in lower case, END.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from headwise.errors import DataError
from headwise.input_files import name_in_errors
from headwise.texts.batching import pad
from headwise_lab.data.arrays import Ragged
from headwise_lab.data.splits import TENTHS, complete_splits, order_by_hash, split_by_hash
from headwise_lab.data.word_vectors import select_vectors
from headwise_lab.tasks.classification.scales import ClassificationScale
from headwise_lab.tasks.classification.texts import Texts, load_texts

SPECIAL = ("<pad>", "<unk>", "<start>", "<end>")
PADDING, UNKNOWN, START, END = range(len(SPECIAL))


class Sentence(TypedDict):
    """One text as token ids, its class, and its number among all texts of the set."""

    tokens: list[int]
    label: int
    number: int


@dataclass(frozen=True, eq=False)
class Sentences(Dataset[Sentence]):
    """The texts of one split, encoded; `split[i]` is a `Sentence`.

    Attributes:
        tokens: Token ids, with START and END.
        labels: Class of each text, int64 [N].
        numbers: Index of each text in the whole set, int64 [N].
    """

    tokens: Ragged
    labels: NDArray[np.int64]
    numbers: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each text, START and END included, [N]."""
        return self.tokens.lengths

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sentence:
        return Sentence(tokens=self.tokens[index], label=int(self.labels[index]), number=int(self.numbers[index]))


@dataclass(frozen=True, eq=False)
class ClassificationData:
    """The task's data.

    Attributes:
        train: Texts to train on.
        dev: Texts to choose settings by.
        test: Texts to answer once at the end; those of all folds, one after another, if no fold is chosen.
        vocabulary: The token of each id; 0 is padding, 1 an unknown word, 2 and 3 begin and end a text.
        labels: The label of each class.
        texts: All texts of the set, with their parses.
        dropped: Number of training and dev texts left out because a later split has them too.
    """

    train: Sentences
    dev: Sentences
    test: Sentences
    vocabulary: tuple[str, ...]
    labels: tuple[str, ...]
    texts: Texts
    dropped: int

    @property
    def fingerprint(self) -> str:
        """Digest of everything the texts depend on; how they are split is part of the scale's record."""
        return self.texts.fingerprint

    def summary(self) -> str:
        """Return the sizes of the splits, what was left out, and the labels."""
        counts = self.counts()
        sizes = ", ".join(f"{counts[name]:,} {name}" for name in ("train", "dev", "test"))
        done = [
            f"{counts[name]:,} {text}"
            for name, text in (
                ("without_text", "without a text left out"),
                ("in_a_later_split_too", "left out of training or dev as a later split has them"),
                ("cut_to_the_longest", "cut to the longest length"),
            )
            if counts[name]
        ]
        labels = ", ".join(self.labels[:8]) + (", ..." if len(self.labels) > 8 else "")
        parses = "" if self.texts.heads is None else "; parsed"
        return f"texts: {'; '.join([sizes, *done])}; labels {labels}; {len(self.vocabulary):,} token ids{parses}"

    def vectors(self, width: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the ids of words that have a vector from the file, [V], and the vectors, [V, width]."""
        return select_vectors(self.texts.vectors, self.vocabulary, width)

    def counts(self) -> dict[str, int]:
        """Return the numbers of texts, and of those left out or truncated, by name."""
        named = {name: len(getattr(self, name)) for name in ("train", "dev", "test")}
        unknown = int((self.test.tokens.values == UNKNOWN).sum())
        words = int(self.test.tokens.values.size - 2 * len(self.test))
        return {
            **named,
            "without_text": self.texts.left_out,
            "in_a_later_split_too": self.dropped,
            "cut_to_the_longest": self.texts.cut,
            "test_words": words,
            "test_words_unknown": unknown,
        }


def list_folds(place: Path, scale: ClassificationScale, cache: Path | None) -> tuple[ClassificationScale, ...]:
    """Return the scale of each training of a run: one per fold if the set has no test split."""
    if scale.folds is None or scale.fold is not None:
        return (scale,)
    texts = load_texts(place, scale, cache)
    if texts.layout.test is not None:
        return (scale,)
    scales = tuple(replace(scale, fold=fold) for fold in range(scale.folds))
    for one in scales:
        _require_labels(texts, _cut_splits(texts, one)[0]["train"], place)
    return scales


def load_data(
    place: Path, scale: ClassificationScale, cache: Path | None, *, progress: bool = False
) -> ClassificationData:
    """Return the data of a scale.

    Equal texts are in one split: of published splits, training texts that are also in dev or test are left out; other
    splits are cut by a hash of the text. A set without a test split is cut into tenths, or into `scale.folds` parts, of
    which one is test and one is dev.

    Args:
        place: Folder with the set's files, or one file.
        scale: How to split, and what to keep.
        cache: Folder for prepared texts and parses; None keeps nothing.
        progress: Whether parsing shows a bar.

    Raises:
        DataError: A file is missing or malformed, or a split is empty.
    """
    return encode_splits(load_texts(place, scale, cache, progress=progress), scale, place)


def encode_splits(
    texts: Texts, scale: ClassificationScale, place: Path, *, every_label: bool = True
) -> ClassificationData:
    """Return texts split and encoded; see `load_data`. Refuse a label without a training text if `every_label`."""
    with name_in_errors(place):
        splits, dropped = _cut_splits(texts, scale)
    if scale.train_examples is not None:
        splits["train"] = np.sort(order_by_hash(splits["train"], texts.keys, "cap")[: scale.train_examples])
    for name, numbers in splits.items():
        if not len(numbers):
            raise DataError(f"{place}: the {name} split holds no text; add data.")
    if every_label:
        _require_labels(texts, splits["train"], place)
    vocabulary = _make_vocabulary(texts, splits["train"], scale.min_count)
    ids = {token: index for index, token in enumerate(vocabulary) if index >= len(SPECIAL)}
    type_ids = [ids.get(word, UNKNOWN) for word in texts.lower]
    encoded = {
        name: Sentences(
            Ragged.of([[START, *(type_ids[word] for word in texts.words[number]), END] for number in numbers.tolist()]),
            texts.classes[numbers],
            numbers,
        )
        for name, numbers in splits.items()
    }
    return ClassificationData(**encoded, vocabulary=vocabulary, labels=texts.labels, texts=texts, dropped=dropped)


def collate(examples: Sequence[Sentence]) -> dict[str, Tensor]:
    """Return a batch: "tokens" [B, L] padded with 0, "labels" [B] and "numbers" [B], all int64.

    Raises:
        DataError: There are no examples.

    Example:
        >>> batch = collate([Sentence(tokens=[2, 5, 3], label=1, number=7), Sentence(tokens=[2, 3], label=0, number=9)])
        >>> batch["tokens"].tolist(), batch["numbers"].tolist()
        ([[2, 5, 3], [2, 3, 0]], [7, 9])
    """
    if not examples:
        raise DataError("collate was given no examples; expected at least one.")
    return {
        "tokens": pad([one["tokens"] for one in examples], PADDING),
        "labels": torch.tensor([one["label"] for one in examples]),
        "numbers": torch.tensor([one["number"] for one in examples]),
    }


def _require_labels(texts: Texts, train: NDArray[np.int64], place: Path) -> None:
    missing = sorted({*range(len(texts.labels))} - {*texts.classes[train].tolist()})
    if missing:
        raise DataError(
            f"{place}: no training text has the label {texts.labels[missing[0]]!r:.60}; add data or drop it."
        )


def _cut_splits(texts: Texts, scale: ClassificationScale) -> tuple[dict[str, NDArray[np.int64]], int]:
    """Return the texts of each split, and the number left out because a later split has them."""
    layout = texts.layout
    files = {"train": layout.train, "dev": layout.dev, "test": layout.test}
    numbers = {split: np.arange(*texts.files[name]) for split, name in files.items() if name is not None}
    keys = [str(key) for key in texts.keys.tolist()]
    if layout.test is None:
        return _cut_folds(numbers["train"], keys, scale), 0
    return complete_splits(numbers, keys, keys)


def _cut_folds(
    numbers: NDArray[np.int64], keys: Sequence[str], scale: ClassificationScale
) -> dict[str, NDArray[np.int64]]:
    chosen = [keys[int(number)] for number in numbers]
    count = TENTHS if scale.folds is None else scale.folds
    found = {name: numbers[places] for name, places in split_by_hash(chosen, count=count, fold=scale.fold or 0).items()}
    if scale.folds is not None and scale.fold is None:
        tests = [numbers[split_by_hash(chosen, count=count, fold=fold)["test"]] for fold in range(count)]
        found["test"] = np.concatenate(tests)
    return found


def _make_vocabulary(texts: Texts, train: NDArray[np.int64], min_count: int) -> tuple[str, ...]:
    found: Counter[str] = Counter()
    for number in train.tolist():
        found.update(texts.lower[word] for word in texts.words[number])
    kept = (word for word, count in found.items() if count >= min_count or word in texts.vectors)
    return (*SPECIAL, *sorted(word for word in kept if word not in SPECIAL))
