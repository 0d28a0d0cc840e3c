from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from docs.pages import EXECUTED, PAGES, ROOT, blocks, name_of

WITH_CODE = [page for page in EXECUTED if blocks(page, "python")]


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_every_python_block_of_a_page_runs_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "__page__"}
    for line, text in blocks(page, "python"):
        # blank lines before the code make a traceback name the line of the page
        exec(compile("\n" * (line - 1) + text, str(page), "exec"), namespace)


def test_what_the_readme_shows_is_what_its_code_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    test_every_python_block_of_a_page_runs_in_order(ROOT / "README.md", tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    shown = [text for _, text in blocks(ROOT / "README.md", "text")]
    assert shown
    assert [text for text in shown if text not in printed] == []


def test_there_is_code_to_run_in_the_readme():
    assert ROOT / "README.md" in WITH_CODE


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_make_target_a_page_names_exists(page: Path):
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z][\w-]*)", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_fence_says_its_language(page: Path):
    assert not blocks(page, "")
