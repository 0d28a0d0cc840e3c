"""The texts of the sentence task as words, split by spaCy's English tokenizer and cached on disk."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headwise.errors import DataError, HeadwiseError
from headwise_lab.data.arrays import Ragged, cache_arrays, digest, pack_words, stable_key, unpack_words
from headwise_lab.data.word_vectors import pack_vectors, unpack_vectors
from headwise_lab.tasks.sentence.files import Example, read_set
from headwise_lab.tasks.sentence.scales import SentenceScale

if TYPE_CHECKING:
    from spacy.tokenizer import Tokenizer

ENCODING = "sentence-1"  # changes with anything below that changes the arrays
TOKENIZER = "en"
LONG_WORD = re.compile(r"\S{1001,}")
# Characters of its parts.
PART = 100


@dataclass(frozen=True, eq=False)
class Words:
    """All examples of a set, split by split.

    Attributes:
        description: What the set is, for people.
        splits: First and last example, exclusive, of each split by name; "all" if there are none.
        labels: The label of each class, in order.
        classes: Class of each example, int64 [N].
        keys: A hash of each example's words, int64 [N].
        groups: A hash of what may not be in two splits (the text, the premise or the author), int64 [N].
        types: The distinct words, in lower case.
        texts: Words of each example's text, as indices into `types`, and of its second text if examples are pairs.
        vectors: Vectors of words, if a file of them was named.
        left_out: Number of examples without a word, which are left out.
        cut: Number of texts longer than the scale allows, which are truncated.
        fingerprint: 16 hexadecimal digits of everything the words depend on.
    """

    description: str
    splits: Mapping[str, tuple[int, int]]
    labels: tuple[str, ...]
    classes: NDArray[np.int64]
    keys: NDArray[np.int64]
    groups: NDArray[np.int64]
    types: tuple[str, ...]
    texts: tuple[Ragged, ...]
    vectors: Mapping[str, NDArray[np.float32]]
    left_out: int
    cut: int
    fingerprint: str

    def words(self, number: int, text: int = 0) -> list[str]:
        """Return the words of an example's text."""
        return [self.types[word] for word in self.texts[text][number]]


def load_words(place: Path, scale: SentenceScale, cache: Path | None, *, progress: bool = False) -> Words:
    """Return the examples of a file or a folder as words in lower case.

    Args:
        place: See `read_set`.
        scale: The maximum length, and which word vectors to use.
        cache: Folder for the arrays; None keeps nothing.
        progress: Whether to show a bar.

    Raises:
        DataError: See `read_set`; or an example of dev or test has a label that training does not.
        HeadwiseError: spaCy is not installed.
    """
    found = read_set(place, scale.columns)
    splits = {name: found.splits[name] for name in ("all", "train", "dev", "test") if name in found.splits}
    labels = _list_labels(splits, place)
    described = f"{ENCODING} {scale.max_words} {found.description} {[*splits]} {_find_version()}"
    extra = [] if scale.embeddings is None else [scale.embeddings]
    described += f" vectors {scale.width}" if extra else ""
    described = " ".join([described, *scale.columns.words()])
    fingerprint = digest(described, [*found.paths, *extra])
    stored = cache_arrays(cache, f"sentence-{fingerprint}", lambda: _encode(splits, labels, scale, progress=progress))
    return _decode(stored, found.description, tuple(splits), labels, fingerprint)


def tokenize(texts: Sequence[str], *, progress: bool = False) -> Iterator[list[str]]:
    """Yield the words of each text in lower case, split by spaCy's blank English tokenizer, without white space.

    Raises:
        HeadwiseError: spaCy is not installed.

    >>> list(tokenize(["Didn't like  it."]))
    [['did', "n't", 'like', 'it', '.']]
    """
    for words in locate_words(texts, progress=progress):
        yield [word for word, _ in words]


def locate_words(texts: Sequence[str], *, progress: bool = False) -> Iterator[list[tuple[str, tuple[int, int]]]]:
    """Yield the words of each text as `tokenize` does, each with its first character and the one after its last.

    Raises:
        HeadwiseError: spaCy is not installed.

    >>> list(locate_words(["No  way!"]))
    [[('no', (0, 2)), ('way', (4, 7)), ('!', (7, 8))]]
    """
    from tqdm.auto import tqdm

    tokenizer = _make_tokenizer()
    for text in tqdm(texts, desc="cutting texts into words", unit="text", disable=None if progress else True):
        found = ((start + token.idx, token) for start, part in _cut_long_words(text) for token in tokenizer(part))
        yield [(token.lower_, (start, start + len(token))) for start, token in found if not token.is_space]


