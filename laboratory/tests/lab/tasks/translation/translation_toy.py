"""A toy size of the translation task and a corpus for it, for tests of everything that trains on it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from headwise_lab.role_masks import stored
from headwise_lab.tasks.translation import task as translation_module
from headwise_lab.tasks.translation.role_masks import make_parser
from headwise_lab.tasks.translation.scales import TRANSLATION_SCALES
from headwise_lab.tasks.translation.task import TranslationTask
from lab.inline import do_inline
from lab.sentences import parsed

WORDS = {"red": "rot", "dog": "hund", "runs": "rennt", "two": "zwei", "small": "klein", "sees": "sieht"}
SMALLEST = dataclasses.replace(
    TRANSLATION_SCALES["demo"],
    width=16,
    hidden=16,
    heads=4,
    encoder_layers=2,
    decoder_layers=2,
    vocabulary_size=300,
    tokens=256,
    epochs=1,
    warmup_steps=5,
    averaged=1,
    beams=1,
    train_examples=20,
    dev_examples=4,
    test_examples=8,
    compile_routing=False,
)

TOY = dataclasses.replace(
    SMALLEST,
    name="toy",
    heads=2,
    encoder_layers=1,
    decoder_layers=1,
    dropout=0.1,
    epochs=2,
    averaged=2,
    beams=2,
    train_examples=80,
    dev_examples=8,
    test_examples=12,
)


def write_toy_corpus(
    folder: Path,
    *,
    words: Mapping[str, str] = WORDS,
    sizes: Sequence[int] = (200, 20, 30),
    longest: int = 25,
) -> Path:
    """Write made sentences under Multi30k's names: so many of training, dev and test."""
    folder.mkdir(exist_ok=True)
    draw = random.Random(5)
    for name, size in zip(("train", "val", "test_2016_flickr"), sizes, strict=True):
        source = [draw.choices(list(words), k=draw.randint(3, longest)) for _ in range(size)]
        (folder / f"{name}.en").write_text("".join(" ".join(line) + "\n" for line in source))
        (folder / f"{name}.de").write_text("".join(" ".join(words[word] for word in line) + "\n" for line in source))
    return folder


def make_demo_smallest(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> list[str]:
    """Make the demo scale the smallest and do jobs in this process; return the list their names are added to."""
    smallest = dataclasses.replace(SMALLEST, **sizes)
    monkeypatch.setattr(TranslationTask, "scales", {**TRANSLATION_SCALES, "demo": smallest})
    return do_inline(monkeypatch)


def parse_without_spacy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw a parse that follows from the words wherever a pipeline is named."""

    def made(pipeline: Path | None, cache: Path) -> Callable:
        return make_parser(None, cache) if pipeline is None else lambda texts: [parsed(text.split()) for text in texts]

    monkeypatch.setattr(translation_module, "make_parser", made)
    # any folder is a pipeline to this parser
    monkeypatch.setattr(stored, "is_file", lambda _path: True)
