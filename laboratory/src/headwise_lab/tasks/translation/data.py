"""From parallel text to a folder that training reads, and its splits as examples.

The text is read as one stream, in constant memory, into a temporary folder that is renamed once it is complete.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress
from torch import Tensor
from torch.utils.data import Dataset

from headwise.atomic import hold, name_write_errors, new_folder, require_no_others, require_unchanged, seal
from headwise.errors import DataError, require_choice, require_integer
from headwise.input_files import read_numbered_lines
from headwise.texts.batching import pad
from headwise.texts.progress import make_bars
from headwise_lab.data.arrays import Ragged, RaggedWriter, digest, open_ragged, stable_key
from headwise_lab.data.subwords import END, PADDING, Subwords, describe_tokenizer, learn_subwords, read_subwords
from headwise_lab.experiment.run_folder import as_record, read_json, write_json
from headwise_lab.tasks.translation.corpora import Cleaning, Corpus, Files, Layout, Sieve, find_files
from headwise_lab.tasks.translation.files import MARKS, TextPair, find_mark, read_pairs

FORMAT = "translation-1"  # changes with anything below that changes what is written
RECORD, TOKENIZER = "record.json", "tokenizer.json"
SIDES = "source", "target"
BATCH = 4096
CUT_SHARE, CUT_PAIRS = 0.05, 2000
# Of lines with a mark of subwords: a raw text has fewer, a text that was cut has far more.
MARKED_SHARE = 0.01
DRAWS = 1 << 64


@dataclass(frozen=True)
class Preparation:
    """How text becomes token ids.

    Attributes:
        vocabulary_size: Size of the joint vocabulary to learn.
        tokenizer: A `tokenizer.json` to use instead; None learns.
        cleaning: Rules for training pairs.
        learned_from: Maximum number of training pairs to learn subwords from, evenly spaced: memory and time grow with
            the number of different words.
    """

    vocabulary_size: int = 10_000
    tokenizer: Path | None = None
    cleaning: Cleaning = field(default_factory=Cleaning)
    learned_from: int = 1_000_000

    def __post_init__(self) -> None:
        require_integer("vocabulary_size", self.vocabulary_size, low=1)


def compute_fingerprint(corpus: Corpus, layout: Layout, files: Files, preparation: Preparation) -> str:
    """Return 16 hexadecimal digits of everything a prepared folder depends on."""
    flat = [path for pairs in files.values() for pair in pairs for path in pair]
    counts = {split: len(pairs) for split, pairs in files.items()}
    how = describe_tokenizer(preparation.tokenizer, preparation.vocabulary_size, preparation.learned_from)
    languages = corpus.source_language, corpus.target_language
    # the endings choose the reader
    endings = [path.name.removesuffix(".gz").rpartition(".")[2] for path in flat]
    # before, dev and test that are cut had blank lines
    cut = "" if counts.keys() >= {"dev", "test"} else " no blanks cut"
    described = f"{FORMAT} {languages} {counts} {endings} {layout.dev_every}{cut} {how} {preparation.cleaning}"
    return digest(described, flat)


def prepare(
    corpus: Corpus,
    layout: Layout,
    files: Files,
    preparation: Preparation,
    fingerprint: str,
    place: Path,
    *,
    progress: bool = False,
) -> None:
    """Write the prepared folder `place`, which appears when it is complete."""
    with hold(place, wait=True):
        # another process may have written the same meanwhile
        if place.is_dir() and any(place.iterdir()):
            return
        with new_folder(place) as partial, name_write_errors(place):
            with make_bars(shown=progress) as bars:
                record = _write(_Text(layout, files, bars), preparation, partial, progress)
            record |= {"fingerprint": fingerprint, "corpus": corpus.name}
            record |= {"source_language": corpus.source_language, "target_language": corpus.target_language}
            record |= {"layout": layout.name, "files": _names(files)}
            write_json(partial / RECORD, seal(record, partial, sorted(path.name for path in partial.iterdir())))


class _Text:
    """The pairs of each split, in order, with a bar for each reading."""

    def __init__(self, layout: Layout, files: Files, bars: Progress) -> None:
        self.files, self.bars = files, bars
        self.cut = [split for split in ("dev", "test") if split not in files]
        self.dev_every = layout.dev_every if "dev" in self.cut else 0
        self.splits = ["train", "dev", "test", *(split for split in files if split not in ("train", "dev", "test"))]
        # everything is read once before anything is made: bad text is refused within seconds
        self.read = {split: self._check(split) for split in files}

    def pairs(self, split: str, title: str) -> Iterator[TextPair]:
        """Yield the pairs of a split."""
        if split in self.files and not (split == "train" and self.cut):
            yield from self._all(split, title)
            return
        for number, pair in enumerate(self._all("train", title), start=1):
            if self._choose_split(number, pair) == split:
                yield pair

    def _choose_split(self, number: int, pair: TextPair) -> str:
        if not (pair.source.text.strip() and pair.target.text.strip()):
            # where it is dropped and counted
            return "train"
        if "dev" in self.cut and self.dev_every:
            return "dev" if number % self.dev_every == 0 else "train"
        # by the source line alone: a line that occurs twice stays on one side of the cut
        draw = stable_key("cut", pair.source.text) / DRAWS / min(CUT_SHARE, CUT_PAIRS / self.read["train"])
        return self.cut[int(draw)] if draw < len(self.cut) else "train"

    def _check(self, split: str) -> int:
        """Return the number of pairs of a split; refuse text that was cut into subwords before."""
        count, marked = 0, [0, 0]
        first: list[tuple[int, str]] = [(0, ""), (0, "")]
        for pair in self._all(split, f"checking {split}"):
            count += 1
            for side, line in enumerate(pair):
                if mark := find_mark(line.text):
                    first[side] = first[side] if marked[side] else (line.number, mark)
                    marked[side] += 1
        for side, (number, mark) in enumerate(first):
            if marked[side] > MARKED_SHARE * count:
                raise DataError(
                    f"{self.files[split][0][side]}, line {number}: {mark} marks pieces of words, as in "
                    f"{marked[side]:,} lines of {count:,}; expected raw text, since subwords are made here: join the "
                    f"pieces with {MARKS[mark][1]}."
                )
        return count

    def _all(self, split: str, title: str) -> Iterator[TextPair]:
        known = getattr(self, "read", {})
        task = self.bars.add_task(title, total=known.get(split))
        for source, target in self.files[split]:
            pairs = read_pairs(source, target)
            while batch := list(islice(pairs, BATCH)):
                yield from batch
                self.bars.advance(task, len(batch))
        self.bars.remove_task(task)


def _write(text: _Text, preparation: Preparation, folder: Path, progress: bool) -> dict[str, Any]:
    if preparation.tokenizer is None:
        every = -(-text.read["train"] // preparation.learned_from)
        kept = islice(text.pairs("train", "reading for subwords"), 0, None, every)
        lines = chain.from_iterable((pair.source.text, pair.target.text) for pair in kept)
        subwords = learn_subwords(lines, preparation.vocabulary_size, progress=progress)
    else:
        subwords = read_subwords(preparation.tokenizer)
    (folder / TOKENIZER).write_text(subwords.to_json(), encoding="utf-8")
    splits = {}
    for split in text.splits:
        sieve = Sieve(preparation.cleaning) if split == "train" else None
        splits[split] = _write_split(text, split, subwords, sieve, folder)
    return {
        "format": FORMAT,
        "preparation": as_record(preparation) | {"tokenizer": "given" if preparation.tokenizer else "learned"},
        "vocabulary_size": subwords.vocabulary_size,
        "splits": splits,
    }


def _write_split(text: _Text, split: str, subwords: Subwords, sieve: Sieve | None, folder: Path) -> dict[str, Any]:
    pairs = text.pairs(split, f"encoding {split}")
    source, target = (RaggedWriter(folder, f"{split}.{side}", subwords.dtype) for side in SIDES)
    lines = [(folder / f"{split}.{side}.txt").open("wb") for side in SIDES] if sieve is None else []
    read = 0
    with source, target:
        while batch := list(islice(pairs, BATCH)):
            read += len(batch)
            if sieve is None:
                batch = [pair for pair in batch if pair.source.text and pair.target.text]
            texts = [[pair[side].text for pair in batch] for side in (0, 1)]
            encoded = [subwords.encode_batch(side) for side in texts]
            if sieve is not None:
                rows = zip(*texts, *encoded, strict=True)
                kept = [sieve.keeps(first, second, len(a), len(b)) for first, second, a, b in rows]
                encoded = [[ids for ids, keep in zip(side, kept, strict=True) if keep] for side in encoded]
            for stream, side in zip(lines, texts, strict=False):
                stream.write("".join(f"{line}\n" for line in side).encode())
            for writer, side in zip((source, target), encoded, strict=True):
                writer.write([[*ids, END] for ids in side])
    for stream in lines:
        stream.close()
    if source.sequences == 0:
        reasons = f" ({dict(sieve.dropped)} dropped)" if sieve is not None and sieve.dropped else ""
        cut = f", cut from {text.read['train']:,} training pairs," if split in text.cut else ""
        raise DataError(f"the {split} split{cut} holds no pair{reasons}; expected at least one.")
    counts: dict[str, Any] = {"pairs": source.sequences, "source_tokens": source.tokens, "target_tokens": target.tokens}
    dropped = {"blank": read - source.sequences} if sieve is None else dict(sorted(sieve.dropped.items()))
    # of dev and test, every pair with text is kept
    return counts | ({"read": read, "dropped": dropped} if sieve is not None or dropped["blank"] else {})


def _names(files: Files) -> dict[str, list[list[str]]]:
    return {split: [[source.name, target.name] for source, target in pairs] for split, pairs in files.items()}


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
        """Return the source lines of a dev or test split as the files have them, without blanks at their ends."""
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
    """Return the data of a corpus, prepared in the folder `place`; what is there already from the same is kept."""
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
    """Return the data of a folder that `load_translation` has prepared, here or on another machine."""
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
