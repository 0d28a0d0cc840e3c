"""A small text to pre-train on, written to disk, and a scale that fits it."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

from headwise_lab.packed_text.folder import find_packed, open_packed
from headwise_lab.packed_text.prepare import TextPreparation, prepare_text
from headwise_lab.tasks.pretraining.data import PACKING, PretrainingData
from headwise_lab.tasks.pretraining.scales import PRETRAINING_SCALES

TEXT = "the old clock ticks and a small bird sings on grey stones near cold rivers while rain falls softly"
WORDS = TEXT.split()

TOY = dataclasses.replace(
    PRETRAINING_SCALES["demo"],
    name="toy",
    width=16,
    hidden=16,
    heads=2,
    embedding=8,
    generator=0.5,
    steps=16,
    rounds=2,
    warmup_steps=2,
    batch_size=8,
    vocabulary_size=90,
    length=16,
    dev_rows=8,
    test_rows=12,
)


def document(number: int, words: int = 60) -> str:
    """A text of words in an order of its own, several lines long."""
    chosen = [WORDS[(number * 5 + place * (1 + number % 3) + place // 7) % len(WORDS)] for place in range(words)]
    chosen[number % words] = f"unlikely{number}"
    return "\n".join(" ".join(chosen[start : start + 12]) for start in range(0, words, 12))


def write_jsonl(path: Path, documents: int, words: int = 60) -> Path:
    """A packed file with an object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"id": str(n), "text": document(n, words)}) + "\n" for n in range(documents))
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))
    return path


def prepare_toy(folder: Path, shard_rows: int = 40) -> Path:
    """A prepared folder of several small shards."""
    preparation = dataclasses.replace(TOY.preparation, shard_bytes=shard_rows * TOY.length * 2)
    prepare_text(PACKING, (write_jsonl(folder / "docs.jsonl.gz", 120),), preparation, "f" * 16, folder / "prepared")
    return folder / "prepared"


def small(**changes) -> TextPreparation:
    """A preparation with rows of 16 tokens and shards of 20 rows."""
    sizes = {"vocabulary_size": 120, "length": 16, "shard_bytes": 20 * 16 * 2, "held_out_rows": 40}
    return TextPreparation(**{**sizes, **changes})


def open_text(folder: Path, dev_rows: int | None = None, test_rows: int | None = None) -> PretrainingData:
    """The data of a prepared folder."""
    return PretrainingData(folder, *open_packed(PACKING, folder), dev_rows, test_rows, 0.15)


def load_text(place: Path, preparation: TextPreparation, cache: Path, dev_rows: int | None = None) -> PretrainingData:
    """The data of text that is prepared in a cache."""
    return PretrainingData(*find_packed(PACKING, place, preparation, cache, scale="toy"), dev_rows, None, 0.15)
