"""The data of the sentence task: splits of labeled texts or pairs as token ids, and how a batch is made."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from headwise.errors import DataError
from headwise.input_files import name_in_errors
from headwise.texts.batching import pad
from headwise_lab.data.arrays import Ragged
from headwise_lab.data.splits import complete_splits, order_by_hash, split_by_hash
from headwise_lab.data.word_vectors import select_vectors
from headwise_lab.tasks.sentence.scales import SentenceScale
from headwise_lab.tasks.sentence.words import Words, load_words

SPECIAL = ("<pad>", "<unk>")
PADDING, UNKNOWN = range(len(SPECIAL))
# The label that `SentenceScale.positive` is about.
POSITIVE = "1"


class Encoded(TypedDict):
    """One example as token ids, those of its second text if it is a pair, and its class."""

    tokens: list[int]
    label: int
    second: NotRequired[list[int]]


@dataclass(frozen=True, eq=False)
class Sentences(Dataset[Encoded]):
    """The examples of one split, encoded; `split[i]` is an `Encoded`.

    Attributes:
        texts: Token ids of each example's text, and of its second text if examples are pairs.
        labels: Class of each example, int64 [N].
        numbers: Index of each example in the whole set, int64 [N].
    """

    texts: tuple[Ragged, ...]
    labels: NDArray[np.int64]
    numbers: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each example, both texts of a pair together, [N]."""
        return sum((text.lengths for text in self.texts[1:]), start=self.texts[0].lengths)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Encoded:
        found = Encoded(tokens=self.texts[0][index], label=int(self.labels[index]))
        if len(self.texts) > 1:
            found["second"] = self.texts[1][index]
        return found


