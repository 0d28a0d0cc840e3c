"""Preparing text of any size to train on: a tokenizer, shards of packed rows and a record, in bounded memory.

A preparation that was stopped resumes after its last complete shard.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from headwise.atomic import follow, hold, is_sealed, name_write_errors, new_file, put, require_unchanged, seal, sweep
from headwise.errors import DataError, SettingError
from headwise.texts.progress import make_bars
from headwise.texts.tables import Columns
from headwise_lab.data.arrays import digest, read_arrays, stable_key
from headwise_lab.data.documents import KEY, Piece, read_pieces
from headwise_lab.data.subwords import TextEncoder, describe_tokenizer
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.scale import Scale

RECORD, TOKENIZER, STATE, HELD = "record.json", "tokenizer.json", "state.json", "held-{}.npz"
SPLITS = ("train", "dev", "test")
# A hash of a document's first piece puts it into dev or test with this chance each; of rows it is their share.
HELD_OUT = 0.02
DRAWS = 1 << 64
# Pieces encoded together.
BATCH = 64

Words = TypeVar("Words", bound=TextEncoder, covariant=True)


class Packer(Protocol):
    """Packs the ids of documents into rows; ids left over wait for more.

    Attributes:
        held: Ids not yet in a row.
        rows: Rows made so far.
    """

    held: list[int]
    rows: int

    def add(self, ids: list[int], *, ends: bool) -> NDArray[np.int64]:
        """Add tokens and return the rows that are full now, [R, length].

        Args:
            ids: The next tokens.
            ends: Whether their document ends with them.
        """
        ...


class Learn(Protocol[Words]):
    """Learns a tokenizer."""

    def __call__(self, texts: Callable[[], Iterable[str]], vocabulary_size: int, *, progress: bool = False) -> Words:
        """Return a tokenizer learned from texts, which may be read several times."""
        ...


@dataclass(frozen=True)
class Packing(Generic[Words]):
    """What a task makes of text.

    Attributes:
        task: Name of the task.
        format: "TASK-N", which changes with anything that changes what is written.
        learn: Learns its tokenizer.
        read: Reads one from a file or a folder.
        pack: Returns a new packer for rows of so many tokens.
    """

    task: str
    format: str
    learn: Learn[Words]
    read: Callable[[Path], Words]
    pack: Callable[[int, Any], Packer]


@dataclass(frozen=True)
class TextPreparation:
    """How text becomes rows of token ids.

    Attributes:
        vocabulary_size: Number of ids to learn at most.
        length: Tokens per row.
        tokenizer: A `tokenizer.json` to use instead; None learns one.
        shard_bytes: Maximum size of a shard.
        held_out_rows: Maximum number of rows of dev, and of test; the rest of what is held out is not used.
        column: Key of the documents in JSON Lines; see `read_pieces`.
        learned_from: Maximum number of pieces to learn a tokenizer from, evenly spaced: memory and time grow with the
            number of different words.
    """

    vocabulary_size: int = 30_522
    length: int = 128
    tokenizer: Path | None = None
    shard_bytes: int = 14_000_000
    held_out_rows: int = 2_000
    learned_from: int = 50_000
    column: str = KEY


class PackedScale(Scale):
    """A scale whose runs are cut into rounds of equal length instead of epochs.

    Attributes:
        steps: Number of optimizer steps.
        rounds: Number of evaluations on dev.
        vocabulary_size: Number of tokens learned from the text.
        length: Tokens per row.
        dev_rows: Maximum number of dev rows; None for all.
        test_rows: Maximum number of test rows; None for all.
    """

    steps: int
    rounds: int
    vocabulary_size: int
    length: int
    columns: Columns

    def __post_init__(self) -> None:
        super().__post_init__()
        self.columns.require(1, labels=False)
        if self.steps % self.rounds:
            raise SettingError(f"{self.steps} steps cannot be cut into {self.rounds} rounds of one length; change one.")

    @property
    def epochs(self) -> int:
        """A round counts as an epoch."""
        return self.rounds

    @property
    def preparation(self) -> TextPreparation:
        """How text is prepared."""
        return TextPreparation(self.vocabulary_size, self.length, column=next(iter(self.columns.texts), KEY))


def compute_fingerprint(packing: Packing, files: Sequence[Path], preparation: TextPreparation) -> str:
    """Return 16 hexadecimal digits of everything a prepared folder depends on."""
    how = describe_tokenizer(preparation.tokenizer, preparation.vocabulary_size, preparation.learned_from)
    sizes = preparation.length, preparation.shard_bytes, preparation.held_out_rows
    # the endings choose the reader
    endings = [path.name.removesuffix(".gz").rpartition(".")[2] for path in files]
    column = "" if preparation.column == KEY else f" {preparation.column}"
    return digest(f"{packing.format} {endings} {how} {sizes} {HELD_OUT}{column}", files)


def name_shard(number: int) -> str:
    """Return the name of a shard of the training split."""
    return f"train-{number:05d}.npy"


def prepare_text(
    packing: Packing[TextEncoder],
    files: Sequence[Path],
    preparation: TextPreparation,
    fingerprint: str,
    place: Path,
    *,
    progress: bool = False,
) -> None:
    """Write the prepared folder `place`, which appears when it is complete.

    An interrupted preparation is kept in a hidden folder next to it. It resumes in the middle of a file or a document
    and gives the same shards.
    """
    # beside the folder that a link leads to
    given, place = place, follow(place)
    partial = place.parent / f".{place.name}-{fingerprint}"
    with hold(place, wait=True), name_write_errors(given):
        # another process may have written the same meanwhile
        if place.is_dir() and any(place.iterdir()):
            return
        partial.mkdir(exist_ok=True)
        sweep(partial)
        try:
            with make_bars(shown=progress) as bars:
                record = _write(packing, files, preparation, partial, bars, progress=progress)
        except DataError:
            # text refused before the first shard leaves nothing to resume
            if not (partial / STATE).exists():
                shutil.rmtree(partial)
            raise
        record |= {"fingerprint": fingerprint, "corpus": files[0].name.split(".")[0]}
        names = [TOKENIZER, *sorted(path.name for path in partial.glob("*.npy"))]
        run_folder.write_json(partial / RECORD, seal(record, partial, names))
        for path in (partial / STATE, *partial.glob(HELD.format("*"))):
            path.unlink(missing_ok=True)
        put(partial, place)


def _write(
    packing: Packing[TextEncoder],
    files: Sequence[Path],
    preparation: TextPreparation,
    folder: Path,
    bars: Progress,
    *,
    progress: bool,
) -> dict[str, Any]:
    state = _read_state(folder) if (folder / STATE).exists() else {}
    # read everything once before writing: bad text is refused before an hour of work
    text = _Text(files, preparation.column, bars)
    found = {"blank": 0, "by_rows": False, **state} if state else text.count()
    found = {name: found[name] for name in ("total", "blank", "by_rows")}
    words = _make_tokenizer(packing, text, preparation, folder, found["total"], progress=progress)
    writer = _Writer(packing, folder, preparation, words, by_rows=bool(found["by_rows"]))
    if "pieces" in state:
        writer.restore(state)
    stream = islice(text.read("packing", found["total"]), writer.pieces, None)
    while batch := list(islice(stream, BATCH)):
        writer.add(batch)
        if writer.is_due:
            writer.write_shards()
            writer.save(found)
    writer.write_shards(everything=True)
    for split in SPLITS:
        if not writer.counts[split]:
            more = f" and {len(files) - 1:,} more" if len(files) > 1 else ""
            counted = f"{writer.documents:,} document{'s' * (writer.documents != 1)}"
            raise DataError(
                f"{files[0]}{more}: of {counted} the {split} split came out empty, at {preparation.length} tokens a "
                "row; give more text, or mark where documents end: in a .txt file by a blank line."
            )
    return {
        "format": packing.format,
        "vocabulary_size": words.vocabulary_size,
        "length": preparation.length,
        "tokenizer": "given" if preparation.tokenizer else "learned",
        "files": [path.name for path in files],
        "documents": writer.documents,
        "rows": writer.counts,
        **({"blank": found["blank"]} if found["blank"] else {}),
        **({"by_rows": True} if found["by_rows"] else {}),
        "shards": writer.shards,
    }


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE
    state = run_folder.read_json(path)
    if not is_sealed(state):
        raise DataError(f"{path} is not the state of a preparation; delete {folder} to prepare the text again.")
    require_unchanged(path, state, remedy=f"delete {folder} to prepare the text again.")
    return state


class _Writer:
    """The rows of each split not yet written, and the position in the text."""

    def __init__(
        self, packing: Packing, folder: Path, preparation: TextPreparation, words: TextEncoder, *, by_rows: bool
    ) -> None:
        self.folder, self.words, self.most, self.by_rows = folder, words, preparation.held_out_rows, by_rows
        self.rows_per_shard = max(1, preparation.shard_bytes // (preparation.length * words.dtype.itemsize))
        self.packers = {split: packing.pack(preparation.length, words) for split in SPLITS}
        empty = np.zeros((0, preparation.length), dtype=words.dtype)
        self.waiting: dict[str, list[NDArray]] = {split: [empty] for split in SPLITS}
        self.shards: list[int] = []
        self.pieces = self.documents = 0
        self.split = "train"

    @property
    def is_due(self) -> bool:
        """Whether a shard of the training split is full, and no row of it can be one of dev or test."""
        return self._waiting("train") >= self.rows_per_shard + 2 * self.most * self.by_rows

    @property
    def counts(self) -> dict[str, int]:
        """Rows of each split."""
        held = {split: min(self.most, self._waiting(split)) for split in SPLITS[1:]}
        return {"train": sum(self.shards) + self._waiting("train"), **held}

    def add(self, batch: Sequence[Piece]) -> None:
        """Encode and pack pieces of text."""
        for piece, ids in zip(batch, self.words.encode_batch([piece.text for piece in batch]), strict=True):
            if piece.begins:
                self.split = "train" if self.by_rows else _choose_split(piece.text)
                self.documents += 1
            made = self.packers[self.split].add(ids, ends=piece.ends)
            if self.split == "train" or self._waiting(self.split) < self.most:
                self.waiting[self.split].append(made.astype(self.words.dtype))
            self.pieces += 1

    def write_shards(self, *, everything: bool = False) -> None:
        """Write the full shards, or with `everything` all rows, dev and test included."""
        rows = np.concatenate(self.waiting["train"])
        if self.by_rows and everything:
            held = min(self.most, max(1, round(HELD_OUT * (sum(self.shards) + len(rows)))), len(rows) // 3)
            rows, dev, test = np.split(rows, [len(rows) - 2 * held, len(rows) - held])
            self.waiting |= {"dev": [dev], "test": [test]}
        reserved = 0 if everything else 2 * self.most * self.by_rows
        while len(rows) >= self.rows_per_shard + reserved or (everything and len(rows)):
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
        sealed = seal({**more, **state, "packers": packers}, self.folder, [path.name])
        run_folder.write_json(self.folder / STATE, sealed)
        for old in set(self.folder.glob(HELD.format("*"))) - {path}:
            old.unlink()

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from what `save` wrote."""
        kept = read_arrays(self.folder / HELD.format(state["pieces"]))
        self.waiting = {split: [kept[split]] for split in SPLITS}
        self.pieces, self.documents, self.split = state["pieces"], state["documents"], state["split"]
        self.shards = list(state["shards"])
        for split, packer in self.packers.items():
            packer.held, packer.rows = list(state["packers"][split]["held"]), state["packers"][split]["rows"]

    def _waiting(self, split: str) -> int:
        return sum(map(len, self.waiting[split]))


