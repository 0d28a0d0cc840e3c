"""Runs of classification whose heads have roles, read again from their folders: lines in no data get the same masks."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from cases import cases
from headwise.errors import DataError
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.frozen.open import open_frozen
from headwise_lab.frozen.vectors import encodings, fingerprint
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES
from headwise_lab.training.train import train_run
from headwise_lab.training.trained import Trained, load_trained
from lab.command import call
from lab.sealing import seal_again
from lab.tasks.sentence.sentence_sets import sentence

pytestmark = pytest.mark.full

spacy = pytest.importorskip("spacy")

SIZES = {"width": 12, "heads": 6, "head_size": 3, "hidden": 8, "epochs": 1, "warmup_steps": 1, "batch_size": 16}
COUNT = 120
ARMS = {
    "roles": "guided",
    "dropped": "em:layers=0,capsules=4+guided:roles=window/major/separator,drop=major",
    "unparsed": "guided:roles=rare/window",
    "random": "random-mask",
    "shuffled": "shuffled-parse",
    "plain": "plain",
}
Run = Callable[..., tuple[Path, RunSettings]]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline whose parses are drawn, so that no role follows from the words alone."""
    nlp = spacy.blank("en")
    parser = nlp.add_pipe("parser")
    for label in ("ROOT", "nsubj", "amod", "punct"):
        parser.add_label(label)
    nlp.initialize()
    folder = tmp_path_factory.mktemp("pipeline") / "drawn"
    nlp.to_disk(folder)
    return folder


def lines_of(attached: bool) -> list[str]:
    """Texts with three commas, and marks that stand apart from words or not."""
    lines = [sentence(number, str(number % 2)).replace(" the ", " the , ") for number in range(COUNT)]
    return [line.replace(" ,", ",").replace(" .", ".") for line in lines] if attached else lines


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory, pipeline: Path) -> Run:
    """Gives the folder of a finished run of an arm, and its settings."""
    done: dict[tuple[str, bool, bool], tuple[Path, RunSettings]] = {}

    def made(name: str, *, attached: bool = False, parsed: bool = True) -> tuple[Path, RunSettings]:
        if (name, attached, parsed) not in done:
            place = tmp_path_factory.mktemp(name)
            texts = "".join(f"{number % 2}\t{line}\n" for number, line in enumerate(lines_of(attached)))
            (place / "mine.tsv").write_text(texts)
            scale = dataclasses.replace(CLASSIFICATION_SCALES["demo"], **SIZES, min_count=1, train_examples=None)
            scale = dataclasses.replace(scale, max_words=9, pipeline=pipeline if parsed else None)
            arm = parse_arm(ARMS[name])
            settings = RunSettings("classification", scale, arm, 3, data=place / "mine.tsv", cache=place / "cache")
            train_run(settings, place / "arm" / "seed-3")
            done[name, attached, parsed] = place / "arm" / "seed-3", settings
        return done[name, attached, parsed]

    return made


def states_of(trained: Trained, numbers: list[int]) -> dict[int, Tensor]:
    """What the encoder of a trained model makes of texts of its data."""
    seen: list[Tensor] = []
    handle = trained.model.encoder.register_forward_hook(lambda _module, _given, states: seen.append(states))
    data, device = trained.data, next(trained.model.parameters()).device
    known = {word: place for place, word in enumerate(data.vocabulary)}
    for number in numbers:
        words = [data.texts.types[word].lower() for word in data.texts.words[0][number]]
        tokens = torch.tensor([[2, *(known.get(word, 1) for word in words), 3]], device=device)
        trained.model(tokens=tokens, numbers=torch.tensor([number]))
    handle.remove()
    return dict(zip(numbers, (one[0] for one in seen), strict=True))


def said_of(frozen: Any, lines: list[str]) -> dict[int, Tensor]:
    found = {}
    for batch in frozen.read(lines):
        output = frozen.run(batch)
        found |= {place: output[row][batch.keep[row]] for row, place in enumerate(batch.places)}
    return found


@cases(
    ("name", "given"),
    [
        ("roles", {}),
        ("roles", {"attached": True}),
        ("dropped", {}),
        ("unparsed", {"parsed": False}),
        ("unparsed", {"attached": True}),
        ("plain", {"attached": True, "parsed": False}),
    ],
)
def test_lines_have_the_states_that_the_texts_of_the_data_had(name, given, run_of):
    folder, settings = run_of(name, **given)
    lines, numbers = lines_of(given.get("attached", False)), list(range(0, COUNT, 3))
    trained = load_trained(settings, folder)
    with torch.no_grad():
        expected = states_of(trained, numbers)
        found = said_of(open_frozen(folder), [lines[number] for number in numbers])
    for place, number in enumerate(numbers):
        torch.testing.assert_close(found[place], expected[number], atol=1e-5, rtol=1e-4)


