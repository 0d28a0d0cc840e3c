"""Training, dev and test splits by a hash of the text, so that equal texts stay together."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headwise.errors import DataError
from headwise_lab.data.arrays import stable_key

TENTHS = 10


def assign_parts(texts: Sequence[str], count: int) -> NDArray[np.int64]:
    """Return the part of each text, from 0 to count - 1; equal texts are in the same part.

    Different texts are ordered by a keyed hash and dealt out in that order. Parts are as equal in size as duplicates
    allow, and do not depend on the order of the texts.

    Raises:
        DataError: There are fewer different texts than parts.

    >>> assign_parts(["a", "b", "a", "c"], 3).tolist()
    [0, 1, 0, 2]
    """
    members: dict[str, list[int]] = {}
    for index, text in enumerate(texts):
        members.setdefault(text, []).append(index)
    if len(members) < count:
        raise DataError(f"{len(members)} different texts cannot be cut into {count} parts; add data.")
    found = np.zeros(len(texts), dtype=np.int64)
    dealt = part = opened = 0
    ordered = sorted(members, key=lambda text: (stable_key("part", text), text))
    for left, text in zip(range(len(members), 0, -1), ordered, strict=True):
        # start the next part when this one is full, or when every text left is needed to start one
        if opened and (dealt * count >= (part + 1) * len(texts) or left < count - part):
            part, opened = min(part + 1, count - 1), 0
        found[members[text]] = part
        dealt += len(members[text])
        opened += 1
    return found


def split_by_hash(texts: Sequence[str], *, count: int = TENTHS, fold: int = 0) -> dict[str, NDArray[np.int64]]:
    """Return the indices of train, dev and test: part `fold` is test, the next one dev, the others train."""
    part = assign_parts(texts, count)
    test, dev = part == fold, part == (fold + 1) % count
    return {"train": np.flatnonzero(~test & ~dev), "dev": np.flatnonzero(dev), "test": np.flatnonzero(test)}


def drop_shared(splits: Mapping[str, Sequence[str]]) -> dict[str, NDArray[np.int64]]:
    """Return the indices of the texts of each split (train, dev, test) that are in no later split.

    >>> {name: places.tolist() for name, places in drop_shared({"train": ["a", "b"], "test": ["b", "b"]}).items()}
    {'train': [0], 'test': [0, 1]}
    """
    found: dict[str, NDArray[np.int64]] = {}
    later: set[str] = set()
    for name, texts in reversed(list(splits.items())):
        found[name] = np.array([place for place, text in enumerate(texts) if text not in later], dtype=np.int64)
        later |= set(texts)
    return {name: found[name] for name in splits}


def complete_splits(
    numbers: Mapping[str, NDArray[np.int64]], keys: Sequence[str], groups: Sequence[str]
) -> tuple[dict[str, NDArray[np.int64]], int]:
    """Return train, dev and test without items that a later split has too, and how many those are.

    Args:
        numbers: Items of "train", "test" and perhaps "dev"; without it, a tenth of train becomes dev.
        keys: What identifies each item.
        groups: What may not be in both train and dev if dev is cut from train.
    """
    whole = dict(numbers)
    if "dev" not in whole:
        # before items of test are dropped, so that dev does not depend on test
        train = whole["train"]
        places = split_by_hash([groups[int(number)] for number in train])
        whole["train"] = np.sort(train[np.concatenate([places["train"], places["test"]])])
        whole["dev"] = train[places["dev"]]
    whole = {name: whole[name] for name in ("train", "dev", "test")}
    kept = drop_shared({name: [keys[int(number)] for number in chosen] for name, chosen in whole.items()})
    found = {name: chosen[kept[name]] for name, chosen in whole.items()}
    return found, sum(map(len, whole.values())) - sum(map(len, found.values()))


def order_by_hash(numbers: NDArray[np.int64], keys: NDArray, purpose: str) -> NDArray[np.int64]:
    """Return items in an order that depends on their keys and a purpose only."""
    ordered = sorted(numbers.tolist(), key=lambda number: (stable_key(purpose, str(keys[number])), number))
    return np.array(ordered, dtype=np.int64)
