"""Importing without the garbage collector: what it leaves alone, and what it must still collect."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from cases import cases
from headwise_lab.importing import importing


class Cycle:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "large_library.py").write_text(
        "import gc\nenabled = gc.isenabled()\nmade = [[] for _ in range(1000)]\n"
    )
    yield "large_library"
    sys.modules.pop("large_library", None)
    gc.unfreeze()


@pytest.mark.full
def test_what_an_import_made_is_never_walked_again_and_garbage_is_still_collected(module: str) -> None:
    gc.unfreeze()
    before = weakref.ref(Cycle())
    with importing():
        made = importlib.import_module(module)
    assert not made.enabled
    assert gc.isenabled()
    assert gc.get_freeze_count() > 1000
    assert before() is None, "garbage from before an import is not kept"
    gc.unfreeze()
    garbage = weakref.ref(Cycle())
    with importing():
        importlib.import_module(module)
    assert gc.get_freeze_count() == 0, "nothing was imported"
    gc.collect()
    assert garbage() is None


@cases("enabled", [True, False])
def test_the_collector_is_as_before_after_a_module_that_is_missing(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "collect", int)
    if not enabled:
        gc.disable()
    try:
        with pytest.raises(ModuleNotFoundError), importing():
            importlib.import_module("no_such_library")
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_a_worker_imports_nothing_large_before_it_knows_its_target() -> None:
    code = "import sys, headwise.__main__, headwise_lab.jobs.serving; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.full
def test_a_process_that_imported_so_ends_without_a_word() -> None:
    code = "from headwise_lab.importing import importing\nwith importing():\n    import headwise_lab.training.train\n"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout + found.stderr == ""
