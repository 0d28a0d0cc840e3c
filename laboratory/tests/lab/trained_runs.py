"""Finished runs, a stopped one and what was measured on them, made once for all tests, which change copies."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import headwise as hw
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.tasks.logic.scales import LOGIC_SCALES
from headwise_lab.training.train import train_run
from lab.command import call
from lab.inline import do_inline
from lab.stopping import stop_after
from lab.tasks.translation.translation_toy import write_toy_corpus

LOGIC = "logic/svgd+em@capsules=4/seed-0"
CLASSIFICATION = "classification/guided@roles=rare_window/seed-0"
TRANSLATION = "translation/output@kinds=cross/seed-0"
STOPPED = "stopped/spos+drophead/seed-0"

LOGIC_SIZES = {
    "width": 8,
    "heads": 2,
    "layers": 1,
    "classifier_width": 8,
    "epochs": 1,
    "warmup_steps": 3,
    "generated_draws": 1500,
    "train_examples": 96,
    "dev_examples": 24,
}
TEXT_SIZES = {"width": 8, "heads": 2, "head_size": 4, "hidden": 8, "layers": 1, "epochs": 1, "warmup_steps": 3}
LINE_SIZES = {
    "width": 8,
    "hidden": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "heads": 2,
    "vocabulary_size": 280,
    "tokens": 256,
    "epochs": 1,
    "averaged": 1,
    "warmup_steps": 5,
    "beams": 1,
    "compile_routing": "false",
}


def compare(task: str, arms: str, sizes: Mapping[str, object], *more: str) -> list[str]:
    """Return the words of a command that compares arms in a folder named after the task."""
    words = [word for size in sizes.items() for word in ("--set", "=".join(map(str, size)))]
    return ["compare", task, "--arms", arms, "--seeds", "1", "--workers", "1", "--out", task, *words, *more]


# Names are relative: the same command is given in a copy, too.
COMMANDS = {
    "logic": compare("logic", "plain,svgd+em:capsules=4", LOGIC_SIZES, "--redundancy", "--step-time"),
    "classification": compare("classification", "guided:roles=rare/window", TEXT_SIZES, "--data", "texts.tsv"),
    "translation": compare("translation", "plain,output:kinds=cross", LINE_SIZES, "--data", "corpus:de-en"),
}


def make_runs(place: Path) -> Path:
    """Train every run below a folder, in this process."""
    with contextlib.chdir(place), pytest.MonkeyPatch.context() as patch:
        do_inline(patch)
        write_texts(place)
        write_toy_corpus(place / "corpus", sizes=(60, 6, 8), longest=8)
        for words in COMMANDS.values():
            assert call(*words, "--quiet") == 0
        probed = ("--data", "past_present.txt", "--out", "probed", "--cache", "encoded", "--workers", "1")
        assert call("probe", CLASSIFICATION, *probed) == 0
        scale = dataclasses.replace(LOGIC_SCALES["demo"], **{**LOGIC_SIZES, "batch_size": 32, "epochs": 2})
        # in the second epoch
        train_run(RunSettings("logic", scale, parse_arm("spos+drophead"), seed=0), place / STOPPED, stop_after(4))
        measure().save(place / "report.json")
    return place


def write_texts(place: Path) -> None:
    """Write labeled sentences to train on, and others to probe with."""
    draw = random.Random(3)

    def sentence(word: str) -> str:
        said: list[str] = draw.choices(("a", "film", "it", "is", "plot", "very", "rain"), k=draw.randint(3, 8))
        said.insert(draw.randrange(len(said) + 1), word)
        return " ".join(said) + " ."

    feelings, tenses = {"pos": "fine", "neg": "dull"}, {"PAST": "went", "PRES": "goes"}
    labels = draw.choices(tuple(feelings), k=60)
    (place / "texts.tsv").write_text("".join(f"{label}\t{sentence(feelings[label])}\n" for label in labels))
    lines = [(split, draw.choice(tuple(tenses))) for split in ["tr"] * 40 + ["va"] * 15 + ["te"] * 20]
    text = "".join(f"{split}\t{label}\t{sentence(tenses[label])}\n" for split, label in lines)
    (place / "past_present.txt").write_text(text)


def measure() -> hw.report.Report:
    """Return a report with scores and roles of heads, of an encoder with an aggregator."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False).eval()
    hw.aggregate(hw.find_heads(encoder).layer(0), hw.routing.EMRouting(capsules=4))
    return hw.measure(
        hw.find_heads(encoder),
        [torch.randn(3, 5, 8)],
        score=lambda output, batch: -(output - batch).square().mean((1, 2)),
        score_name="likeness",
        roles=lambda _: hw.roles.Roles(hw.roles.Separator(), hw.roles.Window(3))(
            [hw.roles.WordTable.split("a , b c .")] * 3, num_heads=2
        ),
    )
