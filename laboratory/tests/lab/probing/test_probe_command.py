"""The command `headwise probe`: what it refuses before anything is written, and where its results lie."""

from __future__ import annotations

import dataclasses
import json
from inspect import signature
from pathlib import Path

import pytest

from headwise_lab.cli.commands import probe
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.frozen import vectors
from headwise_lab.frozen.open import open_frozen
from headwise_lab.probing import fit, run
from headwise_lab.probing.fit import FORM
from headwise_lab.probing.request import SENTENCES
from headwise_lab.tasks.sentence.scales import SENTENCE_SCALES
from headwise_lab.training.train import train_run
from lab.command import call
from lab.tasks.classification.probing_toy import write_bert, write_probing


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("models") / "bert")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence of a call that must end with code 2, behind the progress bar of transformers."""
    assert call(*arguments) == 2
    *_, error = capsys.readouterr().err.strip().splitlines()
    assert error.startswith("headwise: ")
    return error


@pytest.fixture
def words(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that probes two small tasks, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for number, name in enumerate(("past_present", "tree_depth")):
        write_probing(tmp_path / "data" / f"{name}.txt", {"tr": 60, "va": 20, "te": 30}, seed=number)
    return ["probe", str(bert), "--data", "data", "--workers", "1"]


def test_a_wrong_command_is_refused_before_anything_is_encoded_or_written(words, capsys, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(run, "encodings", lambda *_given, **_named: pytest.fail("encoded"))
        for options, said in (
            (("--layers", "99"), "--layers has '99'; expected all, none, or some of emb, 0, 1"),
            (("--heads", "0.7"), "--heads has '0.7'"),
            (("--layers", "none", "--heads", "none"), "--layers and --heads are both none"),
            (
                ("--task", "all,past_present"),
                "--task is 'all,past_present'; expected all, or names of files without it",
            ),
            (("--task", "word_content"), "word_content does not exist"),
            (("--data", "data/past_present.txt", "--task", "tree_depth"), "and --task is tree_depth; name its folder"),
            (("--workers", "0"), "--workers is 0; expected an integer of at least 1"),
            (("--workers", "-3"), "--workers is -3; expected an integer of at least 1"),
            (("--classifier", "forest"), "classifier is 'forest'"),
            (("--sentences", "5"), "no dev sentence is left; raise --sentences"),
            (("--out", "runs/probe/cache"), "is the folder of --cache, which may be removed"),
        ):
            assert said in refused(capsys, *words, "--out", "out", *options)
    for name in ("settings", "config", "comparison"):
        write_probing(Path("data") / f"{name}.txt", {"tr": 60, "va": 20, "te": 30})
        said = refused(capsys, *words[:3], f"data/{name}.txt")
        assert f"its results cannot be called {name}.json; rename the file" in said
    assert [path.name for path in Path("runs/probe").iterdir()] == ["cache"]
    assert not Path("out").exists()


def test_results_of_other_sentences_are_not_shown_for_those_of_this_file(words, capsys):
    quick = [*words, "--heads", "none", "--layers", "emb", "--out", "out"]
    assert call(*quick, "--task", "tree_depth") == 0
    place = Path("out/tree_depth.json")
    before = place.read_text()
    write_probing(Path("data/tree_depth.txt"), {"tr": 60, "va": 20, "te": 30}, seed=9)
    said = refused(capsys, *quick)
    record = json.loads(before)
    assert f"{place} is about other sentences (digest {record['data']}) than those of data/tree_depth.txt" in said
    assert "choose another --out" in said
    assert place.read_text() == before
    assert not Path("out/past_present.json").exists()
    assert call(*quick, "--task", "past_present") == 0
    # a result that does not name its data is refused
    place.write_text(json.dumps({name: value for name, value in record.items() if name != "data"}))
    assert "tree_depth.json is not the result of a probe" in refused(capsys, *quick)


def test_commands_with_other_options_follow_one_another_in_folders_of_their_own(words, capsys):
    quick = [*words, "--task", "tree_depth"]
    assert call(*quick, "--layers", "none", "--heads", "0.1,0.1+1.0", "--sentences", "0", "--seed", "3") == 0
    # the same layers in other words are the same probe
    for layers in ("emb, 1", "emb,1"):
        assert call(*quick, "--layers", layers, "--heads", "none") == 0
    assert call(*quick, "--data", "data/tree_depth.txt", "--layers", "0", "--heads", "0.0") == 0
    assert sorted(path.name for path in Path("runs/probe").iterdir()) == [
        "bert-layers_0-heads_0.0",
        "bert-layers_emb,1-heads_none",
        "bert-layers_none-heads_0.1,0.1+1.0-sentences_all-seed_3",
        "cache",
    ]
    assert Path("runs/probe/bert-layers_0-heads_0.0/tree_depth.json").is_file()
    settings = Path("runs/probe/bert-layers_emb,1-heads_none/settings.json")
    settings.write_text(settings.read_text().replace(FORM, "fit-1"))
    said = refused(capsys, *words, "--heads", "none", "--layers", "emb,1")
    assert f"settings.json has form 'fit-1' but '{FORM}' is requested; choose another --out" in said
    assert signature(probe).parameters["sentences"].default == SENTENCES


def test_classifiers_that_did_not_come_to_their_end_are_counted(words, monkeypatch, capsys):
    quick = [*words, "--task", "past_present", "--heads", "none"]
    assert call(*quick, "--out", "whole") == 0
    assert "limit of iterations" not in Path("whole/probe.md").read_text()
    monkeypatch.setattr(fit, "ITERATIONS", 1)
    assert call(*quick, "--out", "short") == 0
    said = "Tense: 3 of 3 classifiers ended at their limit of iterations."
    assert said in Path("short/probe.md").read_text()
    assert said in capsys.readouterr().out


def test_a_folder_of_something_else_is_not_written_to(words, capsys):
    files = {
        "config.json": "{}",
        "model.safetensors": "{}",
        "comparison.json": "{}",
        "settings.json": '{"task": "logic"}',
    }
    for name, content in files.items():
        place = Path(f"of-{name}")
        place.mkdir()
        (place / name).write_text(content)
        said = refused(capsys, *words, "--out", str(place))
        assert f"{place} holds a model or runs ({name}); choose another --out" in said
        assert [path.name for path in place.iterdir()] == [name]


def test_a_run_of_sentence_has_heads_and_no_layers(words, tmp_path, capsys):
    rows = Path("data/past_present.txt").read_text().splitlines()
    Path("own.tsv").write_text("".join("\t".join(row.split("\t")[1::2]) + "\n" for row in rows))
    toy = dataclasses.replace(SENTENCE_SCALES["demo"], name="toy", width=8, epochs=1)
    place = tmp_path / "plain" / "seed-0"
    train_run(RunSettings("sentence", toy, parse_arm("plain"), seed=0, data=Path("own.tsv")), place)
    command = ["probe", str(place), *words[2:], "--task", "tree_depth"]
    assert "have no state in each layer; give --layers none to probe its heads" in refused(capsys, *command)
    assert call(*command, "--layers", "none") == 0
    record = json.loads(Path("runs/probe/plain-seed-0-layers_none/tree_depth.json").read_text())
    frozen = open_frozen(place)
    (heads,) = vectors.find_shape(frozen).heads
    assert [one["name"] for one in record["found"]] == [f"0.{head}" for head in range(heads)]
    # a head that pools has one vector a text, and the run puts out what its heads pooled
    texts = ["the film walked .", "a town"]
    found = vectors.encodings(frozen, texts, tmp_path / "cache", model="m")
    assert found.layers is None
    assert len(found.heads[0]) == 2
    alone = vectors.encodings(frozen, texts[1:], tmp_path / "cache", model="m")
    assert found.heads[0][1] == pytest.approx(alone.heads[0][0], abs=1e-6)
    assert found.heads[0][1] != pytest.approx(found.heads[0][0], abs=1e-3)
