"""Tokens stand for the words they share characters with, for every kind of tokenizer and any text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers

import headwise as hw
from cases import cases
from headwise.roles.word_table import AlignedRow, tokens_as_words, words_of_tokens
from roles.tokenizers_for_tests import KINDS, fast_tokenizer, tokenizer_of

# what has tripped alignments before: spaces of all kinds, joined emoji, marks, ligatures that normalization takes apart
ALPHABET = st.one_of(
    st.sampled_from("aeinorst'.,!? "),
    st.sampled_from(list(" \t\n\u00a0\u2028\u3000\u200b\u0301éß数ﬁ½Ⅳ👩\u200d👧🏽нй")),
    st.characters(exclude_categories=["Cs"]),
)
TEXTS = st.text(ALPHABET, max_size=24)


def words_by_looking(span: tuple[int, int], table: hw.roles.WordTable) -> set[int]:
    """The words that share a character with a span."""
    return {w for w, (start, end) in enumerate(table.spans) if max(start, span[0]) < min(end, span[1])}


def standing_for(row: AlignedRow, place: int) -> set[tuple[int, int]]:
    """(table, word) of the units a token stands for."""
    units = range(row.first[place], row.last[place] + 1)
    owner = {unit: (t, w) for t, own in enumerate(row.places) for w, unit in enumerate(own) if unit >= 0}
    return {owner[unit] for unit in units if unit in owner}


def require_right(row: AlignedRow, tables: list[hw.roles.WordTable], encoding) -> None:
    """Compare every token with the brute force, and the units with the order of the text."""
    for place, offsets in enumerate(encoding.offsets):
        if not encoding.attention_mask[place]:
            assert row.first[place] == row.last[place] == -1
        elif encoding.special_tokens_mask[place]:
            assert row.first[place] == row.last[place]
            assert row.first[place] in row.special
        else:
            number = encoding.sequence_ids[place]
            shared = words_by_looking(offsets, tables[number])
            if shared:
                assert standing_for(row, place) == {(number, word) for word in shared}
            elif len(tables[number]):
                # a token of white space alone stands for one word, that behind it or the last
                ((_, word),) = standing_for(row, place)
                behind = [w for w, (_, end) in enumerate(tables[number].spans) if end > offsets[0]]
                assert word == (behind[0] if behind else len(tables[number]) - 1)
    seen = [unit for place, unit in enumerate(row.first) if encoding.attention_mask[place]]
    assert set(seen) | set(row.last) - {-1} <= set(range(row.units))
    assert seen == sorted(seen)


@cases("kind", KINDS)
@settings(max_examples=120)
@given(text=TEXTS)
def test_a_token_stands_for_the_words_it_shares_characters_with(kind: str, text: str):
    encoding = tokenizer_of(kind).encode(text)
    table = hw.roles.WordTable.split(text)
    (row,) = hw.roles.align([table], [encoding]).rows
    require_right(row, [table], encoding)
    # no word of a text that is not cut is without a token, but what the tokenizer itself throws away
    covered = {c for span in encoding.offsets for c in range(*span)}
    for word, (start, end) in enumerate(table.spans):
        assert (row.places[0][word] >= 0) or not covered & set(range(start, end))


@cases("kind", KINDS)
@settings(max_examples=60)
@given(pair=st.tuples(TEXTS, TEXTS), most=st.integers(4, 16), left=st.booleans(), length=st.integers(16, 20))
def test_pairs_truncation_and_padding_on_either_side(
    kind: str, pair: tuple[str, str], most: int, left: bool, length: int
):
    side = "left" if left else "right"
    tokenizer = fast_tokenizer(kind, padding_side=side)
    encoding = tokenizer([pair[0], "short"], [pair[1], "er"], truncation="longest_first", max_length=most, padding=True)
    tables = [
        tuple(map(hw.roles.WordTable.split, pair)),
        (hw.roles.WordTable.split("short"), hw.roles.WordTable.split("er")),
    ]
    aligned = hw.roles.align(tables, encoding, length=length, padding_side=side)
    assert aligned.tokens == length
    for row, table, one in zip(aligned.rows, tables, encoding.encodings, strict=True):
        extra = length - len(one.offsets)
        kept = slice(extra, None) if left else slice(None, length - extra)
        assert set([*row.first][:extra] if left else [*row.first][length - extra :]) <= {-1}
        inner = AlignedRow(row.first[kept], row.last[kept], row.units, row.special, row.places)
        require_right(inner, list(table), one)


@settings(max_examples=100)
@given(st.data())
def test_words_of_tokens_is_what_comparing_all_spans_gives(data: st.DataObject):
    size = data.draw(st.integers(1, 20))
    cuts = sorted(data.draw(st.sets(st.integers(0, size), min_size=2)))
    words = [(a, b) for a, b in pairwise(cuts) if data.draw(st.booleans())]
    spans = data.draw(st.lists(st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted).map(tuple)))
    for span, (first, last) in zip(spans, words_of_tokens(spans, words), strict=True):
        shared = [w for w, (start, end) in enumerate(words) if max(start, span[0]) < min(end, span[1])]
        if shared:
            assert (first, last) == (shared[0], shared[-1])
        elif words:
            behind = [w for w, (_, end) in enumerate(words) if end > span[0]]
            assert first == last == (behind[0] if behind else len(words) - 1)
        else:
            assert (first, last) == (-1, -1)


def test_the_space_before_a_word_is_not_the_word_before():
    # the off-by-one that keeps coming back: offsets that hold the space, of byte-level BPE with trim_offsets=False
    table = hw.roles.WordTable.split("so it goes")
    assert words_of_tokens([(0, 2), (2, 5), (5, 10)], table.spans) == [(0, 0), (1, 1), (2, 2)]


def test_words_given_to_the_tokenizer_are_aligned_by_their_number():
    tokenizer = fast_tokenizer("WordPiece")
    words = ["I", "do", "n't", "sesquipedalian", "!"]
    encoding = tokenizer([words], is_split_into_words=True)
    table = hw.roles.WordTable(words)
    (row,) = hw.roles.align([table], encoding, split_into_words=True).rows
    ids = encoding.encodings[0].word_ids
    assert len(ids) > len(words) + 2
    for place, word in enumerate(ids):
        if word is not None:
            assert standing_for(row, place) == {(0, word)}
    assert row.special == (0, row.units - 1)


@cases("kind", KINDS)
@cases(
    "words", [["the", "old", "man", "."], ["I", "do", "n't"], ["the", "\u200bold"], list("数据数据"), ["数", "film"]]
)
def test_words_given_to_the_tokenizer_are_noticed_where_it_is_not_said(kind: str, words: list[str]):
    tokenizer, tables = (
        fast_tokenizer(kind),
        [(hw.roles.WordTable(["so"]), hw.roles.WordTable(words)), hw.roles.WordTable(words)],
    )
    pair = tokenizer([["so"]], [words], is_split_into_words=True)
    alone = tokenizer([words], is_split_into_words=True, padding="max_length", max_length=30)
    for table, encoding in zip(tables, (pair, alone), strict=True):
        with pytest.raises(
            hw.errors.DataError, match=r"row 0: .* use hw.roles.align\(tables, encoding, split_into_words=True\)"
        ):
            hw.roles.align([table], encoding)
        hw.roles.align([table], encoding, split_into_words=True)


@cases("text", ["н", "ну 👽!", "½", "a½ b", "\tfilm", "\n", "⑴.", "½ мир", "🙽 no"])
def test_a_character_of_several_words_of_the_tokenizer_is_a_text_nevertheless(text: str):
    made = Tokenizer.from_str(tokenizer_of("byte-level BPE").to_str())
    split_bytes = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=True), pre_tokenizers.Digits(True)]
    )
    split_forms = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()])
    table = hw.roles.WordTable.split(text)
    for normalizer, splitter in ((None, split_bytes), (normalizers.NFKC(), split_forms)):
        made.normalizer, made.pre_tokenizer = normalizer, splitter
        encoding = made.encode(text)
        (row,) = hw.roles.align([table], [encoding]).rows
        require_right(row, [table], encoding)


def test_texts_that_overflow_give_a_row_for_each_part():
    tokenizer = fast_tokenizer("WordPiece")
    texts = ["one two three four five six", "seven"]
    encoding = tokenizer(texts, truncation=True, max_length=6, stride=1, return_overflowing_tokens=True)
    tables = [hw.roles.WordTable.split(text) for text in texts]
    aligned = hw.roles.align(tables, encoding)
    assert len(aligned.rows) == len(encoding.encodings) > 2
    assert [owner[0].text for owner in aligned.tables] == [texts[i] for i in encoding["overflow_to_sample_mapping"]]
    for row, owner, one in zip(aligned.rows, aligned.tables, encoding.encodings, strict=True):
        padded = AlignedRow(row.first[: len(one.ids)], row.last[: len(one.ids)], row.units, row.special, row.places)
        require_right(padded, list(owner), one)


def test_words_that_are_tokens_stand_between_special_ones():
    aligned = tokens_as_words([hw.roles.WordTable(["a", "b"]), hw.roles.WordTable(["c"])], before=1, after=2, length=6)
    assert [list(row.first) for row in aligned.rows] == [[0, 1, 2, 3, 4], [0, 1, 2, 3]]
    assert aligned.rows[0].special == (0, 3, 4)
    assert list(aligned.rows[1].places[0]) == [1]
