"""Inverse document frequencies of words, counted on training text and saved with the model."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headwise.atomic import write_whole
from headwise.errors import DataError, require_integer
from headwise.roles.word_table import WordTable

FORMAT = 1


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

    documents: int
    frequencies: Mapping[str, int]
    lowercase: bool = True
    _values: dict[str, float] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        require_integer("documents", self.documents)
        n = self.documents
        for word, count in self.frequencies.items():
            if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= n:
                raise DataError(f"{word!r} is in {count!r} documents of {n}; expected an integer from 1 to {n}.")
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
            DataError: The file cannot be written.
        """
        content = {
            "format": FORMAT,
            "documents": self.documents,
            "lowercase": self.lowercase,
            "frequencies": dict(self.frequencies),
        }
        write_whole(Path(path), json.dumps(content, ensure_ascii=False).encode())

    @staticmethod
    def load(path: str | Path) -> IDF:
        """Read a file of `save`.

        Raises:
            DataError: The file is missing or has other contents.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise DataError(f"it has format {content['format']!r}; this version of headwise reads {FORMAT}")
            return IDF(content["documents"], content["frequencies"], content["lowercase"])
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}); expected a file written by IDF.save.") from None
        except (ValueError, KeyError, TypeError, AttributeError, DataError) as error:
            raise DataError(f"{path} holds no inverse document frequencies: {error}.") from None

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
