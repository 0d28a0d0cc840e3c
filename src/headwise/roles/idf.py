"""Inverse document frequencies of words, counted on training text and saved with the model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

from headwise.atomic import write_whole
from headwise.errors import DataError, require_integer
from headwise.input_files import encode_json, parse_json, read_whole
from headwise.roles.word_table import WordTable
from headwise.settings import check_fields

FORMAT = 1
# What a float of their ratio can hold.
MOST_DOCUMENTS = 2**63 - 1


@dataclass(frozen=True, repr=False)
class IDF:
    """Inverse document frequencies: idf(w) = ln((1 + n) / (1 + df(w))) + 1 over n documents.

    df(w) is the number of documents that contain w. A word in none of them has df = 0, and so the greatest value.
    Wang et al. 2021 follow Voita et al. 2019 in selecting rare words by it; the smoothing is from their released code.

    Args:
        documents: Number of documents n.
        frequencies: df of each word.
        lowercase: Whether words are compared in lower case.

    Example:
        >>> table = idf([["a", "good", "movie"], ["a", "movie"], ["a", "plot"]])
        >>> table("movie") < table("plot") < table("unheard")
        True
    """

    documents: Annotated[int, partial(require_integer, high=MOST_DOCUMENTS)]
    frequencies: Mapping[str, int]
    lowercase: bool = True
    _values: dict[str, float] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        n = self.documents
        for word, count in self.frequencies.items():
            if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= n:
                raise DataError(
                    f"{word[:60]!r} is in {count!r:.60} documents of {n}; expected an integer from 1 to {n}."
                )
        logs: dict[int, float] = {}
        for count in set(self.frequencies.values()):
            logs[count] = math.log((1 + n) / (1 + count)) + 1
        object.__setattr__(self, "_values", {word: logs[count] for word, count in self.frequencies.items()})

    def __call__(self, word: str) -> float:
        """Return the inverse document frequency of a word."""
        return self._values.get(word.lower() if self.lowercase else word, self.greatest)

    @property
    def greatest(self) -> float:
        """The value of a word in no document, ln(1 + n) + 1."""
        return math.log(1 + self.documents) + 1

    def rate(self, table: WordTable) -> WordTable:
        """Return the table with the values of its words as rarities."""
        values, greatest = self._values, self.greatest
        words = map(str.lower, table.words) if self.lowercase else table.words
        return table.rated(tuple([values.get(word, greatest) for word in words]))

    def save(self, path: str | Path) -> None:
        """Write the counts as JSON, atomically.

        Raises:
            DataError: The file cannot be written, or a word is no text that a file can hold.
        """
        content = {
            "format": FORMAT,
            "documents": self.documents,
            "lowercase": self.lowercase,
            "frequencies": dict(self.frequencies),
        }
        try:
            text = encode_json(content, ascii_only=False).encode()
        except UnicodeEncodeError as error:
            broken = error.object[error.start]
            raise DataError(f"a word holds {broken!r}, half of a surrogate pair; take it out of the text.") from None
        write_whole(Path(path), text)

    @staticmethod
    def load(path: str | Path) -> IDF:
        """Read a file of `save`.

        Raises:
            DataError: The file is missing or has other contents.
        """
        try:
            content = parse_json(read_whole(Path(path)))
            if content["format"] != FORMAT:
                raise DataError(f"format {str(content['format'])[:60]!r}; this version of headwise reads {FORMAT}")
            return IDF(content["documents"], content["frequencies"], content["lowercase"])
        except (ValueError, KeyError, TypeError, AttributeError, DataError) as error:
            reason = str(error).removesuffix(".")[:200]
            raise DataError(
                f"{path} holds no inverse document frequencies ({reason}); expected a file written by IDF.save."
            ) from None

    def __repr__(self) -> str:
        return f"IDF({self.documents:,} documents, {len(self.frequencies):,} words)"


def idf(documents: Iterable[WordTable | Sequence[str]], *, lowercase: bool = True) -> IDF:
    """Count inverse document frequencies on documents; use those of the training split only.

    Args:
        documents: Word tables, or the words of each document.
        lowercase: Whether words are compared in lower case.

    Raises:
        DataError: There is no document, or one is not a sequence of words.

    Example:
        >>> idf([["a", "movie"], ["a", "plot"]])
        IDF(2 documents, 3 words)
    """
    frequencies: Counter[str] = Counter()
    count = 0
    for document in documents:
        if isinstance(document, str):
            raise DataError(
                f"document {count} is the text {document[:40]!r}; expected words, for example WordTable.split(text)."
            )
        words = document.words if isinstance(document, WordTable) else tuple(document)
        wrong = next((word for word in words if not isinstance(word, str)), None)
        if wrong is not None:
            raise DataError(f"document {count} holds {wrong!r}; expected words, as strings.")
        frequencies.update({word.lower() if lowercase else word for word in words})
        count += 1
    if count == 0:
        raise DataError("idf was given no document; expected those of the training split.")
    return IDF(count, dict(frequencies), lowercase)
