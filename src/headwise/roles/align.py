"""From words to the tokens of a model, by the characters they share.

Owns `Alignment`: which units (words and special tokens, in their order) each token stands for. A token that shares
characters with several words stands for all of them; one that shares none (white space) for the next word. Must not
know roles or masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headwise.errors import DataError, SettingError, require_choice, require_integer
from headwise.roles.word_table import WordTable

# One table, or the two of a pair of texts.
Sentence = WordTable | tuple[WordTable, ...]

ABSENT = -1


@dataclass(frozen=True)
class AlignedRow:
    """One row of a batch: the units its tokens stand for.

    Attributes:
        first: For each token the first unit it stands for; -1 for padding. Where every word is one token, a range
            without the padding.
        last: For each token the last one, the same as the first unless it covers several words.
        units: Number of units: words that have a token, and special tokens, in the order of the text.
        special: Units that are special tokens.
        places: For each table of the row, the unit of each of its words; -1 for a word that was cut off.
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
    """

    tables: tuple[tuple[WordTable, ...], ...]
    rows: tuple[AlignedRow, ...]
    tokens: int


def align(
    tables: Sequence[Sentence],
    encoding: Any,
    *,
    split_into_words: bool = False,
    length: int | None = None,
    padding_side: str = "right",
) -> Alignment:
    """Return which words the tokens of a batch stand for, by the characters they share.

    Args:
        tables: One word table a text, or a pair of them for a pair of texts; their texts are those that were encoded.
        encoding: What a fast tokenizer of Hugging Face returned for them, or a list of `tokenizers.Encoding`.
            Truncated, padded and overflowing ones are taken as they are.
        split_into_words: Whether the tokenizer was given the tables' words (is_split_into_words=True).
        length: Tokens of the batch; the longest row when None.
        padding_side: Where rows that are shorter are padded: "right" or "left".

    Raises:
        DataError: The tokenizer has no offsets, the number of texts differs, a row is no word table, or a text is not
            the table's.
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
    encodings, origins = _encodings(encoding)
    if origins is None:
        origins = range(len(encodings))
        if len(encodings) != len(tables):
            raise DataError(
                f"{len(encodings)} encoded texts were given for {len(tables)} word tables; expected as many."
            )
    grouped = [_grouped(row, table) for row, table in enumerate(tables)]
    owners = [grouped[origin] for origin in origins]
    rows = [
        _aligned(index, owner, one, split_into_words)
        for index, (owner, one) in enumerate(zip(owners, encodings, strict=True))
    ]
    return _batched(owners, rows, length, padding_side)


def tokens_as_words(
    tables: Sequence[Sentence], *, before: int = 0, after: int = 0, length: int | None = None
) -> Alignment:
    """Return the alignment of models whose tokens are the words themselves.

    Args:
        tables: One word table a row.
        before: Special tokens before the words.
        after: Special tokens after them.
        length: Tokens of the batch; the longest row when None. Shorter rows are padded on the right.

    Raises:
        SettingError: A row is longer than `length`, or a number is no integer of at least 0.
        DataError: A row is a pair of tables, or no word table.
    """
    require_integer("before", before)
    require_integer("after", after)
    rows, owners = [], []
    for index, given in enumerate(tables):
        table, *others = _grouped(index, given)
        if others:
            raise DataError(f"row {index} is a pair of texts; expected one word table, or give the encoding.")
        units = before + len(table) + after
        special = (*range(before), *range(units - after, units))
        rows.append(AlignedRow(range(units), range(units), units, special, (range(before, units - after),)))
        owners.append((table,))
    return _batched(owners, rows, length, "right")


def words_of_tokens(spans: Sequence[tuple[int, int]], words: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the first and the last word each token shares a character with.

    A token that shares none stands for the next word, and behind the last word for that; without any word for (-1, -1).

    Args:
        spans: First character and the one after the last, of each token.
        words: The same of each word; neither the beginnings nor the ends go back.

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


def _grouped(index: int, tables: Sentence) -> tuple[WordTable, ...]:
    """Return the word tables of a row as a tuple."""
    if isinstance(tables, WordTable):
        return (tables,)
    if not isinstance(tables, tuple | list) or not tables or not all(isinstance(one, WordTable) for one in tables):
        raise DataError(
            f"row {index} is {tables!r:.60}; expected a word table or a pair of them, as WordTable.split(text) makes "
            "of a text, and headwise.roles.spacy.Parser of several."
        )
    return tuple(tables)


def _aligned(index: int, tables: tuple[WordTable, ...], encoding: Any, split_into_words: bool) -> AlignedRow:
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
            _require_same_text(index, table, spans)
            words = words_of_tokens(spans, table.spans or ())
        _require_words(index, table, words)
        for place, one in zip(own, words, strict=True):
            covered[place] = one
    if any(sequence is not None and sequence >= len(tables) for sequence in belongs):
        raise DataError(f"row {index} is a pair of texts; expected a pair of word tables for it.")
    return _placed(tables, belongs, covered, real)


def _placed(
    tables: tuple[WordTable, ...],
    belongs: Sequence[int | None],
    covered: Sequence[tuple[int, int]],
    real: Sequence[int],
) -> AlignedRow:
    """Number the units in the order of the tokens: words without a token have none."""
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


def _batched(
    tables: Sequence[tuple[WordTable, ...]], rows: Sequence[AlignedRow], length: int | None, side: str
) -> Alignment:
    longest = max((len(row.first) for row in rows), default=0)
    tokens = longest if length is None else length
    if longest > tokens:
        index = next(i for i, row in enumerate(rows) if len(row.first) > tokens)
        raise SettingError(
            f"sentence {index} has {len(rows[index].first)} tokens; expected at most {tokens}: cut it with table[:n], "
            "or truncate when encoding."
        )
    return Alignment(tuple(tables), tuple(_padded(row, tokens, side) for row in rows), tokens)


def _padded(row: AlignedRow, tokens: int, side: str) -> AlignedRow:
    if len(row.first) == tokens or isinstance(row.first, range):
        return row
    padding = [ABSENT] * (tokens - len(row.first))
    first, last = ([*one, *padding] if side == "right" else [*padding, *one] for one in (row.first, row.last))
    return AlignedRow(first, last, row.units, row.special, row.places)


def _encodings(encoding: Any) -> tuple[list[Any], Sequence[int] | None]:
    """Return the encoding of each row, and which text each row comes from where they overflow."""
    encodings = list(encoding) if isinstance(encoding, list | tuple) else getattr(encoding, "encodings", None)
    if encodings is None or not all(hasattr(one, "offsets") for one in encodings):
        raise DataError(
            f"the encoding is a {type(encoding).__name__} without character offsets; expected what a fast tokenizer of "
            "Hugging Face returns for a batch of texts, or tokenizers.Encoding of each."
        )
    mapped: Any = {} if isinstance(encoding, list | tuple) else encoding
    origins = mapped.get("overflow_to_sample_mapping")
    return encodings, None if origins is None else [int(origin) for origin in origins]


def _require_same_text(index: int, table: WordTable, spans: Sequence[tuple[int, int]]) -> None:
    end = max((span[1] for span in spans), default=0)
    if end > len(table.text or ""):
        raise DataError(
            f"row {index}: its tokens reach character {end} of a text of {len(table.text or '')} ({table.text!r:.60}); "
            "expected the word table of the text that was encoded."
        )


def _require_words(index: int, table: WordTable, words: Sequence[tuple[int, int]]) -> None:
    most = max((last for _, last in words), default=ABSENT)
    if most >= len(table):
        raise DataError(f"row {index}: its tokens belong to word {most} of a table of {len(table)} words.")
