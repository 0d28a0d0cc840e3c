"""The texts of a set as arrays of words, cached on disk, and the splits of token ids that a task makes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NotRequired, Self, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from headwise.errors import DataError
from headwise.roles.word_table import WordTable
from headwise.texts.batching import pad
from headwise_lab.data.arrays import Ragged, cache_arrays, digest, pack_words, stable_key, unpack_words
from headwise_lab.data.splits import TENTHS, complete_splits, order_by_hash, split_by_hash
from headwise_lab.data.word_vectors import pack_vectors, select_vectors, unpack_vectors
from headwise_lab.texts.sets import ALL, Example, TextSet, list_labels

SPECIAL = ("<pad>", "<unk>", "<start>", "<end>")
PADDING, UNKNOWN, START, END = range(len(SPECIAL))
# Prefixes of the words of a pair: a word in both texts is two features.
SIDES = ("", "2:")


@dataclass(frozen=True)
class Form:
    """How a task makes tokens of texts."""

    # Returns the words of each text, lists or parsed tables, of the texts, the scale and the cache.
    words: Callable[..., Sequence[Sequence[str] | WordTable]]
    # Returns what identifies an example, given it and its words.
    key: Callable[[Example, Sequence[Sequence[str]]], tuple[str, ...]]
    # Whether examples of a group are kept in one split, not only equal ones.
    grouped: bool
    # Whether START and END surround the words of a text.
    bounded: bool
    # What examples without a text are called in counts and in a summary.
    left_out: tuple[str, str]
    # What texts longer than the scale allows are called in a summary.
    cut: str

    @property
    def special(self) -> tuple[str, ...]:
        """The tokens before the words of a vocabulary."""
        return SPECIAL if self.bounded else SPECIAL[:START]

    def encoder(self, vocabulary: Sequence[str]) -> Callable[[Sequence[str]], list[int]]:
        """Return a function from words to their ids; a word that the vocabulary does not have is 1."""
        special = len(self.special)
        ids = {token: index for index, token in enumerate(vocabulary) if index >= special}
        return lambda words: [ids.get(word, UNKNOWN) for word in words]


class Encoded(TypedDict):
    """One example as token ids, those of its second text if it is a pair, its class, and its number in the set."""

    tokens: list[int]
    label: int
    number: int
    second: NotRequired[list[int]]


@dataclass(frozen=True, eq=False)
class Split(Dataset[Encoded]):
    """The examples of one split, encoded; `split[i]` is an `Encoded`."""

    # Token ids of the texts, and of the second texts of pairs.
    texts: tuple[Ragged, ...]
    # Class of each example, and its index in the whole set, [N].
    labels: NDArray[np.int64]
    numbers: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each example, both texts of a pair together, [N]."""
        return sum((text.lengths for text in self.texts[1:]), start=self.texts[0].lengths)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Encoded:
        found = Encoded(tokens=self.texts[0][index], label=int(self.labels[index]), number=int(self.numbers[index]))
        if len(self.texts) > 1:
            found["second"] = self.texts[1][index]
        return found


