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


@given(TEXTS, st.integers(2, 6))
def test_equal_texts_are_in_one_part_and_parts_are_as_equal_as_they_can_be(texts, count):
    if len(set(texts)) < count:
        with pytest.raises(DataError, match="different texts cannot be cut into"):
            assign_parts(texts, count)
        return
    found = assign_parts(texts, count)
    of_text: dict[str, set[int]] = {}
    for text, part in zip(texts, found.tolist(), strict=True):
        of_text.setdefault(text, set()).add(part)
    assert all(len(place) == 1 for place in of_text.values())
    sizes = np.bincount(found, minlength=count)
    assert len(sizes) == count
    assert sizes.min() >= 1
    assert sizes.max() <= len(texts) / count + max(Counter(texts).values()) + count


@given(TEXTS, st.randoms(use_true_random=False))
def test_the_part_of_a_text_does_not_depend_on_where_it_stands(texts, draw):
    if len(set(texts)) < 3:
        return
    order = list(range(len(texts)))
    draw.shuffle(order)
    shuffled = assign_parts([texts[i] for i in order], 3)
    assert shuffled.tolist() == assign_parts(texts, 3)[order].tolist()


@pytest.mark.parametrize("fold", range(4))
def test_a_cut_gives_each_text_to_one_split_and_dev_is_the_next_test(fold):
    texts = [str(number % 37) for number in range(90)]
    found = split_by_hash(texts, count=4, fold=fold)
    assert sorted(np.concatenate([*found.values()]).tolist()) == list(range(90))
    assert found["dev"].tolist() == split_by_hash(texts, count=4, fold=(fold + 1) % 4)["test"].tolist()


def test_what_stands_in_a_later_split_too_is_left_out_of_the_earlier():
    found = drop_shared({"train": ["a", "b", "c", "a"], "dev": ["b", "d"], "test": ["d", "c", "e"]})
    assert {name: places.tolist() for name, places in found.items()} == {"train": [0, 3], "dev": [0], "test": [0, 1, 2]}
