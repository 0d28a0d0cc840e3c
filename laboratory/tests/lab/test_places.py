"""Where a command writes: a link is followed, and a place that can hold no folder is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwise.errors import DataError
from lab.command import call, refused
from lab.tasks.lm.lm_toy import write_documents
from lab.tasks.translation.translation_toy import write_toy_corpus

COMMANDS = {
    "prepare lm": ("prepare", "lm", "--data", "docs.jsonl"),
    "prepare pretraining": ("prepare", "pretraining", "--data", "docs.jsonl"),
    "prepare translation": ("prepare", "translation", "--data", "pairs"),
}


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.chdir(tmp_path)
    write_documents(Path("docs.jsonl"), 250)
    write_toy_corpus(Path("pairs"))
    return COMMANDS[request.param]


@pytest.mark.parametrize("exists", [True, False])
def test_the_folder_that_a_link_leads_to_is_written(command, exists):
    Path("target").mkdir() if exists else None
    Path("link").symlink_to("target")
    assert call(*command, "--out", "link") == 0
    assert Path("link").is_symlink()
    assert any(Path("target").iterdir())
    assert not [*Path().glob(".*")]


@pytest.mark.parametrize("command", [("compare", "logic"), ("tune", "logic", "svgd"), ("download", "multi30k")])
def test_a_command_that_fills_a_folder_step_by_step_follows_a_link_too(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("deep/target")
    Path("loop").symlink_to("loop")

    def stop(*_arguments: object, **_options: object) -> None:
        raise DataError(f"the target is {'there' if Path('deep/target').is_dir() else 'missing'}.")

    monkeypatch.setattr("headwise_lab.data.downloads._transfer", stop)
    monkeypatch.setattr("headwise_lab.experiment.run_folder.tempfile.TemporaryFile", stop)
    assert "the target is there." in refused(capsys, *command, "--out", "link")
    assert not Path("deep").exists()
    assert "loop is a link to itself; choose another folder." in refused(capsys, *command, "--out", "loop")


def test_a_place_that_can_be_no_folder_is_named(command, capsys):
    Path("loop").symlink_to("loop")
    Path("file").touch()
    assert "loop is a link to itself; choose another folder." in refused(capsys, *command, "--out", "loop")
    assert "loop/in is a link to itself; choose another folder." in refused(capsys, *command, "--out", "loop/in")
    assert "/ is the root of all folders; choose one inside it." in refused(capsys, *command, "--out", "/")
    assert "file is no folder; choose another." in refused(capsys, *command, "--out", "file")
    assert not [*Path().glob(".*")]
