"""A small text to model, prepared on disk, and a scale that fits it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from headwise_lab.packed_text.folder import open_packed
from headwise_lab.packed_text.prepare import prepare_text
from headwise_lab.tasks.lm.data import PACKING, LmData
from headwise_lab.tasks.lm.scales import LM_SCALES
from lab.tasks.pretraining.pretraining_toy import document

TOY = dataclasses.replace(
    LM_SCALES["demo"],
    name="toy",
    width=16,
    hidden=24,
    steps=16,
    rounds=2,
    warmup_steps=2,
    batch_size=8,
    vocabulary_size=330,
    length=32,
    dev_rows=8,
    test_rows=12,
)


def write_documents(path: Path, documents: int) -> Path:
    """A file with a document a line, of 24 to 66 words in sentences of 12."""
    texts = (document(number, 24 + 6 * (number % 8)).replace("\n", ".\n") + "." for number in range(documents))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def prepare_toy(folder: Path, shard_rows: int = 40) -> Path:
    """A prepared folder of several small shards."""
    preparation = dataclasses.replace(TOY.preparation, shard_bytes=shard_rows * TOY.length * 2)
    prepare_text(PACKING, (write_documents(folder / "docs.jsonl", 250),), preparation, "f" * 16, folder / "prepared")
    return folder / "prepared"


def open_toy(folder: Path) -> LmData:
    """The data of a prepared folder."""
    return LmData(folder, *open_packed(PACKING, folder), TOY.dev_rows, TOY.test_rows)
