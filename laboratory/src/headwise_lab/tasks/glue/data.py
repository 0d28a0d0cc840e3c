"""The data of a GLUE set: its splits as token ids of the model to fine-tune, and batches.

GLUE's test files have no labels. Its dev files are therefore the test split here, and dev is cut from training by a
hash of the first text: no settings are chosen on the test split.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from headwise.errors import DataError
from headwise.texts.pretrained import open_tokenizer
from headwise_lab.data.arrays import Ragged, digest, stable_key
from headwise_lab.tasks.glue.files import (
    GlueExample,
    GlueSet,
    find_missing_file,
    find_set,
    list_labeled_files,
    list_unlabeled_files,
    read_split,
)
from headwise_lab.tasks.glue.scales import GlueScale
from headwise_lab.training.start import Start, find_start, require_positions

FORMAT = "glue-2"  # bump this when the training data changes
DEV_SHARE, DEV_MOST = 0.1, 1_000
DRAWS = 1 << 64


@dataclass(frozen=True)
class EncodedText:
    """An example: token ids, the segment of each where the tokenizer tells segments apart, and its label."""

    ids: list[int]
    types: list[int] | None
    label: float


@dataclass(frozen=True, eq=False)
class GlueSplit(Dataset[EncodedText]):
    """The examples of a split; `split[i]` is an `EncodedText`.

    Attributes:
        ids: Token ids of each example.
        types: Segment of each token, or None.
        labels: Class or score of each example, float64 [N]; zeros in a test file.
    """

    ids: Ragged
    types: Ragged | None
    labels: NDArray[np.float64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each example, [N]."""
        return self.ids.lengths

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> EncodedText:
        types = None if self.types is None else self.types[index]
        return EncodedText(self.ids[index], types, float(self.labels[index]))


@dataclass(frozen=True, eq=False)
class GlueData:
    """The task's data."""

    found: GlueSet
    folder: Path
    start: Start
    tokenizer: Any
    length: int
    train: GlueSplit
    dev: GlueSplit
    test: GlueSplit
    left_out: int
    fingerprint: str

    @property
    def classes(self) -> int:
        """Number of classes; 1 for a score."""
        return max(1, len(self.found.labels))

    def summary(self) -> str:
        """Return the set, the sizes of its splits and the pretrained models."""
        sizes = ", ".join(f"{len(getattr(self, name)):,} {name}" for name in ("train", "dev", "test"))
        left = f"; {self.left_out:,} lines without all fields left out" if self.left_out else ""
        begun = f"each arm's run of {self.start.task}" if self.start.of_arms else f"{self.start.place.name}"
        return f"{self.found.name}: {sizes} (test is GLUE's dev file, dev is cut from training){left}; from {begun}"

    def read_unlabeled(self) -> list[tuple[str, list[GlueExample], GlueSplit]]:
        """Return for each of GLUE's test files present the name of its submission, its examples, and these encoded."""
        found = []
        for file, name in list_unlabeled_files(self.folder):
            examples, _ = read_split(self.folder, file)
            found.append((name, examples, _encode(examples, self.found, self.tokenizer, self.length)))
        return found


def load_glue(folder: Path, scale: GlueScale) -> GlueData:
    """Return the data of a set's folder for the models of `scale.pretrained`."""
    found = require_set(folder)
    start = find_start(scale.pretrained)
    tokenizer = open_tokenizer(start.any_folder(), trust_remote_code=scale.trust_remote_code)
    require_positions(start.any_folder(), scale.length, trust_remote_code=scale.trust_remote_code)
    train, left_out = read_split(folder, "train")
    test, more = read_split(folder, "dev")
    for file, _ in list_unlabeled_files(folder):
        # test files are read again after hours of training: refuse malformed lines now
        read_split(folder, file)
    held = [_is_held_out(example, len(train)) for example in train]
    splits = {
        "train": _take_first([one for one, out in zip(train, held, strict=True) if not out], scale.train_examples),
        "dev": [one for one, out in zip(train, held, strict=True) if out],
        "test": _take_first(test, scale.test_examples),
    }
    if scale.both_orders and found.unordered:
        splits["train"] = [one for pair in splits["train"] for one in (pair, replace(pair, texts=pair.texts[::-1]))]
    for name, examples in splits.items():
        if not examples:
            raise DataError(f"{folder}: the {name} split holds no example of {len(train):,}; add data.")
    files = list_labeled_files(folder)
    described = f"{FORMAT} {found.name} {[path.name for path in files]} {start.fingerprint}"
    encoded = {name: _encode(examples, found, tokenizer, scale.length) for name, examples in splits.items()}
    fingerprint = digest(described, files)
    return GlueData(
        found, folder, start, tokenizer, scale.length, **encoded, left_out=left_out + more, fingerprint=fingerprint
    )


def require_set(folder: Path) -> GlueSet:
    """Return the GLUE set in a folder."""
    found, absent = find_set(folder), find_missing_file(folder)
    if absent:
        raise DataError(f"{folder} lacks {absent}, plain or .gz; {found.name} cannot be fine-tuned or judged without.")
    return found


def make_collator(padding: int) -> Callable[[Sequence[EncodedText]], dict[str, Tensor]]:
    """Return a function that pads examples into a batch, the arguments of `Classifier`."""

    def collate(examples: Sequence[EncodedText]) -> dict[str, Tensor]:
        width = max(len(example.ids) for example in examples)
        ids = torch.full((len(examples), width), padding)
        keep, types = torch.zeros_like(ids), torch.zeros_like(ids)
        for row, example in enumerate(examples):
            count = len(example.ids)
            ids[row, :count], keep[row, :count] = torch.tensor(example.ids), 1
            if example.types is not None:
                types[row, :count] = torch.tensor(example.types)
        labels = torch.tensor([example.label for example in examples])
        batch = {"input_ids": ids, "attention_mask": keep, "labels": labels}
        return batch if examples[0].types is None else {**batch, "token_type_ids": types}

    return collate


def _encode(examples: Sequence[GlueExample], found: GlueSet, tokenizer: Any, length: int) -> GlueSplit:
    texts = [[example.texts[side] for example in examples] for side in range(len(found.texts))]
    made = tokenizer(*texts, truncation=True, max_length=length)
    types = Ragged.of(made["token_type_ids"]) if "token_type_ids" in made else None
    classes = {label: float(number) for number, label in enumerate(found.labels)}
    labels = [classes.get(example.label, 0.0) if classes else float(example.label or 0.0) for example in examples]
    return GlueSplit(Ragged.of(made["input_ids"]), types, np.array(labels, dtype=np.float64))


def _is_held_out(example: GlueExample, total: int) -> bool:
    # by the first text alone: pairs that share it stay on one side
    return stable_key("glue dev", example.texts[0]) / DRAWS < min(DEV_SHARE, DEV_MOST / total)


def _take_first(examples: list[GlueExample], most: int | None) -> list[GlueExample]:
    if most is None or len(examples) <= most:
        return examples
    keys = [stable_key("glue cap", *example.texts) for example in examples]
    kept = set(sorted(range(len(examples)), key=lambda place: (keys[place], place))[:most])
    return [example for place, example in enumerate(examples) if place in kept]
