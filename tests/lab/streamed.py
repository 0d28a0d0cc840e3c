"""A command that answers lines of standard input, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = str(Path(__file__).parents[2] / "src")


def started(command: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "headwise.lab.cli", command, *arguments],
        # what is not flushed is not seen
        env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def answered(command: str, given: bytes, *arguments: str) -> tuple[int, list[str], str]:
    """Exit code, lines of output and what was said."""
    with started(command, *arguments) as process:
        output, said = process.communicate(given, timeout=300)
    return process.returncode, output.decode().split("\n")[:-1], said.decode()
