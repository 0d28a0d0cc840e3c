"""Preparing text of any size for pre-training: word pieces, shards of packed rows and a record, in bounded memory.

A preparation that was stopped resumes after its last complete shard.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from rich.progress import Progress

from headwise.errors import DataError
from headwise.lab.data.arrays import digest, stable_key
from headwise.lab.data.progress import make_bars
from headwise.lab.data.subwords import describe_tokenizer
from headwise.lab.experiment import run_folder
from headwise.lab.tasks.pretraining.files import Piece, read_pieces
from headwise.lab.tasks.pretraining.rows import Packer
from headwise.lab.tasks.pretraining.wordpieces import WordPieces, learn_word_pieces, read_word_pieces

FORMAT = "pretraining-2"  # changes with anything below that changes what is written
RECORD, TOKENIZER, STATE, HELD = "record.json", "tokenizer.json", "state.json", "held-{}.npz"
SPLITS = ("train", "dev", "test")
# A hash of a document's first piece puts it into dev or test with this chance each.
HELD_OUT = 0.02
DRAWS = 1 << 64
# Pieces encoded together.
BATCH = 64


@dataclass(frozen=True)
class TextPreparation:
    """How text becomes rows of token ids.

    Attributes:
        vocabulary_size: Number of word pieces to learn.
        length: Tokens per row.
        tokenizer: A `tokenizer.json` to use instead; None learns one.
        shard_bytes: Maximum size of a shard.
        held_out_rows: Maximum number of rows of dev, and of test; the rest of what is held out is not used.
        learned_from: Maximum number of pieces to learn word pieces from, evenly spaced: memory and time grow with the
            number of different words.
    """

    vocabulary_size: int = 30_522
    length: int = 128
    tokenizer: Path | None = None
    shard_bytes: int = 14_000_000
    held_out_rows: int = 2_000
    learned_from: int = 50_000


def compute_fingerprint(files: Sequence[Path], preparation: TextPreparation) -> str:
    """Return 16 hexadecimal digits of everything a prepared folder depends on.

    Raises:
        DataError: A file cannot be read.
    """
    how = describe_tokenizer(preparation.tokenizer, preparation.vocabulary_size, preparation.learned_from)
    sizes = preparation.length, preparation.shard_bytes, preparation.held_out_rows
    # the endings choose the reader
    endings = [path.name.removesuffix(".gz").rpartition(".")[2] for path in files]
    return digest(f"{FORMAT} {endings} {how} {sizes} {HELD_OUT}", files)


def name_shard(number: int) -> str:
    """Return the name of a shard of the training split."""
    return f"train-{number:05d}.npy"


def prepare_text(
    files: Sequence[Path], preparation: TextPreparation, fingerprint: str, place: Path, *, progress: bool = False
) -> None:
    """Write the prepared folder `place`, which appears when it is complete.

    An interrupted preparation is kept in a hidden folder next to it. It resumes in the middle of a file or a document
    and gives the same shards.

    Raises:
        DataError: The text is bad, a split comes out empty, or the folder cannot be written.
    """
    partial = place.parent / f".{place.name}-{fingerprint}"
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = FileLock(partial.with_name(f"{partial.name}.lock"))
        # a second process waits, and then finds the folder
        with lock:
            if not place.exists():
                try:
                    with make_bars(shown=progress) as bars:
                        record = _write(files, preparation, partial, bars, progress=progress)
                except DataError:
                    # text refused before the first shard leaves nothing to resume
                    if not (partial / STATE).exists():
                        shutil.rmtree(partial)
                        Path(lock.lock_file).unlink(missing_ok=True)
                    raise
                record |= {"fingerprint": fingerprint, "corpus": files[0].name.split(".")[0]}
                run_folder.write_json(partial / RECORD, record)
                for path in (partial / STATE, *partial.glob(HELD.format("*"))):
                    path.unlink(missing_ok=True)
                partial.rename(place)
        Path(lock.lock_file).unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{place} cannot be written ({error}); name another folder.") from error


def _write(
    files: Sequence[Path], preparation: TextPreparation, folder: Path, bars: Progress, *, progress: bool
) -> dict[str, Any]:
    state = run_folder.read_json(folder / STATE) if (folder / STATE).exists() else {}
    # read everything once before writing: bad text is refused before an hour of work
    total = state.get("total") or sum(1 for _ in _read_all(files, bars, "reading", None))
    words = _make_word_pieces(files, preparation, folder, bars, total, progress=progress)
    writer = _Writer(folder, preparation, words)
    if "pieces" in state:
        writer.restore(state)
    stream = islice(_read_all(files, bars, "packing", total), writer.pieces, None)
    while batch := list(islice(stream, BATCH)):
        writer.add(batch)
        if writer.is_due:
            writer.write_shards()
            writer.save({"total": total})
    writer.write_shards(everything=True)
    for split in SPLITS:
        if not writer.counts[split]:
            raise DataError(
                f"{files[0].parent}: of {writer.documents:,} documents the {split} split came out empty, at "
                f"{preparation.length} tokens a row; give more text, or mark where documents end."
            )
    return {
        "format": FORMAT,
        "vocabulary_size": words.vocabulary_size,
        "length": preparation.length,
        "tokenizer": "given" if preparation.tokenizer else "learned",
        "files": [path.name for path in files],
        "documents": writer.documents,
        "rows": writer.counts,
        "shards": writer.shards,
    }


class _Writer:
    """The rows of each split not yet written, and the position in the text."""

    def __init__(self, folder: Path, preparation: TextPreparation, words: WordPieces) -> None:
        self.folder, self.words, self.most = folder, words, preparation.held_out_rows
        self.rows_per_shard = max(1, preparation.shard_bytes // (preparation.length * words.dtype.itemsize))
        self.packers = {split: Packer(preparation.length, words.start, words.end) for split in SPLITS}
        empty = np.zeros((0, preparation.length), dtype=words.dtype)
        self.waiting: dict[str, list[NDArray]] = {split: [empty] for split in SPLITS}
        self.shards: list[int] = []
        self.pieces = self.documents = 0
        self.split = "train"

    @property
    def is_due(self) -> bool:
        """Whether a shard of the training split is full."""
        return self._waiting("train") >= self.rows_per_shard

    @property
    def counts(self) -> dict[str, int]:
        """Rows of each split."""
        held = {split: min(self.most, self._waiting(split)) for split in SPLITS[1:]}
        return {"train": sum(self.shards) + self._waiting("train"), **held}

    def add(self, batch: Sequence[Piece]) -> None:
        """Encode and pack pieces of text."""
        for piece, ids in zip(batch, self.words.encode_batch([piece.text for piece in batch]), strict=True):
            if piece.begins:
                self.split = _choose_split(piece.text)
                self.documents += 1
            made = self.packers[self.split].add(ids, ends=piece.ends)
            if self.split == "train" or self._waiting(self.split) < self.most:
                self.waiting[self.split].append(made.astype(self.words.dtype))
            self.pieces += 1

    def write_shards(self, *, everything: bool = False) -> None:
        """Write the full shards, or with `everything` all rows, dev and test included."""
        rows = np.concatenate(self.waiting["train"])
        while len(rows) >= self.rows_per_shard or (everything and len(rows)):
            shard, rows = rows[: self.rows_per_shard], rows[self.rows_per_shard :]
            _write_array(self.folder / name_shard(len(self.shards)), shard)
            self.shards.append(len(shard))
        self.waiting["train"] = [rows]
        for split in SPLITS[1:] if everything else ():
            self.waiting[split] = [np.concatenate(self.waiting[split])[: self.most]]
            _write_array(self.folder / f"{split}.npy", self.waiting[split][0])

    def save(self, more: dict[str, Any]) -> None:
        """Save the state, so that an interrupted preparation resumes here."""
        path = self.folder / HELD.format(self.pieces)
        run_folder.write_arrays(path, **{split: np.concatenate(rows) for split, rows in self.waiting.items()})
        packers = {split: {"held": packer.held, "rows": packer.rows} for split, packer in self.packers.items()}
        state = {"pieces": self.pieces, "documents": self.documents, "split": self.split, "shards": self.shards}
        run_folder.write_json(self.folder / STATE, {**more, **state, "packers": packers})
        for old in set(self.folder.glob(HELD.format("*"))) - {path}:
            old.unlink()

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from what `save` wrote."""
        with np.load(self.folder / HELD.format(state["pieces"]), allow_pickle=False) as kept:
            self.waiting = {split: [kept[split]] for split in SPLITS}
        self.pieces, self.documents, self.split = state["pieces"], state["documents"], state["split"]
        self.shards = list(state["shards"])
        for split, packer in self.packers.items():
            packer.held, packer.rows = list(state["packers"][split]["held"]), state["packers"][split]["rows"]

    def _waiting(self, split: str) -> int:
        return sum(map(len, self.waiting[split]))


