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

from fuzz.mutate import Mutation, fuzz, mutate_json, mutate_text
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


@pytest.mark.parametrize("mutate", [mutate_json, mutate_text])
def test_a_careful_reader_passes_and_the_file_is_restored(path: Path, mutate: Mutation):
    before = path.read_bytes()
    tally = fuzz(lambda: read(path), path, mutate=mutate, inputs=500)
    assert tally.read > 20
    assert tally.refused > 20
    assert path.read_bytes() == before


def test_an_unchecked_type_is_reported_with_its_input(path: Path):
    with pytest.raises(AssertionError, match=r"(?s)TypeError at .*test_mutate.py.*failed-\d+-numbers.json"):
        fuzz(lambda: sum(json.loads(path.read_bytes())["numbers"]), path, mutate=mutate_json, inputs=200)


def test_a_hang_is_reported(path: Path):
    def slow() -> None:
        if read(path) != 3:
            time.sleep(5)

    with pytest.raises(AssertionError, match=r"TooSlow"):
        fuzz(slow, path, mutate=mutate_json, inputs=60, seconds=0.05)


def allocate() -> None:
    bytearray(300 << 20)


def swallow() -> None:
    try:
        bytearray(300 << 20)
    except MemoryError:
        raise DataError("too much was asked for.") from None


@pytest.mark.parametrize(
    ("grow", "message"),
    [
        (allocate, "MemoryError at"),
        (lambda: torch.ones(75 << 20), "RuntimeError at"),
        (swallow, "DataError at"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"died of signal 9 at input \d+ of seed 0"),
    ],
)
def test_a_huge_allocation_is_reported_however_it_ends(grow: Callable[[], object], message: str, path: Path):
    def large() -> None:
        if read(path) != 3:
            grow()

    before = path.read_bytes()
    with pytest.raises(AssertionError, match=message):
        fuzz(large, path, mutate=mutate_json, inputs=60, memory=200 << 20)
    assert path.read_bytes() == before
