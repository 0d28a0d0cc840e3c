"""Files that a test changes, and how they are written."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz.mutate import Mutation, mutate_bytes, mutate_text

# The file to change, what reads it and all that belongs to it, and how it is changed.
Reader = tuple[Path, Callable[[], object], Mutation]


def mutate_packed(content: bytes, draw: random.Random) -> bytes:
    """Return a packed file whose text is changed, or whose bytes are."""
    if draw.random() < 0.5:
        return mutate_bytes(content, draw)
    return gzip.compress(mutate_text(gzip.decompress(content), draw), compresslevel=1)


def lines(path: Path, *texts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def packed(path: Path) -> Path:
    place = path.with_name(f"{path.name}.gz")
    place.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return place


def write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path
