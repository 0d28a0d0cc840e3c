"""Subwords and word vectors: what is learned or read, and what is refused."""

from __future__ import annotations

import functools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from cases import cases
from fuzz.mutate import read_in_time
from headwise.errors import DataError, SettingError
from headwise_lab.data.subwords import (
    END,
    PADDING,
    SPECIAL,
    START,
    drop_long_words,
    learn_subwords,
    read_subwords,
)
from headwise_lab.data.word_vectors import read_word_vectors
from headwise_lab.tasks.pretraining.wordpieces import learn_word_pieces
from lab.published import DATA, needs
from lab.tasks.translation.translation_text import SOURCE_WORDS, TARGET_WORDS, lines

TEXT = [*lines(200, 1, SOURCE_WORDS), *lines(200, 1, TARGET_WORDS)]


@functools.cache
def learned():
    return learn_subwords(TEXT, 340)


@given(st.text(max_size=60))
@example("a </s> b <pad> <s><pad>")
@example("e\u0301 \u1100\u1161 \ufb01 \u2126")
@example("\x00\x07 \u2028 \u00a0 \U0001f469\u200d\U0001f680  two  blanks ")
def test_decoding_gives_back_the_normalized_text_exactly(text):
    subwords = learned()
    ids = subwords.encode(text)
    assert subwords.decode(ids) == subwords.tokenizer.normalizer.normalize_str(text)
    assert all(len(SPECIAL) <= id_ < subwords.vocabulary_size for id_ in ids)


def test_normalization_is_form_c_and_nothing_more():
    subwords = learned()
    assert subwords.decode(subwords.encode("e\u0301 \ufb01 ½ A\u030a")) == "\u00e9 \ufb01 ½ \u00c5"


def test_the_vocabulary_is_the_special_ids_the_bytes_and_merges():
    subwords = learned()
    assert subwords.vocabulary_size == 340
    assert [subwords.tokenizer.id_to_token(id_) for id_ in (PADDING, START, END)] == list(SPECIAL)
    assert len(subwords.encode("ein hund")) < len("ein hund") / 2
    assert learn_subwords(["abc def"], 300).vocabulary_size == 259


def test_a_text_full_of_special_words_never_teaches_a_special_id():
    subwords = learn_subwords([f"{special} a{special}a" for special in SPECIAL] * 50, 330)
    for text in SPECIAL:
        ids = subwords.encode(text)
        assert min(ids) >= len(SPECIAL)
        assert subwords.decode(ids) == text


@pytest.mark.full
@cases("word", [" " + "(" * 200_000, " " + "ab" * 100_000, " " + "1" * 200_000, " " * 200_000])
def test_a_word_of_any_length_does_not_hold_learning_up(word):
    """One word of 200,000 characters took a minute."""
    texts = ["ein hund rennt"] * 3
    found = []
    read_in_time(lambda: found.append(learn_subwords([*texts, f"zwei{word} hund"], 300)))
    assert found[0].tokenizer.get_vocab() == learn_subwords([*texts, "zwei", " hund"], 300).tokenizer.get_vocab()
    read_in_time(lambda: learn_word_pieces(lambda: [*texts, f"zwei{word} hund"], 100))


def test_a_text_without_such_a_word_is_learned_from_as_it_is():
    tokenizer = learn_subwords(["a"], 259).tokenizer
    chinese = "\u6211\u4eec\uff0c" * 2_000
    for text in ("a b", "w" * 1_000, chinese, "a" * 999 + " " + "b" * 999, "a" + " " * 1_000 + "b"):
        assert drop_long_words(text, tokenizer) is text
    assert drop_long_words(f"a {'w' * 1_001} b {'v' * 2_000}.", tokenizer).split() == ["a", "b", "."]


def test_special_ids_have_no_text_and_the_first_end_ends_it():
    subwords = learned()
    one, two = subwords.encode("ein hund"), subwords.encode("wiese")
    assert subwords.decode([START, *one, PADDING, END, *two]) == "ein hund"
    assert subwords.decode(np.array([START, END])) == ""


@pytest.mark.full
def test_the_same_lines_give_the_same_file_in_another_process_with_other_threads(tmp_path):
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from headwise_lab.data.subwords import learn_subwords\n"
        "from lab.data.test_subwords import TEXT\n"
        "sys.stdout.reconfigure(encoding='utf-8'); print(learn_subwords(TEXT, 340).to_json())"
    )
    environment = {"RAYON_NUM_THREADS": "3", "PYTHONHASHSEED": "7"}
    output = subprocess.run(
        [sys.executable, "-c", program, *sys.path], env=environment, capture_output=True, check=True, cwd=tmp_path
    ).stdout
    assert output.decode().strip() == learned().to_json()


