"""The data of the translation task: its splits as examples, its references as text, and how a batch is made."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from headwise.atomic import hold, require_no_others, require_unchanged
from headwise.errors import DataError, require_choice
from headwise.input_files import read_numbered_lines
from headwise.texts.batching import pad
from headwise_lab.data.arrays import Ragged, open_ragged
from headwise_lab.data.subwords import PADDING, Subwords, read_subwords
from headwise_lab.experiment.run_folder import read_json
from headwise_lab.tasks.translation.corpora import Cleaning, Corpus, find_files
from headwise_lab.tasks.translation.prepare import FORMAT, RECORD, TOKENIZER, Preparation, compute_fingerprint, prepare

IGNORED = -100
# Characters of the name of a split, which begins the names of its files.
LONGEST_NAME = 100


class TranslationExample(TypedDict):
    """One pair as token ids, each side with its end."""

    source: list[int]
    target: list[int]


@dataclass(frozen=True, eq=False)
class TranslationSplit(Dataset[TranslationExample]):
    """The pairs of one split, encoded; `split[i]` is a `TranslationExample`.

    Attributes:
        sources: Token ids of the source sides.
        targets: Token ids of the target sides.

    Example:
        >>> split = TranslationSplit(Ragged.of([[5, 2], [7, 6, 2]]), Ragged.of([[9, 8, 4, 2], [3, 2]]))
        >>> split[1], split.lengths.tolist()
        ({'source': [7, 6, 2], 'target': [3, 2]}, [[2, 4], [3, 2]])
    """

    sources: Ragged
    targets: Ragged

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.targets):
            raise DataError(f"{len(self.sources)} sources but {len(self.targets)} targets; expected the same number.")

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of both sides of each pair, [N, 2]: what `TokenBatches` cuts by."""
        return np.stack([self.sources.lengths, self.targets.lengths], axis=1)

    def __len__(self) -> int:
        return len(self.sources)

    def __iter__(self) -> Iterator[TranslationExample]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> TranslationExample:
        return TranslationExample(source=self.sources[index], target=self.targets[index])


