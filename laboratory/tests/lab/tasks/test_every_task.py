"""What holds of every task: its arms train and end in a table, a run that was stopped goes on to the same bits, arms of
a seed begin alike, and a task without data says what it reads."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from rich.console import Console

from cases import cases, thin, tiers
from headwise.errors import DataError
from headwise_lab.compare import Comparison, compare
from headwise_lab.experiment.arm_text import parse_arm, parse_arms
from headwise_lab.experiment.registry import TASKS, named_task
from headwise_lab.training.attach import attach_arm
from lab.sentences import parse_without_spacy
from lab.stopping import assert_goes_on_to_the_same_bits
from lab.tasks.toys import TOYS, toy_run
from lab.tasks.translation import translation_toy

pytest.importorskip("spacy")
pytest.importorskip("nltk")

BOTH = "svgd:kinds=self,projections=query+output:kinds=self,kind_weights=1/0.5/0.5+em:layers=0,kinds=decoder,capsules=4"
# By task, arm and step of the stop; the runs of logic are stopped in training/test_train.py.
STOPS = [("classification", "guided:random=rare/window,shuffled=major", 5), ("lm", "svgd", 3)]
MORE_STOPS = [
    ("graph2text", "svgd", 3),
    ("sentence", "svgd-function", 8),
    ("probing", "output+em:layers=0", 5),
    ("glue", "svgd", 3),
    ("pretraining", "svgd", 3),
    ("pairs", "frobenius", 8),
    ("translation", BOTH, 3),
]
MOST_STOPS = [
    *(("classification", arm, 5) for arm in ("guided", "output+guided", "bilstm")),
    ("lm", "svgd", 11),
    ("pretraining", "svgd", 11),
    *(("sentence", arm, 8) for arm in ("plain", "spos", "frobenius", "cnn")),
    *(("pairs", arm, 8) for arm in ("plain", "spos", "svgd-function", "cnn")),
    ("translation", BOTH, 7),
    ("translation", "guided:roles=rare/separator/window,random=window", 4),
    ("translation", "shuffled-parse:roles=major/dependency", 4),
]


# Arms of each task that are compared on a file of one's own.
COMPARED = [("sentence", "plain,scaled,svgd-function,cnn")]
MORE_COMPARED = [
    ("classification", "plain,guided,bilstm"),
    ("probing", "plain,em:layers=0,output+em:layers=0,guided:roles=window,bilstm"),
    ("graph2text", "plain,svgd,em:layers=0,no-graph"),
]
MOST_COMPARED = [
    ("classification", "random-mask,shuffled-parse,guided:drop=major/rare,guided:roles=window,cnn,svgd+guided"),
    ("classification", "output+guided,trunk+guided,drophead+guided"),
    ("probing", "output,svgd,trunk:layers=0,drophead"),
    ("sentence", "smooth,svgd,svgd-relative,svgd-normalized,spos,sgld,cosine-penalty,cosine-repulsion"),
    ("sentence", "svgd:kernel=cosine,frobenius,output,drophead,svgd+frobenius,bilstm"),
    ("graph2text", "smooth,svgd-relative,cosine-penalty:alpha=0.01,step_size=1,output"),
]
# What the console says of the data, and a score that a baseline has at least.
SAID = {
    "classification": ("texts: 96 train, 18 dev, 18 test", "labels neg, pos"),
    "probing": ("training and dev are nine tenths and one of va",),
}
REACHED = {
    "classification": ("counts", "accuracy", 0),
    "probing": ("counts", "accuracy", 90),
    "sentence": ("nb-lr", "AUC-ROC", 0.9),
    "graph2text": ("nearest", "coverage", 90),
}


@pytest.fixture(autouse=True)
def parser(monkeypatch: pytest.MonkeyPatch) -> None:
    parse_without_spacy(monkeypatch)
    translation_toy.parse_without_spacy(monkeypatch)


def make_pipeline(place: Path) -> Path:
    """Any folder is a pipeline to the parsers of these tests."""
    (place / "pipeline").mkdir()
    return place / "pipeline"


def test_every_task_has_a_toy():
    assert {"sentence" if name == "pairs" else name for name in TOYS} == {*TASKS}


@pytest.mark.usefixtures("inline")
@tiers(("task", "arms"), COMPARED, MORE_COMPARED, MOST_COMPARED)
def test_every_kind_of_arm_trains_on_a_file_of_ones_own(task: str, arms: str, tmp_path: Path):
    sizes = {"pipeline": make_pipeline(tmp_path)} if task == "classification" else {}
    settings, own = toy_run(task, tmp_path / "data", epochs=1, **sizes), named_task(task)
    console, out, parsed = Console(record=True, width=200), tmp_path / "out", tuple(parse_arms(arms))
    assert compare(Comparison(task, parsed, (0,), settings.scale, out, settings.data), console) == []
    said = console.export_text()
    assert all(words in said for words in SAID.get(task, ()))
    rows = {row["arm"]: row for row in json.loads((out / "results.json").read_text())["rows"]}
    assert set(rows) == {*own.baselines, *(arm.name for arm in parsed)}
    baseline, score, least = REACHED[task]
    answered = rows[baseline]["answered"] | {"accuracy": 100 * rows[baseline]["score"]["value"]}
    assert answered[score] > least
    for arm in parsed:
        row, bare = rows[arm.name], arm.name in ("bilstm", "cnn", "no-graph")
        assert (row["measures"]["output_cosine"] is None) == bare, arm
        assert {one.key for one in own.shown} <= set(row["answered"]), arm
        assert row["control"] == arm.control, arm
        if arm.name in ("svgd-relative", "svgd-function"):
            assert row["measures"]["force_ratio"] == pytest.approx(0.1, rel=1e-3)
        if task == "graph2text":
            assert len((out / arm.folder / "seed-0" / "predictions.txt").read_text().splitlines()) == 6


@tiers(("task", "arm", "stopped"), STOPS, MORE_STOPS, MOST_STOPS)
def test_a_run_stopped_in_the_middle_goes_on_to_the_same_bits(task: str, arm: str, stopped: int, tmp_path: Path):
    sizes = {"heads": 4, "encoder_layers": 2} if (task, "roles=" in arm) == ("translation", True) else {}
    if task == "classification" or sizes:
        sizes["pipeline"] = make_pipeline(tmp_path)
    settings = toy_run(task, tmp_path / "data", arm, **sizes)
    if task in ("lm", "pretraining"):
        rows = named_task(task).load(settings.data, settings.scale, None).shards[0]
        assert stopped * settings.scale.batch_size % rows, "the stop is inside a shard"
    assert_goes_on_to_the_same_bits(settings, tmp_path, stopped=stopped)


@tiers("task", *thin(TOYS, 4))
def test_arms_of_a_seed_begin_with_the_same_parameters_and_read_the_same_batches(task: str, tmp_path: Path):
    settings = toy_run(task, tmp_path)
    own = named_task(settings.task)
    data = own.load(settings.data, settings.scale, settings.cache)
    one, other, third = (
        attach_arm(own, parse_arm(arm), data, settings.scale, seed=seed)[0]
        for arm, seed in (("plain", 3), ("svgd", 3), ("plain", 4))
    )
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), third.parameters(), strict=True))
    first, again, later = ([*islice(own.batches(data, settings.scale, seed), 3)] for seed in (5, 5, 6))
    assert first == again
    assert first != later


@cases("task", sorted({*TASKS} - {"logic", "facts"}))
def test_a_task_without_data_says_what_it_reads(task: str):
    said = {
        "classification": "a set's folder",
        "glue": "the folder of one of GLUE's sets",
        "lm": r"a file or a folder of files: \.txt",
        "pretraining": r"a file or a folder of files: \.txt",
        "probing": "the file of one task",
        "translation": "a folder with the files of multi30k",
    }
    with pytest.raises(DataError, match=f"{task} needs --data: {said.get(task, '')}"):
        named_task(task).load(None, TOYS[task][0], None)
