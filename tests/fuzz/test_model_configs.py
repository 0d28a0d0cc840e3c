"""Folders of every family of transformers, with other numbers in their configurations: a model or an early refusal."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from fuzz.mutate import INPUTS, fuzz, mutate_numbers
from heads.families import FAMILIES
from heads.family import Family
from headwise.errors import DataError
from headwise.stock_folders import open_within
from headwise.texts.pretrained import quietly

SLOW = pytest.param(INPUTS // 50, marks=pytest.mark.slow)


def find_stock(family: Family) -> Any:
    """The model of transformers in that of a family, or None."""
    return next((one for one in family.make().modules() if isinstance(one, PreTrainedModel)), None)


def load(folder: Path, kind: Any) -> None:
    try:
        with quietly(), open_within(folder, trusted=False):
            kind.from_pretrained(str(folder), local_files_only=True)
    except DataError:
        raise
    except Exception as error:
        # as every command does
        raise DataError(f"{folder} cannot be loaded: {error}") from error


@pytest.mark.parametrize("inputs", [pytest.param(2, marks=pytest.mark.full), SLOW])
def test_numbers_of_a_configuration_never_fill_the_memory(inputs: int, tmp_path: Path):
    names = []
    for number, family in enumerate(FAMILIES):
        model = find_stock(family)
        if model is None:
            continue
        folder = tmp_path / str(number)
        model.save_pretrained(folder)
        names.append(family.name)
        fuzz(
            partial(load, folder, type(model)),
            folder / "config.json",
            mutate=mutate_numbers,
            inputs=inputs,
            seed=number,
        )
    assert len(names) > 40
