"""The toy sets and the small model, made once for each file of tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.tasks.glue.glue_toy import write_glue, write_model


@pytest.fixture(scope="module")
def glue(tmp_path_factory) -> Path:
    return write_glue(tmp_path_factory.mktemp("glue"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "small")
