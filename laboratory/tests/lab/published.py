"""The published files, where HEADWISE_DATA names their folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("HEADWISE_DATA", "absent"))


def needs(name: str) -> pytest.MarkDecorator:
    """Skip a test where there are no such files."""
    return pytest.mark.skipif(not (DATA / name).exists(), reason=f"HEADWISE_DATA has no {name}")
