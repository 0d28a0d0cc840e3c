"""Where a command writes: a link is followed, and a place that can hold no folder is named, before anything is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwise.errors import DataError
from lab.command import call, refused
from lab.tasks.lm.lm_toy import write_documents
from lab.tasks.translation.translation_toy import write_toy_corpus

COMMANDS = {
    "translation": ("prepare", "translation", "--data", "pairs"),
    "lm": ("prepare", "lm", "--data", "docs.jsonl"),
    "pretraining": ("prepare", "pretraining", "--data", "docs.jsonl"),
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_documents(Path("docs.jsonl"), 250)
    write_toy_corpus(Path("pairs"))
    Path("loop").symlink_to("loop")


@pytest.mark.parametrize(
    "name", [name if name == "translation" else pytest.param(name, marks=pytest.mark.full) for name in COMMANDS]
)
def test_the_folder_that_a_link_leads_to_is_written_whether_it_exists_or_not(name: str):
    Path("target").mkdir()
    for target in ("target", "new"):
        link = Path(f"{target}-link")
        link.symlink_to(target)
        assert call(*COMMANDS[name], "--out", str(link)) == 0
        assert link.is_symlink()
        assert any(Path(target).iterdir())
    assert not [*Path().glob(".*")]


def test_a_command_that_fills_a_folder_step_by_step_follows_a_link_too(monkeypatch, capsys):
    Path("link").symlink_to("deep/target")

    def stop(*_arguments: object, **_options: object) -> None:
        raise DataError(f"the target is {'there' if Path('deep/target').is_dir() else 'missing'}.")

    monkeypatch.setattr("headwise_lab.data.downloads._transfer", stop)
    monkeypatch.setattr("headwise_lab.experiment.run_folder.tempfile.TemporaryFile", stop)
    for command in (("compare", "logic"), ("tune", "logic", "svgd"), ("download", "multi30k")):
        assert "the target is there." in refused(capsys, *command, "--out", "link")
        assert not Path("deep").exists()


def test_a_place_that_can_be_no_folder_is_named(capsys):
    Path("file").touch()
    rest = (("compare", "logic"), ("download", "multi30k"), ("inspect", "pairs", "--text", "docs.jsonl"))
    for command in (*COMMANDS.values(), *rest):
        for out, said in (
            ("loop", "loop is a link to itself; choose another folder."),
            ("loop/in", "loop/in is a link to itself; choose another folder."),
            ("/", "/ is the root of all folders; choose one inside it."),
        ):
            assert said in refused(capsys, *command, "--out", out)
    for command in COMMANDS.values():
        assert "file is no folder; choose another." in refused(capsys, *command, "--out", "file")
    assert not [*Path().glob(".*")]
