"""`headwise translate` on runs whose heads have roles: with the run's own roles, or refused in a sentence."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from pathlib import Path
from typing import ClassVar

import pytest

import headwise as hw
from headwise.errors import DataError
from headwise.roles import spacy as bridge
from headwise.texts.frozen import Fidelity
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.run_folder import read_json
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.frozen.open import open_frozen
from headwise_lab.tasks.translation import decoding
from headwise_lab.tasks.translation.model import build_model
from headwise_lab.tasks.translation.task import TranslationTask
from headwise_lab.tasks.translation.translator import Translator, open_translator
from headwise_lab.training.train import train_run
from headwise_lab.training.trained import read_arm, restore_run
from lab import command
from lab.sealing import seal_again
from lab.sentences import parsed
from lab.streamed import answered
from lab.tasks.test_line_commands import lines_of
from lab.tasks.translation.translation_toy import TOY, WORDS

pytestmark = pytest.mark.full

ARMS = {
    "roles": "guided:roles=rare/separator/window",
    "random": "random-mask:roles=rare/window",
    "parsed": "guided:roles=window/major/dependency+trunk:layers=0,kinds=cross",
    "shuffled": "shuffled-parse:roles=major/dependency",
}


class Parser:
    """A parser without spaCy, with its memory."""

    kept: ClassVar[set[str]] = set()

    def __init__(self, pipeline: str, cache: Path | None = None, *, progress: bool = True) -> None:
        assert Path(pipeline, "meta.json").exists()
        assert progress == (cache is not None)

    def __call__(self, texts):
        self.kept.update(texts)
        return [parsed(text.split()) for text in texts]

    def forget(self) -> None:
        self.kept.clear()


@pytest.fixture(scope="module", autouse=True)
def parse_texts_without_spacy():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bridge, "Parser", Parser)
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of each arm, "corpus" and "pipeline"."""
    place, draw = tmp_path_factory.mktemp("runs"), random.Random(5)
    (place / "corpus").mkdir()
    for name, size in (("train", 200), ("val", 20), ("test_2016_flickr", 30)):
        source = [draw.choices(list(WORDS), k=draw.randint(2, 9)) for _ in range(size)]
        for language, words in (("en", {word: word for word in WORDS}), ("de", WORDS)):
            text = "".join(" ".join(words[word] for word in line) + "\n" for line in source)
            (place / "corpus" / f"{name}.{language}").write_text(text)
    (place / "pipeline").mkdir()
    (place / "pipeline" / "config.cfg").touch()
    (place / "pipeline" / "meta.json").write_text('{"lang": "en"}')
    better = {"width": 32, "heads": 4, "train_examples": 200, "learning_rate": 1e-2, "dropout": 0.0, "beams": 3}
    for name, arm in ARMS.items():
        scale = dataclasses.replace(TOY, **better, epochs=2 if name == "shuffled" else 4)
        if name in ("parsed", "shuffled"):
            scale = dataclasses.replace(scale, pipeline=place / "pipeline")
        run = RunSettings("translation", scale, parse_arm(arm), seed=3, data=place / "corpus", cache=place / "cache")
        data = TranslationTask().load(run.data, scale, run.cache)
        train_run(dataclasses.replace(run, fingerprint=data.fingerprint), place / name)
    return place


def sources(place: Path) -> list[str]:
    return (place / "corpus" / "test_2016_flickr.en").read_text().splitlines()[: TOY.test_examples]


def expected(run: Path) -> list[str]:
    return (run / "predictions.txt").read_text().split("\n")[:-1]


@pytest.mark.parametrize("name", ["roles", "random", "parsed"])
def test_a_run_with_roles_translates_its_test_set_as_it_did_when_it_was_tested(place, name):
    found = expected(place / name)
    assert len(set(found)) > 3
    given = "".join(f"{line}\n\n" for line in sources(place)).encode()
    # blank lines, and sources in other batches
    assert lines_of(place / name, given, batch=3) == ([line for one in found for line in (one, "")], [])
    own = open_translator(place / name)
    arm = read_arm(place / name, read_json(place / name / "settings.json"))
    model = build_model(dataclasses.replace(TOY, width=32, heads=4), own.subwords.vocabulary_size)
    restore_run(place / name, arm, model, TranslationTask(), seed=3)
    free = Translator(model, own.subwords, own.scale)
    assert free.translate(free.encode(sources(place))) != found


