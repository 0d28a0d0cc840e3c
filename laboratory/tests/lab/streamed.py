"""A command that answers lines of standard input: in a process of its own, or in this one."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from lab.command import call


def started(command: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A process of its own, whose streams are pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", "headwise", command, *arguments],
        # what is not flushed is not seen
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def answered(command: str, given: bytes, *arguments: str) -> tuple[int, list[str], str]:
    """Exit code, lines of output and what was said, of a call in this process."""
    streams = {"stdin": io.TextIOWrapper(io.BytesIO(given)), "stdout": io.TextIOWrapper(io.BytesIO())}
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patched:
        for name, stream in {**streams, "stderr": said}.items():
            patched.setattr(sys, name, stream)
        code = call(command, *arguments)
    return code, streams["stdout"].buffer.getvalue().decode().split("\n")[:-1], said.getvalue()
