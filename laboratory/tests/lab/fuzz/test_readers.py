"""The readers of tasks, roles and commands on broken files: each is read, or refused in a sentence that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.mutate import INPUTS, fuzz
from lab.fuzz.files import MAKERS

# What is done with the texts takes longer than reading them, and so does opening a model.
LOADERS = ("parallel text", "classified texts", "probed sentences", "sentences as words")
SLOWER = {"folder": 4, "language model": 2} | dict.fromkeys(LOADERS, 10)

pytestmark = pytest.mark.full


def test_broken_files_of_every_kind_are_read_or_refused_by_name(tmp_path: Path):
    assert len(MAKERS) > 50
    for name in MAKERS:
        refuses_by_name(name, tmp_path, inputs=40)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_a_broken_file_is_read_or_refused_by_name(name: str, tmp_path: Path):
    refuses_by_name(name, tmp_path, inputs=INPUTS // SLOWER.get(name.partition(":")[0], 1))


def refuses_by_name(name: str, root: Path, *, inputs: int) -> None:
    place = root / name.replace(" ", "-")
    place.mkdir()
    path, read, mutate = MAKERS[name](place)
    tally = fuzz(read, path, mutate=mutate, inputs=inputs)
    named = (path.name, str(path.parent))
    unnamed = [one for one in tally.messages.values() if not any(part in one for part in named)]
    assert not unnamed, (name, unnamed[:5])
    long = [message[:500] for message in tally.messages.values() if len(message) > 1_000]
    assert not long, (name, long[:3])