@dataclass(frozen=True, eq=False)
class SentenceData:
    """The task's data.

    Attributes:
        train: Examples to train on.
        dev: Examples to choose settings by.
        test: Examples to answer once at the end.
        vocabulary: The token of each id; 0 is padding, 1 an unknown word.
        words: All examples of the set as words.
        dropped: Number of training and dev examples left out because a later split has them too.
        thinned: Number of examples left out to reach the requested share of label 1.
    """

    train: Sentences
    dev: Sentences
    test: Sentences
    vocabulary: tuple[str, ...]
    words: Words
    dropped: int
    thinned: int

    @property
    def labels(self) -> tuple[str, ...]:
        """The label of each class."""
        return self.words.labels

    @property
    def pairs(self) -> bool:
        """Whether examples are pairs of texts."""
        return len(self.words.texts) > 1

    @property
    def fingerprint(self) -> str:
        """Digest of everything the words depend on; how they are truncated is part of the scale's record."""
        return self.words.fingerprint

    def summary(self) -> str:
        """Return a description of the set: its splits, what was left out, and its labels."""
        counts = self.counts()
        sizes = ", ".join(f"{counts[name]:,} {name}" for name in ("train", "dev", "test"))
        done = [
            f"{counts[name]:,} {text}"
            for name, text in (
                ("without_words", "without a word left out"),
                ("in_a_later_split_too", "left out of training or dev as a later split has them"),
                ("thinned", f"with label {POSITIVE} left out for the share asked for"),
                ("cut_to_the_longest", "texts cut to the longest length"),
            )
            if counts[name]
        ]
        shares = np.bincount(self.test.labels, minlength=len(self.labels)) / max(1, len(self.test))
        labels = ", ".join(f"{name} {share:.0%}" for name, share in zip(self.labels, shares, strict=True))
        known = f", {len(self.words.vectors):,} words of the set with a vector" if self.words.vectors else ""
        return (
            f"{self.words.description}: {'; '.join([sizes, *done])}; labels of test {labels}; "
            f"{len(self.vocabulary):,} token ids{known}"
        )

    def vectors(self, width: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the ids of words that have a vector from the file, [V], and the vectors, [V, width]."""
        return select_vectors(self.words.vectors, self.vocabulary, width)

    def counts(self) -> dict[str, int]:
        """Return the numbers of examples, and of those left out or truncated, by name."""
        return {
            **{name: len(getattr(self, name)) for name in ("train", "dev", "test")},
            "without_words": self.words.left_out,
            "in_a_later_split_too": self.dropped,
            "thinned": self.thinned,
            "cut_to_the_longest": self.words.cut,
            "test_words": int(self.test.lengths.sum()),
            "test_words_unknown": int(sum((text.values == UNKNOWN).sum() for text in self.test.texts)),
        }


def load_sentences(place: Path, scale: SentenceScale, cache: Path | None, *, progress: bool = False) -> SentenceData:
    """Return the data of a scale.

    Of published splits, training examples that are also in dev or test are left out, and dev is cut from training if
    there is none. A set without splits is cut into tenths by a hash of the text, the premise or the author.

    Args:
        place: Folder with the set's files, or one file.
        scale: What to keep.
        cache: Folder for the words; None keeps nothing.
        progress: Whether to show a bar.

    Raises:
        DataError: A file is missing or malformed, a split is empty, or there are too few examples of label 1.
        HeadwiseError: spaCy is not installed.
    """
    words = load_words(place, scale, cache, progress=progress)
    with name_in_errors(place):
        splits, dropped = _cut_splits(words)
    thinned = 0
    if scale.positive is not None:
        before = sum(map(len, splits.values()))
        splits = {name: _thin(words, numbers, scale.positive, place) for name, numbers in splits.items()}
        thinned = before - sum(map(len, splits.values()))
    if scale.train_examples is not None:
        splits["train"] = np.sort(order_by_hash(splits["train"], words.keys, "cap")[: scale.train_examples])
    for name, numbers in splits.items():
        if not len(numbers):
            raise DataError(f"{place}: the {name} split holds no example; add data.")
    missing = sorted({*range(len(words.labels))} - {*words.classes[splits["train"]].tolist()})
    if missing:
        raise DataError(
            f"{place}: no training example has label {words.labels[missing[0]]!r:.60}; add data or drop it."
        )
    vocabulary = _make_vocabulary(words, splits["train"], scale.min_count)
    ids = encode(words.types, vocabulary)
    encoded = {
        name: Sentences(
            tuple(
                Ragged.of([[ids[word] for word in text[number]] for number in numbers.tolist()]) for text in words.texts
            ),
            words.classes[numbers],
            numbers,
        )
        for name, numbers in splits.items()
    }
    return SentenceData(**encoded, vocabulary=vocabulary, words=words, dropped=dropped, thinned=thinned)


def encode(words: Sequence[str], vocabulary: Sequence[str]) -> list[int]:
    """Return the id of each word; 1 if the vocabulary does not have it.

    >>> encode(["a", "<pad>", "b"], ("<pad>", "<unk>", "b"))
    [1, 1, 2]
    """
    ids = {token: index for index, token in enumerate(vocabulary) if index >= len(SPECIAL)}
    return [ids.get(word, UNKNOWN) for word in words]


def collate(examples: Sequence[Encoded]) -> dict[str, Tensor]:
    """Return a batch: "tokens" [B, L] padded with 0, "labels" [B] and, of pairs, "second" [B, L2], all int64.

    Raises:
        DataError: There are no examples.

    Example:
        >>> batch = collate([Encoded(tokens=[5, 3], label=1, second=[4]), Encoded(tokens=[2], label=0, second=[6])])
        >>> batch["tokens"].tolist(), batch["second"].tolist(), batch["labels"].tolist()
        ([[5, 3], [2, 0]], [[4], [6]], [1, 0])
    """
    if not examples:
        raise DataError("collate was given no examples; expected at least one.")
    batch = {"tokens": pad([one["tokens"] for one in examples], PADDING)}
    batch["labels"] = torch.tensor([one["label"] for one in examples])
    seconds = [one["second"] for one in examples if "second" in one]
    if seconds:
        batch["second"] = pad(seconds, PADDING)
    return batch


def _cut_splits(words: Words) -> tuple[dict[str, NDArray[np.int64]], int]:
    """Return the examples of each split, and the number left out because a later split has them."""
    numbers = {name: np.arange(*ends) for name, ends in words.splits.items()}
    keys, groups = ([str(key) for key in found.tolist()] for found in (words.keys, words.groups))
    if "all" in numbers:
        return {name: numbers["all"][found] for name, found in split_by_hash(groups).items()}, 0
    return complete_splits(numbers, keys, groups)


def _thin(words: Words, numbers: NDArray[np.int64], share: float, place: Path) -> NDArray[np.int64]:
    """Return a split with as many examples of label 1 left out as needed to reach their share."""
    if sorted(words.labels) != ["0", POSITIVE]:
        raise DataError(f"{place} has labels {', '.join(words.labels[:4])}; a share of label 1 needs labels 0 and 1.")
    positive = words.classes[numbers] == words.labels.index(POSITIVE)
    wanted = round(share / (1 - share) * int((~positive).sum()))
    if wanted > int(positive.sum()):
        raise DataError(f"{place}: {positive.mean():.1%} of a split have label 1, less than {share:.1%}; lower it.")
    chosen = order_by_hash(numbers[positive], words.keys, "thin")[:wanted]
    return np.sort(np.concatenate([numbers[~positive], chosen]))


def _make_vocabulary(words: Words, train: NDArray[np.int64], min_count: int) -> tuple[str, ...]:
    found: Counter[int] = Counter()
    for text in words.texts:
        for number in train.tolist():
            found.update(text[number])
    kept = (
        words.types[word] for word, count in found.items() if count >= min_count or words.types[word] in words.vectors
    )
    return (*SPECIAL, *sorted(word for word in kept if word not in SPECIAL))