@dataclass(frozen=True, eq=False)
class Texts:
    """All examples of a set as words, split by split."""

    description: str
    # First and last example, exclusive, of each split; "all" if there are none.
    splits: Mapping[str, tuple[int, int]]
    labels: tuple[str, ...]
    classes: NDArray[np.int64]
    # Hashes of what identifies each example, and of what may not be in two splits.
    keys: NDArray[np.int64]
    groups: NDArray[np.int64]
    # The distinct words, and the words of each text, and of each second text of pairs, as indices into them.
    types: tuple[str, ...]
    words: tuple[Ragged, ...]
    # Index of each word's head in its text and its relation, as an index into `relation_names`; None without a parse.
    heads: Ragged | None
    relations: Ragged | None
    relation_names: tuple[str, ...]
    # Vectors of words in lower case, if a file of them was named.
    vectors: Mapping[str, NDArray[np.float32]]
    # How many examples had no text, and how many texts were truncated.
    left_out: int
    cut: int
    # 16 hexadecimal digits of everything the texts depend on.
    fingerprint: str

    def table(self, number: int) -> WordTable:
        """Return the words of an example's text with their parse, if there is one."""
        words = [self.types[word] for word in self.words[0][number]]
        if self.heads is None or self.relations is None:
            return WordTable(words)
        relations = [self.relation_names[relation] for relation in self.relations[number]]
        return WordTable(words, heads=self.heads[number], relations=relations)

    @cached_property
    def lower(self) -> tuple[str, ...]:
        """The words in lower case, one a type."""
        return tuple(word.lower() for word in self.types)

    def cut_splits(self, folds: int | None = None, fold: int | None = None) -> tuple[dict[str, NDArray[np.int64]], int]:
        """Return the examples of each split, and the number left out because a later split has them.

        Equal examples are in one split. A set without splits is cut by a hash into tenths, or into `folds` parts, of
        which one is test and one is dev; without a `fold`, test is all of them, one after another.
        """
        keys, groups = ([str(key) for key in found.tolist()] for found in (self.keys, self.groups))
        if ALL not in self.splits:
            return complete_splits({name: np.arange(*ends) for name, ends in self.splits.items()}, keys, groups)
        count = folds or TENTHS
        found = split_by_hash(groups, count=count, fold=fold or 0)
        if folds is not None and fold is None:
            found["test"] = np.concatenate(
                [split_by_hash(groups, count=count, fold=one)["test"] for one in range(count)]
            )
        return found, 0

    def require_labels(self, train: NDArray[np.int64], place: Path) -> None:
        """Raise `DataError` for a label without a training text."""
        missing = sorted({*range(len(self.labels))} - {*self.classes[train].tolist()})
        if missing:
            raise DataError(
                f"{place}: no training text has the label {self.labels[missing[0]]!r:.60}; add data or drop it."
            )


