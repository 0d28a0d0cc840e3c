"""The tasks that read files, trained by two processes: the loss curve and the answers of one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from distributed.processes import Processes
from distributed.test_laboratory import assert_same_run, train
from headwise.lab.arm_text import parse_arm
from headwise.lab.settings import RunSettings
from headwise.lab.tasks.classification_scales import CLASSIFICATION_SCALES
from headwise.lab.tasks.sentence_scales import SENTENCE_SCALES
from headwise.lab.tasks.task import Scale
from lab.sentence_sets import write_texts
from lab.sentences import write_sentences
from lab.translation_toy import SMALLEST, write_toy_corpus

# Batches are of unequal size, by tokens or because the last one is short; without dropout nothing is drawn apart.
TRANSLATION = dataclasses.replace(SMALLEST, epochs=2, train_examples=75, averaged=2)
CLASSIFICATION = dataclasses.replace(
    CLASSIFICATION_SCALES["demo"],
    name="toy",
    width=12,
    heads=4,
    head_size=3,
    hidden=12,
    epochs=2,
    batch_size=15,
    warmup_steps=3,
    train_examples=76,
    dropout=0.0,
)
SENTENCE = dataclasses.replace(
    SENTENCE_SCALES["demo"],
    name="toy",
    width=8,
    units=6,
    attention=5,
    heads=4,
    hidden=10,
    epochs=2,
    batch_size=15,
    warmup_steps=3,
    train_examples=76,
    dropout=0.0,
    min_count=1,
)


def assert_two_are_one(two: Processes, given: RunSettings, place: Path) -> None:
    train(given, place / "one")
    two.run(train, given, place / "two")
    assert_same_run(place / "two", place / "one")


@pytest.mark.parametrize(
    "arm", ["spos:kinds=self+output:weight=0.7", "svgd-relative+em:layers=0,kinds=self,capsules=4"]
)
def test_translation(two: Processes, arm: str, tmp_path: Path):
    corpus = write_toy_corpus(tmp_path / "corpus")
    given = RunSettings("translation", TRANSLATION, parse_arm(arm), seed=3, data=corpus, cache=tmp_path / "cache")
    assert_two_are_one(two, given, tmp_path)


def test_classification_with_roles(two: Processes, tmp_path: Path):
    texts = write_sentences(tmp_path / "mine.tsv", 160)
    given = _of_texts("classification", CLASSIFICATION, "svgd+guided:roles=window/separator", texts)
    assert_two_are_one(two, given, tmp_path)


def test_sentence_embedding(two: Processes, tmp_path: Path):
    pytest.importorskip("spacy")
    texts = write_texts(tmp_path / "mine.tsv", 160)
    assert_two_are_one(two, _of_texts("sentence", SENTENCE, "spos+output:weight=0.7", texts), tmp_path)


def _of_texts(task: str, scale: Scale, arm: str, texts: Path) -> RunSettings:
    return RunSettings(task, scale, parse_arm(arm), seed=3, data=texts, cache=texts.parent / "cache")