@dataclass(frozen=True, eq=False)
class TranslationData:
    """The task's data.

    Attributes:
        folder: The prepared folder; it may be copied elsewhere.
        splits: "train", "dev", "test" and any further test sets.
        tokenizer: Text to ids and back.
        record: What was done: files, settings, counts of what was read, kept and dropped.
    """

    folder: Path
    splits: Mapping[str, TranslationSplit]
    tokenizer: Subwords
    record: Mapping[str, Any]

    @property
    def train(self) -> TranslationSplit:
        """The training split."""
        return self.splits["train"]

    @property
    def dev(self) -> TranslationSplit:
        """The dev split."""
        return self.splits["dev"]

    @property
    def test(self) -> TranslationSplit:
        """The test split."""
        return self.splits["test"]

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of everything the data depends on."""
        return self.record["fingerprint"]

    @property
    def source_language(self) -> str:
        """Language translated from."""
        return self.record["source_language"]

    @property
    def target_language(self) -> str:
        """Language translated into."""
        return self.record["target_language"]

    def sources(self, split: str) -> list[str]:
        """Return the source lines of a dev or test split as the files have them, without blanks at their ends.

        Raises:
            SettingError: Unknown split, or the training split, whose lines are not stored.
        """
        return self._lines(split, "source")

    def references(self, split: str) -> list[str]:
        """Return the target lines of a dev or test split, likewise: what a translation is scored against."""
        return self._lines(split, "target")

    def summary(self) -> str:
        """Return what the data is, then a line for each split: pairs and subwords kept, what was dropped and why."""
        about, vocabulary = self.record["corpus"], self.tokenizer.vocabulary_size
        title = f"{about}, {self.source_language} to {self.target_language}, {vocabulary:,} subwords"
        absent = [name for name in ("dev", "test") if name not in self.record["files"]]
        drawn = f"; {' and '.join(absent)} cut from train" if absent else ""
        return "\n".join([title + drawn, *(_summary(name, counts) for name, counts in self.record["splits"].items())])

    def _lines(self, split: str, side: str) -> list[str]:
        require_choice("split", split, [name for name in self.splits if name != "train"])
        return [line for _, line in read_numbered_lines(self.folder / f"{split}.{side}.txt")]


def load_translation(
    corpus: Corpus,
    folder: Path,
    *,
    cache: Path,
    vocabulary_size: int = 10_000,
    tokenizer: Path | None = None,
    cleaning: Cleaning | None = None,
    progress: bool = False,
) -> TranslationData:
    """Return the data of a corpus, prepared now, or earlier if nothing it depends on has changed.

    Dev and test are kept whole and are never cleaned; subwords are learned from the training split alone.

    Args:
        corpus: One of `CORPORA`, or `make_custom_corpus` or `make_folder_corpus`.
        folder: Folder with its files.
        cache: Folder for the prepared data, under a name that changes with their origin. Several processes may prepare
            the same data; the first to finish is kept.
        vocabulary_size: Size of the joint vocabulary of subwords to learn.
        tokenizer: A `tokenizer.json` to use instead.
        cleaning: Rules for training pairs; None for those of the corpus.
        progress: Whether to show bars on stderr if that is a terminal.

    Raises:
        DataError: A file is missing or malformed, the cache cannot be written, or a split comes out empty.
        SettingError: A setting is outside its range.
    """
    preparation = Preparation(vocabulary_size, tokenizer, cleaning or corpus.cleaning)
    layout, files = find_files(corpus, folder)
    fingerprint = compute_fingerprint(corpus, layout, files, preparation)
    place = cache / f"translation-{fingerprint}"
    if place.exists():
        try:
            return open_prepared(place)
        except DataError:
            # a damaged cache is rebuilt
            shutil.rmtree(place, ignore_errors=True)
    prepare(corpus, layout, files, preparation, fingerprint, place, progress=progress)
    return open_prepared(place)


def prepare_translation(
    corpus: Corpus,
    folder: Path,
    place: Path,
    *,
    vocabulary_size: int,
    tokenizer: Path | None = None,
    progress: bool = False,
) -> TranslationData:
    """Return the data of a corpus, prepared in the folder `place`; what is there already from the same is kept.

    Raises:
        DataError: As `load_translation`, or `place` holds something else; nothing is overwritten.
        SettingError: A setting is outside its range.
    """
    preparation = Preparation(vocabulary_size, tokenizer, corpus.cleaning)
    layout, files = find_files(corpus, folder)
    fingerprint = compute_fingerprint(corpus, layout, files, preparation)
    with hold(place, wait=True):
        if place.exists() and not place.is_dir():
            raise DataError(f"{place} is no folder; choose another.")
        if not (place.exists() and any(place.iterdir())):
            prepare(corpus, layout, files, preparation, fingerprint, place, progress=progress)
        elif not (place / RECORD).is_file() or open_prepared(place).fingerprint != fingerprint:
            raise DataError(f"{place} holds something else; nothing is overwritten: name another --out.")
    return open_prepared(place)


def open_prepared(folder: Path) -> TranslationData:
    """Return the data of a folder that `load_translation` has prepared, here or on another machine.

    Raises:
        DataError: The folder holds no prepared data, or it is damaged or of another version.
    """
    record = read_json(folder / RECORD)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise DataError(f"{folder / RECORD} is not of format {FORMAT}; prepare the data again.")
    require_unchanged(folder / RECORD, record, remedy="prepare the data again.")
    require_no_others(folder / RECORD, record, remedy="take it away, or prepare the data again.")
    splits: dict[str, TranslationSplit] = {}
    subwords = read_subwords(folder / TOKENIZER)
    try:
        for name, counts in record["splits"].items():
            if Path(name).name != name or len(name) > LONGEST_NAME:
                raise ValueError(f"a split is called {name!r:.60}")
            split = TranslationSplit(open_ragged(folder, f"{name}.source"), open_ragged(folder, f"{name}.target"))
            found = [len(split), len(split.sources.values), len(split.targets.values)]
            if found != [counts["pairs"], counts["source_tokens"], counts["target_tokens"]]:
                raise DataError(f"{folder}: split {name} is not what {RECORD} says; prepare the data again.")
            splits[name] = split
        texts = [record[name] for name in ("fingerprint", "corpus", "source_language", "target_language")]
        if not {"train", "dev", "test"} <= splits.keys() or not all(isinstance(text, str) for text in texts):
            raise DataError(f"{folder / RECORD} does not describe the data; prepare the data again.")
        data = TranslationData(folder, splits, subwords, record)
        # formats all numbers of the record
        data.summary()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{folder / RECORD} does not describe the data ({error}); prepare the data again.") from None
    return data


def collate(examples: Sequence[TranslationExample]) -> dict[str, Tensor]:
    """Return a batch: "input_ids" [B, S] padded with 0 and "labels" [B, T] padded with -100, both int64.

    Raises:
        DataError: There are no examples, or a side has no tokens.

    Example:
        >>> batch = collate([{"source": [5, 2], "target": [2]}, {"source": [2], "target": [7, 2]}])
        >>> batch["input_ids"].tolist(), batch["labels"].tolist()
        ([[5, 2], [2, 0]], [[2, -100], [7, 2]])
    """
    if not examples:
        raise DataError("collate was given no examples; expected at least one.")
    sides = {"source": [one["source"] for one in examples], "target": [one["target"] for one in examples]}
    for name, rows in sides.items():
        if [] in rows:
            raise DataError(f"{name} {rows.index([])} of the batch has no tokens; expected at least one.")
    return {"input_ids": pad(sides["source"], PADDING), "labels": pad(sides["target"], IGNORED)}


def _summary(name: str, counts: Mapping[str, Any]) -> str:
    dropped = ", ".join(f"{number:,} {reason}" for reason, number in counts.get("dropped", {}).items())
    read = f" of {counts['read']:,}" if "read" in counts else ""
    kept = f"{name}: {counts['pairs']:,}{read} pairs"
    tokens = f"{counts['source_tokens']:,} and {counts['target_tokens']:,} subwords"
    return f"{kept}, {tokens}" + (f"; dropped {dropped}" if dropped else "")
