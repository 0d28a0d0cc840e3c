"""What a command says and leaves when it cannot do its work: without the laboratory, or with bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwise.cli.stopping import stoppable
from headwise_lab.tasks.translation.corpora import CORPORA
from lab.command import call, refused

SOURCE = str(Path(__file__).parents[4] / "src")
BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
sys.argv = ["headwise", *{arguments!r}]
from headwise.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("blocked", "arguments", "source"),
    [
        ("typer", ["--help"], "'headwise[cli]'"),
        ("scipy", ["compare", "logic", "--data", "missing"], "headwise-lab"),
        ("transformers", ["inspect", "model", "--text", "text.txt"], "'headwise[cli]'"),
    ],
)
def test_where_a_package_is_missing_the_command_says_what_to_install(tmp_path, blocked, arguments, source):
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(blocked=blocked, arguments=arguments)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == f"headwise: {blocked} is not installed, and the command needs it: pip install {source}.\n"
    assert list(tmp_path.iterdir()) == []


def test_a_module_of_headwise_that_is_missing_is_a_defect(tmp_path):
    script = BLOCKED.format(blocked="headwise.cli.main", arguments=[]).replace('name.partition(".")[0]', "name")
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'headwise.cli.main'\n")


def write_bad_pairs(folder: Path) -> None:
    folder.mkdir()
    (folder / "train.de").write_text("ein hund\n")
    (folder / "train.en").write_text("a dog\ntwo\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("compare", "logic", "--data", "missing", "--out", "deep/out"),
        ("compare", "logic", "--arms", "svgd:layers=9", "--out", "deep/out"),
        ("compare", "translation", "--data", "pairs:de-en", "--out", "deep/out"),
        ("tune", "logic", "svgd", "--data", "missing", "--out", "deep/out"),
        ("prepare", "translation", "--data", "pairs:de-en", "--out", "deep/out"),
        ("prepare", "pretraining", "--data", "pairs", "--out", "deep/out"),
        ("probe", "missing", "--data", "pairs", "--out", "deep/out", "--cache", "deep/cache"),
        ("inspect", "missing", "--text", "pairs/train.de"),
        ("rate", "one", "other", "--data", "pairs", "--out", "deep/out"),
    ],
)
def test_a_failed_command_leaves_no_empty_folder(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_bad_pairs(tmp_path / "pairs")
    refused(capsys, *arguments)
    # data that was prepared is kept
    assert [path for path in tmp_path.rglob("*") if path.is_dir() and not any(path.iterdir())] == []
    assert arguments[1] == "logic" or sorted(path.name for path in tmp_path.iterdir()) == ["pairs"]


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
    with stoppable(folders=[tmp_path / "kept"]):
        (tmp_path / "kept").mkdir()
    assert (tmp_path / "kept").is_dir()


def test_help_is_shown_by_the_entry_point(capsys):
    assert call("--help") == 0
    assert "compare" in capsys.readouterr().out
