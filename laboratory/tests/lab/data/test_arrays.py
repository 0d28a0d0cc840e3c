"""The cache of arrays: what is not whole is made again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headwise.errors import DataError
from headwise_lab.data.arrays import cache_arrays, read_arrays


def test_a_cache_that_lost_its_list_with_an_array_is_made_again_and_a_file_of_version_0_1_is_read(tmp_path: Path):
    made = {"tokens": np.arange(5), "labels": np.arange(3.0)}
    np.savez(tmp_path / "data.npz", tokens=made["tokens"])
    assert list(read_arrays(tmp_path / "data.npz")) == ["tokens"]
    with pytest.raises(DataError, match=r"data\.npz is damaged \(ValueError: it does not list its arrays\)"):
        read_arrays(tmp_path / "data.npz", listed=True)
    assert list(cache_arrays(tmp_path, "data", lambda: made)) == ["tokens", "labels"]
    assert list(cache_arrays(tmp_path, "data", dict)) == ["tokens", "labels"]
