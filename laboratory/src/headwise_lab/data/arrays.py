"""Ragged token arrays in memory and on disk, file lookup, digests, and the cache of prepared arrays."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import IO, Self, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from headwise.atomic import new_file
from headwise.errors import DataError, HeadwiseError, ShapeError
from headwise.input_files import describe_place, is_file, open_input
from headwise.stock_folders import require_unpacked

# The entry of a cache that names the others.
LISTED = "names"


@dataclass(frozen=True, eq=False)
class Ragged:
    """Sequences of token ids of unequal length in one flat array.

    Attributes:
        values: All ids concatenated, [T]; uint8 or int32.
        offsets: Where each sequence starts, and the end of the last, int64 [N + 1].

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
                f"Ragged was given {len(self.values)} values and offsets {self.offsets[:8].tolist()} ...; expected "
                f"offsets that rise from 0 to {len(self.values)}."
            )

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int]]) -> Ragged:
        """Return the sequences packed; ids take one byte each if none is above 255."""
        kept = list(sequences)
        offsets = np.zeros(len(kept) + 1, dtype=np.int64)
        np.cumsum([len(sequence) for sequence in kept], out=offsets[1:])
        flat = np.fromiter((token for s in kept for token in s), dtype=np.int32, count=int(offsets[-1]))
        small = flat.size == 0 or int(flat.max()) <= np.iinfo(np.uint8).max
        return cls(flat.astype(np.uint8) if small else flat, offsets)

    def pack(self, name: str) -> dict[str, NDArray]:
        """Return its arrays under names for `cache_arrays`; `unpack` reads them."""
        return {f"{name}.values": self.values, f"{name}.offsets": self.offsets}

    @classmethod
    def unpack(cls, arrays: Mapping[str, NDArray], name: str) -> Ragged:
        """Return what `pack` stored under a name."""
        return cls(arrays[f"{name}.values"], arrays[f"{name}.offsets"])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each sequence, [N]."""
        return np.diff(self.offsets)

    def first(self, most: int) -> Ragged:
        """Return at most the first `most` sequences, without a copy."""
        offsets = self.offsets[: most + 1]
        return Ragged(self.values[: offsets[-1]], offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> list[int]:
        position = range(len(self))[index]
        return self.values[self.offsets[position] : self.offsets[position + 1]].tolist()


class RaggedWriter:
    """Writes sequences to `NAME.ids.npy` and `NAME.offsets.npy` batch by batch; `open_ragged` reads them back.

    Args:
        folder: Folder of the files.
        name: Name of the files.
        dtype: Type of the ids.
    """

    def __init__(self, folder: Path, name: str, dtype: np.dtype) -> None:
        self._ids = _GrowingFile(folder / f"{name}.ids.npy", dtype)
        self._offsets = _GrowingFile(folder / f"{name}.offsets.npy", np.dtype(np.int64))
        self._offsets.append(np.zeros(1, dtype=np.int64))

    @property
    def sequences(self) -> int:
        """Number of sequences written."""
        return self._offsets.length - 1

    @property
    def tokens(self) -> int:
        """Number of tokens written."""
        return self._ids.length

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ids.close()
        self._offsets.close()

    def write(self, sequences: Sequence[Sequence[int]]) -> None:
        """Append sequences."""
        lengths = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
        ends = self.tokens + np.cumsum(lengths)
        self._ids.append(np.fromiter(chain.from_iterable(sequences), self._ids.dtype, count=int(lengths.sum())))
        self._offsets.append(ends)


def open_ragged(folder: Path, name: str) -> Ragged:
    """Return memory-mapped sequences from the files of a `RaggedWriter`."""
    ids, offsets = (load_array(folder / f"{name}.{part}.npy") for part in ("ids", "offsets"))
    try:
        if ids.dtype not in (np.uint16, np.uint32) or offsets.dtype != np.int64 or (ids.ndim, offsets.ndim) != (1, 1):
            raise ShapeError(f"{ids.dtype} [{ids.ndim} axes] with {offsets.dtype}; expected ids and int64 offsets")
        # plain arrays over the same files: slices of a memmap cost several times as much
        return Ragged(ids.view(np.ndarray), offsets.view(np.ndarray))
    except ShapeError as error:
        raise DataError(
            f"{folder / f'{name}.offsets.npy'} does not fit its ids ({error}); prepare the data again."
        ) from None


def load_array(path: Path) -> NDArray:
    """Return the array of an .npy file, memory-mapped."""
    if not is_file(path):
        raise DataError(f"{path} {describe_place(path)}; prepare the data again.")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("it is an archive of arrays")
    except Exception as error:
        # a header is Python's text, and a damaged one gives any of Python's errors
        raise DataError(f"{path} cannot be read ({error}); prepare the data again.") from error
    return array


def pack_words(words: Sequence[str]) -> NDArray[np.uint8]:
    """Return words without line breaks as one array; a NumPy array of strings would pad all to the longest.

    >>> unpack_words(pack_words(["a", "cat"]))
    ('a', 'cat')
    """
    return np.frombuffer("\n".join(words).encode(), dtype=np.uint8)


def unpack_words(packed: NDArray[np.uint8]) -> tuple[str, ...]:
    """Return the words of `pack_words`."""
    return tuple(packed.tobytes().decode().split("\n"))


def require_files(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Return the path of each name in `folder`, plain or with `.gz`."""
    wanted = list(names)
    if not folder.is_dir():
        raise DataError(
            f"{folder} {describe_place(folder)}; expected a folder with {_list_names(wanted)}, plain or .gz."
        )
    found: dict[str, Path] = {}
    for name in wanted:
        path = find_plain_or_gz(folder, name)
        if path is not None:
            found[name] = path
    missing = [name for name in wanted if name not in found]
    if missing:
        below = sorted(child.name for child in folder.iterdir() if child.is_dir() and _has_file(child, missing[0]))
        advice = f" They seem to be in {folder / below[0]}: name that folder." if below else ""
        raise DataError(f"{folder} lacks {_list_names(missing)}; expected each, plain or .gz.{advice}")
    return found