def test_a_guided_run_is_probed_with_its_roles(run_of, tmp_path):
    folder, settings = run_of("roles")
    lines = lines_of(False)[:40]
    frozen, trained = open_frozen(folder), load_trained(settings, folder)
    found = encodings(frozen, lines, tmp_path / "cache", model=fingerprint(frozen))
    with torch.no_grad():
        expected = states_of(trained, list(range(40)))
    for number in (0, 17, 39):
        last = torch.tensor(found.layers[-1][number])
        torch.testing.assert_close(last, expected[number].mean(0), atol=1e-5, rtol=1e-4)
    counts = folder / "idf.json"
    before = fingerprint(frozen)
    counts.write_text(counts.read_text() + "\n")
    with pytest.raises(DataError, match=r"idf\.json was changed since it was written"):
        open_frozen(folder)
    seal_again(folder)
    assert fingerprint(open_frozen(folder)) != before
    counts.write_text(counts.read_text()[:-1])
    seal_again(folder)


def test_a_random_mask_is_drawn_by_the_words_alone(run_of):
    folder, settings = run_of("random")
    lines = lines_of(False)
    trained = load_trained(settings, folder)
    with torch.no_grad():
        whole = said_of(open_frozen(folder), lines[:40])
        part = said_of(open_frozen(folder), [lines[7], lines[5]])
        # the data has another draw
        assert not torch.allclose(states_of(trained, [5])[5], part[1], atol=1e-4)
    torch.testing.assert_close(part[0], whole[7], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(part[1], whole[5], atol=1e-5, rtol=1e-4)


def test_guided_heads_are_measured_in_their_roles(run_of, pipeline, tmp_path):
    folder, _ = run_of("roles")
    (tmp_path / "text.txt").write_text("".join(f"{line}\n" for line in lines_of(False)[:20]))
    out = tmp_path / "out"
    asked = ["inspect", str(folder), "--text", str(tmp_path / "text.txt"), "--out", str(out)]
    assert call(*asked, "--pipeline", str(pipeline), "--exact") == 0
    report = hw.report.load_report(out / "report.json")
    assert report.whole is not None
    assert report.whole.value == pytest.approx(1.0)
    assert report.replayed
    for layer in report.layers:
        # the role of a head is where all its attention is; no row of these three is empty
        for name in ("separator", "dependency", "window"):
            role = report.roles.index(name)
            assert layer.roles[role][role] == pytest.approx(1.0, abs=1e-6)
            assert layer.roles[role][5] < 0.9
        assert all(drop.value > 0 for drop in layer.drops)


def test_a_run_keeps_how_rare_its_training_words_are_and_what_parsed_them(run_of, pipeline):
    folder, settings = run_of("roles")
    data = load_trained(settings, folder).data
    kept, counted = hw.roles.IDF.load(folder / "idf.json"), hw.roles.idf(data.words(data.train))
    for word in ("the", "lovely", ".", "never-seen", *map(str, range(30))):
        assert kept(word) == counted(word)
    assert kept("the") < kept("lovely") < kept("never-seen")
    assert json.loads((folder / "roles.json").read_text())["pipeline"] == str(pipeline.resolve())
    for name, given in (("unparsed", {"parsed": False}), ("plain", {})):
        assert (run_of(name, **given)[0] / "roles.json").is_file() == (name == "unparsed")


def test_a_run_whose_masks_cannot_be_made_again_is_refused(run_of, pipeline, tmp_path):
    def refused(folder: Path, *pipeline: Path) -> str:
        seal_again(folder)
        with pytest.raises(DataError) as refusal:
            open_frozen(folder, *pipeline)
        return str(refusal.value)

    assert "roles are from parses of other training sentences" in refused(run_of("shuffled")[0])
    other, moved = tmp_path / "other", tmp_path / "moved"
    for copy in (other, moved):
        shutil.copytree(pipeline, copy)
    (other / "meta.json").write_text((other / "meta.json").read_text().replace("0.0.0", "0.0.1"))
    run = Path(shutil.copytree(run_of("roles")[0], tmp_path / "run"))
    assert f"{other} is not the pipeline that parsed the texts of {run}" in refused(run, other)
    assert len(list(open_frozen(run, moved).read(["the food is here ."]))) == 1
    record = json.loads((run / "roles.json").read_text())
    (run / "roles.json").write_text(json.dumps({**record, "pipeline": str(tmp_path / "gone")}))
    assert f"{tmp_path / 'gone'}, the pipeline that parsed the run's texts, does not exist any more" in refused(run)
    assert len(list(open_frozen(run, moved).read(["the food is here ."]))) == 1
    (run / "roles.json").write_text(json.dumps({**record, "pipeline": None}))
    assert "roles.json names no pipeline; name the one that parsed" in refused(run)
    (run / "roles.json").write_text(json.dumps({"pipeline": str(pipeline)}))
    assert "roles.json does not name the pipeline of the run's texts" in refused(run)
    (run / "idf.json").unlink()
    assert f"{run / 'idf.json'} is missing" in refused(run)
    # where nothing was parsed a pipeline is for what is measured
    assert open_frozen(run_of("unparsed", parsed=False)[0], other).heads
