"""Word vectors from a file: GloVe's lines, and what is refused by its number."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from headwise.errors import DataError
from headwise_lab.data.word_vectors import read_word_vectors

PUBLISHED = Path(os.environ.get("HEADWISE_DATA", "")) / "glove"


@pytest.mark.skipif("HEADWISE_DATA" not in os.environ, reason="HEADWISE_DATA names no folder with the published files")
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
