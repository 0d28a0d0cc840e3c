from __future__ import annotations

import pytest

from docs.pages import generator
from heads.families import FAMILIES, REACHED
from heads.refused import REFUSED
from heads.written import WRITTEN


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return generator("generate_any_model").render().splitlines()


def test_every_family_every_form_and_every_refusal_has_a_row(lines: list[str]):
    for name in [entry.name for entry in (*FAMILIES, *WRITTEN, *REFUSED)]:
        assert sum(line.startswith(f"| {name} |") for line in lines) == 1


def test_weights_and_biases_are_said_to_be_reached_exactly_where_they_are(lines: list[str]):
    rows = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in lines}
    for family in FAMILIES:
        assert (rows[family.name][4] == "yes") == (family in REACHED)