def test_a_written_file_reads_back_as_the_same_subwords(tmp_path):
    (tmp_path / "tokenizer.json").write_text(learned().to_json(), encoding="utf-8")
    again = read_subwords(tmp_path / "tokenizer.json")
    text = "ein hund </s> läuft"
    assert (again.shift, again.vocabulary_size) == (0, 340)
    assert again.encode(text) == learned().encode(text)
    assert again.decode([*again.encode(text), END]) == text


def test_a_tokenizer_from_elsewhere_keeps_its_ids_above_ours(tmp_path):
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        TEXT, trainers.WordLevelTrainer(special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    )
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "theirs.json"))
    subwords = read_subwords(tmp_path / "theirs.json")
    ids = subwords.encode("ein hund läuft über")
    assert subwords.shift == 3
    assert ids == [3 + tokenizer.token_to_id(word) for word in ("ein", "hund", "läuft", "über")]
    assert subwords.vocabulary_size == 3 + tokenizer.get_vocab_size()
    assert subwords.decode([START, *ids, END, *ids]) == "ein hund läuft über"
    assert subwords.encode("zebra") == [3]


def test_ids_take_two_bytes_while_they_can(tmp_path):
    assert learned().dtype == np.uint16
    for size, dtype in ((2**16 - 3, np.uint16), (2**16 - 2, np.uint32)):
        tokenizer = Tokenizer(models.WordLevel({str(number): number for number in range(size)}, unk_token="0"))
        tokenizer.save(str(tmp_path / "large.json"))
        subwords = read_subwords(tmp_path / "large.json")
        assert subwords.dtype == dtype
        assert max(subwords.encode(str(size - 1))) <= np.iinfo(dtype).max


def test_what_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_subwords(tmp_path / "none.json")
    for content, message in (("{}", "not a tokenizer"), ('{"a": 1', "not a tokenizer")):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(DataError, match=message):
            read_subwords(tmp_path / "bad.json")
    Tokenizer(models.BPE()).save(str(tmp_path / "empty.json"))
    with pytest.raises(DataError, match="empty vocabulary"):
        read_subwords(tmp_path / "empty.json")
    with pytest.raises(SettingError, match="vocabulary_size is 258"):
        learn_subwords(TEXT, 258)


PUBLISHED = DATA / "glove"


@needs("glove")
def test_the_first_lines_of_glove_are_read():
    found = read_word_vectors(PUBLISHED / "glove.6B.100d.first100.txt.gz", {"the", "of", "xyzzy"}, 100)
    assert found.keys() == {"the", "of"}
    np.testing.assert_allclose(found["the"][:2], [-0.038194, -0.24487], rtol=1e-6)
    assert found["of"].dtype == np.float32


def test_words_may_hold_blanks_the_first_of_two_counts_and_a_line_of_sizes_is_passed_over(tmp_path):
    path = tmp_path / "v.txt"
    path.write_text("3 2\nnew york 0.5 -1e-1\na 1 2\na 3 4\nb 5 6\n")
    found = read_word_vectors(path, {"new york", "a"}, 2)
    assert {word: vector.tolist() for word, vector in found.items()} == {
        "new york": pytest.approx([0.5, -0.1]),
        "a": [1.0, 2.0],
    }


def test_what_is_no_vector_is_refused_by_its_line(tmp_path):
    path = tmp_path / "v.txt"
    for content, message in (
        ("a 1 2\nb 1\n", r"v\.txt, line 2: a word and 1 numbers; expected 2, the model's width"),
        ("a 1 2 3\n", r"line 1: a word and more than 2 numbers; expected 2"),
        ("a 1 2\nb 1 x\n", r"line 2: not all of the last 2 fields are numbers"),
        ("b 1 nan\n", r"line 1: the vector of 'b' holds a number that is not finite"),
        ("a 1 2\nb 1 1e999\n", r"line 2: the vector of 'b' holds a number that is not finite; drop the line"),
        ("a 1 2\nb 1 1e40\n", r"line 2: the vector of 'b' holds a number that is not finite; drop the line"),
        (f"a {'1 ' * 100_000}", r"line 1: a word and more than 2 numbers"),
        ("", r"is empty; expected a word and 2 numbers in each line"),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=message):
            read_word_vectors(path, {"a", "b"}, 2)
