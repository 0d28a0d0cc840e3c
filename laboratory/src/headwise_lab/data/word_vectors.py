"""Reading word vectors such as GloVe's: `word v1 ... vn` in each line, separated by single spaces."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headwise.errors import DataError
from headwise.input_files import read_numbered_lines
from headwise_lab.data.arrays import pack_words, unpack_words


def read_word_vectors(path: Path, words: Collection[str], width: int) -> dict[str, NDArray[np.float32]]:
    """Return the vectors of those of `words` that are in the file, each float32 [width].

    The first of duplicate words counts. Some words of GloVe 840B contain a space: the last `width` fields are the
    vector. A first line of two numbers, as in word2vec files, is skipped.

    Raises:
        DataError: The file cannot be read or is empty, a line has another width, or a value is not a finite
            number; the message names the line.
    """
    wanted, found = frozenset(words), {}
    number = 0
    for number, line in read_numbered_lines(path):
        fields = line.rstrip(" ").split(" ")
        if number == 1 and len(fields) == 2 and all(field.isdigit() for field in fields):
            continue
        if len(fields) <= width:
            raise DataError(
                f"{path}, line {number}: a word and {len(fields) - 1} numbers; expected {width}, the model's width."
            )
        word = " ".join(fields[:-width])
        if word in found or (word not in wanted and number > 1):
            continue
        vector = _read_numbers(fields[-width:])
        if vector is None:
            raise DataError(
                f"{path}, line {number}: not all of the last {width} fields are numbers; expected a word and {width}, "
                "the model's width."
            )
        if not np.isfinite(vector).all():
            raise DataError(
                f"{path}, line {number}: the vector of {word[:60]!r} holds a number that is not finite; drop the line."
            )
        if len(fields) > width + 1 and _read_numbers(fields[-width - 1 : -width]) is not None:
            raise DataError(
                f"{path}, line {number}: a word and more than {width} numbers; expected {width}, the model's width."
            )
        if word in wanted:
            found[word] = vector
    if number == 0:
        raise DataError(f"{path} is empty; expected a word and {width} numbers in each line.")
    return found


def _read_numbers(fields: Sequence[str]) -> NDArray[np.float32] | None:
    try:
        # a number that float32 does not hold is infinite
        with np.errstate(over="ignore"):
            return np.array(fields, dtype=np.float32)
    except ValueError:
        return None


def pack_vectors(path: Path, words: Collection[str], width: int) -> dict[str, NDArray]:
    """Return the vectors of words as arrays for `cache_arrays`; arguments as for `read_word_vectors`.

    Raises:
        DataError: The file cannot be read or has none of the words.
    """
    found = read_word_vectors(path, words, width)
    if not found:
        raise DataError(f"{path} has a vector for none of the {len(words)} words; name another file.")
    return {"vector_words": pack_words([*found]), "vectors": np.stack([*found.values()])}


def unpack_vectors(stored: Mapping[str, NDArray]) -> dict[str, NDArray[np.float32]]:
    """Return the vectors of words that `pack_vectors` stored; empty if there are none."""
    if "vectors" not in stored:
        return {}
    return dict(zip(unpack_words(stored["vector_words"]), stored["vectors"], strict=True))


def select_vectors(
    vectors: Mapping[str, NDArray[np.float32]], vocabulary: Sequence[str], width: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the ids of the words of a vocabulary that have a vector, [V], and the vectors, [V, width]."""
    known = [(index, vectors[word]) for index, word in enumerate(vocabulary) if word in vectors]
    ids = np.array([index for index, _ in known], dtype=np.int64)
    return ids, np.array([vector for _, vector in known], dtype=np.float32).reshape(len(known), width)
