"""What a command says and leaves when it cannot do its work: without the laboratory, or with bad input."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headwise.cli.stopping import stoppable
from headwise.errors import DataError
from headwise_lab.tasks.logic.task import LogicTask
from headwise_lab.tasks.translation.corpora import CORPORA
from lab.cli.tiny_models import write_models
from lab.command import refused
from lab.sentences import write_sentences
from lab.tasks.logic.logic_toy import TOY

# Finds no module of a name.
BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if {blocked!r} in (name, name.partition(".")[0]):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
sys.argv = ["headwise", *{arguments!r}]
from headwise.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("blocked", "arguments", "said"),
    [
        ("typer", ["--help"], "pip install 'headwise[cli]'.\n"),
        ("headwise.cli.main", [], "ModuleNotFoundError: No module named 'headwise.cli.main'\n"),
        pytest.param(
            "scipy", ["compare", "logic", "--data", "missing"], "pip install headwise-lab.\n", marks=pytest.mark.full
        ),
        pytest.param(
            "transformers",
            ["inspect", "model", "--text", "text.txt"],
            "pip install 'headwise[cli]'.\n",
            marks=pytest.mark.full,
        ),
    ],
)
def test_where_a_package_is_missing_the_command_says_what_to_install(tmp_path, blocked, arguments, said):
    script = BLOCKED.format(blocked=blocked, arguments=arguments)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr.endswith(said)
    # a module of headwise that is missing is a defect
    if not blocked.startswith("headwise"):
        assert done.returncode == 2
        assert done.stderr == f"headwise: {blocked} is not installed, and the command needs it: {said}"
    assert list(tmp_path.iterdir()) == []


# What is typed, and a part of the sentence that refuses it.
SHRINK = "models/llama --text models/text.txt --out deep/out"
OWN = "compare classification --data mine.tsv --seeds 1 --out deep/out"
REFUSALS = (
    ("campare logic", "no such command 'campare'"),
    ("compare", "missing argument 'task'; see headwise compare --help.\n"),
    ("compare logik", "there is no task 'logik'; did you mean logic? (all: logic, translation, "),
    ("compare logic --arms plain,svdg", "there is no arm 'svdg'; did you mean svgd"),
    ("compare logic --arms svgd:layers=9 --out deep/out", "layers"),
    ("compare logic --scale dem", "there is no scale 'dem'; did you mean demo?"),
    ("compare logic --sedes 3", "no such option: --sedes"),
    ("compare logic --seeds many", "invalid value for '--seeds'"),
    ("compare logic --seeds 0 -q", "headwise: --seeds is 0; expected at least 1.\n"),
    ("compare logic --workers 0", "workers is 0"),
    ("compare logic --folds 5", "task logic takes no --folds"),
    ("compare logic --lora r=8", "task logic takes no --lora; omit it."),
    ("compare logic --launch a", "--launch is 'a'; expected NAME=VALUE"),
    ("compare logic --data missing --out deep/out", "missing does not exist"),
    ("compare logic --out file/out", "cannot write to file/out"),
    ("compare logic --report-to paper", "report_to is 'paper'; expected one of wandb"),
    ("compare classification --out deep/out", "classification needs --data"),
    (f"{OWN} --arms plain,guided", "need parses; name"),
    (f"{OWN} --pipeline nowhere", "nowhere does not exist; expected a spaCy pipeline"),
    (f"{OWN} --set heads", "--set heads: expected size=value"),
    ("compare translation --data pairs:de-en --out deep/out", "train.de"),
    ("compare --config nowhere.toml", "nowhere.toml cannot be read"),
    ("compare --config bad.toml", "bad.toml is not readable as TOML"),
    ("compare --config other.toml", "other.toml names sedes; expected options of headwise compare"),
    ("compare --config wrong.toml", "invalid value for '--seeds'"),
    ("compare --config pipe.toml", "pipe.toml is a pipe; expected a file"),
    ("data classification --data none.tsv", "headwise: none.tsv "),
    ("tune logic svgd:alfa=1", "arm svgd has no setting 'alfa'"),
    ("tune logic svgd --draws 0", "draws is 0"),
    ("tune logic svgd --data missing --out deep/out", "missing does not exist"),
    ("prepare logic --out o --json", "no such option: --json"),
    ("prepare logic --out deep/out", "logic needs no preparation; give its data to headwise compare logic --data."),
    ("prepare lm --out deep/out", "prepare needs --data."),
    ("prepare translation --data pairs:de-en --out deep/out", "train.de"),
    ("prepare pretraining --data pairs --out deep/out", "pairs"),
    ("reproduce diversify/table-9", "there is no reproduction 'diversify/table-9'; did you mean diversify/table-"),
    ("reproduce diversify/figure-4 --scale gpu", "there is no scale 'gpu'"),
    ("reproduce diversify/figure-4 --seeds 0", "--seeds is 0"),
    ("reproduce diversify/figure-4 --scale demo --part all", "has one part alone: leave --part out"),
    (
        "reproduce diversify/figure-4 --resume",
        "--resume takes over the runs of a record",
    ),
    (
        "reproduce diversify/figure-4 --from paper --seeds 2 --part a --set b=1 --dry-run --workers 3",
        "--from trains nothing; leave out --dry-run, --part, --seeds, --set, --workers.\n",
    ),
    ("reproduce repulsive/table-6 --scale demo", "translation needs --data"),
    ("reproduce guided/table-3 --data nowhere", "nowhere/cr does not exist"),
    ("probe missing --data pairs --out deep/out --cache deep/cache", "pairs"),
    ("probe missing --data pairs --task word", "there is no probing task 'word'"),
    ("probe missing --data pairs --workers 0", "--workers is 0"),
    ("rate one other --data pairs --out deep/out", "one"),
    ("rate out/plain/seed-0 out/../out/plain/seed-0 --data d", "RUN and AGAINST are both out/plain/seed-0"),
    ("show pairs --csv --latex", "expected one of --csv, --latex"),
    ("show pairs", "pairs holds no comparison"),
    ("show nowhere", "nowhere holds no comparison"),
    ("inspect missing --text file", "missing does not exist; expected a folder of save_pretrained()"),
    ("inspect pairs --text file", "holds no config.json"),
    ("inspect empty --text file", "cannot be loaded by transformers"),
    ("inspect models/bert --text file", "holds no text"),
    ("inspect models/bert --text bytes.txt", "bytes.txt, line 1: not UTF-8"),
    ("inspect models/bert --text absent.txt", "absent.txt"),
    ("inspect run --text file", "a run of chess; expected one of logic, translation, classification"),
    ("prune run --text models/text.txt --out deep/out", "keeps no model in the format of Hugging Face"),
    (f"prune {SHRINK} --by size", "there is no --by 'size'"),
    (f"prune {SHRINK} --keep 1.5", "invalid value for '--keep'"),
    ("prune models/llama --text models/text.txt --out pairs", "is not an empty folder"),
    ("prune models/llama --text line.txt --out deep/out", "has 1 lines; expected at least 2"),
    (f"merge {SHRINK} --kv-heads 3", "expected one of 1, 2"),
    (f"merge {SHRINK} --kv-heads 4", "has 4 key/value heads; expected fewer"),
)
# Values of the wrong type in a file of options.
ODD = ("set = 5", "set = [1]", 'launch = "a=1"', "data = [[1]]", "arms = {}", "seeds = 2020-01-01")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with what the commands are told to read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LogicTask, "scales", {**LogicTask.scales, "demo": dataclasses.replace(TOY, name="demo")})
    write_models(tmp_path / "models")
    write_sentences(Path("mine.tsv"), 80)
    for name, text in {
        "pairs/train.de": "ein hund\n",
        "pairs/train.en": "a dog\ntwo\n",
        "empty/config.json": "{}",
        "run/settings.json": '{"task": "chess"}',
        "file": "\n\n",
        "line.txt": "a b c",
        "bad.toml": "task = [",
        "other.toml": 'task = "logic"\nsedes = 3\n',
        "wrong.toml": 'task = "logic"\nseeds = "many"\n',
    }.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    Path("bytes.txt").write_bytes(b"abc\xff")
    os.mkfifo("pipe.toml")
    return tmp_path


def test_a_refused_command_says_one_sentence_and_leaves_no_empty_folder(place: Path, capsys):
    before, wrong = {*place.rglob("*")}, []
    for words, said in REFUSALS:
        error = refused(capsys, *shlex.split(words))
        if said not in error:
            wrong.append((words, error))
        left = {*place.rglob("*")} - before
        # data that was prepared is kept
        if any(path.suffix != ".npz" if path.is_file() else not any(path.iterdir()) for path in left):
            wrong.append((words, str(left)))
        shutil.rmtree("deep", ignore_errors=True)
    for text in ODD:
        Path("odd.toml").write_text(f"{text}\n")
        if f"odd.toml: {text.partition(' ')[0]} is " not in refused(capsys, "compare", "--config", "odd.toml"):
            wrong.append((text, ""))
    assert not wrong, "\n".join(map(str, wrong))


def test_a_download_that_fails_leaves_no_empty_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def unreachable(*_arguments: object, **_options: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("headwise_lab.data.downloads.urllib.request.urlopen", unreachable)
    assert CORPORA["multi30k"].downloads
    assert "no network" in refused(capsys, "download", "multi30k", "--out", "deep/out")
    assert not (tmp_path / "deep").exists()


def test_folders_of_the_user_and_what_was_written_stay(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "mine").mkdir(parents=True)
    refused(capsys, "compare", "logic", "--data", "missing", "--out", "out")
    assert (tmp_path / "out" / "mine").is_dir()

    def fail() -> None:
        with stoppable(folders=[tmp_path / "new"]):
            (tmp_path / "new" / "empty" / "deeper").mkdir(parents=True)
            (tmp_path / "new" / "file").touch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]
    # before all of its folders are looked at
    with pytest.raises(DataError, match="is the root of all folders"), stoppable(folders=[Path("/")]):
        pass
    with stoppable(folders=[tmp_path / "kept"]):
        (tmp_path / "kept").mkdir()
    assert (tmp_path / "kept").is_dir()
