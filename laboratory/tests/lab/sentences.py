"""Sentences made for the tests of classification, and parses of them that need no parser."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from headwise.roles.word_table import WordTable
from headwise_lab.role_masks import stored
from headwise_lab.tasks.classification import task as classification
from headwise_lab.tasks.classification.scales import ClassificationScale
from headwise_lab.texts.words import word_tables

GOOD, BAD, REST = (
    ("fine", "great", "lovely"),
    ("dull", "poor", "awful"),
    ("a", "film", "it", "is", "plot", "n't", "very"),
)
RELATIONS = ("nsubj", "amod", "punct", "det", "obj")


def write_sentences(path: Path, count: int, *, seed: int = 3, shortest: int = 2, longest: int = 12) -> Path:
    """Write a file of `count` sentences whose class shows in one word; some sentences occur more than once."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        label = draw.choice(("neg", "pos"))
        words = draw.choices(REST, k=draw.randint(shortest, longest) - 1)
        words.insert(draw.randrange(len(words) + 1), draw.choice(GOOD if label == "pos" else BAD))
        lines.append(f"{label}\t{' '.join(words)} {draw.choice('.!,')}\n")
    lines += lines[: count // 10]
    path.write_text("".join(lines))
    return path


def parsed(words: Sequence[str]) -> WordTable:
    """Return a tree that follows from the words: drawn, with a root and no circle."""
    draw = random.Random(" ".join(words))
    heads = [index if index == 0 else draw.randrange(index) for index in range(len(words))]
    return WordTable(words, heads=heads, relations=[draw.choice(RELATIONS) for _ in words])


def parse_without_spacy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse as `parsed` does wherever a pipeline is named."""

    def made(
        texts: Sequence[str], scale: ClassificationScale, cache: Path | None, *, progress: bool
    ) -> list[WordTable]:
        if scale.pipeline is None:
            return word_tables(texts, scale, cache, progress=progress)
        return [parsed(text.split()) for text in texts]

    monkeypatch.setattr(classification, "FORM", dataclasses.replace(classification.FORM, words=made))
    # any folder is a pipeline to this parser
    monkeypatch.setattr(stored, "is_file", lambda _path: True)
