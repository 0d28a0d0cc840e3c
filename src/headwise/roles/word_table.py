"""Sentences as tables of words, with their spans in the text and, optionally, a parse; and their tokens.

Tokens of a model are aligned with words by the characters they share. A unit is a word or a special token, in the order
of the text. A token that shares characters with several words represents all of them; one that shares none (white
space) represents the next word.
"""

from __future__ import annotations

import operator
import random
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

from headwise.errors import DataError, SettingError, require_choice, require_integer


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
            object.__setattr__(self, "spans", _find_spans(words, self.text or ""))
        else:
            _require_spans(self.spans, self.text or "")

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
        given = {name: getattr(self, name) for name in ("words", "heads", "relations", "spans", "rarities")}
        parts = {name: column[start:stop] for name, column in given.items() if column is not None}
        if self.heads is not None:
            places = enumerate(parts["heads"])
            parts["heads"] = [head - start if start <= head < stop else word for word, head in places]
        return replace(self, **parts)

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


# One table, or two for a pair of texts.
Sentence = WordTable | tuple[WordTable, ...]

ABSENT = -1


@dataclass(frozen=True)
class AlignedRow:
    """One row of a batch: the units that its tokens represent.

    Attributes:
        first: First unit of each token; -1 for padding. If every word is one token, a range without the padding.
        last: Last unit of each token; equal to the first unless the token covers several words.
        units: Number of units: words that have a token, and special tokens, in the order of the text.
        special: Units that are special tokens.
        places: For each table of the row, the unit of each word; -1 for a word that was truncated.
    """

    first: Sequence[int]
    last: Sequence[int]
    units: int
    special: tuple[int, ...]
    places: tuple[Sequence[int], ...]


@dataclass(frozen=True)
class Alignment:
    """A batch of aligned rows of equal length; made by `align`.

    Attributes:
        tables: The word tables of each row.
        rows: The rows.
        tokens: Tokens n of each row, padding included.
        origins: For each row the index of its text, of which several rows may hold parts; 0 to B - 1 when not given.
    """

    tables: tuple[tuple[WordTable, ...], ...]
    rows: tuple[AlignedRow, ...]
    tokens: int
    origins: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.origins:
            object.__setattr__(self, "origins", tuple(range(len(self.rows))))

    def with_tables(self, tables: Sequence[Sentence]) -> Self:
        """Return the alignment with other tables of the same words, one per text, for example of another parse.

        Raises:
            DataError: There are more or fewer tables than texts, or one has other words or spans.
        """
        owners = _assign_tables(tables, self.origins, "aligned")
        for index, (given, own) in enumerate(zip(owners, self.tables, strict=True)):
            if [(table.words, table.spans) for table in given] != [(table.words, table.spans) for table in own]:
                shown, wanted = (" and ".join(f"{' '.join(one.words)!r:.60}" for one in row) for row in (given, own))
                raise DataError(
                    f"row {index} was aligned with {wanted} and is given {shown}; expected the same words at the same "
                    "characters: call hw.roles.align with the tables given."
                )
        return replace(self, tables=tuple(owners))


def align(
    tables: Sequence[Sentence],
    encoding: Any,
    *,
    split_into_words: bool = False,
    length: int | None = None,
    padding_side: str = "right",
) -> Alignment:
    """Align the tokens of a batch with words, by the characters they share.

    Args:
        tables: One word table per text, or a pair of them for a pair of texts, with the texts that were encoded.
        encoding: The output of a fast Hugging Face tokenizer for these texts, or a list of `tokenizers.Encoding`;
            may be truncated, padded or overflowing.
        split_into_words: Whether the tokenizer was given the words of the tables (is_split_into_words=True).
        length: Number of tokens in the batch. Default: that of the longest row.
        padding_side: The side on which shorter rows are padded: "right" or "left".

    Raises:
        DataError: The encoding has no offsets, the number of texts differs, a row is not a word table, a text differs
            from that of its table, or the tokenizer was given words without `split_into_words`.
        SettingError: A row is longer than `length`.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> tokenizer = Tokenizer(models.WordPiece({"un": 0, "##like": 1, "##ly": 2, "so": 3, "?": 4}, unk_token="?"))
        >>> tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        >>> table = WordTable.split("so unlikely")
        >>> align([table], [tokenizer.encode(table.text)]).rows[0].first
        [0, 1, 1, 1]
    """
    require_choice("padding_side", padding_side, ("right", "left"))
    encodings, origins = _read_encodings(encoding)
    owners = _assign_tables(tables, origins, "encoded")
    rows = [
        _align_row(index, owner, one, split_into_words)
        for index, (owner, one) in enumerate(zip(owners, encodings, strict=True))
    ]
    return _batch(owners, rows, length, padding_side, origins)


