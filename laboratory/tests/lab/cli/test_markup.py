"""Names that rich takes for markup or emoji, in paths, arms and texts: shown as they are."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest
from rich.console import Console

from architecture.source import FILES, read_source
from headwise.texts.progress import make_bars
from headwise_lab.experiment.run_folder import Failure, Job
from headwise_lab.jobs.progress import Bars
from lab.command import call, refused
from lab.tasks.classification.probing_toy import write_bert

# the first closes a tag that was not opened, at which rich raises; the others would vanish
NAMES = ["[/x]", "[red]:smile:"]


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("name", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.full)])
def test_what_is_read_and_written_may_have_such_a_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    write_bert(tmp_path / name)
    Path(f"{name}.txt").write_text(f"it is here {name} .\n")
    assert call("inspect", name, "--text", f"{name}.txt", "--against", name, "--out", f"out/{name}") == 0
    assert f"written to out/{name}/heads.html" in capsys.readouterr().out
    Path(f"{name}.tsv").write_text("".join(f"{label}\ta {label} film {n}\n" for n in range(60) for label in ("a", "b")))
    sizes = ["width=8", "heads=2", "head_size=4", "hidden=8", "layers=1", "epochs=1", "warmup_steps=1"]
    words = ["compare", "classification", "--data", f"{name}.tsv", "--arms", "plain", "--seeds", "1", "--workers", "1"]
    assert call(*words, "--out", f"{name}/c", *(word for size in sizes for word in ("--set", size))) == 0
    assert f"page: {name}/c/report.html" in capsys.readouterr().out


def test_the_consoles_and_bars_show_such_names_as_they_are(tmp_path: Path):
    for name in NAMES:
        console = Console(record=True, width=200, force_terminal=True, emoji=False, file=io.StringIO())
        with make_bars(console=console, transient=False) as bars:
            bars.add_task(f"forwards of {name}", total=1)
        job = Job(name, tmp_path, None)
        with Bars(console, [job], 0) as running:
            running.started(job)
            running.ended(job, Failure(job, f"{name} cannot be read", refused=True))
        text = console.export_text()
        assert f"forwards of {name}" in text
        assert f"{name} failed: {name} cannot be read" in text


def test_a_message_cannot_drive_the_terminal(capsys: pytest.CaptureFixture[str]):
    error = refused(capsys, "inspect", "\x1b]0;title\x07", "--text", "x")
    assert "\x1b" not in error
    assert "\\x1b]0;title\\x07" in error


def test_every_formatted_line_that_is_printed_turns_markup_off():
    loose = [
        f"{path}:{node.lineno}"
        for path in FILES
        if ".print(f" in read_source(path) or ".print(\n" in read_source(path)
        for node in ast.walk(ast.parse(read_source(path)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "print"
        if node.args and isinstance(node.args[0], ast.JoinedStr)
        if "markup" not in {keyword.arg for keyword in node.keywords}
    ]
    assert not loose, f"{loose} print a formatted text with markup: give markup=False."