def find_plain_or_gz(folder: Path, name: str) -> Path | None:
    """Return the path of a file in `folder`, plain or with `.gz`; None if there is none."""
    forms = [path for path in (folder / name, folder / f"{name}.gz") if is_file(path)]
    if len(forms) == 2:
        raise DataError(f"{folder} holds both {name} and {name}.gz; expected one of them: take the other away.")
    return forms[0] if forms else None


def stable_key(*parts: str) -> int:
    """Return a 64-bit integer that depends on the parts alone: equal on every machine and in every run.

    >>> stable_key("a", "b") == stable_key("a", "b") != stable_key("ab", "")
    True
    """
    content = "\x1f".join(parts).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, key=b"headwise").digest(), "big")


def digest(description: str, files: Iterable[Path] = ()) -> str:
    """Return 16 hexadecimal digits that identify a description and the contents of files."""
    state = hashlib.blake2b(description.encode(), digest_size=8)
    for path in files:
        with open_input(path, unpack=False) as stream:
            try:
                state.update(hashlib.file_digest(stream, hashlib.blake2b).digest())
            except OSError as error:
                raise DataError(f"{path}: cannot be read ({error}).") from error
    return state.hexdigest()


def cache_arrays(cache: Path | None, name: str, make: Callable[[], Mapping[str, NDArray]]) -> Mapping[str, NDArray]:
    """Return the arrays of `cache/name.npz`, making and storing them first if needed.

    The file appears by rename, so an interrupted or concurrent writer never leaves a partial one. Corrupt files are
    rebuilt.
    """
    if cache is None:
        return make()
    path = cache / f"{name}.npz"
    if is_file(path):
        with suppress(DataError):
            return read_arrays(path, listed=True)
    arrays = make()
    _write_atomically(path, arrays)
    return arrays


def read_arrays(path: Path, *, listed: bool = False) -> dict[str, NDArray]:
    """Return the arrays of an .npz file, whose checksums tell of any change.

    Args:
        path: The file.
        listed: Whether the file must list its arrays, as those of version 0.1 do not: checksums do not tell of entries
            that are gone.
    """
    try:
        # numpy leaves a file open that it opened itself and could not read
        with open_input(path, unpack=False) as stream:
            with zipfile.ZipFile(cast(IO[bytes], stream)) as archive:
                require_unpacked(path, archive, "delete it to make it again.")
            stream.seek(0)
            with np.load(cast(IO[bytes], stream), allow_pickle=False) as stored:
                arrays = {key: stored[key] for key in stored.files}
            names = arrays.pop(LISTED, None)
            if names is None and listed:
                raise ValueError("it does not list its arrays")
            if names is not None and names.tolist() != list(arrays):
                raise ValueError(f"it holds {', '.join(arrays)} of {', '.join(names.tolist())}")
            return arrays
    except HeadwiseError:
        raise
    except Exception as error:
        # zip files and numpy have many ways to fail
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        raise DataError(f"{path} is damaged ({reason}); delete it to make it again.") from None


def _write_atomically(path: Path, arrays: Mapping[str, NDArray]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as temporary, temporary.open("wb") as stream:
            np.savez(stream, allow_pickle=False, **arrays, **{LISTED: np.array(list(arrays))})
    except OSError as error:
        raise DataError(f"{path}: the cache cannot be written ({error}); name another cache folder.") from error


def _has_file(folder: Path, name: str) -> bool:
    return (folder / name).is_file() or (folder / f"{name}.gz").is_file()


def _list_names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} ... {names[-1]}"


class _GrowingFile:
    """An .npy file of one axis whose length is known only when it is closed."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.dtype, self.length = dtype, 0
        self._stream = path.open("wb")
        self._write_header()

    def append(self, values: NDArray) -> None:
        self._stream.write(values.tobytes())
        self.length += len(values)

    def close(self) -> None:
        self._stream.seek(0)
        # numpy leaves room in a header for the first axis to grow
        self._write_header()
        self._stream.close()

    def _write_header(self) -> None:
        header = {"descr": npy.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.length,)}
        npy.write_array_header_1_0(self._stream, header)
