"""The cut into parts: equal texts stay together, parts are of like size, and the order of the texts does not matter."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.errors import DataError
from headwise_lab.data.splits import assign_parts, drop_shared, split_by_hash

TEXTS = st.lists(st.text(alphabet="abc", min_size=0, max_size=3), min_size=3, max_size=60)


@given(TEXTS, st.integers(2, 6), st.randoms(use_true_random=False))
def test_equal_texts_are_in_one_part_wherever_they_stand_and_parts_are_as_equal_as_they_can_be(texts, count, draw):
    if len(set(texts)) < count:
        with pytest.raises(DataError, match="different texts cannot be cut into"):
            assign_parts(texts, count)
        return
    found = assign_parts(texts, count)
    assert len({*zip(texts, found.tolist(), strict=True)}) == len(set(texts))
    sizes = np.bincount(found, minlength=count)
    assert len(sizes) == count
    assert sizes.min() >= 1
    assert sizes.max() <= len(texts) / count + max(Counter(texts).values()) + count
    order = list(range(len(texts)))
    draw.shuffle(order)
    assert assign_parts([texts[i] for i in order], count).tolist() == found[order].tolist()


def test_a_cut_gives_each_text_to_one_split_and_dev_is_the_next_test():
    texts = [str(number % 37) for number in range(90)]
    for fold in range(4):
        found = split_by_hash(texts, count=4, fold=fold)
        assert sorted(np.concatenate([*found.values()]).tolist()) == list(range(90))
        assert found["dev"].tolist() == split_by_hash(texts, count=4, fold=(fold + 1) % 4)["test"].tolist()
    # what stands in a later split too is left out of the earlier
    found = drop_shared({"train": ["a", "b", "c", "a"], "dev": ["b", "d"], "test": ["d", "c", "e"]})
    assert {name: places.tolist() for name, places in found.items()} == {"train": [0, 3], "dev": [0], "test": [0, 1, 2]}
