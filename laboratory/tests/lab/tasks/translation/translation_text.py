"""Small parallel text for the tests of the translation task: made up, and the same every time."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

SOURCE_WORDS = [
    "ein",
    "hund",
    "läuft",
    "über",
    "die",
    "große",
    "wiese",
    "und",
    "schläft",
    "im",
    "garten",
    "weiß",
    "grün",
]
TARGET_WORDS = [
    "a",
    "dog",
    "runs",
    "across",
    "the",
    "large",
    "meadow",
    "and",
    "sleeps",
    "in",
    "garden",
    "white",
    "green",
]


def lines(count: int, seed: int, words: list[str]) -> list[str]:
    """Return lines of 2 to 12 words; the same seed draws lines of the same lengths in every language."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(2, 13, size=count)
    return [" ".join(generator.choice(words, size)) + "." for size in sizes]


def write(path: Path, text: list[str]) -> None:
    """Write lines, gzipped where the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(f"{line}\n" for line in text).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_corpus(folder: Path, train: int = 300, dev: int = 20, test: int = 30) -> Path:
    """Write `train`, `dev` and `test` from de to en."""
    for seed, (split, count) in enumerate((("train", train), ("dev", dev), ("test", test))):
        write(folder / f"{split}.de", lines(count, seed, SOURCE_WORDS))
        write(folder / f"{split}.en", lines(count, seed, TARGET_WORDS))
    return folder