def test_the_command_translates_with_roles(place):
    given = "".join(f"{line}\n" for line in ["", *sources(place)]).encode()
    asked = answered("translate", given, str(place / "roles"), "--batch", "4", "--window", "5")
    assert asked == (0, ["", *expected(place / "roles")], "")
    code, lines, said = answered("translate", given, str(place / "shuffled"))
    assert (code, lines) == (2, [])
    assert said == (
        f"headwise: {place / 'shuffled'} holds a control whose roles are from parses of other training sentences, "
        "which a run does not keep; its answers on the test set are in the folder.\n"
    )


def test_nothing_is_kept_of_the_lines_that_were_translated(place):
    translator = open_translator(place / "parsed")
    ids = translator.encode(sources(place))
    translator.translate(ids)
    assert not translator.masks.sources._ids
    assert not translator.masks.sources._tables
    assert not translator.masks.masks._kept
    assert not Parser.kept
    assert translator.translate(ids) == expected(place / "parsed")


def test_a_line_too_long_is_cut_inside_a_word_and_translated(place, monkeypatch):
    translator = open_translator(place / "parsed", beams=1)
    monkeypatch.setattr(decoding, "LONGEST", 20)
    long = translator.encode(["redrunsdogsmallseestwo " * 10])[0]
    for size in (17, 18, 19):
        assert translator.translate([long[:size]])[0]


def test_the_pipeline_is_remembered_or_named_and_has_to_be_the_same(place, tmp_path):
    run, folder = tmp_path / "run", tmp_path / "pipeline"
    shutil.copytree(place / "parsed", run)
    shutil.copytree(place / "pipeline", folder)
    assert open_translator(run).masks is not None
    assert lines_of(run, b"red dog\n", pipeline=folder) == lines_of(place / "parsed", b"red dog\n")
    (folder / "meta.json").write_text('{"lang": "de"}')

    def refused(run: Path, **given) -> str:
        with pytest.raises(DataError) as refusal:
            open_translator(run, **given)
        return str(refusal.value)

    assert f"{folder} is not the pipeline that parsed the texts of {run}" in refused(run, pipeline=folder)
    assert "nowhere does not exist; expected a spaCy pipeline" in refused(run, pipeline=tmp_path / "nowhere")
    for name in ("roles.json", "idf.json"):
        (run / name).unlink()
        assert f"{run / name} is missing; a run with roles keeps it when it ends" in refused(run)


def test_a_pipeline_is_no_matter_of_sources_that_were_not_parsed(place, tmp_path, capsys):
    record = read_json(place / "roles" / "settings.json")
    shutil.copytree(place / "roles", tmp_path / "free")
    (tmp_path / "free" / "settings.json").write_text(json.dumps({**record, "arm": {**record["arm"], "methods": []}}))
    seal_again(tmp_path / "free")
    for run in (place / "roles", tmp_path / "free"):
        said = command.refused(capsys, "translate", str(run), "--pipeline", str(place / "pipeline"))
        assert said == f"headwise: the sources of {run} were not parsed; leave --pipeline out.\n"


@pytest.mark.parametrize("name", ["roles", "parsed"])
def test_heads_with_roles_are_measured_with_them(name, place):
    frozen = open_frozen(place / name)
    batches = [*frozen.read(sources(place))]

    def measured(*, replay: bool) -> hw.report.Report:
        return hw.measure(
            frozen.heads,
            batches,
            score=Fidelity(),
            forward=lambda _model, batch: frozen.run(batch),
            replay=replay,
        )

    fast, slow = measured(replay=True), measured(replay=False)
    assert (fast.replayed, slow.replayed) == (True, False)
    for one, other in zip(fast.layers, slow.layers, strict=True):
        assert [drop.value for drop in one.drops] == pytest.approx([drop.value for drop in other.drops], abs=1e-6)
        assert all(drop.value > 0 for drop in one.drops)