def _make_word_pieces(
    files: Sequence[Path], preparation: TextPreparation, folder: Path, bars: Progress, total: int, *, progress: bool
) -> WordPieces:
    path = folder / TOKENIZER
    if path.exists():
        return read_word_pieces(path)
    if preparation.tokenizer is None:
        every = max(1, -(-total // preparation.learned_from))

        def texts() -> Iterator[str]:
            kept = islice(_read_all(files, bars, "reading for word pieces", total), 0, None, every)
            return (piece.text for piece in kept)

        words = learn_word_pieces(texts, preparation.vocabulary_size, progress=progress)
    else:
        words = read_word_pieces(preparation.tokenizer)
    run_folder.write_text(path, words.to_json())
    return words


def _read_all(files: Sequence[Path], bars: Progress, title: str, total: int | None) -> Iterator[Piece]:
    task = bars.add_task(title, total=total)
    for number, piece in enumerate(chain.from_iterable(map(read_pieces, files)), start=1):
        yield piece
        if number % BATCH == 0:
            bars.update(task, completed=number)
    bars.remove_task(task)


def _choose_split(text: str) -> str:
    draw = int(stable_key("held out", text) / DRAWS / HELD_OUT)
    return SPLITS[1 + draw] if draw < len(SPLITS) - 1 else "train"


def _write_array(path: Path, rows: NDArray) -> None:
    temporary = path.with_name(f".{path.name}")
    with temporary.open("wb") as stream:
        np.save(stream, rows)
    temporary.replace(path)