def tokens_as_words(
    tables: Sequence[Sentence], *, before: int = 0, after: int = 0, length: int | None = None
) -> Alignment:
    """Return the alignment for models whose tokens are words.

    Args:
        tables: One word table per row.
        before: Number of special tokens before the words.
        after: Number of special tokens after the words.
        length: Number of tokens in the batch. Default: that of the longest row. Shorter rows are padded on the right.

    Raises:
        SettingError: A row is longer than `length`, or a number is not an integer of at least 0.
        DataError: A row is a pair of tables, or not a word table.
    """
    require_integer("before", before)
    require_integer("after", after)
    rows, owners = [], []
    for index, given in enumerate(tables):
        table, *others = _as_tuple(index, given)
        if others:
            raise DataError(f"row {index} is a pair of texts; expected one word table; for pairs, pass the encoding.")
        units = before + len(table) + after
        special = (*range(before), *range(units - after, units))
        rows.append(AlignedRow(range(units), range(units), units, special, (range(before, units - after),)))
        owners.append((table,))
    return _batch(owners, rows, length, "right", range(len(rows)))


def words_of_tokens(spans: Sequence[tuple[int, int]], words: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the first and the last word that each token shares a character with.

    A token that shares none gets the next word, or the last word at the end of the text; (-1, -1) without words.

    Args:
        spans: First character of each token, and the one after its last.
        words: The same for each word; starts and ends must not decrease.

    Example:
        >>> words_of_tokens([(0, 2), (2, 6), (6, 7), (7, 9)], [(0, 2), (2, 4), (4, 6), (7, 9)])
        [(0, 0), (1, 2), (3, 3), (3, 3)]
    """
    found, place, before = [], 0, 0
    for start, end in spans:
        if start < before:
            place = 0
        before = start
        while place < len(words) and words[place][1] <= start:
            place += 1
        first = min(place, len(words) - 1)
        last = first
        while last + 1 < len(words) and words[last + 1][0] < end:
            last += 1
        found.append((first, last))
    return found


def _as_tuple(index: int, tables: Sentence) -> tuple[WordTable, ...]:
    """Return the word tables of a row as a tuple."""
    if isinstance(tables, WordTable):
        return (tables,)
    if not isinstance(tables, tuple | list) or not tables or not all(isinstance(one, WordTable) for one in tables):
        raise DataError(
            f"row {index} is {tables!r:.60}; expected a word table or a pair of them, made by WordTable.split(text) "
            "or headwise.roles.spacy.Parser."
        )
    return tuple(tables)


def _assign_tables(tables: Sequence[Sentence], origins: Sequence[int], what: str) -> list[tuple[WordTable, ...]]:
    """Return the word tables of each row, given the tables of each text."""
    texts = max(origins, default=-1) + 1
    if texts != len(tables):
        raise DataError(f"{texts} {what} texts were given for {len(tables)} word tables; expected one table per text.")
    grouped = [_as_tuple(text, table) for text, table in enumerate(tables)]
    return [grouped[origin] for origin in origins]


def _align_row(index: int, tables: tuple[WordTable, ...], encoding: Any, split_into_words: bool) -> AlignedRow:
    real = encoding.attention_mask
    belongs = [
        None if special or not kept else sequence
        for special, kept, sequence in zip(encoding.special_tokens_mask, real, encoding.sequence_ids, strict=True)
    ]
    if any(sequence is not None and sequence >= len(tables) for sequence in belongs):
        raise DataError(f"row {index} is a pair of texts; expected a pair of word tables for it.")
    ids: list[Any] = getattr(encoding, "word_ids", None) or [None] * len(belongs)
    covered: list[tuple[int, int]] = [(ABSENT, ABSENT)] * len(belongs)
    for number, table in enumerate(tables):
        own = [place for place, sequence in enumerate(belongs) if sequence == number]
        if split_into_words:
            words = [(ids[place], ids[place]) for place in own]
        else:
            spans = [encoding.offsets[place] for place in own]
            _require_text(index, table, spans, [ids[place] for place in own])
            words = words_of_tokens(spans, table.spans or ())
        most = max((last for _, last in words), default=ABSENT)
        if most >= len(table):
            raise DataError(
                f"row {index}: a token belongs to word {most} of a table of {len(table)} words; expected the table "
                "whose words were encoded."
            )
        for place, one in zip(own, words, strict=True):
            covered[place] = one
    # units are numbered in the order of the tokens; a word without a token has no unit
    places = [[ABSENT] * len(table) for table in tables]
    first, last, special, units = [], [], [], 0
    for sequence, (low, high), kept in zip(belongs, covered, real, strict=True):
        if kept and (sequence is None or low == ABSENT):
            special.append(units)
            ends, units = (units, units), units + 1
        elif kept and sequence is not None:
            own = places[sequence]
            new = [word for word in range(low, high + 1) if own[word] == ABSENT]
            for word, unit in zip(new, range(units, units + len(new)), strict=True):
                own[word] = unit
            ends, units = (own[low], own[high]), units + len(new)
        else:
            ends = ABSENT, ABSENT
        first.append(ends[0])
        last.append(ends[1])
    return AlignedRow(first, last, units, tuple(special), tuple(places))


def _batch(
    tables: Sequence[tuple[WordTable, ...]],
    rows: Sequence[AlignedRow],
    length: int | None,
    side: str,
    origins: Sequence[int],
) -> Alignment:
    longest = max((len(row.first) for row in rows), default=0)
    tokens = longest if length is None else length
    if longest > tokens:
        index = next(i for i, row in enumerate(rows) if len(row.first) > tokens)
        raise SettingError(
            f"sentence {index} has {len(rows[index].first)} tokens; expected at most {tokens}: cut it with table[:n], "
            "or truncate when encoding."
        )
    return Alignment(tuple(tables), tuple(_pad(row, tokens, side) for row in rows), tokens, tuple(origins))


def _pad(row: AlignedRow, tokens: int, side: str) -> AlignedRow:
    if isinstance(row.first, range):
        return row
    padding = [ABSENT] * (tokens - len(row.first))
    first, last = ([*one, *padding] if side == "right" else [*padding, *one] for one in (row.first, row.last))
    return replace(row, first=first, last=last)


def _read_encodings(encoding: Any) -> tuple[list[Any], Sequence[int]]:
    """Return the encoding of each row, and the index of its text."""
    encodings = list(encoding) if isinstance(encoding, list | tuple) else getattr(encoding, "encodings", None)
    if encodings is None or not all(hasattr(one, "offsets") for one in encodings):
        raise DataError(
            f"the encoding is a {type(encoding).__name__} without character offsets; expected the output of a fast "
            "Hugging Face tokenizer for a batch of texts, or a list of tokenizers.Encoding."
        )
    mapped: Any = {} if isinstance(encoding, list | tuple) else encoding
    origins = mapped.get("overflow_to_sample_mapping")
    return encodings, range(len(encodings)) if origins is None else [int(origin) for origin in origins]


def _require_text(index: int, table: WordTable, spans: Sequence[tuple[int, int]], words: Sequence[int | None]) -> None:
    """Raise `DataError` if the tokens are of another text, or of words: their spans start again in each word."""
    changes = [
        (end, start)
        for ((_, end), (start, _)), (before, word) in zip(pairwise(spans), pairwise(words), strict=True)
        if before != word
    ]
    # words of a text share at most one character: its bytes, or what it is normalized into
    overlap = any(end - start > 1 for end, start in changes)
    # words of one character, all at the start, of a text that goes on
    piled = bool(changes) and all(start == 0 < end for end, start in changes)
    reached = max((end for _, end in spans), default=0)
    if overlap or (piled and table.spans and reached < table.spans[-1][1]):
        end, start = max(changes, key=lambda change: change[0] - change[1])
        raise DataError(
            f"row {index}: a word of the encoding starts at character {start} and the word before it ends at {end}, so "
            "the tokenizer was given words; use hw.roles.align(tables, encoding, split_into_words=True)."
        )
    text = table.text or ""
    if reached > len(text):
        raise DataError(
            f"row {index}: its tokens reach character {reached} of a text of {len(text)} ({text!r:.60}); expected the "
            "word table of the text that was encoded."
        )
