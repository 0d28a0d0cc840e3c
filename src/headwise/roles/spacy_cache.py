"""An on-disk cache of parses: small integer arrays, keyed by digests of the pipeline and of the text.

Files are written atomically and never changed. Texts that two processes parse at the same time are stored twice.
"""

import hashlib
import io
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from headwise.atomic import write_whole
from headwise.errors import DataError, HeadwiseError
from headwise.input_files import read_whole

FORMAT = 1
DIGEST_BYTES = 16


@dataclass(frozen=True)
class Parse:
    """The parse of one text.

    Attributes:
        starts: First character of each word.
        ends: Last character of each word plus one.
        heads: Head of each word; the word itself at the root.
        relations: Relation of each word to its head.
    """

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    heads: tuple[int, ...]
    relations: tuple[str, ...]


def digest(*parts: str | bytes) -> bytes:
    """Return a digest of 16 bytes of some texts, in order."""
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        content = part.encode("utf-8", errors="surrogatepass") if isinstance(part, str) else part
        found.update(len(content).to_bytes(8, "little"))
        found.update(content)
    return found.digest()


class ParseCache:
    """The cached parses of one pipeline, in a subfolder of `folder`.

    Args:
        folder: Folder of the parses of all pipelines; created when the first is written.
        pipeline: Digest of the pipeline.

    Raises:
        DataError: A file there is not a cache file.
    """

    def __init__(self, folder: str | Path, pipeline: bytes) -> None:
        self.folder = Path(folder) / pipeline.hex()
        self._parses: dict[bytes, Parse] = {}
        for path in sorted(self.folder.glob("*.npz")):
            self._parses.update(_read(path))

    def __len__(self) -> int:
        return len(self._parses)

    def get(self, key: bytes) -> Parse | None:
        """Return the parse under a key, or None."""
        return self._parses.get(key)

    def add(self, parses: Mapping[bytes, Parse]) -> None:
        """Store parses in a new file.

        Raises:
            DataError: The file cannot be written.
        """
        new = {key: parse for key, parse in parses.items() if key not in self._parses}
        if not new:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{self.folder} cannot be created ({error.strerror}); choose another folder.") from None
        content = io.BytesIO()
        np.savez_compressed(content, allow_pickle=False, **_pack(new))
        write_whole(self.folder / f"{secrets.token_hex(8)}.npz", content.getvalue())
        self._parses.update(new)


def _pack(parses: Mapping[bytes, Parse]) -> dict[str, np.ndarray]:
    labels = sorted({relation for parse in parses.values() for relation in parse.relations})
    number = {label: index for index, label in enumerate(labels)}
    every = list(parses.values())
    return {
        "format": np.array(FORMAT),
        "keys": np.frombuffer(b"".join(parses), dtype=np.uint8).reshape(-1, DIGEST_BYTES),
        "counts": _shrink([len(parse.heads) for parse in every]),
        # differences are small numbers, positions are not
        "starts": _shrink(b - a for parse in every for a, b in pairwise((0, *parse.starts))),
        "lengths": _shrink(e - s for parse in every for s, e in zip(parse.starts, parse.ends, strict=True)),
        "heads": _shrink(head - word for parse in every for word, head in enumerate(parse.heads)),
        "relations": _shrink(number[relation] for parse in every for relation in parse.relations),
        "labels": np.array(labels, dtype=np.str_),
    }


def _shrink(numbers: Iterable[int]) -> np.ndarray:
    """Return integers as an array of the smallest type that holds them."""
    flat = list(numbers)
    low, high = min(flat, default=0), max(flat, default=0)
    for kind in (np.int8, np.int16, np.int32):
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return np.array(flat, dtype=kind)
    return np.array(flat, dtype=np.int64)


def _read(path: Path) -> dict[bytes, Parse]:
    try:
        with np.load(io.BytesIO(read_whole(path)), allow_pickle=False) as file:
            content = {name: file[name] for name in file.files}
        if int(content["format"]) != FORMAT:
            raise DataError(f"{path} has format {int(content['format'])}; this version of headwise reads {FORMAT}.")
        return _unpack(content)
    except HeadwiseError:
        raise
    except Exception as error:
        # zip files and numpy have many ways to fail
        raise DataError(f"{path} is not a file of parses ({str(error)[:200]}); delete it to parse again.") from None


def _unpack(content: Mapping[str, np.ndarray]) -> dict[bytes, Parse]:
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