@dataclass(frozen=True, eq=False)
class TextData:
    """The data of a task."""

    train: Split
    dev: Split
    # Of all folds, one after another, if no fold is chosen.
    test: Split
    # The token of each id.
    vocabulary: tuple[str, ...]
    texts: Texts
    form: Form
    # How many examples of train and dev were left out because a later split has them too.
    dropped: int
    # How many were left out to reach the requested share of a label; None if no share can be requested.
    thinned: int | None = None

    @classmethod
    def of(
        cls,
        texts: Texts,
        splits: Mapping[str, NDArray[np.int64]],
        form: Form,
        scale: Any,
        place: Path,
        *,
        every_label: bool = True,
        **more: Any,
    ) -> Self:
        """Return the data of splits, given as numbers of examples, with `more` attributes.

        Raises:
            DataError: A split is empty or, if `every_label`, a label has no training text; the message names `place`.
        """
        splits = dict(splits)
        if scale.train_examples is not None:
            splits["train"] = np.sort(order_by_hash(splits["train"], texts.keys, "cap")[: scale.train_examples])
        for name, numbers in splits.items():
            if not len(numbers):
                raise DataError(f"{place}: the {name} split holds no text; add data.")
        if every_label:
            texts.require_labels(splits["train"], place)
        counts: Counter[str] = Counter()
        for words in texts.words:
            for number in splits["train"].tolist():
                counts.update(texts.lower[word] for word in words[number])
        kept = (word for word, count in counts.items() if count >= scale.min_count or word in texts.vectors)
        vocabulary = (*form.special, *sorted(word for word in kept if word not in form.special))
        ids = form.encoder(vocabulary)(texts.lower)
        before, after = ([START], [END]) if form.bounded else ([], [])

        def encode(words: Ragged, numbers: NDArray[np.int64]) -> Ragged:
            return Ragged.of([[*before, *(ids[word] for word in words[number]), *after] for number in numbers.tolist()])

        encoded = {
            name: Split(tuple(encode(words, numbers) for words in texts.words), texts.classes[numbers], numbers)
            for name, numbers in splits.items()
        }
        return cls(**encoded, vocabulary=vocabulary, texts=texts, form=form, **more)

    @property
    def labels(self) -> tuple[str, ...]:
        """The label of each class."""
        return self.texts.labels

    @property
    def pairs(self) -> bool:
        """Whether examples are pairs of texts."""
        return len(self.texts.words) > 1

    @property
    def fingerprint(self) -> str:
        """Digest of everything the texts depend on; how they are split is part of the scale's record."""
        return self.texts.fingerprint

    def summary(self) -> str:
        """Return a description of the set: its splits, what was left out, and its labels."""
        counts = self.counts()
        sizes = ", ".join(f"{counts[name]:,} {name}" for name in ("train", "dev", "test"))
        done = [
            f"{counts[name]:,} {text}"
            for name, text in (
                self.form.left_out,
                ("in_a_later_split_too", "left out of training or dev as a later split has them"),
                ("thinned", "with label 1 left out for the share asked for"),
                ("cut_to_the_longest", self.form.cut),
            )
            if counts.get(name)
        ]
        return f"{self.texts.description}: {'; '.join([sizes, *done])}; {self.describe_labels()}"

    def describe_labels(self) -> str:
        """Return the labels, the size of the vocabulary, and whether there are parses."""
        labels = ", ".join(self.labels[:8]) + (", ..." if len(self.labels) > 8 else "")
        parses = "" if self.texts.heads is None else "; parsed"
        return f"labels {labels}; {len(self.vocabulary):,} token ids{parses}"

    def counts(self) -> dict[str, int]:
        """Return the numbers of examples, and of those left out or truncated, by name."""
        edges = 2 * len(self.test) if self.form.bounded else 0
        return {
            **{name: len(getattr(self, name)) for name in ("train", "dev", "test")},
            self.form.left_out[0]: self.texts.left_out,
            "in_a_later_split_too": self.dropped,
            **({} if self.thinned is None else {"thinned": self.thinned}),
            "cut_to_the_longest": self.texts.cut,
            "test_words": int(self.test.lengths.sum()) - edges,
            "test_words_unknown": int(sum((text.values == UNKNOWN).sum() for text in self.test.texts)),
        }

    def vectors(self, width: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the ids of words that have a vector from the file, [V], and the vectors, [V, width]."""
        return select_vectors(self.texts.vectors, self.vocabulary, width)

    def words(self, split: Split, *, lower: bool = False) -> list[list[str]]:
        """Return the words of each example of a split; those of a pair's second text are marked."""
        types = self.texts.lower if lower else self.texts.types
        sides = [*zip(SIDES, self.texts.words, strict=False)]
        return [
            [side + types[word] for side, text in sides for word in text[number]] for number in split.numbers.tolist()
        ]


def load_texts(
    found: TextSet,
    form: Form,
    scale: Any,
    cache: Path | None,
    inputs: str,
    files: Sequence[Path] = (),
    *,
    labels: tuple[str, ...] | None = None,
    progress: bool = False,
) -> Texts:
    """Return the examples of a set as words, from the cache if they are there.

    Args:
        found: The set.
        form: How its texts are cut into words.
        scale: The maximum length, and which word vectors to use.
        cache: Folder for the arrays and for parses; None keeps nothing.
        inputs: What the words depend on besides the contents of files.
        files: Files they depend on besides those of the set.
        labels: The labels; None for those of `list_labels`.
        progress: Whether to show a bar.
    """
    labels = list_labels(found) if labels is None else labels
    fingerprint = digest(inputs, [*found.paths, *files])
    stored = cache_arrays(
        cache, f"texts-{fingerprint}", lambda: _encode(found, form, labels, scale, cache, progress=progress)
    )
    ends, parsed = [0, *stored["splits"].tolist()], "relation_names" in stored
    total = sum(map(len, found.splits.values()))
    return Texts(
        description=found.description,
        splits=dict(zip(found.splits, pairwise(ends), strict=True)),
        labels=labels,
        classes=stored["classes"],
        keys=stored["keys"],
        groups=stored["groups"],
        types=unpack_words(stored["types"]),
        words=tuple(Ragged.unpack(stored, name) for name in ("words", "second") if f"{name}.values" in stored),
        heads=Ragged.unpack(stored, "heads") if parsed else None,
        relations=Ragged.unpack(stored, "relations") if parsed else None,
        relation_names=unpack_words(stored["relation_names"]) if parsed else (),
        vectors=unpack_vectors(stored),
        left_out=found.blank + total - len(stored["classes"]),
        cut=int(stored["cut"]),
        fingerprint=fingerprint,
    )


def collate(examples: Sequence[Encoded]) -> dict[str, Tensor]:
    """Return a batch: "tokens" [B, L] padded with 0, "labels" and "numbers" [B], and "second" [B, L2] of pairs, int64.

    Raises:
        DataError: There are no examples.

    Example:
        >>> one, other = Encoded(tokens=[2, 5, 3], label=1, number=7), Encoded(tokens=[2, 3], label=0, number=9)
        >>> batch = collate([one, other])
        >>> batch["tokens"].tolist(), batch["numbers"].tolist()
        ([[2, 5, 3], [2, 3, 0]], [7, 9])
    """
    if not examples:
        raise DataError("collate was given no examples; expected at least one.")
    batch = {"tokens": pad([one["tokens"] for one in examples], PADDING)}
    batch |= {f"{name}s": torch.tensor([one[name] for one in examples]) for name in ("label", "number")}
    seconds = [one["second"] for one in examples if "second" in one]
    return batch | ({"second": pad(seconds, PADDING)} if seconds else {})


def _encode(
    found: TextSet, form: Form, labels: Sequence[str], scale: Any, cache: Path | None, *, progress: bool
) -> dict[str, NDArray]:
    every = [(name, one) for name, examples in found.splits.items() for one in examples if all(one.texts)]
    texts = iter(form.words([text for _, one in every for text in one.texts], scale, cache, progress=progress))
    rows = zip(*[texts] * len(every[0][1].texts), strict=True)
    kept = [(name, one, row) for (name, one), row in zip(every, rows, strict=True) if all(row)]
    most = scale.max_words
    short = [[text if len(text) <= most else text[:most] for text in row] for *_, row in kept]
    words = [[_list_words(text) for text in row] for row in short]
    types = sorted({word for row in words for text in row for word in text})
    place = {word: index for index, word in enumerate(types)}
    keys = [stable_key(*form.key(one, [_list_words(text) for text in row])) >> 1 for _, one, row in kept]
    groups = [stable_key("group", one.group) >> 1 for _, one, _ in kept] if form.grouped else keys
    counts = Counter(name for name, *_ in kept)
    arrays: dict[str, NDArray] = {
        "splits": np.cumsum([counts[name] for name in found.splits]),
        "classes": np.array([labels.index(one.label) for _, one, _ in kept], dtype=np.int64),
        "keys": np.array(keys, dtype=np.int64),
        "groups": np.array(groups, dtype=np.int64),
        "types": pack_words(types),
        "cut": np.array(sum(len(text) > most for *_, row in kept for text in row)),
    }
    for name, column in zip(("words", "second"), zip(*words, strict=True), strict=False):
        arrays |= Ragged.of([[place[word] for word in text] for text in column]).pack(name)
    parses = [text for row in short for text in row if isinstance(text, WordTable) and text.relations is not None]
    if parses:
        names = sorted({relation for table in parses for relation in table.relations or ()})
        ids = {name: index for index, name in enumerate(names)}
        arrays |= Ragged.of([list(table.heads or ()) for table in parses]).pack("heads")
        arrays |= Ragged.of([[ids[name] for name in table.relations or ()] for table in parses]).pack("relations")
        arrays["relation_names"] = pack_words(names)
    if scale.embeddings is not None:
        arrays |= pack_vectors(scale.embeddings, {word.lower() for word in types}, scale.width)
    return arrays


def _list_words(text: Sequence[str] | WordTable) -> Sequence[str]:
    return text.words if isinstance(text, WordTable) else text
