"""Parses on disk: small integer arrays, under the digest of what parsed and of what was parsed.

Owns the files. Must not know spaCy. Files are written whole and never changed; what two processes parsed at the same
time is there twice and read once.
"""

from __future__ import annotations

import hashlib
import io
import secrets
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headwise.atomic import write_whole
from headwise.errors import DataError

FORMAT = 1
DIGEST_BYTES = 16


@dataclass(frozen=True)
class Parse:
    """The parse of one text.

    Attributes:
        starts: First character of each word.
        ends: The character behind its last.
        heads: Its head, itself at the root.
        relations: Its relation to the head.
    """

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    heads: tuple[int, ...]
    relations: tuple[str, ...]


def digest(*parts: str | bytes) -> bytes:
    """Return 16 bytes that stand for some texts, in order."""
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        content = part.encode("utf-8", errors="surrogatepass") if isinstance(part, str) else part
        found.update(len(content).to_bytes(8, "little"))
        found.update(content)
    return found.digest()


class ParseCache:
    """The parses one pipeline made, in a folder of its own inside `folder`.

    Args:
        folder: Where parses of all pipelines are kept; made when the first is written.
        pipeline: Digest of the pipeline.

    Raises:
        DataError: A file there is not one of ours.
    """

    def __init__(self, folder: str | Path, pipeline: bytes) -> None:
        self.folder = Path(folder) / pipeline.hex()
        self._parses: dict[bytes, Parse] = {}
        for path in sorted(self.folder.glob("*.npz")):
            self._parses.update(_read(path))

    def __len__(self) -> int:
        return len(self._parses)

    def get(self, key: bytes) -> Parse | None:
        """Return the parse under a key, None where there is none."""
        return self._parses.get(key)

    def add(self, parses: Mapping[bytes, Parse]) -> None:
        """Keep parses, in a file of their own.

        Raises:
            DataError: The file cannot be written.
        """
        new = {key: parse for key, parse in parses.items() if key not in self._parses}
        if not new:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{self.folder} cannot be made ({error.strerror}); choose another folder.") from None
        content = io.BytesIO()
        np.savez_compressed(content, allow_pickle=False, **_arrays(new))
        write_whole(self.folder / f"{secrets.token_hex(8)}.npz", content.getvalue())
        self._parses.update(new)


def _arrays(parses: Mapping[bytes, Parse]) -> dict[str, np.ndarray]:
    labels = sorted({relation for parse in parses.values() for relation in parse.relations})
    number = {label: index for index, label in enumerate(labels)}
    every = list(parses.values())
    return {
        "format": np.array(FORMAT),
        "keys": np.frombuffer(b"".join(parses), dtype=np.uint8).reshape(-1, DIGEST_BYTES),
        "counts": _small([len(parse.heads) for parse in every]),
        # distances are small where characters and words are not
        "starts": _small(_steps(parse.starts) for parse in every),
        "lengths": _small(e - s for parse in every for s, e in zip(parse.starts, parse.ends, strict=True)),
        "heads": _small(head - word for parse in every for word, head in enumerate(parse.heads)),
        "relations": _small(number[relation] for parse in every for relation in parse.relations),
        "labels": np.array(labels, dtype=np.str_),
    }


def _small(numbers: Iterable[int] | Iterable[list[int]]) -> np.ndarray:
    """Return integers in the smallest type that holds them."""
    flat = [n for item in numbers for n in (item if isinstance(item, list) else [item])]
    low, high = min(flat, default=0), max(flat, default=0)
    for kind in (np.int8, np.int16, np.int32):
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return np.array(flat, dtype=kind)
    return np.array(flat, dtype=np.int64)


def _steps(starts: Iterable[int]) -> list[int]:
    before, steps = 0, []
    for start in starts:
        steps.append(start - before)
        before = start
    return steps


def _read(path: Path) -> dict[bytes, Parse]:
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            content = {name: file[name] for name in file.files}
        if int(content["format"]) != FORMAT:
            raise DataError(f"{path} has format {int(content['format'])}; this version of headwise reads {FORMAT}.")
        return _parses(content)
    except (OSError, EOFError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not a file of parses ({error}); delete it to parse again.") from None


def _parses(content: Mapping[str, np.ndarray]) -> dict[bytes, Parse]:
    labels = content["labels"].tolist()
    relations = [labels[index] for index in content["relations"].tolist()]
    steps, lengths, heads = (content[name].tolist() for name in ("starts", "lengths", "heads"))
    found, begin = {}, 0
    for key, count in zip(content["keys"], content["counts"].tolist(), strict=True):
        end = begin + count
        starts = np.cumsum(steps[begin:end]).tolist() if count else []
        found[key.tobytes()] = Parse(
            tuple(starts),
            tuple(start + length for start, length in zip(starts, lengths[begin:end], strict=True)),
            tuple(word + offset for word, offset in enumerate(heads[begin:end])),
            tuple(relations[begin:end]),
        )
        begin = end
    if begin != len(heads):
        raise ValueError(f"{len(heads)} words for {begin}")
    return found
