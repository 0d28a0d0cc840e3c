"""A sentence as a table of words, with their spans in the text and, optionally, a dependency parse."""

from __future__ import annotations

import operator
import random
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from headwise.errors import DataError, SettingError


@dataclass(frozen=True)
class WordTable:
    """The words of a sentence, one per row.

    Args:
        words: The words.
        heads: For each word the index of its head in the dependency tree, the same index at the root; None without a
            parse.
        relations: For each word its relation to its head, such as "nsubj"; None without a parse.
        text: The text that contains the words. Default: the words joined by single spaces.
        spans: For each word its first character in the text and the one after its last. Default: found in the text.
        rarities: For each word a number that is larger for rarer words; `Roles` sets inverse document frequencies.

    Raises:
        DataError: A word is empty, a column differs in length from the words, a head is not a word, or a word is not
            in the text.

    Example:
        >>> table = WordTable(["Great", "movie", "!"], heads=[1, 1, 1], relations=["amod", "ROOT", "punct"])
        >>> table.text, table.spans[2], len(table[:2])
        ('Great movie !', (12, 13), 2)
    """

    words: Sequence[str]
    heads: Sequence[int] | None = None
    relations: Sequence[str] | None = None
    text: str | None = None
    spans: Sequence[tuple[int, int]] | None = None
    rarities: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.words, str):
            raise DataError(f"words is the text {self.words[:40]!r}; expected its words, or WordTable.split(text).")
        words = tuple(self.words)
        if not all(isinstance(word, str) and word for word in words):
            wrong = next(i for i, word in enumerate(words) if not (isinstance(word, str) and word))
            raise DataError(f"word {wrong} is {words[wrong]!r}; expected a string of at least one character.")
        object.__setattr__(self, "words", words)
        for name in ("heads", "relations", "rarities", "spans"):
            column = getattr(self, name)
            if column is None:
                continue
            if len(column) != len(words):
                raise DataError(
                    f"{name} has {len(column)} entries for {len(words)} words ({self._preview()}); expected "
                    "one per word."
                )
            object.__setattr__(self, name, tuple(column))
        if self.heads is not None:
            object.__setattr__(self, "heads", _check_heads(self.heads, words))
        if self.text is None:
            object.__setattr__(self, "text", " ".join(words))
        if self.spans is None:
            object.__setattr__(self, "spans", _find_spans(words, self._text))
        else:
            _require_spans(self._spans, self._text)

    @staticmethod
    def split(text: str) -> WordTable:
        """Split a text at white space and around each punctuation mark and symbol; the table has no parse.

        >>> WordTable.split("Well, it isn't 3.5 stars").words
        ('Well', ',', 'it', 'isn', "'", 't', '3', '.', '5', 'stars')
        """
        spans = list(_split_text(text))
        return WordTable([text[start:end] for start, end in spans], text=text, spans=spans)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, part: slice) -> WordTable:
        """Return a contiguous part; a word whose head is outside becomes its own head.

        Raises:
            SettingError: `part` is not a slice, or its step is not 1.
        """
        if not isinstance(part, slice):
            raise SettingError(
                f"a word table was indexed by {part!r:.60}; expected a slice: table[:1] is a table of its first word, "
                "table.words[0] that word."
            )
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise SettingError(f"a word table was sliced from {start} to {stop} by {step}; expected a step of 1.")
        heads = None
        if self.heads is not None:
            heads = [h - start if start <= h < stop else w - start for w, h in enumerate(self.heads)][start:stop]
        return replace(
            self,
            words=self.words[start:stop],
            heads=heads,
            relations=None if self.relations is None else self.relations[start:stop],
            spans=self._spans[start:stop],
            rarities=None if self.rarities is None else self.rarities[start:stop],
        )

    def rated(self, rarities: Sequence[float]) -> WordTable:
        """Return the table with these rarities."""
        # nothing else changes, so skip the checks: this runs once per sentence and role
        rated = object.__new__(WordTable)
        rated.__dict__.update(self.__dict__, rarities=rarities)
        return rated

    def shuffled_parse(self, seed: int) -> WordTable:
        """Return the table with its words randomly reassigned to the nodes of the tree: a control (ours).

        Raises:
            DataError: There is no parse.
        """
        heads, relations = self.parse()
        places = list(range(len(self)))
        random.Random(seed).shuffle(places)
        moved, named = [0] * len(self), [""] * len(self)
        for word, place in enumerate(places):
            moved[place], named[place] = places[heads[word]], relations[word]
        return replace(self, heads=moved, relations=named)

    def parse(self) -> tuple[Sequence[int], Sequence[str]]:
        """Return heads and relations.

        Raises:
            DataError: There is no parse.
        """
        if self.heads is None or self.relations is None:
            raise DataError(
                f"the sentence {self._preview()} has no parse; parse it with headwise.roles.spacy.Parser, or pass "
                "heads and relations."
            )
        return self.heads, self.relations

    @property
    def _text(self) -> str:
        return self.text or ""

    @property
    def _spans(self) -> Sequence[tuple[int, int]]:
        return self.spans or ()

    def _preview(self) -> str:
        shown = " ".join(self.words[:8])
        return repr(shown if len(self.words) <= 8 else f"{shown} ...")


def _check_heads(heads: Sequence[int], words: Sequence[str]) -> tuple[int, ...]:
    try:
        found = tuple(map(operator.index, heads))
    except TypeError:
        raise DataError(f"heads is {tuple(heads)!r:.60}; expected the index of a word for each word.") from None
    for word, head in enumerate(found):
        if not 0 <= head < len(words):
            raise DataError(
                f"the head of word {word} ({words[word]!r}) is {head}; expected 0 to {len(words) - 1}, and the word's "
                "own index at the root."
            )
    return found


def _find_spans(words: Sequence[str], text: str) -> tuple[tuple[int, int], ...]:
    """Return the span of each word, searched for after the previous word."""
    spans, place = [], 0
    for index, word in enumerate(words):
        start = text.find(word, place)
        if start < 0:
            raise DataError(f"word {index} ({word!r}) is not in the text after character {place}: {text[:60]!r}.")
        place = start + len(word)
        spans.append((start, place))
    return tuple(spans)


def _require_spans(spans: Sequence[tuple[int, int]], text: str) -> None:
    for index, (start, end) in enumerate(spans):
        if not 0 <= start < end <= len(text):
            raise DataError(
                f"word {index} spans characters {start} to {end} of a text of {len(text)}; expected 0 <= start < end."
            )
    for index, (one, other) in enumerate(pairwise(spans)):
        if other[0] < one[0] or other[1] < one[1]:
            raise DataError(
                f"word {index + 1} spans {tuple(other)} and the word before it {tuple(one)}; expected "
                "spans in the order of the text."
            )


def _split_text(text: str) -> Iterator[tuple[int, int]]:
    start = None
    for place, letter in enumerate(text):
        space = letter.isspace()
        mark = not space and unicodedata.category(letter)[0] in "PS"
        if (space or mark) and start is not None:
            yield start, place
            start = None
        if mark:
            yield place, place + 1
        elif not space and start is None:
            start = place
    if start is not None:
        yield start, len(text)