class _Text:
    """The documents of files, piece by piece, with a bar for each reading."""

    def __init__(self, files: Sequence[Path], column: str, bars: Progress) -> None:
        self.files, self.column, self.bars = files, column, bars

    def count(self) -> dict[str, int]:
        """Return the numbers of pieces and blank documents, and whether documents are too few to split by them."""
        found = {"total": 0, "blank": 0}
        splits = set()
        for piece in self._read("reading", None):
            found["blank" if piece.is_blank else "total"] += 1
            if piece.begins and not piece.is_blank:
                splits.add(_choose_split(piece.text))
        return found | {"by_rows": len(splits) < len(SPLITS)}

    def read(self, title: str, total: int) -> Iterator[Piece]:
        """Yield the pieces, without blank documents."""
        return (piece for piece in self._read(title, total) if not piece.is_blank)

    def _read(self, title: str, total: int | None) -> Iterator[Piece]:
        task = self.bars.add_task(title, total=total)
        found = chain.from_iterable(read_pieces(path, self.column) for path in self.files)
        for number, piece in enumerate(found, start=1):
            yield piece
            if number % BATCH == 0:
                self.bars.update(task, completed=number)
        self.bars.remove_task(task)


def _make_tokenizer(
    packing: Packing[TextEncoder],
    text: _Text,
    preparation: TextPreparation,
    folder: Path,
    total: int,
    *,
    progress: bool,
) -> TextEncoder:
    path = folder / TOKENIZER
    if path.exists():
        return packing.read(path)
    if preparation.tokenizer is None:
        every = max(1, -(-total // preparation.learned_from))

        def texts() -> Iterator[str]:
            kept = islice(text.read("reading for a tokenizer", total), 0, None, every)
            return (piece.text for piece in kept)

        words = packing.learn(texts, preparation.vocabulary_size, progress=progress)
    else:
        words = packing.read(preparation.tokenizer)
    run_folder.write_text(path, words.to_json())
    return words


def _choose_split(text: str) -> str:
    draw = int(stable_key("held out", text) / DRAWS / HELD_OUT)
    return SPLITS[1 + draw] if draw < len(SPLITS) - 1 else "train"


def _write_array(path: Path, rows: NDArray) -> None:
    with new_file(path) as temporary, temporary.open("wb") as stream:
        np.save(stream, rows)
