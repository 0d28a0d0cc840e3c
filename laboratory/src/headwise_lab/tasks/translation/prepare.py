"""From parallel text to a folder that training reads: subwords, token arrays, the raw dev and test lines, a record.

The text is read as one stream, in constant memory, into a temporary folder that is renamed once it is complete.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rich.progress import Progress

from headwise.atomic import hold, name_write_errors, new_folder, seal
from headwise.errors import DataError, require_integer
from headwise.texts.progress import make_bars
from headwise_lab.data.arrays import RaggedWriter, digest, stable_key
from headwise_lab.data.subwords import END, Subwords, describe_tokenizer, learn_subwords, read_subwords
from headwise_lab.experiment.run_folder import as_record, write_json
from headwise_lab.tasks.translation.corpora import Cleaning, Corpus, Files, Layout, Sieve
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
    """Return 16 hexadecimal digits of everything a prepared folder depends on.

    Raises:
        DataError: A file cannot be read.
    """
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
    """Write the prepared folder `place`, which appears when it is complete.

    Raises:
        DataError: The text is bad, a split comes out empty, or the folder cannot be written.
    """
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
