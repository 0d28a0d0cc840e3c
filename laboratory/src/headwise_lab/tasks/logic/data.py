"""The data of the logical inference task: pairs of propositional formulas and the relation between them.

It is generated, or read from the published files (Bowman et al. 2015). Training has formulas with few operators; the
test set has longer ones too, in bins by number of operators (Tran et al. 2018).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from headwise.errors import DataError, SettingError
from headwise.texts.batching import pad
from headwise_lab.data.arrays import Ragged, cache_arrays, digest, require_files, stable_key
from headwise_lab.experiment.scale import was_set
from headwise_lab.tasks.logic.formulas import RELATIONS, Pair, read_pairs
from headwise_lab.tasks.logic.generator import generate
from headwise_lab.tasks.logic.scales import LogicScale

PADDING, UNKNOWN = "<pad>", "<unk>"
GENERATOR_SEED = 0
ENCODING = "logic-1"  # changes with anything below that changes the arrays


class Example(TypedDict):
    """One pair as token ids, and its relation as an index into the labels."""

    premise: list[int]
    hypothesis: list[int]
    label: int


@dataclass(frozen=True, eq=False)
class LogicSplit(Dataset[Example]):
    """The pairs of one split, encoded; `split[i]` is an `Example`.

    Attributes:
        premises: Token ids of the first formulas.
        hypotheses: Token ids of the second.
        labels: Index of the relation, uint8 [N].
        bins: Number of operators, uint8 [N].
    """

    premises: Ragged
    hypotheses: Ragged
    labels: NDArray[np.uint8]
    bins: NDArray[np.uint8]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of the longer side of each pair, [N]: what a batch is padded to."""
        return np.maximum(self.premises.lengths, self.hypotheses.lengths)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Example:
        return Example(premise=self.premises[index], hypothesis=self.hypotheses[index], label=int(self.labels[index]))


@dataclass(frozen=True, eq=False)
class LogicData:
    """The data of a scale: train has few operators, dev is cut from its side, both dev and test have the test bins."""

    train: LogicSplit
    dev: LogicSplit
    test: LogicSplit
    vocabulary: tuple[str, ...]
    labels: tuple[str, ...]
    fingerprint: str

    def summary(self) -> str:
        """Return the number of pairs of each split, in one line."""
        sizes = {"train": len(self.train), "dev": len(self.dev), "test": len(self.test)}
        listed = ", ".join(f"{size:,} {name}" for name, size in sizes.items())
        return f"pairs: {listed}; {self.swapped:,} test pairs are training pairs with their sides swapped"

    @cached_property
    def swapped(self) -> int:
        """How many test pairs are in training the other way round, from where their relation follows."""
        known = {*zip(_list_bytes(self.train.premises), _list_bytes(self.train.hypotheses), strict=True)}
        swapped = zip(_list_bytes(self.test.hypotheses), _list_bytes(self.test.premises), strict=True)
        return sum(pair in known for pair in swapped)


def _list_bytes(sides: Ragged) -> list[bytes]:
    ids = sides.values.astype(np.int32)
    whole, places = ids.tobytes(), (ids.itemsize * sides.offsets).tolist()
    return [whole[start:end] for start, end in pairwise(places)]


def find_files(folder: Path, scale: LogicScale) -> dict[str, Path]:
    """Return the published files that a scale reads, by name."""
    most = max(scale.train_operators, *scale.test_bins)
    return require_files(folder, [*(f"train{k}" for k in range(most + 1)), *(f"test{k}" for k in scale.test_bins)])


def load_logic(folder: Path | None, scale: LogicScale, cache: Path | None, *, progress: bool = False) -> LogicData:
    """Return the data of a scale, from published files or else from the generator.

    The split of a pair depends on a keyed hash of its text. Generated pairs are split 80 / 10 / 10. With files, test is
    the test files, and dev about a tenth of the training files.
    """
    if folder is not None and was_set(scale, "generated_draws"):
        raise SettingError(f"generated_draws is set, and {folder} has pairs that were published; omit one of them.")
    most = max(scale.train_operators, *scale.test_bins)
    place = "generated pairs" if folder is None else str(folder)
    kept = f"{scale.train_operators} {scale.test_bins} {scale.train_examples} {scale.dev_examples}"
    if folder is None:
        source = f"generated {scale.generated_draws} {GENERATOR_SEED}"
        fingerprint = digest(f"{ENCODING} {source} {kept}")
        pairs = _generate(scale, most, progress)
    else:
        files = find_files(folder, scale)
        fingerprint = digest(f"{ENCODING} files {kept}", files.values())
        pairs = _read(files, scale, most)
    stored = cache_arrays(
        cache,
        f"logic-{fingerprint}",
        lambda: _encode(pairs, scale, place),
    )
    return _decode(stored, fingerprint)


