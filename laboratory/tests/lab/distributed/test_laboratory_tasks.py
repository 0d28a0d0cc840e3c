"""The tasks that read files, trained by two processes: the loss curve and the answers of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.processes import Processes
from headwise_lab.experiment.arm_text import parse_arm
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

pytestmark = pytest.mark.full

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


GLUE = dataclasses.replace(
    GLUE_SCALES["demo"], name="toy", epochs=2, batch_size=15, warmup_share=0.1, length=32, train_examples=52
)
# what replaces a masked token is drawn apart in each process, as dropout is: the generator alone has one curve
GENERATOR = dataclasses.replace(PRETRAINED, dropout=0.0, discriminator_weight=0.0)
CASES: list[tuple[str, Any, str, Callable[[Path], Path]]] = [
    ("translation", TRANSLATION, "spos:kinds=self+output:weight=0.7", lambda place: write_toy_corpus(place / "corpus")),
    (
        "translation",
        TRANSLATION,
        "svgd-relative+em:layers=0,kinds=self,capsules=4",
        lambda place: write_toy_corpus(place / "corpus"),
    ),
    (
        "classification",
        CLASSIFICATION,
        "svgd+guided:roles=window/separator",
        lambda place: write_sentences(place / "mine.tsv", 160),
    ),
    ("sentence", SENTENCE, "spos+output:weight=0.7", lambda place: write_texts(place / "mine.tsv", 160)),
    (
        "probing",
        PROBING,
        "svgd+output:weight=0.7",
        lambda place: write_probing(place / "past_present.txt", {"va": 200, "te": 60}),
    ),
    ("graph2text", GRAPHS, "spos+output:weight=0.7", lambda place: write_triples(place / "mine.tsv", 60)),
    ("glue", GLUE, "svgd:layers=0+output:weight=0.7", lambda place: write_glue(place / "glue") / "RTE"),
    ("pretraining", GENERATOR, "svgd:layers=0", lambda place: write_jsonl(place / "docs.jsonl.gz", 120)),
]


@pytest.mark.parametrize(("task", "scale", "arm", "write"), CASES)
def test_two_processes_train_as_one_does(
    two: Processes, task: str, scale: Any, arm: str, write: Callable[[Path], Path], tmp_path: Path
):
    if task == "glue":
        scale = dataclasses.replace(scale, pretrained=write_model(tmp_path / "model", dropout=0.0))
    data = write(tmp_path)
    given = RunSettings(task, scale, parse_arm(arm), seed=3, data=data, cache=data.parent / "cache")
    train(given, tmp_path / "one")
    two.run(train, given, tmp_path / "two")
    if task != "pretraining":
        assert_same_run(tmp_path / "two", tmp_path / "one")
    curves = [[epoch["train_loss"] for epoch in epochs(tmp_path / name)] for name in ("one", "two")]
    assert curves[1] == pytest.approx(curves[0], rel=1e-7)
