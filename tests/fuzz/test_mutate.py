"""The harness notices each kind of failure that it is there for."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fuzz.mutate import fuzz, mutate_json, mutate_text
from headwise.errors import DataError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.json"
    path.write_text(json.dumps({"numbers": [1, 2, 3], "name": "x"}))
    return path


def read(path: Path) -> int:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise DataError(f"{path} is not JSON; write it again.") from None
    if not isinstance(content, dict) or not isinstance(content.get("numbers"), list):
        raise DataError(f"{path} holds no numbers; add them.")
    return len(content["numbers"])


def test_a_careful_reader_passes_and_the_file_is_restored(path: Path):
    before = path.read_bytes()
    for mutate in (mutate_json, mutate_text):
        tally = fuzz(lambda: read(path), path, mutate=mutate, inputs=200)
        assert tally.read > 8
        assert tally.refused > 8
        assert path.read_bytes() == before


def swallow() -> None:
    try:
        bytearray(300 << 20)
    except MemoryError:
        raise DataError("too much was asked for.") from None


FAILURES: dict[str, Callable[[], object]] = {
    r"(?s)TypeError at .*test_mutate.py.*failed-\d+-numbers.json": lambda: sum(["text"]),
    "TooSlow": lambda: time.sleep(5),
    "MemoryError at": lambda: bytearray(300 << 20),
    "RuntimeError at": lambda: torch.ones(75 << 20),
    "DataError at": swallow,
    r"died of signal 9 at input \d+ of seed 0": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


@pytest.mark.parametrize(
    "message", [one if one != "TooSlow" else pytest.param(one, marks=pytest.mark.full) for one in FAILURES]
)
def test_every_kind_of_failure_is_reported(message: str, path: Path):
    def fail() -> None:
        if read(path) != 3:
            FAILURES[message]()

    before = path.read_bytes()
    with pytest.raises(AssertionError, match=message):
        fuzz(fail, path, mutate=mutate_json, inputs=60, seconds=0.05 if message == "TooSlow" else 2.0, memory=200 << 20)
    assert path.read_bytes() == before
