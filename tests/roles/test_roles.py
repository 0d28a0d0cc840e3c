"""The five roles as the paper states them, as its code has them, and a user's own; word by word and token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import headwise as hw
from cases import cases
from headwise.roles.roles import MAJOR
from headwise.roles.word_table import Alignment
from roles.tokenizers_for_tests import KINDS, fast_tokenizer

# "The very old film bored me , but John liked it ; why not ?" with the parse of a person
WORDS = ["The", "very", "old", "film", "bored", "me", ",", "but", "John", "liked", "it", ";", "why", "not", "?"]
HEADS = [3, 2, 3, 4, 4, 4, 9, 9, 9, 4, 9, 13, 13, 9, 4]
RELATIONS = [
    *("det", "advmod", "amod", "nsubj", "ROOT", "obj", "punct", "cc", "nsubj", "conj", "dobj", "punct"),
    *("obl", "parataxis", "punct"),
]
SENTENCE = hw.roles.WordTable(WORDS, HEADS, RELATIONS)
# how often in 100 documents
TIMES = [99, 40, 30, 20, 5, 60, 99, 90, 7, 35, 80, 4, 33, 50, 70]
FREQUENT = hw.roles.IDF(100, dict(zip(map(str.lower, WORDS), TIMES, strict=True)))


def named(columns: list[int]) -> list[str]:
    return [WORDS[word] for word in columns]


def test_rare_is_the_tenth_with_the_highest_idf_rounded_up():
    rated = FREQUENT.rate(SENTENCE)
    assert named(hw.roles.Rare().find(rated)) == ["bored", ";"]
    assert named(hw.roles.Rare(share=0.2).find(rated)) == ["bored", "John", ";"]
    for count in (10, 20, 21, 70):
        table = hw.roles.WordTable([f"w{i}" for i in range(count)], rarities=list(range(count)))
        assert hw.roles.Rare().find(table) == list(range(count - -(-count // 10), count))
        assert len(hw.roles.Rare.released().find(table)) == max(2, count // 10)
    # 0.07 of 100 is 7 and 0.29 of 100 is 29, though binary digits make a little more and a little less of them
    table = hw.roles.WordTable([f"w{i}" for i in range(100)], rarities=list(range(100)))
    assert len(hw.roles.Rare(share=0.07).find(table)) == 7
    assert len(hw.roles.Rare(share=0.29, round_up=False).find(table)) == 29
    assert hw.roles.Rare().find(hw.roles.WordTable(["one"], rarities=[1.0])) == [0]
    assert hw.roles.Rare().find(hw.roles.WordTable(["a", "b"], rarities=[1.0, 1.0])) == [0]


def test_rare_as_released_takes_two_at_least_and_skips_letters_and_numbers():
    rated = FREQUENT.rate(SENTENCE)
    assert named(hw.roles.Rare.released().find(rated)) == ["bored", "John"]
    numbers = hw.roles.WordTable(["3.5", "x", "1999", "rare", "words", "more"], rarities=[9, 9, 9, 2, 1, 2])
    assert hw.roles.Rare.released().find(numbers) == [3, 5]
    assert hw.roles.Rare.released().find(hw.roles.WordTable(["aa", "bb", "cc"], rarities=[1, 1, 1])) == [1, 2]


def test_separators_are_the_papers_marks_alone():
    assert named(hw.roles.Separator().find(SENTENCE)) == [",", ";", "?"]
    marks = hw.roles.WordTable(["Well", "...", "no", ":", "yes", "!", "?!", "a.b", ".", ".net"])
    assert hw.roles.Separator().find(marks) == [1, 5, 6, 8]
    assert hw.roles.Separator.released().find(marks) == [3, 8]


def test_dependency_is_the_word_its_head_and_its_children():
    pairs = set(hw.roles.Dependency().find(SENTENCE))
    for word, head in enumerate(HEADS):
        children = {child for child, parent in enumerate(HEADS) if parent == word}
        assert {j for i, j in pairs if i == word} == {word, head} | children
    assert set(hw.roles.Dependency(children=False).find(SENTENCE)) == {
        (i, j) for i, h in enumerate(HEADS) for j in (i, h)
    }
    assert set(hw.roles.Dependency(head=False).find(SENTENCE)) == {(i, j) for j, h in enumerate(HEADS) for i in (j, h)}


def test_major_is_the_words_of_the_four_relations_and_their_heads():
    found = named(hw.roles.Major().find(SENTENCE))
    # very-advmod-old, old-amod-film, film-nsubj-bored, me-obj-bored, John-nsubj-liked, it-dobj-liked
    assert found == ["very", "old", "film", "bored", "me", "John", "liked", "it"]
    # and The hangs on film, which is a subject
    assert named(hw.roles.Major.released().find(SENTENCE)) == ["The", *found]
    assert named(hw.roles.Major(relations=("cc",)).find(SENTENCE)) == ["but", "liked"]
    passive = hw.roles.WordTable(["it", "was", "seen"], [2, 2, 2], ["nsubj:pass", "aux:pass", "ROOT"])
    assert hw.roles.Major().find(passive) == []
    assert hw.roles.Major((*MAJOR, "nsubj:pass")).find(passive) == [0, 2]


def cells(mask: Tensor) -> list[list[int]]:
    return mask.int().tolist()


def test_windows_are_centered_and_end_at_the_sentence():
    tables = [hw.roles.WordTable(list("abcd")), hw.roles.WordTable(list("ab"))]
    mask = hw.roles.Roles(hw.roles.Window(), hw.roles.Window.released())(tables, num_heads=2)
    assert mask.names == ("window", "window 2")
    assert cells(mask.roles[0, 0]) == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert cells(mask.roles[0, 1]) == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]
    assert cells(mask.roles[1, 0]) == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert cells(mask.keep) == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_special_tokens_are_separators_and_major_and_see_themselves_under_dependency():
    roles = hw.roles.Roles(
        hw.roles.Rare(), hw.roles.Separator(), hw.roles.Dependency(), hw.roles.Major(), hw.roles.Window(), idf=FREQUENT
    )
    table = hw.roles.WordTable(["bored", "?"], [0, 0], ["ROOT", "punct"])
    mask = roles(table, num_heads=6, before=1, after=1)
    rare, separator, dependency, major, window = mask.roles[0]
    assert cells(rare) == [[0, 1, 0, 0]] * 4
    assert cells(separator) == [[1, 0, 1, 1]] * 4
    assert cells(dependency) == [[1, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    assert cells(major) == [[1, 0, 0, 1]] * 4
    assert cells(window) == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert (mask.num_heads, mask.heads) == (6, (0, 1, 2, 3, 4))


def test_a_sentence_without_a_separator_follows_the_policy():
    roles = hw.roles.Roles(hw.roles.Separator())
    tables = [hw.roles.WordTable(["no", "mark"]), hw.roles.WordTable(["a", "mark", "."])]
    regular = roles(tables, num_heads=2).allowed()
    assert cells(regular[0, 0]) == [[1, 1, 0]] * 3
    assert cells(regular[1, 0]) == [[0, 0, 1]] * 3
    itself = roles(tables, num_heads=2, empty="self").allowed()
    assert cells(itself[0, 0]) == [[1, 0, 0], [0, 1, 0], [0, 0, 0]]


def test_a_role_of_your_own_is_a_function_from_words_to_columns_or_pairs():
    def short(table):
        return [word for word, text in enumerate(table.words) if len(text) < 3]

    def next_word(table):
        return [(word, word + 1) for word in range(len(table) - 1)]

    def known(table):
        return [word for word, rarity in enumerate(table.rarities) if rarity < 2.0]

    roles = hw.roles.Roles(short, next_word, hw.roles.Role("known", known, special_tokens=True), idf=FREQUENT)
    mask = roles(hw.roles.WordTable(["film", "it", "the"]), num_heads=4, after=1, heads=(3, 0, 1))
    assert mask.names == ("short", "next_word", "known")
    assert mask.heads == (3, 0, 1)
    assert cells(mask.roles[0, 0]) == [[0, 1, 0, 0]] * 4
    assert cells(mask.roles[0, 1]) == [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
    assert cells(mask.roles[0, 2]) == [[0, 1, 1, 1]] * 4


@cases("array", [np.array, torch.tensor])
def test_a_role_of_your_own_may_find_arrays(array):
    table = hw.roles.WordTable(["a", "b", "c"])
    for found in ([1, 2], [(0, 1), (2, 2)]):
        plain, given = (hw.roles.Roles(hw.roles.Role("mine", lambda _, f=one: f)) for one in (found, array(found)))
        assert torch.equal(given(table, num_heads=1).allowed(), plain(table, num_heads=1).allowed())


def by_words(roles: hw.roles.Roles, aligned: Alignment, index: int) -> Tensor:
    """The masks of one sentence of a batch, word by word and cell by cell."""
    (table,), row = aligned.tables[index], aligned.rows[index]
    rated = roles.idf.rate(table)
    found = torch.zeros(len(roles.roles), aligned.tokens, aligned.tokens, dtype=torch.bool)
    word_of = {unit: word for word, unit in enumerate(row.places[0]) if unit >= 0}
    for r, role in enumerate(roles.roles):
        listed = [] if isinstance(role, hw.roles.Window) else role.find(rated)
        columns = {word for word in listed if isinstance(word, int)}
        pairs = {pair for pair in listed if isinstance(pair, tuple)}
        for q, k in torch.cartesian_prod(torch.arange(aligned.tokens), torch.arange(aligned.tokens)).tolist():
            for one in range(row.first[q], row.last[q] + 1):
                for other in range(row.first[k], row.last[k] + 1):
                    if one < 0 or other < 0:
                        continue
                    if isinstance(role, hw.roles.Window):
                        allowed = abs(one - other) <= role.reach
                    elif other in row.special:
                        allowed = role.special_tokens or (isinstance(role, hw.roles.Dependency) and one == other)
                    else:
                        allowed = word_of[other] in columns or (word_of.get(one), word_of[other]) in pairs
                    found[r, q, k] |= allowed
    return found


@pytest.mark.full
@cases("kind", KINDS)
@settings(max_examples=25)
@given(
    st.lists(st.sampled_from(["film", "I", "do", "n't", "sesquipedalian", ",", "?!", "数"]), min_size=1, max_size=8),
    st.sampled_from(["", " "]),
)
def test_every_piece_of_a_word_has_the_row_and_the_column_of_the_word(kind: str, words: list[str], space: str):
    size, relations = len(words), [MAJOR[i % 4] if i % 3 else "x" for i in range(len(words))]
    # without spaces many tokens cover several words
    parsed = hw.roles.WordTable(words, [i // 2 for i in range(size)], relations, text=space.join(words))
    tables = [parsed, hw.roles.WordTable(["a", "film"], [1, 1], ["det", "ROOT"])]
    roles = hw.roles.Roles.paper(FREQUENT)
    for side in ("right", "left"):
        tokenizer = fast_tokenizer(kind, padding_side=side)
        encoding = tokenizer([table.text for table in tables], padding=True, truncation=True, max_length=14)
        aligned = hw.roles.align(tables, encoding)
        mask = roles(tables, num_heads=5, encoding=encoding)
        assert mask.keep.int().tolist() == encoding["attention_mask"]
        for index in range(2):
            assert torch.equal(mask.roles[index], by_words(roles, aligned, index))


def test_the_roles_print_as_the_record_of_an_experiment():
    assert repr(hw.roles.Roles(hw.roles.Window(5), hw.roles.Rare.released(), idf=hw.roles.IDF(3, {"a": 1}))) == (
        "Roles(roles=(Window(size=5), Rare(share=0.1, least=2, round_up=False, skip=True, ties='later')), "
        "idf=IDF(3 documents, 1 words))"
    )
    assert hw.roles.Roles.released(FREQUENT).names == hw.roles.Roles.paper(FREQUENT).names


def test_an_empty_text_with_special_tokens_is_a_sentence():
    mask = hw.roles.Roles(hw.roles.Window(), hw.roles.Separator())(
        [hw.roles.WordTable([])], num_heads=2, before=1, after=1
    )
    assert cells(mask.allowed()[0, 0]) == [[1, 1], [1, 1]]


def test_words_found_may_be_integers_of_numpy():
    find = lambda _: np.arange(2), lambda _: [(np.int64(1), 0)]
    words, pairs = (hw.roles.Roles(found)(SENTENCE, num_heads=1).roles[0, 0] for found in find)
    assert words.sum(-1).unique().tolist() == [2]
    assert pairs.nonzero().tolist() == [[1, 0]]


def test_an_alignment_takes_the_parse_of_the_tables_given_with_it():
    roles = hw.roles.Roles(hw.roles.Dependency(), hw.roles.Major())
    encoding = fast_tokenizer("WordPiece")([SENTENCE.text, "It bored me."], padding=True)
    other = hw.roles.WordTable(
        ["It", "bored", "me", "."], [1, 1, 1, 1], ["nsubj", "ROOT", "obj", "punct"], "It bored me."
    )
    aligned = hw.roles.align([SENTENCE, other], encoding)
    shuffled = [SENTENCE.shuffled_parse(3), other]
    for make in (roles, roles.for_flex):
        shown, expected = (make(shuffled, 3, encoding=one) for one in (aligned, encoding))
        if make is roles:
            assert torch.equal(shown.roles, expected.roles)
            assert not torch.equal(shown.roles, make([SENTENCE, other], 3, encoding=aligned).roles)
        else:
            assert torch.equal(shown.pairs, expected.pairs)
    with pytest.raises(
        hw.errors.DataError, match=r"row 1 was aligned with 'It bored me \.' and is given 'It bored me'"
    ):
        roles([SENTENCE, other[:3]], 3, encoding=aligned)
    moved = hw.roles.WordTable(other.words, other.heads, other.relations, "It  bored me.")
    with pytest.raises(hw.errors.DataError, match="expected the same words at the same characters"):
        roles([SENTENCE, moved], 3, encoding=aligned)
    with pytest.raises(hw.errors.DataError, match="2 aligned texts were given for 1 word tables"):
        roles([SENTENCE], 3, encoding=aligned)


def test_an_alignment_of_texts_that_overflow_is_one_row_for_each_part():
    tables = [SENTENCE, hw.roles.WordTable(["film", "!"], [0, 0], ["ROOT", "punct"])]
    encoding = fast_tokenizer("WordPiece")(
        [table.text for table in tables], truncation=True, max_length=9, stride=2, return_overflowing_tokens=True
    )
    aligned = hw.roles.align(tables, encoding)
    assert aligned.origins == tuple(encoding["overflow_to_sample_mapping"]) == (0,) * (len(aligned.rows) - 1) + (1,)
    roles = hw.roles.Roles.paper(FREQUENT)
    mask = roles(tables, num_heads=5, encoding=aligned)
    for index in range(len(aligned.rows)):
        assert torch.equal(mask.roles[index], by_words(roles, aligned, index))
    assert torch.equal(mask.roles, roles(tables, num_heads=5, encoding=encoding).roles)
    with pytest.raises(hw.errors.DataError, match="2 encoded texts were given for 3 word tables"):
        roles([*tables, SENTENCE], num_heads=5, encoding=encoding)


def test_a_batch_is_as_long_as_told():
    encoding = fast_tokenizer("WordPiece")([SENTENCE.text])
    aligned = hw.roles.align([SENTENCE], encoding, length=70)
    for make in (hw.roles.Roles(hw.roles.Separator()), hw.roles.Roles(hw.roles.Separator()).for_flex):
        assert make(SENTENCE, 2, encoding=aligned, length=70).keep.shape == (1, 70)
        assert make(SENTENCE, 2, encoding=encoding, length=80).keep.shape == (1, 80)


def test_the_random_control_of_a_causal_mask_keeps_as_many_keys_for_each_query():
    roles, tables = hw.roles.Roles(hw.roles.Window(5)), [hw.roles.WordTable([f"w{i}" for i in range(20)])]
    mask = roles(tables, num_heads=2, causal=True)
    assert mask.causal
    drawn = mask.randomized([3])
    assert torch.equal(drawn.allowed().sum(-1), mask.allowed().sum(-1))
    assert not torch.equal(drawn.allowed(), mask.allowed())
    late = roles(tables, num_heads=2)
    assert not torch.equal(late.randomized([3]).allowed(causal=True).sum(-1), late.allowed(causal=True).sum(-1))