def _cut_long_words(text: str) -> Iterator[tuple[int, str]]:
    """Yield a text in parts, each with its first character; it is one part if it has no word of over 1,000 characters.

    spaCy's tokenizer takes minutes for 100,000 brackets in a row, and has not a word of so many characters.
    """
    place = 0
    for word in LONG_WORD.finditer(text):
        yield place, text[place : word.start()]
        place = word.end()
        yield from ((start, text[start : min(start + PART, place)]) for start in range(word.start(), place, PART))
    yield place, text[place:]


# takes a tenth of a second, and `locate_words` may be called for every line
@cache
def _make_tokenizer() -> Tokenizer:
    _find_version()
    # spaCy takes seconds to import, and is an extra
    import spacy

    return spacy.blank(TOKENIZER).tokenizer


def _find_version() -> str:
    try:
        return version("spacy")
    except PackageNotFoundError:
        raise HeadwiseError(
            "texts are cut into words by spaCy's tokenizer, and spaCy is not installed; install headwise[spacy]."
        ) from None


def _list_labels(splits: Mapping[str, Sequence[Example]], place: Path) -> tuple[str, ...]:
    # an example without a text is left out, whatever its label
    splits = {name: [one for one in examples if all(one.texts)] for name, examples in splits.items()}
    train = splits["all"] if "all" in splits else splits["train"]
    labels = tuple(sorted({one.label for one in train}))
    if len(labels) < 2:
        raise DataError(f"{place} has {len(labels)} labels in {len(train)} training examples; expected at least two.")
    for name, examples in splits.items():
        strange = next((one for one in examples if one.label not in labels), None)
        if strange is not None:
            raise DataError(
                f"{place}, {name}, line {strange.line}: label {strange.label!r:.60} does not occur in training; "
                f"expected one of {', '.join(labels[:8]):.200}."
            )
    return labels


def _encode(
    splits: Mapping[str, Sequence[Example]], labels: Sequence[str], scale: SentenceScale, *, progress: bool
) -> dict[str, NDArray]:
    every = [(name, one) for name, examples in splits.items() for one in examples]
    pairs = len(every[0][1].texts)
    flat = tokenize([text for _, one in every for text in one.texts], progress=progress)
    words = [[next(flat) for _ in range(pairs)] for _ in every]
    kept = [(name, one, texts) for (name, one), texts in zip(every, words, strict=True) if all(texts)]
    types = sorted({word for _, _, texts in kept for text in texts for word in text[: scale.max_words]})
    place = {word: index for index, word in enumerate(types)}
    counts = [sum(name == split for name, _, _ in kept) for split in splits]
    arrays: dict[str, NDArray] = {
        "splits": np.cumsum(counts),
        "classes": np.array([labels.index(one.label) for _, one, _ in kept], dtype=np.int64),
        "keys": np.array(
            [stable_key("example", *(" ".join(text) for text in texts)) >> 1 for _, _, texts in kept], dtype=np.int64
        ),
        "groups": np.array([stable_key("group", one.group) >> 1 for _, one, _ in kept], dtype=np.int64),
        "types": pack_words(types),
        "cut": np.array(sum(len(text) > scale.max_words for _, _, texts in kept for text in texts)),
        "left_out": np.array(len(every) - len(kept)),
    }
    for text in range(pairs):
        ragged = Ragged.of([[place[word] for word in texts[text][: scale.max_words]] for _, _, texts in kept])
        arrays |= ragged.pack(f"text{text}")
    return arrays | ({} if scale.embeddings is None else pack_vectors(scale.embeddings, set(types), scale.width))


def _decode(
    stored: Mapping[str, NDArray], description: str, names: tuple[str, ...], labels: tuple[str, ...], fingerprint: str
) -> Words:
    ends = stored["splits"].tolist()
    texts = tuple(Ragged.unpack(stored, f"text{text}") for text in range(2) if f"text{text}.values" in stored)
    return Words(
        description=description,
        splits=dict(zip(names, zip([0, *ends], ends, strict=False), strict=True)),
        labels=labels,
        classes=stored["classes"],
        keys=stored["keys"],
        groups=stored["groups"],
        types=unpack_words(stored["types"]),
        texts=texts,
        vectors=unpack_vectors(stored),
        left_out=int(stored["left_out"]),
        cut=int(stored["cut"]),
        fingerprint=fingerprint,
    )
