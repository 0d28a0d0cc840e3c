"""Sequences of token ids on disk: written piece by piece, read without loading them.

Owns the two files of a side, `NAME.ids.npy` and `NAME.offsets.npy`. Must not know text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from headwise.errors import DataError, HeadwiseError
from headwise.lab.data.arrays import Ragged


class RaggedWriter:
    """Writes sequences one batch after another in memory of one batch; `open_ragged` reads them back.

    Args:
        folder: Where to.
        name: Name of the side.
        dtype: Type of the ids.
    """

    def __init__(self, folder: Path, name: str, dtype: np.dtype) -> None:
        self._ids = _GrowingFile(folder / f"{name}.ids.npy", dtype)
        self._offsets = _GrowingFile(folder / f"{name}.offsets.npy", np.dtype(np.int64))
        self._offsets.append(np.zeros(1, dtype=np.int64))

    @property
    def sequences(self) -> int:
        """Sequences written."""
        return self._offsets.length - 1

    @property
    def tokens(self) -> int:
        """Tokens written."""
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
    """Return sequences that lie in their files: memory grows only by what is looked at.

    Raises:
        DataError: A file is missing, damaged or of another type.
    """
    try:
        ids, offsets = (np.load(folder / f"{name}.{part}.npy", mmap_mode="r") for part in ("ids", "offsets"))
        if ids.dtype not in (np.uint16, np.uint32) or offsets.dtype != np.int64 or ids.ndim != 1:
            raise DataError(f"{ids.dtype} [{ids.ndim} axes] with {offsets.dtype}; expected ids and int64 offsets")
        # plain arrays over the same files: slices of a memmap cost several times as much
        return Ragged(ids.view(np.ndarray), offsets.view(np.ndarray))
    except (OSError, ValueError, EOFError, HeadwiseError) as error:
        raise DataError(f"{folder / name}: the token arrays cannot be read ({error}); prepare them again.") from error


class _GrowingFile:
    """An .npy file of one axis whose length is known when it is closed."""

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
