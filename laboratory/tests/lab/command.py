"""The `headwise` command as a person calls it, in this process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwise.cli import main


def call(*arguments: str) -> int:
    """The exit code of a call."""
    with pytest.raises(SystemExit) as caught:
        main.main(list(arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence on stderr of a call that must end with code 2."""
    assert call(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("headwise: "), error
    assert error.count("\n") == 1
    assert "Traceback" not in error
    return error


def run_elsewhere(code: str, place: Path) -> str:
    """What code prints in a process that does not find this repository, in a folder."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=place, env=kept)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
