"""Align the tokens of a model with words, by the characters they share.

A unit is a word or a special token, in the order of the text. A token that shares characters with several words
represents all of them; one that shares none (white space) represents the next word.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

from headwise.errors import DataError, SettingError, require_choice, require_integer
from headwise.roles.word_table import WordTable

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
            DataError: The number of tables is not that of the texts, or one has other words or spans.
        """
        owners = _assign_tables(tables, self.origins, "aligned")
        for index, (given, own) in enumerate(zip(owners, self.tables, strict=True)):
            if list(map(_place_words, given)) != list(map(_place_words, own)):
                raise DataError(
                    f"row {index} was aligned with {_preview(own)} and is given {_preview(given)}; expected the same "
                    "words at the same characters: call hw.roles.align with the tables given."
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
    """Return the word tables of each row, given those of each text."""
    texts = max(origins, default=-1) + 1
    if texts != len(tables):
        raise DataError(f"{texts} {what} texts were given for {len(tables)} word tables; expected one table per text.")
    grouped = [_as_tuple(text, table) for text, table in enumerate(tables)]
    return [grouped[origin] for origin in origins]


def _align_row(index: int, tables: tuple[WordTable, ...], encoding: Any, split_into_words: bool) -> AlignedRow:
    sequences = encoding.sequence_ids
    special_tokens, real = encoding.special_tokens_mask, encoding.attention_mask
    belongs = [
        None if special or not kept or sequence is None else sequence
        for special, kept, sequence in zip(special_tokens, real, sequences, strict=True)
    ]
    covered: list[tuple[int, int]] = [(ABSENT, ABSENT)] * len(belongs)
    for number, table in enumerate(tables):
        own = [place for place, sequence in enumerate(belongs) if sequence == number]
        if split_into_words:
            ids = encoding.word_ids
            words = [(ids[place], ids[place]) for place in own]
        else:
            spans = [encoding.offsets[place] for place in own]
            ids = getattr(encoding, "word_ids", None)
            _require_one_text(index, table, spans, [None if ids is None else ids[place] for place in own])
            _require_same_text(index, table, spans)
            words = words_of_tokens(spans, table.spans or ())
        _require_words(index, table, words)
        for place, one in zip(own, words, strict=True):
            covered[place] = one
    if any(sequence is not None and sequence >= len(tables) for sequence in belongs):
        raise DataError(f"row {index} is a pair of texts; expected a pair of word tables for it.")
    return _number_units(tables, belongs, covered, real)


def _number_units(
    tables: tuple[WordTable, ...],
    belongs: Sequence[int | None],
    covered: Sequence[tuple[int, int]],
    real: Sequence[int],
) -> AlignedRow:
    """Number the units in the order of the tokens; a word without a token has no unit."""
    places = [[ABSENT] * len(table) for table in tables]
    first, last, special, units = [], [], [], 0
    for sequence, (low, high), kept in zip(belongs, covered, real, strict=True):
        if not kept:
            first.append(ABSENT)
            last.append(ABSENT)
        elif sequence is None or low == ABSENT:
            special.append(units)
            first.append(units)
            last.append(units)
            units += 1
        else:
            own = places[sequence]
            for word in range(low, high + 1):
                if own[word] == ABSENT:
                    own[word] = units
                    units += 1
            first.append(own[low])
            last.append(own[high])
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
    if len(row.first) == tokens or isinstance(row.first, range):
        return row
    padding = [ABSENT] * (tokens - len(row.first))
    first, last = ([*one, *padding] if side == "right" else [*padding, *one] for one in (row.first, row.last))
    return AlignedRow(first, last, row.units, row.special, row.places)


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


def _require_same_text(index: int, table: WordTable, spans: Sequence[tuple[int, int]]) -> None:
    end = max((span[1] for span in spans), default=0)
    if end > len(table.text or ""):
        raise DataError(
            f"row {index}: its tokens reach character {end} of a text of {len(table.text or '')} ({table.text!r:.60}); "
            "expected the word table of the text that was encoded."
        )


def _require_one_text(
    index: int, table: WordTable, spans: Sequence[tuple[int, int]], words: Sequence[int | None]
) -> None:
    """Raise `DataError` if the spans start again in each word: the tokenizer was given words, not the text."""
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


def _place_words(table: WordTable) -> list[tuple[str, int, int]]:
    return [(word, *span) for word, span in zip(table.words, table.spans or (), strict=True)]


def _preview(tables: Sequence[WordTable]) -> str:
    return " and ".join(f"{' '.join(table.words)!r:.60}" for table in tables)


def _require_words(index: int, table: WordTable, words: Sequence[tuple[int, int]]) -> None:
    most = max((last for _, last in words), default=ABSENT)
    if most >= len(table):
        raise DataError(
            f"row {index}: a token belongs to word {most} of a table of {len(table)} words; expected the table whose "
            "words were encoded."
        )
