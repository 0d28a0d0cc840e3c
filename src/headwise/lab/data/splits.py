"""Which text belongs to training, dev and test: parts cut by a hash of the text, so that equal texts stay together.

Owns the cut. Must not know files or token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headwise.errors import DataError
from headwise.lab.data.arrays import stable_key

TENTHS = 10


def parts(texts: Sequence[str], count: int) -> NDArray[np.int64]:
    """Return the part, 0 to count - 1, that each text is in; equal texts are in one part.

    Different texts are ordered by a keyed hash and dealt out in that order, so that parts are as equal in size as equal
    texts allow, and the part of a text follows from the texts alone and not from the order they stand in.

    Raises:
        DataError: There are fewer different texts than parts.

    >>> parts(["a", "b", "a", "c"], 3).tolist()
    [0, 1, 0, 2]
    """
    members: dict[str, list[int]] = {}
    for index, text in enumerate(texts):
        members.setdefault(text, []).append(index)
    if len(members) < count:
        raise DataError(f"{len(members)} different texts cannot be cut into {count} parts; add data.")
    found = np.zeros(len(texts), dtype=np.int64)
    dealt = part = opened = 0
    for left, text in zip(range(len(members), 0, -1), sorted(members, key=_order), strict=True):
        # the next part begins where this one is full, or where only as many texts are left as parts to begin
        if opened and (dealt * count >= (part + 1) * len(texts) or left < count - part):
            part, opened = min(part + 1, count - 1), 0
        found[members[text]] = part
        dealt += len(members[text])
        opened += 1
    return found


def cut(texts: Sequence[str], *, count: int = TENTHS, fold: int = 0) -> dict[str, NDArray[np.int64]]:
    """Return the places of train, dev and test: part `fold` is test, the next one dev, the others train.

    Args:
        texts: What tells texts apart.
        count: Parts.
        fold: The part that is test.
    """
    part = parts(texts, count)
    test, dev = part == fold, part == (fold + 1) % count
    return {"train": np.flatnonzero(~test & ~dev), "dev": np.flatnonzero(dev), "test": np.flatnonzero(test)}


def without(splits: Mapping[str, Sequence[str]]) -> dict[str, NDArray[np.int64]]:
    """Return the places of each split, train, dev and test, whose texts are in no split that comes after it.

    >>> {name: places.tolist() for name, places in without({"train": ["a", "b"], "test": ["b", "b"]}).items()}
    {'train': [0], 'test': [0, 1]}
    """
    found: dict[str, NDArray[np.int64]] = {}
    later: set[str] = set()
    for name, texts in reversed(list(splits.items())):
        found[name] = np.array([place for place, text in enumerate(texts) if text not in later], dtype=np.int64)
        later |= set(texts)
    return {name: found[name] for name in splits}


def _order(text: str) -> tuple[int, str]:
    return stable_key("part", text), text