def collate(examples: Sequence[Example]) -> dict[str, Tensor]:
    """Return a batch: "premise" [B, L] and "hypothesis" [B, L'] padded with 0, "labels" [B], all int64.

    Example:
        >>> batch = collate([Example(premise=[4], hypothesis=[5, 6], label=2)])
        >>> batch["hypothesis"].tolist(), batch["labels"].tolist()
        ([[5, 6]], [2])
    """
    if not examples:
        raise DataError("collate was given no examples; expected at least one.")
    return {
        "premise": _pad_side([example["premise"] for example in examples], "premise"),
        "hypothesis": _pad_side([example["hypothesis"] for example in examples], "hypothesis"),
        "labels": torch.tensor([example["label"] for example in examples]),
    }


class _Assigned(NamedTuple):
    split: str
    order: int
    pair: Pair


def _generate(scale: LogicScale, most: int, progress: bool) -> Iterator[_Assigned]:
    for pair in generate(scale.generated_draws, seed=GENERATOR_SEED, max_operators=most, progress=progress):
        order, tenth = divmod(stable_key("split", pair.premise, pair.hypothesis), 10)
        yield _Assigned({0: "test", 1: "dev"}.get(tenth, "train"), order, pair)


def _read(files: Mapping[str, Path], scale: LogicScale, most: int) -> Iterator[_Assigned]:
    for bin_ in range(most + 1):
        for pair in read_pairs(files[f"train{bin_}"], bin_):
            order, tenth = divmod(stable_key("split", pair.premise, pair.hypothesis), 10)
            yield _Assigned("dev" if tenth == 0 else "train", order, pair)
    for bin_ in scale.test_bins:
        for number, pair in enumerate(read_pairs(files[f"test{bin_}"], bin_)):
            yield _Assigned("test", number, pair)


def _encode(assigned: Iterable[_Assigned], scale: LogicScale, source: str) -> dict[str, NDArray]:
    """Return all arrays of the data by name."""
    splits: dict[str, list[_Assigned]] = {"train": [], "dev": [], "test": []}
    for item in assigned:
        wanted = (
            item.pair.operators <= scale.train_operators
            if item.split == "train"
            else item.pair.operators in scale.test_bins
        )
        if wanted:
            splits[item.split].append(item)
    for name, cap in (("train", scale.train_examples), ("dev", scale.dev_examples)):
        if cap is not None:
            splits[name] = sorted(splits[name], key=lambda item: item.order)[:cap]
    vocabulary = [PADDING, UNKNOWN, *sorted({token for item in splits["train"] for token in _tokens(item.pair)})]
    known = defaultdict(lambda: vocabulary.index(UNKNOWN), {token: i for i, token in enumerate(vocabulary)})
    arrays: dict[str, NDArray] = {"vocabulary": np.array(vocabulary)}
    for name, items in splits.items():
        if not items:
            raise DataError(f"{source}: the {name} split of scale {scale.name} holds no pair; add data or bins.")
        for side in ("premise", "hypothesis"):
            ids = Ragged.of([[known[token] for token in getattr(item.pair, side).split()] for item in items])
            arrays |= ids.pack(f"{name}.{side}")
        arrays[f"{name}.labels"] = np.array([RELATIONS.index(item.pair.relation) for item in items], dtype=np.uint8)
        arrays[f"{name}.bins"] = np.array([item.pair.operators for item in items], dtype=np.uint8)
    return arrays


def _tokens(pair: Pair) -> set[str]:
    return {*pair.premise.split(), *pair.hypothesis.split()}


def _decode(stored: Mapping[str, NDArray], fingerprint: str) -> LogicData:
    def split(name: str) -> LogicSplit:
        premises, hypotheses = (Ragged.unpack(stored, f"{name}.{side}") for side in ("premise", "hypothesis"))
        return LogicSplit(premises, hypotheses, stored[f"{name}.labels"], stored[f"{name}.bins"])

    vocabulary = tuple(str(token) for token in stored["vocabulary"])
    return LogicData(split("train"), split("dev"), split("test"), vocabulary, RELATIONS, fingerprint)


def _pad_side(sequences: Sequence[Sequence[int]], name: str) -> Tensor:
    lengths = [len(sequence) for sequence in sequences]
    if min(lengths) == 0:
        raise DataError(f"{name} {lengths.index(0)} of the batch has no tokens; expected at least one.")
    return pad(sequences, 0)
