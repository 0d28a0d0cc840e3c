"""The tasks that read files, trained by two processes: the loss curve and the answers of one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from distributed.processes import Processes
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.scale import Scale
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES, PROBING_SCALES
from headwise_lab.tasks.glue.scales import GLUE_SCALES
from headwise_lab.tasks.graph2text.scales import GRAPH_SCALES
from headwise_lab.tasks.sentence.scales import SENTENCE_SCALES
from lab.distributed.test_laboratory import assert_same_run, epochs, train
from lab.sentences import write_sentences
from lab.tasks.classification.probing_toy import write_probing
from lab.tasks.glue.glue_toy import write_glue, write_model
from lab.tasks.graph2text.graph_sets import write_triples
from lab.tasks.pretraining.pretraining_toy import TOY as PRETRAINED
from lab.tasks.pretraining.pretraining_toy import write_jsonl
from lab.tasks.sentence.sentence_sets import write_texts
from lab.tasks.translation.translation_toy import SMALLEST, write_toy_corpus

# Batches divide unevenly, and by tokens or at the end are of unequal size; without dropout nothing is drawn apart.
SMALL: dict[str, Any] = {
    "name": "toy",
    "epochs": 2,
    "batch_size": 15,
    "warmup_steps": 3,
    "train_examples": 76,
    "dropout": 0.0,
}
TRANSLATION = dataclasses.replace(SMALLEST, epochs=2, train_examples=75, averaged=2)
CLASSIFICATION = dataclasses.replace(CLASSIFICATION_SCALES["demo"], **SMALL, width=12, heads=4, head_size=3, hidden=12)
SENTENCE = dataclasses.replace(
    SENTENCE_SCALES["demo"], **SMALL, width=8, units=6, attention=5, heads=4, hidden=10, min_count=1
)
PROBING = dataclasses.replace(PROBING_SCALES["demo"], **SMALL, width=12, heads=3, head_size=4, hidden=12, min_count=1)
# five texts of 16 words a batch
GRAPHS = dataclasses.replace(
    GRAPH_SCALES["demo"], name="toy", width=16, epochs=2, tokens=80, min_count=1, longest=16, beams=1, dropout=0.0
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


def test_probing(two: Processes, tmp_path: Path):
    file = write_probing(tmp_path / "past_present.txt", {"va": 200, "te": 60})
    assert_two_are_one(two, _of_texts("probing", PROBING, "svgd+output:weight=0.7", file), tmp_path)


def test_graph_to_text(two: Processes, tmp_path: Path):
    pytest.importorskip("nltk")
    triples = write_triples(tmp_path / "mine.tsv", 60)
    assert_two_are_one(two, _of_texts("graph2text", GRAPHS, "spos+output:weight=0.7", triples), tmp_path)


def test_glue(two: Processes, tmp_path: Path):
    scale = dataclasses.replace(
        GLUE_SCALES["demo"],
        name="toy",
        epochs=2,
        batch_size=15,
        warmup_share=0.1,
        length=32,
        train_examples=52,
        pretrained=write_model(tmp_path / "model", dropout=0.0),
    )
    folder = write_glue(tmp_path / "glue") / "RTE"
    assert_two_are_one(two, _of_texts("glue", scale, "svgd:layers=0+output:weight=0.7", folder), tmp_path)


def test_pretraining(two: Processes, tmp_path: Path):
    # what replaces a masked token is drawn apart in each process, as dropout is: the generator alone has one curve
    scale = dataclasses.replace(PRETRAINED, dropout=0.0, discriminator_weight=0.0)
    text = write_jsonl(tmp_path / "docs.jsonl.gz", 120)
    given = _of_texts("pretraining", scale, "svgd:layers=0", text)
    train(given, tmp_path / "one")
    two.run(train, given, tmp_path / "two")
    curves = [[epoch["train_loss"] for epoch in epochs(tmp_path / name)] for name in ("one", "two")]
    assert curves[1] == pytest.approx(curves[0], rel=1e-7)


def _of_texts(task: str, scale: Scale, arm: str, texts: Path) -> RunSettings:
    return RunSettings(task, scale, parse_arm(arm), seed=3, data=texts, cache=texts.parent / "cache")
