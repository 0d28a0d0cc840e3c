"""A toy of each task: sizes that train in a second or two, and data that is written to disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES, PROBING_SCALES
from headwise_lab.tasks.graph2text.scales import GRAPH_SCALES
from headwise_lab.tasks.sentence.scales import SENTENCE_SCALES
from lab.sentences import write_sentences
from lab.tasks.classification.probing_toy import write_probing
from lab.tasks.glue import glue_toy
from lab.tasks.graph2text.graph_sets import write_triples
from lab.tasks.lm import lm_toy
from lab.tasks.logic import logic_toy
from lab.tasks.pretraining import pretraining_toy
from lab.tasks.sentence.sentence_sets import write_pairs, write_texts
from lab.tasks.translation import translation_toy

TEXTS = {"name": "toy", "epochs": 2, "batch_size": 16, "warmup_steps": 3, "train_examples": 96}
WHOLE = dict.fromkeys(("train_examples", "dev_examples", "test_examples"))
CLASSIFICATION = dataclasses.replace(
    CLASSIFICATION_SCALES["demo"], **TEXTS, width=12, hidden=12, heads=6, head_size=3, dropout=0.1
)
PROBING = dataclasses.replace(PROBING_SCALES["demo"], **TEXTS, width=12, hidden=12, heads=3, head_size=4, min_count=1)
SENTENCE = dataclasses.replace(
    SENTENCE_SCALES["demo"], **TEXTS, width=8, units=6, attention=5, heads=4, hidden=10, dropout=0.1, min_count=1
)
GRAPHS = dataclasses.replace(
    GRAPH_SCALES["demo"], **WHOLE, name="toy", width=16, epochs=1, tokens=128, min_count=1, longest=16, beams=2
)
# By task: the sizes, and what writes the data below a folder. "pairs" is the sentence task on pairs of texts.
TOYS: dict[str, tuple[Any, Callable[[Path], Path | None]]] = {
    "logic": (logic_toy.TOY, lambda _: None),
    "classification": (CLASSIFICATION, lambda place: write_sentences(place / "mine.tsv", 160)),
    "probing": (PROBING, lambda place: write_probing(place / "past_present.txt", {"va": 200, "te": 60})),
    "sentence": (SENTENCE, lambda place: write_texts(place / "mine.tsv", 160)),
    "pairs": (SENTENCE, lambda place: write_pairs(place / "pairs", 96)),
    "facts": (SENTENCE, lambda _: None),
    "graph2text": (GRAPHS, lambda place: write_triples(place / "mine.tsv", 60)),
    "glue": (glue_toy.toy(Path("model")), lambda place: glue_toy.write_glue(place / "glue") / "RTE"),
    "pretraining": (pretraining_toy.TOY, pretraining_toy.prepare_toy),
    "lm": (lm_toy.TOY, lm_toy.prepare_toy),
    "translation": (translation_toy.TOY, lambda place: translation_toy.write_toy_corpus(place / "corpus")),
}


def toy_run(task: str, place: Path, arm: str = "plain", *, seed: int = 3, **changes: Any) -> RunSettings:
    """Return a run of a task whose data, and model to begin with, are written below a folder; sizes may be changed."""
    scale, write = TOYS[task]
    place.mkdir(parents=True, exist_ok=True)
    if task == "glue":
        scale = dataclasses.replace(scale, pretrained=glue_toy.write_model(place / "model"))
    scale = dataclasses.replace(scale, **changes)
    name = "sentence" if task == "pairs" else task
    return RunSettings(name, scale, parse_arm(arm), seed=seed, data=write(place), cache=place / "cache")
