"""Ragged arrays, and the cache of arrays: what is not whole is made again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.errors import DataError, ShapeError
from headwise_lab.data.arrays import Ragged, cache_arrays, read_arrays


def test_a_cache_that_lost_its_list_with_an_array_is_made_again_and_a_file_of_version_0_1_is_read(tmp_path: Path):
    made = {"tokens": np.arange(5), "labels": np.arange(3.0)}
    np.savez(tmp_path / "data.npz", tokens=made["tokens"])
    assert list(read_arrays(tmp_path / "data.npz")) == ["tokens"]
    with pytest.raises(DataError, match=r"data\.npz is damaged \(ValueError: it does not list its arrays\)"):
        read_arrays(tmp_path / "data.npz", listed=True)
    assert list(cache_arrays(tmp_path, "data", lambda: made)) == ["tokens", "labels"]
    assert list(cache_arrays(tmp_path, "data", dict)) == ["tokens", "labels"]


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(0, 300), max_size=6), max_size=12))
def test_packed_sequences_come_back_as_they_went_in(sequences):
    packed = Ragged.of(sequences)
    assert [packed[index] for index in range(len(packed))] == sequences
    assert packed.lengths.tolist() == [len(sequence) for sequence in sequences]
    fits = all(token < 256 for sequence in sequences for token in sequence)
    assert packed.values.dtype == (np.uint8 if fits else np.int32)


def test_packed_sequences_end_where_they_end():
    packed = Ragged.of([[1], [2, 3]])
    assert packed[-1] == [2, 3]
    with pytest.raises(IndexError):
        packed[2]
    with pytest.raises(ShapeError, match="offsets"):
        Ragged(packed.values, packed.offsets[:-1])
