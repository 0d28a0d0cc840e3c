"""A command that must succeed, for the checks of packages."""

from __future__ import annotations

import subprocess
import sys
import time


def run(*command: str, cwd: str | None = None) -> str:
    """Run a command and return what it printed; it must succeed."""
    began = time.monotonic()
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed after {time.monotonic() - began:.0f} s:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()
