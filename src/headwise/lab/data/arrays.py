"""Where data comes from and how it is kept: ragged token arrays, file lookup and the cache on disk.

Owns: `Ragged`, the refusals for missing folders and files, and atomic reading and writing of cached arrays.
Must not know any task.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headwise.errors import DataError, ShapeError


@dataclass(frozen=True, eq=False)
class Ragged:
    """Sequences of token ids of unequal length in one flat array.

    Attributes:
        values: All ids one after another, [T]; uint8 or int32.
        offsets: Where each sequence starts, and the end of the last, int64 [N + 1].

    Raises:
        ShapeError: The offsets do not begin at 0, end at T or rise.

    Example:
        >>> sequences = Ragged.of([[4, 5], [6]])
        >>> sequences[0], sequences.lengths.tolist()
        ([4, 5], [2, 1])
    """

    values: NDArray[np.integer]
    offsets: NDArray[np.int64]

    def __post_init__(self) -> None:
        rising = len(self.offsets) > 0 and bool((np.diff(self.offsets) >= 0).all())
        if not rising or self.offsets[0] != 0 or self.offsets[-1] != len(self.values):
            raise ShapeError(
                f"Ragged was given {len(self.values)} values and offsets {self.offsets!r}; expected offsets "
                f"that rise from 0 to {len(self.values)}."
            )

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int]]) -> Ragged:
        """Return the sequences packed; ids take one byte each while none is above 255."""
        kept = list(sequences)
        offsets = np.zeros(len(kept) + 1, dtype=np.int64)
        np.cumsum([len(sequence) for sequence in kept], out=offsets[1:])
        flat = np.fromiter((token for s in kept for token in s), dtype=np.int32, count=int(offsets[-1]))
        small = flat.size == 0 or int(flat.max()) <= np.iinfo(np.uint8).max
        return cls(flat.astype(np.uint8) if small else flat, offsets)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each sequence, [N]."""
        return np.diff(self.offsets)

    def first(self, most: int) -> Ragged:
        """Return the first sequences, at most `most`, without a copy."""
        offsets = self.offsets[: most + 1]
        return Ragged(self.values[: offsets[-1]], offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> list[int]:
        position = range(len(self))[index]
        return self.values[self.offsets[position] : self.offsets[position + 1]].tolist()


def require_files(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Return the path of each name in `folder`, plain or with `.gz`.

    Raises:
        DataError: The folder is missing, a file is missing, or both forms of one are there.
    """
    wanted = list(names)
    if not folder.is_dir():
        state = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"{folder} {state}; expected a folder with {_listing(wanted)}, plain or .gz.")
    found: dict[str, Path] = {}
    for name in wanted:
        forms = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
        if len(forms) == 2:
            raise DataError(f"{folder} holds both {name} and {name}.gz; expected one of them: take the other away.")
        if forms:
            found[name] = forms[0]
    missing = [name for name in wanted if name not in found]
    if missing:
        below = sorted(child.name for child in folder.iterdir() if child.is_dir() and _holds(child, missing[0]))
        advice = f" They seem to be in {folder / below[0]}: name that folder." if below else ""
        raise DataError(f"{folder} lacks {_listing(missing)}; expected each, plain or .gz.{advice}")
    return found


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line without its end) of a UTF-8 text file, unpacked when it ends in `.gz`.

    Raises:
        DataError: The file cannot be read, unpacked or decoded; the message names the line reached.
    """
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                yield number, line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: not UTF-8 ({error.reason}); convert the file.") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}, after line {number}: cannot be read ({error}); fetch the file again.") from error


def stable_key(*parts: str) -> int:
    """Return a 64-bit integer that depends on the parts alone: equal on every machine and in every run.

    >>> stable_key("a", "b") == stable_key("a", "b") != stable_key("ab", "")
    True
    """
    content = "\x1f".join(parts).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, key=b"headwise").digest(), "big")


def digest(description: str, files: Iterable[Path] = ()) -> str:
    """Return 16 hexadecimal digits of a description and the contents of files: the name of what follows from them.

    Raises:
        DataError: A file cannot be read.
    """
    state = hashlib.blake2b(description.encode(), digest_size=8)
    for path in files:
        try:
            with path.open("rb") as stream:
                state.update(hashlib.file_digest(stream, hashlib.blake2b).digest())
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error}).") from error
    return state.hexdigest()


def cached_arrays(cache: Path | None, name: str, make: Callable[[], Mapping[str, NDArray]]) -> Mapping[str, NDArray]:
    """Return the arrays kept as `cache/name.npz`, or make them, keep them there and return them.

    The file appears by rename, so an interrupted or a second writer never leaves half of one. A file that cannot
    be read is made anew.

    Args:
        cache: Folder, made when missing; None keeps nothing.
        name: File name without suffix; it has to change with whatever the arrays depend on.
        make: Makes the arrays.

    Raises:
        DataError: The cache folder cannot be written.
    """
    if cache is None:
        return make()
    path = cache / f"{name}.npz"
    if path.is_file():
        try:
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
                return {key: stored[key] for key in stored.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
            pass
    arrays = make()
    _write_atomically(path, arrays)
    return arrays


def _write_atomically(path: Path, arrays: Mapping[str, NDArray]) -> None:
    partial: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial_name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".partial")
        partial = Path(partial_name)
        with os.fdopen(handle, "wb") as stream:
            np.savez(stream, allow_pickle=False, **arrays)
        partial.replace(path)
    except OSError as error:
        raise DataError(f"{path}: the cache cannot be written ({error}); name another cache folder.") from error
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


def _holds(folder: Path, name: str) -> bool:
    return (folder / name).is_file() or (folder / f"{name}.gz").is_file()


def _listing(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} ... {names[-1]}"
